"""Words that name hardware, and the facts behind them."""

import pytest

from jaxrl_llm import hardware
from jaxrl_llm.config import load, resolve
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
    config = targets.on_target(resolve(load(str(rig.CONFIG))), targets.parse("h100:64"))
    assert (config.trainer.nnodes, config.trainer.n_devices_per_node) == (8, 8)
