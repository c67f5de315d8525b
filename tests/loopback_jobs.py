"""What the processes of `tests/test_processes.py` and `tests/test_several.py` run: `python -m tests.loopback_jobs NAME FOLDER`, or
`train` and the words of the training command.

Process 0 writes what there is to look at into the folder.
"""

import itertools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm import assembly, joining, metrics, networks, processes, runtime, sharding, step
from jaxrl_llm.checkpoint import Checkpointer
from jaxrl_llm.checks import MeshShape
from jaxrl_llm.commands import train
from jaxrl_llm.compilation_cache import write_whole_entries
from jaxrl_llm.console import Progress
from jaxrl_llm.errors import DataError, TrainingStopped
from jaxrl_llm.knobs import DistributedKnobs
from jaxrl_llm.records import END_EOS, Rollout
from jaxrl_llm.replicas import ReplicaCheck
from jaxrl_llm.rewards.grader import Grade
from jaxrl_llm.rollout.engine import Stats
from tests import rig
from tests.test_replicas import damaged

FED = {
    "data.val_files": "[]",
    "trainer.test_freq": "none",
    "trainer.save_freq": "none",
    "mesh.data": "none",
    "mesh.fsdp": 1,
    "actor.ppo_mini_batch_size": 4,
    "actor.optim.lr": 1e-4,
    "critic.optim.lr": 1e-4,
}
STEPS, DEAD_STEP, BAD_STEP = 4, 2, 3
"""Steps of a fed run; in one the second half of the prompts has no trained token, in one it has logits that are not finite."""


# A run with recorded responses ---------------------------------------------------------------------------------------------


class ByLength:
    """Grades a response by its length: 1 for an even one; a length of 5 fails, one of 7 is abstained from."""

    names = ("fake",)
    digests: dict[str, str] = {}  # noqa: RUF012

    def __init__(self):
        self.seen = {}

    def submit(self, key, sample):
        self.seen[key] = sample.response_length

    def collect(self, keys):
        return {key: self.grade(self.seen.pop(key)) for key in list(keys)}

    def grade(self, length):
        if length == 5:
            return Grade(np.nan, {"fake": None}, None, "five tokens")
        if length == 7:
            return Grade(np.nan, {"fake": None}, False)
        return Grade(float(length % 2 == 0), {"fake": float(length % 2 == 0)}, True)


def recorded(parts, halves):
    """A `generate` that replays responses made from step, prompt and sample alone: starts of the worked answer, short ones for the
    first half of the prompts, of any length for the second."""
    width = parts.config.data.max_response_length

    def generate(engine, params, prompts, *, n, step, on_finished, poll, **_):
        del params
        rows = len(prompts) * n
        tokens = np.zeros((rows, width), np.int32)
        logprobs = np.zeros((rows, width), np.float32)
        lengths = np.zeros((rows,), np.int32)
        second = [prompt.prompt_id in halves[step] for prompt in prompts for _ in range(n)]
        for row in range(rows):
            prompt = prompts[row // n]
            random = np.random.default_rng([step, prompt.prompt_id, row % n])
            text = list(prompt.extra_info["solution"].encode())[:width]
            lengths[row] = length = random.integers(1, len(text) + 1 if second[row] else 9)
            tokens[row, :length] = text[:length]
            logprobs[row, :length] = -random.random(length)
        mask = np.arange(width) < lengths[:, None]
        trained = mask & ~(np.array(second)[:, None] & (step == DEAD_STEP))
        bad = sum(second) if step == BAD_STEP else 0
        head = np.zeros((len(prompts), engine.prompt_width), np.int32)
        for number, prompt in enumerate(prompts):
            head[number, engine.prompt_width - len(prompt.ids) :] = prompt.ids
        if not bad:
            for row in range(rows):
                on_finished(row, tokens[row, : lengths[row]].tolist())
        poll()
        rollout = Rollout(
            prompt_tokens=head,
            prompt_lengths=np.array([len(prompt.ids) for prompt in prompts], np.int32),
            response_tokens=tokens,
            response_lengths=lengths,
            response_mask=mask,
            loss_mask=trained,
            sampler_logprobs=logprobs,
            filtered_logprobs=None,
            end_reason=np.full((rows,), END_EOS, np.int32),
            policy_step=np.full((rows,), step, np.int32),
            bad=bad,
        )
        return rollout, Stats(0.5, int(lengths.max()), 3 * len(prompts), int(lengths.sum()))

    return generate


def halves_of(parts):
    """The prompts in the second half of each global batch, by step, whatever the number of processes."""
    data = parts.config.data
    stream = assembly.make_stream(
        len(parts.train.prompts), batch_size=data.train_batch_size, shuffle=data.shuffle, seed=data.seed
    )  # fmt: skip
    batches = {number: stream.next() for number in range(1, STEPS + 1)}
    half = data.train_batch_size // 2
    return {
        number: {parts.train.prompts[index].prompt_id for index in batch[half:]}
        for number, batch in batches.items()
    }


def fed(
    algorithm: str, meet: processes.Meetings
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Metric rows of a fed run, and every leaf of its last state."""
    parts = assembly.build(rig.settings(FED | rig.ALGORITHMS[algorithm]), lambda text: None)
    state = networks.first_state(parts)
    run = step.Run(
        folder=Path("nowhere"),
        signals=runtime.Signals(meet),
        grader=ByLength(),  # type: ignore[arg-type]
        keys=itertools.count(),
        log=metrics.MetricsLog(None),
        progress=Progress(STEPS, process=1),
        saver=Checkpointer(Path("nowhere"), keep=None, log=lambda text: None),
        phases=metrics.Phases(),
        compilations=metrics.CompileCounter(),
        history=[],
    )
    rows, sampler = [], step.generate
    step.generate = recorded(parts, halves_of(parts))
    try:
        for number in range(1, STEPS + 1):
            state, row = step.train_step(parts, run, state, number)
            rows.append(
                {k: v for k, v in row.items() if not rig.TIMES.search(k)} | {"samples": run.samples}
            )
    finally:
        step.generate = sampler
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return rows, {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def save_fed(folder: Path, algorithm: str, meet: processes.Meetings) -> None:
    rows, leaves = fed(algorithm, meet)
    if jax.process_index() == 0:
        (folder / f"{algorithm}.json").write_text(json.dumps(rows))
        np.savez(folder / f"{algorithm}.npz", **leaves)


# What processes tell each other ------------------------------------------------------------------------------------------


def exchanged() -> dict[str, Any]:
    """Facts about every way of telling, from inside of two processes."""
    me = jax.process_index()
    found: dict[str, Any] = {"gathered": processes.gather("one", {"me": me, "nan": float("nan")})}
    found["any"] = [
        any(processes.gather(tag, up)) for tag, up in (("any", me == 1), ("none", False))
    ]
    meet = processes.Meetings(60.0)
    found["first"] = meet.first("first", lambda: [me, "made"])
    for number in range(5):
        meet.gather("again", number)
    found["kept"] = len(processes.client().key_value_dir_get(f"{processes.ROOT}/loop"))
    wild = np.array([[np.nan, -0.0], [np.inf, 5e-324]]) * (me + 1)
    rows = {
        "f64": wild,
        "bool": np.array([[True], [me == 1]]),
        "i8": np.array([[-1 - me] * 3] * 2, np.int8),
        "i64": np.array([2**40 + me]),
    }
    for piece in (2**26, 16):
        processes.PIECE_BYTES = piece
        whole = processes.gather_rows(rows)
        same = {
            name: array[len(rows[name]) * me :][: len(rows[name])] for name, array in whole.items()
        }
        found[f"bits {piece}"] = all(same[name].tobytes() == rows[name].tobytes() for name in rows)
        found[f"dtypes {piece}"] = {name: str(array.dtype) for name, array in whole.items()}
        found[f"rows {piece}"] = {"i64": whole["i64"].tolist(), "i8": whole["i8"][:, 0].tolist()}
    mesh = sharding.make_mesh(MeshShape(jax.device_count(), 1, 1))
    table = np.arange(24).reshape(8, 3)
    placed = {
        "spread": sharding.put_rows(mesh, table),
        "whole": sharding.put(table, sharding.replicated(mesh)),
    }
    own = processes.own_rows(placed, "spread")
    found["own"] = processes.gather("own", {name: array.tolist() for name, array in own.items()})
    host = processes.own_rows({"a": table, "b": table}, "a")
    found["host"] = all(np.array_equal(array, table) for array in host.values())
    return found


def lonely() -> list[Any]:
    """What process 0 hears when process 1 does not come in time, and after how many seconds."""
    heard: list[Any] = []
    if jax.process_index() == 0:
        begun = time.monotonic()
        try:
            processes.gather("lonely", None, 1.0)
        except processes.Missing as problem:
            heard = [str(problem), time.monotonic() - begun]
    processes.barrier("lonely is over")
    return heard


def drifted(meet: processes.Meetings) -> list[list[str]]:
    """What each process hears when one device of process 1 holds other bits of a replicated parameter than the rest."""
    parts = assembly.build(rig.settings(FED | rig.ALGORITHMS["grpo"]), lambda text: None)
    state, position = networks.first_state(parts), parts.stream.state()
    ReplicaCheck(parts, meet, 1).check(state, position)
    damaged_state = damaged(state, "norm.scale", number=jax.devices()[-1].id)
    heard: list[str] = []
    try:
        ReplicaCheck(parts, meet, 1).check(damaged_state, position)
    except TrainingStopped as problem:
        heard += problem.problems
    return processes.gather("drifted", heard)


def talk(folder: Path) -> int:
    """Everything that two processes do short of the command itself; ends with a problem of process 1 that process 0 words."""
    found = exchanged() | {"lonely": lonely()}
    meet = processes.Meetings(120.0)
    found["drifted"] = drifted(meet)
    for algorithm in ("ppo", "grpo"):
        save_fed(folder, algorithm, meet)
    processes.post_stop() if jax.process_index() == 1 else None
    processes.barrier("stop is posted")
    found["stop"] = processes.stop_posted()
    if jax.process_index() == 0:
        (folder / "found.json").write_text(json.dumps(found))

    def last() -> int:
        if jax.process_index() == 1:
            raise DataError("the file of process 1 is broken")
        processes.barrier("never", 120.0)
        return 0

    return processes.end_together(last)


# Starting in one folder ------------------------------------------------------------------------------------------------------


def folders(base: Path) -> int:
    """Begin twenty runs in folders that do not exist yet, all processes at once."""
    config = rig.settings({})
    meet = processes.Meetings(60.0)
    for number in range(20):
        here = base / str(number) / "deep"
        now = replace(config, trainer=replace(config.trainer, run_dir=str(here)))
        with runtime.run_folder(now) as folder:
            assert runtime.saved_config(folder, meet) is None
            if jax.process_index() == 0:
                runtime.write_config(folder, now)
            meet.gather("written", None)
            assert runtime.saved_config(folder, meet) == now
            meet.gather("read", None)
    return 0


def keep_compilations() -> None:
    """Let every process write the compilation cache: JAX reserves that to process 0, but on CPUs the programs of each have keys of
    their own."""
    from jax._src import compiler, distributed

    write, state = compiler._cache_write, distributed.global_state

    def written(*arguments: Any) -> None:
        number, state.process_id = state.process_id, 0
        try:
            write(*arguments)
        finally:
            state.process_id = number

    compiler._cache_write = written


def main() -> int:
    name, *words = sys.argv[1:]
    keep_compilations()
    write_whole_entries()
    if name == "train":
        return train.run(words, prog="loopback")
    joining.join(DistributedKnobs(initialization_timeout=200), print)
    return train.guarded(lambda: {"talk": talk, "folders": folders}[name](Path(words[0])))


if __name__ == "__main__":
    sys.exit(main())
