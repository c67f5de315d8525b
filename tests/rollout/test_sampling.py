"""Sampling against a plain numpy reference, its edges, and the derivation of keys."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rollout import sampling
from jaxrl_llm.rollout.sampling import inverse_cdf, keep_top, make_sampling, row_keys, uniforms

TOP = float(1 - 2.0**-24)
"""The largest uniform number."""

run = jax.jit(sampling.sample)
keep = jax.jit(keep_top)
draw_from_logs = jax.jit(inverse_cdf)


def logs(probs: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probs, np.float32))


def relative(probs: Any) -> np.ndarray:
    probs = np.asarray(probs, np.float32)
    return probs / probs.max(axis=-1, keepdims=True)


def draw(probs: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    return np.asarray(draw_from_logs(logs(probs), numbers))


def probabilities(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def reference_keep(probs: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """Plain loop: the most likely ids first, ties by id; k of them; then until the renormalised sum reaches top_p."""
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))[: top_k or len(probs)]
    total, held, kept = sum(probs[i] for i in order), 0.0, set()
    for i in order:
        kept.add(i)
        held += probs[i] / total
        if top_p < 1 and held >= top_p:
            break
    return kept


def kept(probs: Any, top_k: int, top_p: float) -> set[int]:
    got = keep(relative([probs]), jnp.int32(top_k), jnp.float32(top_p))[0]
    return set(np.flatnonzero(got).tolist())


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (0, 1.0, {0, 1, 2, 3, 4}),
        (1, 1.0, {1}),
        (2, 1.0, {1, 0}),
        (99, 1.0, {0, 1, 2, 3, 4}),
        (0, 0.5, {1}),
        (0, 0.51, {1, 0}),
        (0, 0.76, {1, 0, 2}),
        (0, 1e-6, {1}),
        (2, 0.66, {1}),
        (2, 0.68, {1, 0}),
        (3, 0.85, {1, 0}),
        (3, 0.86, {1, 0, 2}),
    ],
)
def test_kept_sets_worked_by_hand(top_k, top_p, expected):
    """1/2, 1/4, then ties of 1/8, 1/16, 1/16; after k = 2: 2/3, 1/3; after k = 3: 4/7, 2/7, 1/7 (6/7 = 0.857)."""
    assert kept([1 / 4, 1 / 2, 1 / 8, 1 / 16, 1 / 16], top_k, top_p) == expected


def test_ties_are_cut_by_id():
    even = [0.2] * 5
    assert kept(even, 2, 1.0) == {0, 1}
    assert kept(even, 0, 0.5) == {0, 1, 2}
    assert kept([0.1, 0.4, 0.1, 0.4], 3, 1.0) == {0, 1, 3}


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (7, 1.0), (7, 0.6), (1, 0.3), (0, 0.05)])
def test_kept_sets_equal_the_reference(top_k, top_p):
    probs = probabilities(np.random.default_rng(3).normal(size=(20, 131)) * 2)
    got = np.asarray(keep(relative(probs), jnp.int32(top_k), jnp.float32(top_p)))
    for row, mask in zip(probs, got, strict=True):
        assert set(np.flatnonzero(mask).tolist()) == reference_keep(row, top_k, top_p)


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.5), (0, 0.97), (128, 1.0), (128, 0.9), (400, 0.9), (3, 0.7)]
)
def test_kept_sets_of_any_size_equal_the_reference(top_k, top_p):
    """Rows from nearly even (hundreds kept) to nearly certain (a handful), ties across the whole vocabulary; weights are
    multiples of 2^-12, so that no sum rounds."""
    random = np.random.default_rng(4)
    scores = random.normal(size=(12, 700)) * np.linspace(0.05, 6, 12)[:, None]
    weights = np.round(relative(probabilities(scores)) * 2**12) / 2**12
    got = np.asarray(keep(np.float32(weights), jnp.int32(top_k), jnp.float32(top_p)))
    sizes = set()
    for row, mask in zip(weights, got, strict=True):
        expected = reference_keep(row, top_k, float(np.float32(top_p)))
        assert set(np.flatnonzero(mask).tolist()) == expected
        sizes.add(len(expected))
    assert len(sizes) > 5 or top_p == 1 or top_k == 3


def test_a_top_p_of_one_keeps_the_tail_behind_a_full_sum():
    """In float32 the first two already sum to 1; a top-k in force must not make top-p drop the rest."""
    assert kept([0.75, 0.25, 1e-12, 1e-13], 4, 1.0) == {0, 1, 2, 3}


def test_log_probs_are_of_the_tempered_distribution_before_and_after_the_filters():
    logits = np.random.default_rng(0).normal(size=(64, 50)).astype(np.float32) * 3
    numbers = uniforms(jax.random.split(jax.random.key(0), 64), jnp.int32(0))
    for temperature, top_k, top_p in (
        (0.6, None, 1.0),
        (1.7, 5, 1.0),
        (1.0, None, 0.7),
        (0.8, 9, 0.5),
    ):
        out = jax.device_get(run(logits, numbers, make_sampling(temperature, top_k, top_p)))
        for row, probs in enumerate(probabilities(logits, temperature)):
            token = int(out.tokens[row])
            allowed = reference_keep(probs, top_k or 0, top_p)
            assert token in allowed
            assert out.logprobs[row] == pytest.approx(np.log(probs[token]), abs=1e-5)
            mass = sum(probs[i] for i in allowed)
            assert out.filtered_logprobs[row] == pytest.approx(
                np.log(probs[token] / mass), abs=1e-5
            )
        assert out.finite.all()


def test_greedy_takes_the_argmax_at_temperature_one_and_scores_there():
    logits = np.random.default_rng(1).normal(size=(8, 50)).astype(np.float32)
    logits[3, [7, 11]] = 9.0
    greedy = make_sampling(0.3, 4, 0.2, greedy=True)
    out = run(logits, jnp.full((8, 2), 0.99), greedy)
    np.testing.assert_array_equal(out.tokens, logits.argmax(axis=-1))
    assert out.tokens[3] == 7
    expected = np.log(probabilities(logits).max(axis=-1))
    np.testing.assert_allclose(out.logprobs, expected, atol=1e-6)
    np.testing.assert_allclose(out.filtered_logprobs, expected, atol=1e-6)


@pytest.mark.parametrize("greedy", [False, True])
def test_rows_that_are_not_numbers_are_flagged(greedy):
    logits = np.zeros((5, 50), np.float32)
    logits[0, 3], logits[1, 49], logits[2, 0], logits[4] = np.nan, np.inf, -np.inf, np.nan
    out = run(logits, jnp.full((5, 2), 0.5), make_sampling(greedy=greedy))
    np.testing.assert_array_equal(out.finite, [False, False, False, True, False])
    assert (np.asarray(out.tokens) >= 0).all() and (np.asarray(out.tokens) < 50).all()


@pytest.mark.parametrize(("top_k", "top_p"), [(None, 1.0), (7, 1.0), (None, 0.8)])
def test_frequencies_follow_the_distribution(top_k, top_p):
    """Pearson's statistic over cells of at least 5 expected draws stays within 5 standard deviations of its mean."""
    count, temperature = 8192, 0.7
    logits = np.random.default_rng(2).normal(size=300).astype(np.float32)
    probs = probabilities(logits, temperature)
    allowed = sorted(reference_keep(probs, top_k or 0, top_p))
    share = np.zeros(300)
    share[allowed] = probs[allowed] / probs[allowed].sum()
    numbers = uniforms(jax.random.split(jax.random.key(5), count), jnp.int32(3))
    tokens = run(
        np.tile(logits, (count, 1)), numbers, make_sampling(temperature, top_k, top_p)
    ).tokens
    seen = np.bincount(np.asarray(tokens), minlength=300)
    assert set(np.flatnonzero(seen).tolist()) <= set(allowed)
    cells = share * count >= 5
    expected = np.append(share[cells], share[~cells].sum()) * count
    found = np.append(seen[cells], seen[~cells].sum())
    found, expected = found[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    statistic = ((found - expected) ** 2 / expected).sum()
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def grid_near(low: float, high: float) -> np.ndarray:
    """All uniform numbers from just below `low` to just above `high`."""
    numbers = np.arange(int(low * 2**24) - 6, int(high * 2**24) + 8)
    return np.clip(numbers, 0, 2**24 - 1) / 2**24


@pytest.mark.parametrize(
    "likely", [[(60, 1.0)], [(0, 0.6), (127, 0.4)], [(0, 0.3), (100, 0.3), (130, 0.4)]]
)
@pytest.mark.parametrize("tail", [1, 59, 90, 126, 188, 200, 299])
def test_a_token_of_probability_1e7_has_about_that_probability(likely, tail):
    """Counts the pairs of uniform numbers that give the token, by trying all of them around the edges of its interval."""
    probs = np.zeros(300)
    for token, share in likely:
        probs[token] = share
    probs[tail] = 1e-7
    probs /= probs.sum()
    grid = np.append(probs, np.zeros(84)).reshape(3, 128)
    place, column = divmod(tail, 128)

    def interval(weights: np.ndarray, index: int) -> tuple[float, float]:
        edges = np.cumsum(weights) / weights.sum()
        return edges[index] - weights[index] / weights.sum(), edges[index]

    outer = interval(grid.sum(axis=0), column)
    inner = interval(grid[:, column], place)
    hits = 1.0
    for level, (low, high) in enumerate((outer, inner)):
        if high - low > 1e-3:
            hits *= high - low
            continue
        tried = np.unique(grid_near(low, high))
        numbers = np.empty((len(tried), 2), np.float32)
        numbers[:, 0], numbers[:, 1] = np.mean(outer), np.mean(inner)
        numbers[:, level] = tried
        padded = np.resize(numbers, (64, 2))
        got = draw(np.tile(probs, (64, 1)), padded)[: len(tried)]
        hits *= (got == tail).sum() / 2**24
    assert 0.5e-7 < hits < 2e-7


def test_many_rare_tokens_come_as_often_as_they_should():
    """One token of 0.99 and 100,000 of 1e-7: 500 of 50,000 draws, standard deviation 22, both halves alike."""
    probs = np.full(100_001, 1e-7, np.float32)
    probs[70_000] = 0.99
    numbers = uniforms(jax.random.split(jax.random.key(1), 50_000), jnp.int32(0))
    one = lambda number: inverse_cdf(jnp.log(probs)[None], number[None])[0]  # noqa: E731
    tokens = np.asarray(jax.jit(lambda n: jax.lax.map(one, n, batch_size=2000))(numbers))
    rare = tokens[tokens != 70_000]
    assert abs(len(rare) - 500) < 5 * 22
    assert abs((rare < 50_000).mean() - 0.5) < 5 * 0.5 / np.sqrt(len(rare))
    assert len(np.unique(rare)) > 0.97 * len(rare)


@pytest.mark.parametrize("size", [1, 50, 128, 300, 1000])
def test_a_token_of_probability_zero_is_never_drawn(size):
    random = np.random.default_rng(size)
    probs = random.exponential(size=(60, size)) * (random.random((60, size)) < 0.1)
    probs[np.arange(60), random.integers(0, size, 60)] += 1e-6
    probs = probs.astype(np.float32)
    for pair in itertools.product((0.0, 0.5, TOP), repeat=2):
        tokens = draw(probs, np.tile(np.float32(pair), (60, 1)))
        assert (tokens < size).all()
        assert (probs[np.arange(60), tokens] > 0).all()


def test_rounding_of_long_prefix_sums_never_draws_a_token_of_probability_zero():
    """Parallel prefix sums step up (and down) in the last bit at weights of 0; the uniform numbers here hit such steps."""
    random, long, rows = np.random.default_rng(0), 400, 48
    weights = random.exponential(size=(rows, long)) * (random.random((rows, long)) < 0.1)
    probs = np.zeros((rows, long, 128), np.float32)
    probs[:, :, 5] = weights
    probs = probs.reshape(rows, -1)
    relative = jax.jit(lambda w: jnp.cumsum(jnp.exp(w - w.max(axis=-1, keepdims=True)), axis=-1))
    edges = np.asarray(relative(logs(weights)))
    steps = np.diff(edges, axis=1) * (weights[:, 1:] == 0)
    assert (steps != 0).any(), (
        "this backend's prefix sums are exact at zeros: the test has nothing to hit"
    )
    place = np.argmax(np.abs(steps), axis=1)
    aim = edges[np.arange(rows), place] / edges[:, -1]
    for shift in (-1, 0, 1):
        numbers = np.stack([np.full(rows, 0.5, np.float32), aim + np.float32(shift * 2.0**-24)], 1)
        tokens = draw(probs, numbers.astype(np.float32))
        assert (probs[np.arange(rows), tokens] > 0).all()


def test_filtered_tokens_stay_out_at_the_edges_of_the_uniform_numbers():
    logits = np.zeros((1, 300), np.float32)
    logits[0, [150, 10, 299]] = [5.0, 4.0, 3.0]
    settings = make_sampling(1.0, 3, 1.0)
    got = {
        int(run(logits, np.float32([pair]), settings).tokens[0])
        for pair in itertools.product((0.0, 0.3, 0.6, 0.8, TOP), repeat=2)
    }
    assert got == {150, 10, 299}


def test_nothing_compiles_anew_for_other_settings():
    fresh = jax.jit(lambda *args: sampling.sample(*args))
    logits, numbers = np.zeros((2, 50), np.float32), np.zeros((2, 2), np.float32)
    for settings in (
        make_sampling(),
        make_sampling(0.5, None, 0.9),
        make_sampling(2, 7, 1.0),
        make_sampling(greedy=True),
        make_sampling(1.0, 50, 0.1),
    ):
        fresh(logits, numbers, settings)
    assert fresh._cache_size() == 1


def test_uniform_numbers_are_multiples_of_two_to_the_minus_24_below_one():
    keys = jax.random.split(jax.random.key(0), 4096)
    numbers = np.asarray(uniforms(keys, jnp.int32(4)), np.float64)
    assert numbers.shape == (4096, 2)
    assert (numbers >= 0).all() and (numbers < 1).all()
    whole = numbers * 2**24
    np.testing.assert_array_equal(whole, np.round(whole))
    assert (whole % 2 == 1).mean() == pytest.approx(0.5, abs=0.05)
    assert numbers.mean(axis=0) == pytest.approx([0.5, 0.5], abs=0.02)
    assert abs(np.corrcoef(numbers.T)[0, 1]) < 0.06
    assert not np.array_equal(numbers, uniforms(keys, jnp.int32(5)))


def test_keys_depend_on_everything_they_are_derived_from_and_nothing_else():
    def data(seed=1, step=2, purpose=sampling.TRAIN, prompts=(4, 4, 9), samples=(0, 1, 0)):
        parts = (np.uint32(seed), np.uint32(step), np.uint32(purpose))
        keys = row_keys(*parts, np.int32(prompts), np.int32(samples))
        return [tuple(key) for key in np.asarray(jax.random.key_data(keys)).tolist()]

    base = data()
    assert base == data()
    assert len(set(base)) == 3
    others = [
        data(seed=2),
        data(step=3),
        data(purpose=sampling.VALIDATE),
        data(prompts=(5, 5, 10)),
        data(samples=(2, 3, 2)),
    ]
    assert len(set(itertools.chain(base, *others))) == 18
    assert data(prompts=(9, 4, 4), samples=(0, 1, 0)) == [base[2], base[1], base[0]]
    assert data(prompts=(0,), samples=(4,)) != data(prompts=(4,), samples=(0,))
    purposes = (sampling.TRAIN, sampling.VALIDATE, sampling.BASELINE, sampling.SHUFFLE)
    assert len({data(purpose=purpose)[0] for purpose in purposes}) == 4
