"""Devices that are not there."""

import importlib.util
from types import SimpleNamespace

import pytest
from jax.experimental import topologies
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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("v5e:1x1", {"chips_per_host_bounds": [1, 1, 1]}),
        ("v5e:2x2", {}),
        ("v5p:2x2x1*2", {"num_slices": 2}),
    ],
)
def test_the_compiler_for_tpus_is_asked_for_the_slice(name, options, monkeypatch):
    target, asked = targets.parse(name), {}

    def describe(**words):
        asked.update(words)
        return SimpleNamespace(devices=[None] * target.count)

    monkeypatch.setattr(topology, "check_compiler", lambda target: None)
    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    assert len(topology.devices(target)) == target.count
    assert asked == {"platform": "tpu", "topology_name": name.partition("*")[0]} | options


def test_xlas_description_of_a_gpu_names_what_it_needs():
    text = topology._gpu_text(targets.parse("h100:8"))
    assert "core_count: 132" in text and "cuda_compute_capability { major: 9 }" in text
    assert 'device_description_str: "NVIDIA H100 80GB HBM3"' in text
    assert text.count("{") == text.count("}")
