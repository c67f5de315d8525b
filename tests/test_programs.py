"""What the compiled programs of a step come to: products, buffers, types, donation, and how many there are.

Every figure is a count that no machine changes. The FLOPs are XLA's own. It counts the body of a loop once, so that the work is
chosen such that every loop runs once, the shape of the rows being that of the speed workload: one prompt of 64 tokens, 8 responses
of 64.
"""

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import flops, learner, optimizer, packing, scoring, sharding
from jaxrl_llm.knobs import ActorKnobs, AlgorithmKnobs, OptimKnobs
from jaxrl_llm.metrics import CompileCounter
from jaxrl_llm.models import families, transformer
from jaxrl_llm.records import Prompt, Rollout
from jaxrl_llm.rollout.engine import generate, make_engine
from jaxrl_llm.rollout.sampling import TRAIN, VALIDATE, make_sampling
from tests import tiny

KNOBS = ActorKnobs(use_kl_loss=True, kl_loss_coef=0.04)


def make_adamw() -> tuple[Any, Any]:
    knobs = OptimKnobs(lr=1e-2)
    schedule = optimizer.make_schedule(knobs, 10)
    return optimizer.make_optimizer(knobs, schedule), schedule


def drawn(prompts: int, group: int, prompt_width: int, width: int, lengths=None) -> Rollout:
    """A rollout of random ids below 29; prompts of full width, responses of these lengths (default: full)."""
    random, rows = np.random.default_rng(0), prompts * group
    lengths = np.full(rows, width) if lengths is None else lengths
    within = np.arange(width) < lengths[:, None]
    return Rollout(
        prompt_tokens=random.integers(3, 29, (prompts, prompt_width)),
        prompt_lengths=np.full(prompts, prompt_width),
        response_tokens=random.integers(3, 29, (rows, width)),
        response_lengths=lengths,
        response_mask=within,
        loss_mask=within,
        sampler_logprobs=np.zeros(within.shape, np.float32),
        filtered_logprobs=None,
        end_reason=np.zeros(rows, int),
        policy_step=np.zeros(rows, int),
    )


def lowered(
    config: families.ModelConfig,
    rollout: Rollout,
    mesh: Any = None,
    remat: str = "full",
    accumulate_in: str = "float32",
    **rows: Any,
):
    """Update and score of a model over a rollout in one mini-batch, lowered, with its layout and packed rows."""
    mesh, prompts = mesh or tiny.mesh(), len(rollout.prompt_tokens)
    kind = rows.get("attention", "blocked")
    network = scoring.Network(config, mesh, jnp.dtype("float32"), remat, kind)
    layout = tiny.layout(rollout, sharding.shards(mesh), **rows)
    packed = packing.pack(layout, rollout)[0]
    width = layout.response_width
    zeros = np.zeros((prompts * layout.group, width), np.float32)
    batch = packing.make_batch(rollout, zeros[:, 0], np.ones(len(zeros), bool), width)
    batch = batch.replace(advantages=zeros, ref_logprobs=zeros)
    adamw, schedule = make_adamw()
    params = transformer.abstract_params(config)
    spread = sharding.param_shardings(mesh, families.param_dims(config), params)
    placed = spread, optimizer.state_shardings(adamw, params, spread, mesh)
    made = params, jax.eval_shape(adamw.init, params)
    params, moments = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        made,
        placed,
    )
    state = learner.ModelState(params, {}, moments)
    loss = learner.make_actor_loss(network, KNOBS, 1.0, on_policy=True)
    plan = learner.Plan(prompts, 1, prompts)
    update = learner.make_update(loss, adamw, schedule, plan, mesh, accumulate_in=accumulate_in)
    score = scoring.make_score(network, len(zeros), width, full=True)
    return (
        update.lower(state, batch, packed, tiny.algorithm()),
        score.lower(params, packed, np.float32(1.0)),
        layout,
        packed,
    )


# Arithmetic and memory ---------------------------------------------------------------------------------------------------

WIDE = families.from_hf(
    tiny.HF
    | {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
    }
)


@pytest.fixture(scope="module")
def once():
    """The update of one row and one layer, the head in one piece: every loop runs once."""
    rollout = drawn(1, 8, 64, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "HEAD_CHUNKS", 1)
        update, _, layout, packed = lowered(WIDE, rollout, budget=576)
        return update.compile(), layout, packed


def test_an_update_spends_the_counted_flops_and_little_more(once):
    """Above the count: the optimizer, norms and softmax, slots behind the last response token, masked pairs."""
    update, layout, packed = once
    entries = (packed.view.blocks >= 0).sum(-1)
    assert layout.micros == 1 and layout.tokens == 576 and entries.max() == 2, "own block and one"
    assert "known_trip_count" not in update.as_text(), "a loop of known length runs more than once"
    work = flops.trajectories(WIDE, [64], [64] * 8)
    counted = flops.update(WIDE, work, remat="full")
    assert 1.0 <= update.cost_analysis()["flops"] / counted <= 1.15


def test_eight_devices_with_eight_times_the_work_spend_as_many_flops_each(once, monkeypatch):
    monkeypatch.setattr(scoring, "HEAD_CHUNKS", 1)
    update, _, layout, _ = lowered(WIDE, drawn(8, 8, 64, 64), tiny.mesh(data=8), budget=576)
    assert layout.tokens == once[1].tokens and layout.micros == once[1].micros == 1
    each = update.compile().cost_analysis()["flops"]
    assert each == pytest.approx(once[0].cost_analysis()["flops"], rel=0.03)


def test_the_updated_parameters_and_moments_take_the_place_of_the_old(once):
    size = sum(4 * prod(leaf.shape) for leaf in jax.tree.leaves(transformer.abstract_params(WIDE)))
    assert once[0].memory_analysis().alias_size_in_bytes >= 3 * size


VOCABULARY, LONG = 3001, 2048
LARGE = replace(tiny.model(), num_layers=1, vocab_size=VOCABULARY, max_position=LONG)


def largest(program: Any) -> int:
    """Elements of the largest array that a compiled program mentions, whatever its shape."""
    shapes = re.findall(r"\b(?:pred|[a-z]+\d+)\[([\d,]+)\]", program.as_text())
    return max(prod(map(int, shape.split(","))) for shape in shapes)


@pytest.fixture(scope="module")
def long():
    """Rows of 2,048 tokens: fewer elements in scores `[T T]` than in logits `[T V]`, and both many."""
    update, score, layout, _ = lowered(LARGE, drawn(2, 7, 128, 128), budget=LONG)
    assert layout.tokens == LONG
    return update.compile(), score.compile()


@pytest.mark.parametrize("program", [0, 1], ids=["update", "score"])
def test_no_buffer_holds_all_logits_or_all_scores_of_a_row(long, program):
    """The largest array is a chunk of logits, about a quarter of a row's."""
    chunk = scoring.head_chunk(LONG, VOCABULARY, "cpu") * VOCABULARY
    assert chunk <= largest(long[program]) < LONG * LONG / 2


@pytest.mark.parametrize(
    ("chunks", "rows"), [(1, {}), (4, {"attention": "reference"})], ids=["logits", "scores"]
)
def test_whole_logits_and_whole_scores_would_be_seen(chunks, rows, monkeypatch):
    """The negative test: a head in one piece, and an attention that makes all scores."""
    monkeypatch.setattr(scoring, "HEAD_CHUNKS", chunks)
    _, score, _, _ = lowered(LARGE, drawn(2, 7, 128, 128), budget=LONG, **rows)
    assert largest(score.compile()) >= LONG * LONG


COLLECTIVE = re.compile(r" (?:all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(")


def test_the_head_moves_once_per_micro_batch_and_not_with_every_chunk():
    """Chunks of the head are the branches of a condition: on four devices nothing is exchanged there."""
    rollout = drawn(4, 4, 64, 64)
    update, score, _, _ = lowered(LARGE, rollout, tiny.mesh(data=2, fsdp=2), micro_rows=4)
    for program in (update, score):
        text = program.compile().as_text()
        exchanges = [line for line in text.splitlines() if COLLECTIVE.search(line)]
        assert "cond/branch" in text and len(exchanges) > 3
        assert not [line for line in exchanges if "cond/branch" in line]


# A whole step ------------------------------------------------------------------------------------------------------------

PROMPTS, GROUP, WIDTH, RESPONSE = 8, 4, 16, 96
"""32 lanes, which narrow to 16; responses need 64 columns, then 96."""


@dataclass(frozen=True)
class Step:
    """What a step runs: the trained state, a frozen copy, rows, and compiled programs."""

    state: learner.ModelState
    reference: Any
    algorithm: Any
    layout: packing.Layout
    engine: Any
    score: Any
    prepare: Any
    update: Any


def set_up(dtype: str = "float32", stop_ids: tuple[int, ...] = (), knobs=KNOBS) -> Step:
    """Everything that compiles or places something before the first step."""
    mesh, config = tiny.mesh(), replace(tiny.model(), max_position=WIDTH + RESPONSE)
    network = scoring.Network(config, mesh, jnp.dtype(dtype), "full")
    params = transformer.init(config, jax.random.key(0))
    shardings = sharding.param_shardings(mesh, families.param_dims(config), params)
    adamw, schedule = make_adamw()
    loss = learner.make_actor_loss(network, knobs, 1.0, on_policy=True)
    plan = learner.Plan(PROMPTS, 1, PROMPTS)
    return Step(
        reference=jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(params),
        state=optimizer.init_model_state(adamw, jax.device_put(params, shardings), optimizer.place_state(adamw, params, shardings, mesh)),
        algorithm=jax.device_put(
            learner.init_algorithm_state(0.0, 0.04), sharding.replicated(mesh)
        ),
        layout=packing.make_layout(
            prompts=PROMPTS, group=GROUP, mini_prompts=PROMPTS, prompt_width=WIDTH,
            response_width=RESPONSE, shards=1,
        ),
        engine=make_engine(
            config, mesh, dtype=jnp.dtype(dtype), stop_ids=stop_ids, decode_text=str, chunk=16,
            prompt_length=WIDTH, response_length=RESPONSE,
        ),
        score=scoring.make_score(network, PROMPTS * GROUP, RESPONSE),
        prepare=learner.make_advantages(
            AlgorithmKnobs(adv_estimator="grpo"), prompts=PROMPTS, kl_loss_type="k3"
        ),
        update=learner.make_update(loss, adamw, schedule, plan, mesh),
    )  # fmt: skip


def prompts(number: int) -> list[Prompt]:
    """Prompts of 1 to 16 tokens."""
    random = np.random.default_rng(number)
    ids = [tuple(random.integers(3, 29, random.integers(1, WIDTH + 1))) for _ in range(PROMPTS)]
    return [
        Prompt(one, "", (), "", "tiny", {}, 8 * number + place, str(place))
        for place, one in enumerate(ids)
    ]


def sampled(step: Step, number: int, **how: Any) -> Rollout:
    """A rollout of the policy."""
    how = {"n": GROUP, "sampling": make_sampling(), "seed": 0, "purpose": TRAIN} | how
    return generate(step.engine, step.state.trainable, prompts(number), step=number, **how)[0]


def taken(step: Step, number: int, **how: Any) -> tuple[Step, Rollout, dict[str, Any]]:
    """The step after an update, what it learned from, and its metrics."""
    rollout = sampled(step, number, **how)
    scores = (rollout.response_tokens % 2 == 0).mean(1)
    batch = packing.make_batch(rollout, scores, np.ones(len(scores), bool), RESPONSE)
    batch = sharding.put_rows(tiny.mesh(), batch)
    packed = scoring.place(packing.pack(step.layout, rollout)[0], tiny.mesh())
    frozen = step.score(step.reference, packed, np.float32(1.0)).logprobs
    batch, algorithm, _ = step.prepare(batch.replace(ref_logprobs=frozen), step.algorithm)
    state, numbers = step.update(step.state, batch, packed, algorithm)
    after = replace(step, state=state, algorithm=algorithm)
    return after, rollout, jax.device_get(numbers)


def test_a_step_needs_fifteen_programs_at_most_and_its_old_state_is_gone():
    """Without ids that end a response; parameters, moments and their copies included."""
    counter = CompileCounter()
    first = set_up()
    step, rollout, _ = taken(first, 0)
    assert (rollout.response_lengths == RESPONSE).all()
    assert 8 <= counter.delta() <= 15
    old = jax.tree.leaves((first.state.trainable, first.state.opt_state))
    assert all(leaf.is_deleted() for leaf in old)
    taken(step, 1)
    assert counter.delta() == 0


def test_nothing_compiles_after_the_first_step_and_evaluation():
    """The first step runs all lanes to the limit; the others end unevenly, so that decoding goes on in fewer lanes."""
    step, lanes = set_up(stop_ids=(2, 2)), []
    advance = step.engine.advance

    def watched(params: Any, state: Any, *rest: Any) -> Any:
        lanes.append((state.last.shape[0], state.own.columns))
        return advance(params, state, *rest)

    def evaluation(number: int) -> None:
        sampled(step, number, n=1, sampling=make_sampling(greedy=True), purpose=VALIDATE)

    endless = replace(step.engine, stop_ids=(-1, -1))
    step, rollout, _ = taken(replace(step, engine=endless), 0)
    assert (rollout.response_lengths == RESPONSE).all()
    evaluation(0)
    ending = replace(step.engine, stop_ids=(2, 2), advance=watched)
    step, counter, kinds = replace(step, engine=ending), CompileCounter(), set()
    for number, how in enumerate([(0.7,), (1.0,), (1.5, 9), (1.2, None, 0.9), (0.9, 20, 0.8)], 1):
        step, rollout, numbers = taken(step, number, sampling=make_sampling(*how))
        kinds.add(tuple(rollout.response_lengths.tolist()))
        assert numbers["skipped"] == 0.0
        evaluation(number)
    assert counter.delta() == 0
    assert len(kinds) == 5
    assert {(32, 64), (16, 64), (16, 96)} <= set(lanes), "narrowed, and grew after that"


def test_a_step_in_bfloat16_keeps_float32_where_it_counts(monkeypatch):
    """Products in bfloat16; gradients, weights, moments and what is reported in float32, and the sampler's log-probs again."""
    plain, kinds = optimizer.make_optimizer, set()

    def watched(*how: Any) -> optax.GradientTransformation:
        def update(gradient: Any, *rest: Any) -> Any:
            kinds.update(leaf.dtype.name for leaf in jax.tree.leaves(gradient))
            return inner.update(gradient, *rest)

        inner = plain(*how)
        return optax.GradientTransformation(inner.init, update)

    monkeypatch.setattr(optimizer, "make_optimizer", watched)
    step, _, numbers = taken(set_up("bfloat16"), 0)
    assert kinds == {"float32"}
    assert numbers["logprob_gap"] < 1e-2 and numbers["skipped"] == 0.0
    assert all(np.isfinite(value).all() for value in numbers.values())
    assert {value.dtype.name for value in numbers.values()} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(step.state)} == {"float32", "int32"}
