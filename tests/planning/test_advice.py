"""What to change when a run does not fit, and what each change saves."""

import pytest

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.planning import advice, work
from jaxrl_llm.planning.site import NoRoom
from jaxrl_llm.planning.targets import parse
from tests.planning import rig

TIGHT = (("data.max_response_length", 2048), ("rollout.max_num_seqs", 400))


@pytest.fixture(scope="module")
def tight():
    known, plan = rig.sketched("grpo_deepseek7b", "h100:8", TIGHT)
    assert not plan.fits
    return plan, advice.what_to_change(plan, known)


def test_each_saving_is_the_difference_of_two_plans(tight):
    plan, found = tight
    assert [one.saves for one in found] == sorted((one.saves for one in found), reverse=True)
    offload = next(one for one in found if one.changes == (("actor.optimizer_offload", "true"),))
    assert offload.saves == pytest.approx(plan.holdings.always["policy: moments"], rel=1e-3)
    assert offload.words == "--actor.optimizer_offload=true" and not offload.enough


def test_the_number_of_slots_that_fits_is_found(tight):
    _, found = tight
    slots = next(one for one in found if one.changes[0][0] == "rollout.max_num_seqs")
    assert slots.enough
    number = int(slots.changes[0][1])
    for count, fits in ((number, True), (number + 8, False)):
        settings = (("data.max_response_length", 2048), ("rollout.max_num_seqs", count))
        assert rig.sketched("grpo_deepseek7b", "h100:8", settings)[1].fits == fits


def test_an_update_that_is_too_large_gets_other_advice():
    known, plan = rig.sketched("grpo_deepseek7b", "v5e:4x4", (("rollout.max_num_seqs", 8),))
    worst = max(plan.phases, key=lambda phase: phase.peak)
    assert worst.name == "update_actor"
    paths = {path for one in advice.what_to_change(plan, known) for path, _ in one.changes}
    assert "mesh.tensor" in paths and "actor.ppo_max_token_len_per_device" in paths
    assert "rollout.max_num_seqs" not in paths


def test_no_room_for_a_single_sequence_is_exit_1():
    with pytest.raises(NoRoom) as caught:
        rig.sketched("grpo_deepseek7b", "v5e:4x4", (("rollout.gpu_memory_utilization", 0.3),))
    assert caught.value.exit_code == 1 and "It does not fit" in caught.value.report()


def test_weights_are_not_split_over_more_devices_than_a_host_has():
    settings = (("rollout.max_num_seqs", 200), ("rollout.tensor_model_parallel_size", 4))
    known, plan = rig.sketched("ppo_deepseek7b", "v6e:4x4", settings)
    assert max(plan.phases, key=lambda phase: phase.peak).name == "gen" and not plan.fits
    paths = {path for one in advice.what_to_change(plan, known) for path, _ in one.changes}
    assert "rollout.max_num_seqs" in paths and "rollout.tensor_model_parallel_size" not in paths
    with pytest.raises(ConfigError, match="does not divide the 4 devices of a host of v6e:4x4"):
        rig.sketched("ppo_deepseek7b", "v6e:4x4", (("rollout.tensor_model_parallel_size", 8),))


def test_what_processes_would_refuse_is_no_advice():
    _, plan = rig.sketched("grpo_deepseek7b", "h100:64")
    assert advice._changed(plan.config, (("mesh.tensor", "8"),), plan.target) is not None
    assert advice._changed(plan.config, (("mesh.tensor", "16"),), plan.target) is None


# Work and time ---------------------------------------------------------------------------------------------------------


def test_decoding_is_counted_by_hand():
    """5,120 responses of 1,024 tokens in 308 slots: 17 rounds of as many steps; weights and caches are read in each."""
    _, plan = rig.sketched("grpo_deepseek7b", "h100:8", (("rollout.max_num_seqs", 308),))
    row = next(row for row in plan.rows if row.name.startswith("advance"))
    steps = 17 * 1024
    assert row.work.calls == steps / plan.config.rollout.decode_chunk
    held = plan.holdings.sampling
    prompts = held["key/value cache"] / 3
    bytes_per_step = held["weights to decode with"] + prompts + 2 * prompts / 2
    assert row.work.moved == pytest.approx(steps * bytes_per_step, rel=1e-3)
    parameters = 6.91e9 - 102400 * 4096
    matrices = 2 * parameters * 5120 * 1024 / 8
    assert matrices < row.work.flops < 1.2 * matrices


def test_the_slowest_of_three_decides():
    target = parse("h100:16")
    one = work.bound(work.Work(989e12, 3352.32e9 / 2, 4), 90e9, 0, target, "bfloat16")
    assert one.arithmetic == pytest.approx(1) and one.memory == pytest.approx(0.5)
    assert one.links == pytest.approx(4 * 90 / 450) and one.by == "arithmetic"
    two = work.bound(work.Work(0, 0, 1), 90e9, 45e9, target, "bfloat16")
    assert two.seconds == pytest.approx(45 / 50) and two.by == "links"
