"""`rollout`: how responses are sampled."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RolloutKnobs:
    """Sampling parameters, group size and the shape of the decode loop."""

    n: int = 1
    """Samples per prompt: the group of group estimators."""
    temperature: float = 1.0
    """Logits are divided by this before sampling; all log-probs and entropies are of that distribution."""
    top_k: int | None = None
    """Sample among so many most likely tokens; `None` does not filter."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens that holds this probability; 1 does not filter."""
    do_sample: bool = True
    """Off is greedy: all samples of a group are then equal, which a group estimator refuses."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, looked for between decode chunks; the token that completes one is the last one kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response, besides the tokenizer's and the model's own end ids."""
    ignore_eos: bool = False
    """Decode to the length limit whatever is sampled (for benchmarks)."""
    decode_chunk: int = 32
    """The most decode steps in one compiled call; between calls the host looks for stop texts, hands finished responses to the
    graders and fills free slots. A call ends early when enough slots are free."""
    max_num_seqs: int | None = None
    """Slots: sequences decoded at once; a slot whose response ends takes the next one. `None` takes what `gpu_memory_utilization` leaves
    room for (on CPU: all of the batch)."""
    gpu_memory_utilization: float = 0.5
    """Share of a device's memory that weights and KV cache may fill while decoding; read where the device reports its memory."""
    tensor_model_parallel_size: int = 1
    """Devices that share one copy of the weights while decoding."""
    log_prob_micro_batch_size_per_device: int | None = None
    """Trajectories one device scores at once for old log-probs; `None` takes the actor's micro-batch."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Bound what a device scores at once by tokens; `None` takes the actor's `use_dynamic_bsz`."""
    log_prob_max_token_len_per_device: int | None = None
    """Most stored tokens one device scores at once for old log-probs; `None` takes `actor.ppo_max_token_len_per_device`."""
