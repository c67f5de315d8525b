import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import heads
from jaxrl_llm.models.families import ModelConfig

TIED = ModelConfig("llama", 3, 1, 2, 1, 1, 2, 4, tie_embeddings=True)
UNTIED = ModelConfig("llama", 3, 1, 2, 1, 1, 2, 4)
TABLE = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


def test_logits_tied_and_untied_by_hand():
    hidden = jnp.array([[[2.0, 3.0]]])
    tied = heads.logits(TIED, {"embed": {"kernel": TABLE}}, hidden)
    np.testing.assert_array_equal(tied, [[[2.0, 3.0, 5.0]]])
    head = {"embed": {"kernel": TABLE * 0}, "head": {"kernel": TABLE.T}}
    np.testing.assert_array_equal(heads.logits(UNTIED, head, hidden), tied)


def test_logits_are_summed_in_float32():
    width = 4096
    config = ModelConfig("llama", 1, 1, width, 1, 1, 2, 4, tie_embeddings=True)
    params = {"embed": {"kernel": jnp.ones((1, width))}}
    out = heads.logits(config, params, jnp.ones((2, width)), compute_dtype=jnp.bfloat16)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, width)
    short = heads.logits(config, params, jnp.full((width,), 1.001), compute_dtype=jnp.bfloat16)
    np.testing.assert_array_equal(short, [width])


def test_values_start_at_zero_and_by_hand():
    head = heads.init_value_head(UNTIED)
    hidden = jnp.array([[[2.0, 3.0]]], jnp.bfloat16)
    assert not heads.values(head, hidden).any()
    out = heads.values({"kernel": jnp.array([1.0, -1.0])}, hidden)
    np.testing.assert_array_equal(out, [[-1.0]])
    assert out.dtype == jnp.float32 and out.shape == hidden.shape[:-1]
