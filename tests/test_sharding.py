"""Meshes, partition rules by dim letter, and the same logits on one and on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxrl_llm import sharding
from jaxrl_llm.checks import MeshShape
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models import families, heads, transformer
from tests import tiny

ROWS = ("data", "fsdp")


def test_a_mesh_holds_its_devices_in_order_under_four_names():
    mesh = sharding.make_mesh(MeshShape(2, 2, 2))
    assert mesh.axis_names == ("data", "fsdp", "context", "tensor")
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "context": 1, "tensor": 2}
    assert [device.id for device in mesh.devices.ravel()] == list(range(8))
    assert sharding.shards(mesh) == 4
    assert sharding.shards(tiny.mesh(1, 1, 4)) == 1
    assert sharding.shards(tiny.mesh(4, 2, 1)) == 8
    some = sharding.make_mesh(MeshShape(1, 2, 1), jax.devices()[3:5])
    assert [device.id for device in some.devices.ravel()] == [3, 4]


@pytest.mark.parametrize(
    ("dims", "shape", "expected"),
    [
        ("VD", (8, 16), ("tensor", "fsdp")),
        ("VD", (29, 16), (None, "fsdp")),
        ("VD", (8, 15), ("tensor", None)),
        ("LDNH", (3, 16, 4, 8), (None, "fsdp", "tensor", None)),
        ("LDKH", (3, 16, 1, 8), (None, "fsdp", None, None)),
        ("LFD", (3, 24, 16), (None, "tensor", "fsdp")),
        ("D", (16,), ("fsdp",)),
        ("LH", (3, 8), (None, None)),
    ],
)
def test_parameters_are_split_by_letter_where_their_axes_divide(dims, shape, expected):
    got = sharding.spec(tiny.mesh(2, 2, 2), dims, shape, sharding.PARAM_AXES)
    assert got == PartitionSpec(*expected)


@pytest.mark.parametrize(
    ("dims", "shape", "expected"),
    [
        ("BTD", (8, 5, 16), (ROWS, "context", None)),
        ("BTD", (6, 5, 16), (None, "context", None)),
        ("BTNH", (4, 5, 4, 8), (ROWS, "context", "tensor", None)),
        ("BTKH", (4, 5, 3, 8), (ROWS, "context", None, None)),
        ("BTV", (4, 5, 30), (ROWS, "context", "tensor")),
    ],
)
def test_activations_are_split_over_rows_and_heads(dims, shape, expected):
    got = sharding.spec(tiny.mesh(2, 2, 2), dims, shape, sharding.ACTIVATION_AXES)
    assert got == PartitionSpec(*expected)


def test_letters_and_axes_must_be_as_many():
    with pytest.raises(ValueError, match="zip"):
        sharding.spec(tiny.mesh(), "BT", (1, 2, 3), sharding.ACTIVATION_AXES)


def test_every_parameter_gets_a_sharding_that_divides_it():
    config, mesh = tiny.model(), tiny.mesh(2, 2, 2)
    shapes = transformer.abstract_params(config)
    placed = sharding.param_shardings(mesh, families.param_dims(config), shapes)
    assert jax.tree.structure(placed) == jax.tree.structure(shapes)
    assert placed["head"]["kernel"].spec == PartitionSpec("fsdp", None)
    assert placed["layers"]["q"]["kernel"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert placed["layers"]["down"]["kernel"].shard_shape((2, 24, 16)) == (2, 12, 8)


def strict(change, mesh=None):
    """The problems of placing the tiny model's parameters after a change of their letters or shapes."""
    config = tiny.model()
    dims, shapes = families.param_dims(config), transformer.abstract_params(config)
    change(dims, shapes)
    with pytest.raises(ConfigError) as caught:
        sharding.param_shardings(mesh or tiny.mesh(2, 2, 2), dims, shapes)
    return str(caught.value)


def test_a_parameter_without_letters_is_an_error():
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    said = strict(lambda dims, shapes: shapes["head"].update(extra=shape))
    assert "parameter head.extra has a shape only, need both" in said
    said = strict(lambda dims, shapes: dims["norm"].update(extra="D"))
    assert "parameter norm.extra has dim letters only, need both" in said


def test_a_letter_without_a_rule_and_a_rule_without_a_parameter_are_errors():
    said = strict(lambda dims, shapes: dims["norm"].update(scale="Q"))
    assert "letter Q of a parameter axis has no rule" in said

    def no_vocabulary(dims, shapes):
        dims["embed"], dims["head"] = {"kernel": "DD"}, {"kernel": "DD"}

    assert "the rule V -> tensor matches no parameter" in strict(no_vocabulary)


def test_a_large_parameter_that_would_lie_whole_on_every_device_is_an_error():
    """29 x 16 floats may; 29 x 2^14 floats (1.8 MB) may not, on a mesh that splits the vocabulary in two."""

    def wide(dims, shapes):
        shapes["embed"]["kernel"] = jax.ShapeDtypeStruct((29, 2**14), jnp.float32)

    said = strict(wide)
    assert "mesh.tensor = 2: parameter embed.kernel has 29 along V" in said
    assert "set mesh.tensor to a divisor of 29" in said
    config = tiny.model()
    dims, shapes = families.param_dims(config), transformer.abstract_params(config)
    wide(dims, shapes)
    sharding.param_shardings(tiny.mesh(4, 2, 1), dims, shapes)


def test_constrain_on_one_device_is_the_identity():
    x = jnp.ones((2, 3))
    assert sharding.make_constrain(tiny.mesh())(x, "BT") is x


def test_constrain_places_what_it_is_given():
    mesh = tiny.mesh(2, 2, 2)
    constrain = sharding.make_constrain(mesh)
    x = np.arange(4 * 3 * 2 * 8.0, dtype=np.float32).reshape(4, 3, 2, 8)
    out = jax.jit(lambda x: constrain(x, "BTNH"))(x)
    assert out.sharding.shard_shape(out.shape) == (1, 3, 1, 8)
    np.testing.assert_array_equal(out, x)


def test_rows_lie_on_the_data_axes_and_whole_copies_along_tensor():
    mesh = tiny.mesh(2, 2, 2)
    tree = {"a": np.arange(8), "b": np.arange(24).reshape(8, 3), "none": None}
    placed = sharding.put_rows(mesh, tree)
    assert placed["none"] is None
    np.testing.assert_array_equal(placed["b"], tree["b"])
    held = {shard.device.id: shard.data.tolist() for shard in placed["a"].addressable_shards}
    assert held == {
        0: [0, 1],
        1: [0, 1],
        2: [2, 3],
        3: [2, 3],
        4: [4, 5],
        5: [4, 5],
        6: [6, 7],
        7: [6, 7],
    }
    assert sharding.rows(mesh, axis=1).spec == PartitionSpec(None, ROWS)
    assert sharding.replicated(mesh).shard_shape((8, 3)) == (8, 3)


def test_a_model_gives_the_same_logits_on_eight_devices():
    """Vocabulary 29 divides by nothing, so its axis stays whole; all others are split."""
    config, batch = tiny.model(), tiny.padded(tiny.ragged()[0])
    results = []
    for mesh in (tiny.mesh(), tiny.mesh(2, 2, 2)):
        constrain = sharding.make_constrain(mesh)

        @jax.jit
        def logits(params, tokens, positions, segments, constrain=constrain):
            hidden = transformer.apply(
                config, params, tokens, positions, segments, constrain=constrain
            )
            return heads.logits(config, params, hidden)

        rows = sharding.put_rows(mesh, batch)
        results.append(np.asarray(logits(tiny.params(mesh), *rows)))
    assert np.abs(results[0]).max() > 0.1
    np.testing.assert_allclose(results[1], results[0], atol=1e-5, rtol=1e-5)
