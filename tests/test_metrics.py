import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.metrics import (
    CompileCounter,
    Phases,
    Profiler,
    batch_part,
    join_batch,
    memory,
    peak_rss_mb,
    speed,
    summarize_batch,
    summarize_rollout,
    throughput,
)
from jaxrl_llm.records import END_EOS, END_LENGTH, END_STOP
from tests import rig


def test_compile_counter_counts_new_programs_only():
    counter = CompileCounter()
    x = jnp.ones(3)
    counter.delta()
    f = jax.jit(lambda y: y * 3 + 1)
    f(x)
    assert counter.delta() == 1
    f(x)
    assert counter.delta() == 0
    other = CompileCounter()
    f(jnp.ones(4))
    row = other.row()
    assert row["perf/compilations"] == counter.delta() >= 1 and row["perf/compile_s"] > 0


# Recompilations, by name ---------------------------------------------------------------------------------------------


def test_a_changed_shape_is_named_once_its_phase_is_warm(capfd):
    watch = CompileCounter()

    def update(x, y, z):
        return x @ y + z

    jitted = jax.jit(update)
    arrays = [np.ones((64, width), np.float32) for width in (64, 80, 96)]
    square, one = np.ones((64, 64), np.float32), np.float32(1)
    for x in (arrays[0].T, arrays[1].T):  # warm-up, whatever compiles
        with watch.phase("update"):
            jitted(x, square, one)
    assert watch.news(2)[0].startswith("warning: recompiled jit(update) at step 2 ("), "2nd run"
    with watch.phase("update"):
        jitted(arrays[0].T, square, one)
    assert watch.news(3) == []
    with watch.phase("update"):
        jitted(arrays[2].T, square, one)
    [line] = watch.news(12)
    assert line.startswith("warning: recompiled jit(update) at step 12 (")
    assert "s): float32[96,64] instead of float32[80,64]; lengths or batch sizes that vary" in line
    row = watch.row()
    assert (row["perf/compilations"], row["perf/recompilations"]) == (3, 2)
    assert watch.news(13) == [] and watch.row()["perf/recompilations"] == 0
    assert capfd.readouterr() == ("", "")


def test_the_first_run_of_every_phase_is_expected_and_so_is_what_lies_outside():
    watch = CompileCounter()
    phases = Phases(around=watch.phase)

    def compile_one(number):
        jax.jit(lambda x: x * number - 1)(np.float32(2))

    with phases("step"):
        with phases("gen"):
            compile_one(1)
        compile_one(2)
    compile_one(3)
    with phases("testing"):
        compile_one(4)
    assert watch.news(1) == []
    with phases("step"):
        with phases("gen"):
            pass
        with phases("update_actor"):  # not during a critic's warm-up
            compile_one(5)
    assert watch.news(2) == []
    compile_one(6)
    with phases("step"), phases("gen"):
        compile_one(7)
    [line] = watch.news(3)
    assert "at step 3" in line
    assert watch.row()["perf/compilations"] == 7
    with phases("testing"):
        compile_one(8)
    assert len(watch.news(4)) == 1 and watch.row()["perf/recompilations"] == 1


def test_what_changed_is_told_in_words():
    watch = CompileCounter()

    def total(*arrays):
        return sum(array.sum() for array in arrays)

    with watch.phase("a"):
        jax.jit(total)(*[np.ones(3, np.float32)] * 5)
        jax.jit(total)(np.ones(3, np.float32))
    with watch.phase("a"):
        jax.jit(total)(*[np.ones(size, np.float32) for size in (4, 5, 6, 7, 3)])
    [line] = watch.news(1)
    changes = [f"float32[{size}] instead of float32[3]" for size in (4, 5, 6)]
    assert f"{', '.join(changes)} and 1 more; lengths" in line
    with watch.phase("a"):
        jax.jit(total)(*[np.ones(3, np.float32)] * 4)
    assert ": 4 arrays instead of " in watch.news(2)[0]
    with watch.phase("a"):
        jax.jit(lambda x: total(x) + 7)(np.ones(3, np.float32))
    assert watch.news(3)[0].startswith("warning: ")
    with watch.phase("a"):
        for scale in range(2):

            def scaled(x, scale=scale):
                return x * scale + 11

            jax.jit(scaled)(np.ones(3, np.float32))
    lines = watch.news(4)
    assert lines[0].startswith("warning: compiled jit(scaled) at step 4, after warm-up (")
    assert "s): equal shapes; something static is new; " in lines[1]


def test_many_recompilations_are_counted_not_listed():
    watch = CompileCounter()
    jitted = jax.jit(lambda x: x + 5)
    with watch.phase("a"):
        pass
    said = []
    for step in range(1, 15):
        with watch.phase("a"):
            for size in range(1, 6) if step == 1 else [step * 10]:
                jitted(np.ones(size, np.float32))
        said.append(watch.news(step))
    assert len(said[0]) == 4 and said[0][3] == "warning: and 2 more recompilations at step 1"
    assert [len(lines) for lines in said[1:]] == [1] * 10 + [0] * 3
    assert "from now on" in said[10][0] and "at step 10 " in said[9][0]
    assert watch.row()["perf/recompilations"] == 5 + 13


WATCHED = """
import sys, logging, json
logging.basicConfig(level=logging.WARNING)
import jax, numpy as np
from jaxrl_llm.metrics import CompileCounter
watch = CompileCounter()
def update(x):
    return jax.numpy.sin(x) @ x.T
jitted = jax.jit(update)
for width in (5, 6):
    with watch.phase("update"):
        jitted(np.ones((4, width), np.float32))
print(json.dumps([watch.row(), watch.news(2)]))
logging.getLogger("jax").setLevel(logging.DEBUG)
jitted(np.ones((4, 7), np.float32))
"""


def test_programs_from_the_persistent_cache_count_and_jax_prints_only_what_it_printed(tmp_path):
    rows = []
    for _ in range(2):
        environment = rig.environment() | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", WATCHED],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        quiet, _, loud = done.stderr.partition("Compiling jit(update)")
        assert quiet == "" or "DEBUG" in quiet, "only what was asked for is printed"
        assert "float32[4,7]" in loud and "float32[4,6]" not in done.stderr
        rows.append(json.loads(done.stdout))
        assert any(path.name.startswith("jit_update") for path in tmp_path.iterdir())
    for row, lines in rows:
        assert (row["perf/compilations"], row["perf/recompilations"]) == (2, 1)
        assert "float32[4,6] instead of float32[4,5]" in lines[0]


# Clocks, traces, memory, speed -----------------------------------------------------------------------------------------


def test_phases_add_up_and_reset():
    times = iter([0.0, 2.0, 10.0, 10.5, 20.0, 21.0, 23.0, 24.0])
    phases = Phases(clock=lambda: next(times))
    with phases("gen"):
        pass
    with pytest.raises(KeyError), phases("gen"):
        raise KeyError
    with phases("step"), phases("update"):
        pass
    assert phases.row() == {"timing_s/gen": 2.5, "timing_s/update": 2.0, "timing_s/step": 4.0}
    phases.reset()
    assert phases.row() == {}


def test_peak_memory_is_in_megabytes():
    assert 20 < peak_rss_mb() < 200_000


def test_memory_of_this_moment_follows_what_is_held():
    before = memory()
    held = np.ones(64 * 2**20 // 8)
    during = memory()
    del held
    after = memory()
    assert 20 < before["perf/rss_mb"] <= before["perf/peak_rss_mb"] + 1
    assert during["perf/rss_mb"] - before["perf/rss_mb"] == pytest.approx(64, abs=8)
    assert during["perf/rss_mb"] - after["perf/rss_mb"] == pytest.approx(64, abs=8)


def test_chosen_steps_leave_a_trace_each(tmp_path):
    said = []
    traced = Profiler(tmp_path / "profile", (2, 3), said.append)
    for step in range(1, 5):
        with traced(step):
            jnp.arange(4).sum().block_until_ready()
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["step_2", "step_3"]
    for number, step in enumerate((2, 3)):
        folder = tmp_path / "profile" / f"step_{step}"
        assert [path.stat().st_size > 0 for path in folder.rglob("*.xplane.pb")] == [True]
        assert said[number].startswith(f"trace of step {step}: {folder} ")
    assert len(said) == 2


def test_a_profiler_that_fails_is_said_once_and_an_error_of_the_step_passes(tmp_path, monkeypatch):
    said = []
    (tmp_path / "taken").write_text("")
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: Path(folder).mkdir())
    traced = Profiler(tmp_path / "taken", (1, 2), said.append)
    for step in (1, 2):
        with traced(step):
            pass
    assert len(said) == 1 and said[0].startswith("warning: no trace of step 1 (NotADirectoryError:")
    assert said[0].endswith("; the run goes on")
    stopped = []
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: stopped.append(True))
    with pytest.raises(KeyboardInterrupt), Profiler(tmp_path, (1,), said.append)(1):
        raise KeyboardInterrupt
    assert stopped == [True]


def test_speed_by_hand():
    row = speed(
        step_flops=8e12,
        step_seconds=4.0,
        update_flops=3e12,
        update_seconds=0.5,
        devices=2,
        peak=10e12,
    )
    assert row == {
        "perf/tflops_per_device": 1.0,
        "perf/mfu": pytest.approx(0.1),
        "perf/tflops_per_device/update": 3.0,
        "perf/mfu/update": pytest.approx(0.3),
    }
    unknown = speed(
        step_flops=8e12, step_seconds=4, update_flops=0, update_seconds=0, devices=2, peak=None
    )
    assert unknown == {"perf/tflops_per_device": 1.0}


def test_throughput_by_hand():
    assert throughput(1000, 4.0, 5) == {
        "perf/total_num_tokens": 1000,
        "perf/time_per_step": 4.0,
        "perf/throughput": 50.0,
    }
    assert "perf/throughput" not in throughput(1000, 0.0, 5)


def test_parts_count_by_their_tokens_not_as_a_mean_of_means():
    """10 tokens of advantage 1 and 990 of 0: 0.01, not 0.5."""
    few = batch_part(mask=np.ones((1, 10)), advantages=np.ones((1, 10)))
    many = batch_part(mask=np.ones((1, 990)), advantages=np.zeros((1, 990)))
    row = join_batch([few, many])
    assert row["critic/advantages/mean"] == pytest.approx(0.01, rel=1e-12)
    assert row["critic/advantages/std"] == pytest.approx(math.sqrt(0.01 * 0.99), rel=1e-12)
    assert (row["critic/advantages/max"], row["critic/advantages/min"]) == (1.0, 0.0)


@pytest.mark.parametrize("cuts", [[3], [1, 2], [2, 4], [0, 5], [1, 2, 3, 4, 5]])
def test_a_batch_in_parts_is_the_batch(cuts):
    """However rows are cut; a part may be empty or hold no trained token (row 2)."""
    random = np.random.default_rng(3)
    arrays = {name: random.normal(5.0, 1.0, (6, 7)) for name in ("advantages", "returns", "values", "token_rewards", "old_logprobs", "sampler_logprobs")}  # fmt: skip
    arrays["mask"] = random.random((6, 7)) < 0.6
    arrays["mask"][2] = False
    arrays["valid"] = np.array([1, 1, 1, 0, 1, 1], bool)
    whole = summarize_batch(**arrays)
    parts = [
        batch_part(**{name: array[low:high] for name, array in arrays.items()})
        for low, high in itertools.pairwise([0, *cuts, 6])
    ]
    joined = join_batch(json.loads(json.dumps(parts)))
    assert joined.keys() == whole.keys()
    assert joined == {name: pytest.approx(value, rel=1e-12) for name, value in whole.items()}


def test_nan_in_one_part_shows_and_parts_without_tokens_do_not_count():
    bad = batch_part(mask=np.ones((1, 2)), advantages=np.array([[np.nan, 1.0]]))
    good = batch_part(mask=np.ones((1, 2)), advantages=np.ones((1, 2)))
    assert all(math.isnan(value) for value in join_batch([good, bad]).values())
    assert join_batch([{}, good]) == join_batch([good])
    assert join_batch([{}, {}]) == {}


def rollout(scores, **changes):
    count = len(scores)
    base: dict[str, Any] = {
        "scores": np.asarray(scores, np.float32),
        "response_lengths": np.arange(1, count + 1),
        "prompt_lengths": np.full(count, 5),
        "end_reason": np.full(count, END_EOS),
        "group_size": 2,
    }
    return summarize_rollout(**(base | changes))


def test_rollout_by_hand():
    row = rollout(
        [1, 1, 0, 0, 0, 1, 0.5, 0.5],
        response_lengths=np.array([0, 2, 4, 6, 8, 10, 12, 14]),
        prompt_lengths=np.array([3, 5, 7, 9]),
        end_reason=np.array([END_EOS, END_LENGTH, END_STOP, END_EOS] * 2),
        max_prompt_length=9,
        answer_found=np.array([1, 1, 1, 1, 1, 1, 0, 0]),
    )
    assert row == {
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "response_length/mean": 7.0,
        "response_length/max": 14.0,
        "response_length/min": 0.0,
        "response_length/clip_ratio": 0.25,
        "prompt_length/mean": 6.0,
        "prompt_length/max": 9.0,
        "prompt_length/min": 3.0,
        "prompt_length/clip_ratio": 0.25,
        "response/aborted_ratio": 0.125,
        "reward/not_finite": 0.0,
        "reward/answer_found": 0.75,
        "groups/no_signal": 0.75,
        "groups/all_right": 0.25,
        "groups/all_wrong": 0.25,
    }


def test_rows_that_do_not_count_change_nothing():
    clean = rollout([1, 0, 0, 0])
    noisy = rollout(
        [1, 0, 0, 0, 7, np.nan],
        response_lengths=np.array([1, 2, 3, 4, 999, 999]),
        prompt_lengths=np.array([5, 5, 5, 5, 77, 77]),
        end_reason=np.array([END_EOS] * 4 + [END_LENGTH] * 2),
        valid=np.array([1, 1, 1, 1, 0, 0]),
    )
    assert clean == noisy
    assert clean["groups/no_signal"] == 0.5 and clean["groups/all_wrong"] == 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_never_counts_as_a_score(bad):
    row = rollout([1, bad, 1, 0])
    assert row["critic/score/mean"] == pytest.approx(2 / 3) and row["critic/score/max"] == 1
    assert row["reward/not_finite"] == 0.25 and row["response_length/mean"] == 2.5
    assert row["groups/no_signal"] == 0.5 and row["groups/all_right"] == 0.5


def test_shifted_scores_shift_means_and_leave_the_signal():
    a, b = rollout([1, 0, 0.3, 0.3]), rollout([11, 10, 10.3, 10.3])
    assert b["critic/score/mean"] == pytest.approx(a["critic/score/mean"] + 10)
    assert a["groups/no_signal"] == b["groups/no_signal"] == 0.5


def test_degenerate_rollouts():
    nothing = rollout([1.0, 0.0], valid=np.zeros(2))
    assert nothing == {}
    single = rollout([1.0, 0.0], group_size=1)
    assert not any(key.startswith("groups/") for key in single)
    without = rollout([1.0, 1.0], max_score=None, min_score=None)
    assert without["groups/no_signal"] == 1 and "groups/all_right" not in without
    all_nan = rollout([np.nan, np.nan])
    assert "critic/score/mean" not in all_nan and all_nan["reward/not_finite"] == 1.0


MASK = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]])
VALID = np.array([1, 1, 1, 0])
POISON = np.array([[0, 0, np.nan], [0, np.nan, np.inf], [np.nan] * 3, [np.nan] * 3])


def test_batch_by_hand_with_poison_in_masked_places():
    row = summarize_batch(
        mask=MASK,
        valid=VALID,
        advantages=POISON + np.array([[1, -2, 0], [4, 0, 0], [0] * 3, [0] * 3]),
        returns=POISON + np.array([[1, 2, 0], [3, 0, 0], [0] * 3, [0] * 3]),
        values=POISON + np.array([[1, 2, 0], [0, 0, 0], [0] * 3, [0] * 3]),
        token_rewards=POISON + np.array([[0.5, 1, 0], [-1, 0, 0], [0] * 3, [0] * 3]),
        old_logprobs=POISON + np.array([[-1, -2, 0], [-3, 0, 0], [0] * 3, [0] * 3]),
        sampler_logprobs=POISON + np.array([[-1, -2.5, 0], [-2, 0, 0], [0] * 3, [0] * 3]),
    )
    expected = {
        "critic/advantages/mean": 1.0,
        "critic/advantages/max": 4.0,
        "critic/advantages/min": -2.0,
        "critic/advantages/std": math.sqrt(6),
        "critic/rewards/mean": 0.25,
        "critic/rewards/max": 1.5,
        "critic/rewards/min": -1.0,
        "critic/returns/mean": 2.0,
        "critic/returns/max": 3.0,
        "critic/returns/min": 1.0,
        "critic/values/mean": 1.0,
        "critic/values/max": 2.0,
        "critic/values/min": 0.0,
        "critic/vf_explained_var": 1 - 2 / (2 / 3 + 1e-5),
        "rollout/logprob_gap/mean": 0.5,
        "rollout/logprob_gap/max": 1.0,
    }
    assert row == pytest.approx(expected)


def test_a_perfect_critic_explains_everything():
    returns = np.array([[1.0, 5.0, 2.0]])
    row = summarize_batch(mask=np.ones((1, 3)), advantages=returns, returns=returns, values=returns)
    assert row["critic/vf_explained_var"] == 1.0


def test_nothing_trained_is_an_empty_row_and_nan_in_a_trained_token_shows():
    assert summarize_batch(mask=np.zeros((2, 3)), advantages=np.ones((2, 3))) == {}
    row = summarize_batch(mask=np.ones((1, 2)), advantages=np.array([[np.inf, np.nan]]))
    assert math.isnan(row["critic/advantages/mean"]) and math.isnan(row["critic/advantages/std"])


def test_bfloat16_arrays_are_reduced_in_float64():
    advantages = jnp.full((1, 1000), 0.1, jnp.bfloat16)
    row = summarize_batch(mask=np.ones((1, 1000)), advantages=advantages)
    assert row["critic/advantages/mean"] == pytest.approx(float(jnp.bfloat16(0.1)), rel=1e-12)
