"""Words that name hardware, and the facts behind them."""

import pytest

from jaxrl_llm import hardware
from jaxrl_llm.config import load, override_all, resolve
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.planning import targets
from tests import rig


@pytest.mark.parametrize(
    ("text", "count", "hosts", "slices"),
    [
        ("h100:8", 8, 1, 1),
        ("H100:4", 4, 1, 1),
        ("a100:64", 64, 8, 1),
        ("b200:512", 512, 64, 1),
        ("v5p:2x2x1", 4, 1, 1),
        ("v5p:2x2x2", 8, 2, 1),
        ("v6e:4x4", 16, 4, 1),
        ("v5e:2x2", 4, 1, 1),
        ("v5p:2x2x2*4", 32, 8, 4),
        ("v5e:1x1", 1, 1, 1),
        ("v6e:1x1", 1, 1, 1),
        ("v5e:2x4", 8, 2, 1),
        ("v5p:2x2x3", 12, 3, 1),
    ],
)
def test_a_target_is_so_many_devices_on_so_many_hosts(text, count, hosts, slices):
    target = targets.parse(text)
    assert (target.count, target.hosts, target.slices) == (count, hosts, slices)
    assert targets.parse(target.name) == target


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("h100", "need NAME:COUNT"),
        ("h900:8", "need NAME:COUNT for GPUs (a100, h100, h200, b200)"),
        ("h100:12", "up to 8 or whole hosts of 8"),
        ("h100:2x4", "need one number of GPUs"),
        ("h100:8*2", "need one number of GPUs"),
        ("h100:0", "need sizes of 1 or more"),
        ("v5p:4x4", "need 3 sizes for v5p, as in v5p:2x2x2"),
        ("v6e:2x2x2", "need 2 sizes for v6e, as in v6e:2x2"),
        ("", "need NAME:COUNT"),
        ("v5e:3x3", "no slice has this shape: need even sizes on the first two axes"),
        ("v5e:1x2", "as in v5e:2x2, or v5e:1x1 for one chip"),
        ("v5p:3x1x1", "as in v5p:2x2x1"),
        ("v5p:1x1x1", "no slice has this shape"),
    ],
)
def test_other_words_are_refused_with_the_way_to_write_them(text, told):
    with pytest.raises(ConfigError) as caught:
        targets.parse(text)
    assert told in str(caught.value) and repr(text) in str(caught.value)


def test_every_device_has_a_peak_rate_and_sane_facts():
    for device in targets.DEVICES.values():
        assert hardware.peak_flops(device.kind, "float32") is not None
        assert 0 < device.usable <= 1 and device.memory > 2**33
        assert device.network < device.link < device.hbm
        assert bool(device.chip) == (device.platform == "gpu")


def test_the_settings_take_the_targets_hosts():
    pairs = list(targets.expected(targets.parse("h100:64")).items())
    config, problems = override_all(load(str(rig.CONFIG)), pairs)
    assert (config.trainer.nnodes, config.trainer.n_devices_per_node, problems) == (8, 8, [])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"data.train_batch_size": "100"}, "100 prompts do not divide over 8 processes"),
        ({"data.train_batch_size": "4"}, "4 prompts do not divide over 8 processes"),
        ({"mesh.tensor": "16"}, "16 devices, but each of the 8 processes has 8"),
        ({"rollout.tensor_model_parallel_size": "16"}, "does not divide the 8 devices of a process"),
    ],
)  # fmt: skip
def test_what_processes_would_refuse_is_a_misfit(settings, told):
    fits = {"data.train_batch_size": "64"}
    config, _ = override_all(load(str(rig.CONFIG)), list((fits | settings).items()))
    (problem,) = targets.misfits(resolve(config), targets.parse("h100:64"))
    assert told in problem
    assert targets.misfits(resolve(config), targets.parse("h100:8")) == []


@pytest.mark.parametrize("name", [targets.FRACTION, targets.OLD_FRACTION])
def test_the_environment_says_the_share_of_a_gpus_memory(name, monkeypatch):
    for other in (targets.FRACTION, targets.OLD_FRACTION):
        monkeypatch.delenv(other, raising=False)
    gpu, tpu = targets.DEVICES["h100"], targets.DEVICES["v6e"]
    assert targets.memory_share(gpu) == 0.75
    monkeypatch.setenv(name, "0.9")
    assert targets.memory_share(gpu) == 0.9 and targets.memory_share(tpu) == 0.976
    for text in ("90%", "nan", "0", "-0.5", "1.5"):
        monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError, match=f"{name}: got '{text}', need a number above 0"):
            targets.memory_share(gpu)


def test_both_names_of_the_share_are_refused_as_jax_refuses_them(monkeypatch):
    monkeypatch.setenv(targets.FRACTION, "0.9")
    monkeypatch.setenv(targets.OLD_FRACTION, "0.9")
    with pytest.raises(ConfigError, match="are both set, need one of them"):
        targets.memory_share(targets.DEVICES["h100"])


@pytest.mark.parametrize(
    ("text", "host"),
    [("v6e:4x4", "v6e:2x2"), ("v5p:2x2x2", "v5p:2x2x1"), ("v5e:2x2*2", "v5e:2x2"), ("v5e:2x2", "v5e:2x2"),
     ("v6e:1x1", "v6e:1x1"), ("h100:64", "h100:64")],
)  # fmt: skip
def test_a_tpus_host_is_a_slice_by_itself(text, host):
    assert targets.decodes_on(targets.parse(text)) == targets.parse(host)
