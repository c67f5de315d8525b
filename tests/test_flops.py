from dataclasses import replace
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxrl_llm import flops
from jaxrl_llm.models import heads, kernels, transformer
from tests import tiny

# D 16, N 4, K 2, H 8, F 24, V 29, L 2
CONFIG = tiny.model()
TRUNK = 2 * 2 * (16 * 4 * 8 + 2 * 16 * 2 * 8 + 4 * 8 * 16 + 3 * 16 * 24)
PAIR, SCORE = 4 * 2 * 4 * 8, 2 * 16 * 29


# By hand ---------------------------------------------------------------------------------------------------------------


def test_a_token_a_pair_and_a_score_by_hand():
    assert flops.trunk(CONFIG, 1) == TRUNK == 10752 and flops.trunk(CONFIG, 7) == 7 * TRUNK
    assert flops.attention(CONFIG, 5) == 5 * PAIR
    assert flops.head(CONFIG, 3) == 3 * SCORE and flops.head(CONFIG, 3, values=True) == 3 * 2 * 16


def test_a_shared_prompt_by_hand():
    """Prompt of 3 with responses of 2 and 0, prompt of 1 with responses of 1 and 4."""
    shared = flops.trajectories(CONFIG, [3, 1], [2, 0, 1, 4])
    prompts, responses = (1 + 2 + 3) + 1, (4 + 5) + 2 + (2 + 3 + 4 + 5)
    assert shared == flops.Work(tokens=4 + 7, pairs=prompts + responses, scored=7)
    alone = flops.trajectories(CONFIG, [3, 1], [2, 0, 1, 4], share=False)
    assert alone == flops.Work(tokens=8 + 7, pairs=2 * prompts + responses, scored=7)


def test_a_rollout_by_hand():
    """The samples feed the last prompt token themselves."""
    assert flops.prefill(CONFIG, [3, 1]) == flops.Work(tokens=2, pairs=1 + 2, scored=0)
    sampled = flops.decode(CONFIG, [3, 1], [2, 0, 1, 4])
    assert sampled == flops.Work(tokens=7, pairs=(3 + 4) + 1 + (1 + 2 + 3 + 4), scored=7)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_pairs_are_those_of_the_attention_mask(window):
    config = replace(CONFIG, sliding_window=window)
    place = np.arange(9)
    sees = place[None] <= place[:, None]
    if window is not None:
        sees &= place[None] > place[:, None] - window
    assert flops.trajectories(config, [4], [5]).pairs == sees.sum()
    assert flops.decode(config, [4], [5]).pairs == sees[3:8].sum()
    assert flops.seen(6, 4, window) == 0


def test_a_step_adds_up():
    prompts, responses = [3, 1], [2, 0, 1, 4]
    work = flops.trajectories(CONFIG, prompts, responses)
    once = flops.forward(CONFIG, work)
    assert once == 11 * TRUNK + work.pairs * PAIR + 7 * SCORE
    rollout = 9 * TRUNK + (3 + 18) * PAIR + 7 * SCORE
    assert flops.step(CONFIG, prompts, responses) == flops.Step(rollout, 0, 3 * once)
    values = once - 7 * SCORE + 7 * 2 * 16
    whole = flops.step(
        CONFIG, prompts, responses, log_probs=2, epochs=4, critic=CONFIG, critic_epochs=3
    )
    assert whole == flops.Step(rollout, 2 * once + values, 12 * once + 9 * values)
    assert whole.total == rollout + 14 * once + 10 * values


def test_an_update_recomputes_what_remat_says():
    work = flops.Work(tokens=11, pairs=31, scored=7)
    once = flops.forward(CONFIG, work)
    again = 7 * SCORE + 31 * PAIR // 2
    assert flops.update(CONFIG, work, remat="none") == 3 * once + again
    assert flops.update(CONFIG, work, remat="dots") == 3 * once + again
    full = again + 11 * (TRUNK - 2 * 2 * 16 * 24) + 31 * PAIR
    assert flops.update(CONFIG, work, remat="full") == 3 * once + full


# Against programs --------------------------------------------------------------------------------------------------------


def products(jaxpr):
    """FLOPs of all matrix products of a jaxpr, bodies of scans as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            inner = prod(shape[axis] for axis in contracted)
            total += 2 * inner * prod(equation.outvars[0].aval.shape)
        times = equation.params.get("length", 1)
        for inside in jaxprs_in_params(equation.params):
            total += times * products(inside)
    return total


def dense(config, rows, length, remat="none"):
    """A loss over all tokens of `rows` causal rows with dense attention, its arguments, and the work it does."""
    tokens = jnp.zeros((rows, length), jnp.int32)
    places = jnp.broadcast_to(jnp.arange(length), tokens.shape)

    def loss(params):
        hidden = transformer.apply(config, params, tokens, places, tokens + 1, remat=remat)
        return jnp.sum(jnp.square(heads.logits(config, params, hidden)))

    params = transformer.abstract_params(config)
    work = flops.Work(rows * length, rows * length * length, rows * length)
    return loss, params, work


def test_a_forward_pass_has_the_counted_products():
    loss, params, work = dense(CONFIG, 3, 10)
    assert products(jax.make_jaxpr(loss)(params).jaxpr) == flops.forward(CONFIG, work)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_a_backward_pass_has_the_counted_products(remat):
    """Dense attention and no checkpoint around the head; nothing asks for the gradient of the embedding's input."""
    loss, params, work = dense(CONFIG, 3, 10, remat)
    compiled = products(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    counted = flops.update(CONFIG, work, remat=remat, fused=False)
    assert compiled == counted - flops.head(CONFIG, work.scored)


def test_blocked_attention_computes_its_scores_again():
    """Two products forward, five backward: half a forward pass more than three."""
    ones = np.ones((1, 16), np.int32)
    view = kernels.make_view(
        "blocked", ones, ones, np.arange(16)[None], block=16, prompt_width=16, response_width=1
    )
    x = jnp.ones((1, 16, 2, 8))
    attend = partial(kernels.KINDS["blocked"], view=view)
    once = products(jax.make_jaxpr(attend)(x, x, x).jaxpr)
    both = jax.make_jaxpr(jax.grad(lambda x: attend(x, x, x).sum()))(x)
    assert products(both.jaxpr) == 3.5 * once > 0


def test_a_compiled_forward_pass_has_little_more():
    """XLA counts a scanned body once, so one layer; its count holds norms, rotations and softmax too."""
    wide = replace(CONFIG, num_layers=1, width=128, head_size=32, hidden=512, vocab_size=512)
    loss, params, work = dense(wide, 2, 32)
    counted = jax.jit(loss).lower(params).compile().cost_analysis()["flops"]
    assert 1.0 <= counted / flops.forward(wide, work) <= 1.05
