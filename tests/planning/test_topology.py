"""Devices that are not there."""

import importlib.util

import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm import sharding
from jaxrl_llm.checks import MeshShape
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.planning import targets, topology


def test_stand_ins_have_places_in_a_mesh_and_belong_to_hosts():
    found = topology.stand_ins(targets.parse("h100:16"))
    assert [device.process_index for device in found] == [0] * 8 + [1] * 8
    assert topology.local_devices(found) == found[:8]
    mesh = sharding.make_mesh(MeshShape(2, 4, 2), found)
    assert sharding.platform(mesh) == "gpu"
    where = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "tensor"))
    assert where.shard_shape((16, 6)) == (2, 3)
    assert where.with_memory_kind("pinned_host").memory_kind == "pinned_host"


@pytest.mark.parametrize(("name", "extra"), [("h100:8", "plan-gpu"), ("v6e:4x4", "plan-tpu")])
def test_a_missing_compiler_is_one_line_that_names_the_extra(name, extra, monkeypatch):
    def nothing(module):
        raise ModuleNotFoundError(module)

    for find in (lambda module: None, nothing):
        monkeypatch.setattr(importlib.util, "find_spec", find)
        with pytest.raises(ConfigError) as caught:
            topology.check_compiler(targets.parse(name))
        (told,) = caught.value.problems
        assert f"pip install 'jaxrl_llm[{extra}]'" in told and "--estimate" in told
    assert caught.value.exit_code == 64


def test_xlas_description_of_a_gpu_names_what_it_needs():
    text = topology._gpu_text(targets.parse("h100:8"))
    assert "core_count: 132" in text and "cuda_compute_capability { major: 9 }" in text
    assert 'device_description_str: "NVIDIA H100 80GB HBM3"' in text
    assert text.count("{") == text.count("}")
