"""`plan`: words, exit codes, what is printed; compiled for real devices only where their compilers are installed."""

import importlib.util
import json
import subprocess
import sys

import pytest

from jaxrl_llm.commands import plan
from jaxrl_llm.planning import crew, targets, topology
from tests import rig

REFERENCE = f"--config={rig.ROOT / 'configs' / 'grpo_deepseek7b.py'}"
QUICK = f"--config={rig.CONFIG}"


def planned(*words):
    return plan.run(list(words), prog="test")


@pytest.fixture(autouse=True)
def kept_environment(monkeypatch):
    """The command sets variables for itself and its children; the suite keeps its own."""
    monkeypatch.setattr(crew, "environment", lambda platform: {})
    for name in (targets.FRACTION, targets.OLD_FRACTION):
        monkeypatch.delenv(name, raising=False)


def test_an_estimate_says_what_fits(capsys):
    assert planned(REFERENCE, "--hardware=h100:8", "--estimate") == 0
    out = capsys.readouterr().out
    for text in (
        "6.91 B parameters on 8 x NVIDIA H100 80GB HBM3 (1 host)",
        "training mesh fsdp 8; rollout mesh of a host data 4 x tensor 2",
        "not on disk; its architecture is known (30 layers, width 4,096)",
        "as many as GSM8K has (7,473)",
        "reference, in host memory",
        "It fits: rollout is the fullest phase",
        "not a promise",
    ):
        assert text in out


def test_what_does_not_fit_is_exit_1_with_advice(capsys):
    words = ["--data.max_response_length=2048", "--rollout.max_num_seqs=400"]
    assert planned(REFERENCE, "--hardware=h100:8", "--estimate", *words) == 1
    out = capsys.readouterr().out
    assert "It does not fit: rollout needs" in out
    assert "--actor.optimizer_offload=true  saves 6.9 GB" in out
    assert "XLA_CLIENT_MEM_FRACTION=0.92 would give programs 14.4 GB more" in out


def test_json_is_one_object_on_standard_output(capsys):
    assert planned(REFERENCE, "--hardware", "v5p:2x2x2", "--estimate", "--json") in (0, 1)
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert found["target"] == "v5p:2x2x2" and found["hosts"] == 2
    assert {phase["name"] for phase in found["phases"]} >= {"gen", "ref", "update_actor"}
    one = next(row for row in found["programs"] if row["name"] == "actor update")
    assert one["source"] == "estimated" and one["bytes"]["peak"] > one["bytes"]["arguments"]
    assert found["fits"] == all(phase["free"] >= 0 for phase in found["phases"])
    assert "6.91 B parameters" in told.err


def test_files_that_are_here_are_read(capsys):
    assert planned(QUICK, "--hardware=a100:1", "--estimate", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["notes"] == [] and found["devices"] == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([QUICK], "--hardware is missing"),
        ([QUICK, "--hardware=h900:8"], "need NAME:COUNT"),
        (["--hardware=h100:8"], "--config is missing"),
        ([QUICK, "--hardware=h100:8", "--jobs=3"], "--jobs: got '3', need 1 or 2"),
        ([QUICK, "--hardware=h100:8", "--timeout=soon"], "--timeout: got 'soon'"),
        ([QUICK, "--hardware=h100:8", "--limit=0"], "--limit: got '0', need whole seconds, 1 or more"),
        ([QUICK, "--hardware=h100:8", "--limit="], "--limit: got ''"),
        ([QUICK, "--hardware=h100:8", "--json=perhaps"], "--json: got 'perhaps'"),
        ([QUICK, "--hardware=h100:8", "--rollout.n=1"], "rollout.n = 1"),
        ([QUICK, "--hardware=h100:8", "--estimat"], "--estimat: needs a value"),
        ([QUICK, "--hardware=h100:8", "--rollout.tensor_model_parallel_size=3"], "does not divide 8"),
        ([REFERENCE, "--hardware=h100:64", "--data.train_batch_size=100", "--actor.ppo_mini_batch_size=100", "--rollout.n=16"], "do not divide over 8 processes"),
        ([REFERENCE, "--hardware=h100:64", "--mesh.tensor=16"], "tensor 16 = 16 devices, but each of the 8 processes has 8"),
        ([QUICK, "--hardware=v5e:3x3"], "no slice has this shape"),
        ([QUICK, "--hardware=h100:8", "--model.path=no/such-model", "--estimate"], "not a model whose architecture is known"),
    ],
)  # fmt: skip
def test_bad_words_are_told_together_and_exit_64(words, told, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert planned(*words) == 64
    assert told in capsys.readouterr().err


def test_the_targets_hosts_stand_in_for_those_of_the_settings(capsys):
    """The config is for one node of eight devices."""
    words = ["--mesh.data=8", "--mesh.fsdp=8", "--rollout.max_num_seqs=64"]
    assert planned(REFERENCE, "--hardware=h100:64", "--estimate", *words) == 0
    assert "training mesh data 8 x fsdp 8" in capsys.readouterr().out


def test_a_share_of_memory_that_is_no_number_is_exit_64(capsys, monkeypatch):
    monkeypatch.setenv(targets.OLD_FRACTION, "90%")
    assert planned(REFERENCE, "--hardware=h100:8", "--estimate") == 64
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION: got '90%'" in capsys.readouterr().err


def test_no_room_at_all_is_one_object_too(capsys):
    words = ["--hardware=v5e:4x4", "--rollout.gpu_memory_utilization=0.3", "--estimate"]
    assert planned(REFERENCE, *words, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    (problem,) = found.pop("problems")
    assert found == {"fits": False, "complete": False} and problem
    assert planned(REFERENCE, *words) == 1
    assert problem in capsys.readouterr().err


def test_settings_and_hardware_are_refused_together(capsys):
    assert planned(QUICK, "--hardware=tpu", "--rollout.n=1") == 64
    err = capsys.readouterr().err
    assert "--hardware: got 'tpu'" in err and "rollout.n = 1" in err


def test_without_a_compiler_one_line_names_the_extra(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    assert planned(REFERENCE, "--hardware=h100:8") == 64
    assert "pip install 'jaxrl_llm[plan-gpu]'" in capsys.readouterr().err


def test_help_names_hardware_and_exit_codes(capsys):
    assert planned("--help") == 0
    out = capsys.readouterr().out
    assert "a100, h100, h200, b200" in out and "v5e, v5p, v6e" in out and "1: it does not" in out


def answers(monkeypatch, missing=(), why="not finished after 600 seconds"):
    """A crew whose children compile nothing: each program takes 1 GB, some have no figures (`why`: `None` where time was up)."""

    def compile_all(order, names, platform, *, jobs, limits, tell):
        told = []
        for name in names:
            size = {"arguments": 10**9, "results": 0, "temporaries": 0, "host_arguments": 0}
            done = {"sent": {}, "abroad": 0.0, "seconds": 1.0, "cached": False}
            gone = limits.late(name) if why is None else {"error": why}
            told.append({"name": name} | (gone if name in missing else size | done))
            tell(told[-1])
        return told

    monkeypatch.setattr(crew, "compile_all", compile_all)
    monkeypatch.setattr(topology, "check_compiler", lambda target: None)


def test_programs_are_told_as_they_finish(capsys, monkeypatch):
    answers(monkeypatch)
    assert planned(REFERENCE, "--hardware=h100:8") == 0
    out = capsys.readouterr().out
    assert "  actor update: peak 1.00 GB (arguments 1.00" in out and "estimated 30.6" in out
    assert out.index("  actor update: peak") < out.index("  advantages: peak")


def test_an_unfinished_program_makes_the_plan_partial(capsys, monkeypatch):
    answers(monkeypatch, missing=("actor update",))
    assert planned(REFERENCE, "--hardware=h100:8") == 1
    out = capsys.readouterr().out
    assert "Not complete, no figures for: actor update (not finished after 600 seconds)" in out
    assert "What frees memory" not in out


@pytest.mark.parametrize(
    ("words", "seconds"),
    [(["--hardware=h100:8"], 300), (["--hardware=v6e:4x4"], 720), (["--hardware=h100:8", "--limit=7"], 7)],
)  # fmt: skip
def test_a_plan_whose_time_is_up_says_so_and_how_to_go_on(words, seconds, capsys, monkeypatch):
    answers(monkeypatch, missing=("actor update", "advantages"), why=None)
    assert planned(REFERENCE, *words, "--cache=/some/where") == 1
    out = capsys.readouterr().out
    late = f"not compiled: the plan's {seconds} s were up"
    assert f"no figures for: advantages; actor update ({late})" in out
    assert "What was compiled is kept in /some/where: the same command goes on from there" in out
    assert "It fits" not in out and "It does not fit" not in out
    assert planned(REFERENCE, *words, "--cache=none", "--json") == 1
    told = capsys.readouterr()
    assert "Nothing was kept (--cache=none)" in told.err
    assert late in {row["source"] for row in json.loads(told.out)["programs"]}


def test_json_of_a_partial_plan_does_not_say_that_it_fits(capsys, monkeypatch):
    answers(monkeypatch, missing=("actor update",))
    assert planned(REFERENCE, "--hardware=h100:8", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"] and not found["complete"] and found["advice"] == []


@pytest.mark.parametrize("name", ["actor update", "weight hand-over"])
def test_a_program_that_its_compiler_finds_too_large_does_not_fit(name, capsys, monkeypatch):
    why = "JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm\nAllocations"
    answers(monkeypatch, missing=(name,), why=why)
    assert planned(REFERENCE, "--hardware=h100:8", "--json") == 1
    told = capsys.readouterr()
    found = json.loads(told.out)
    row = next(row for row in found["programs"] if row["name"] == name)
    assert row["source"].startswith("estimated; too large for its compiler: JaxRuntimeError")
    assert "Allocations" not in row["source"] and row["bytes"]["peak"] > 1.1e9
    assert found["complete"] and not found["fits"]
    assert found["advice"] and not any(one["enough"] for one in found["advice"])
    assert f"{name}: peak" in told.err and "[estimated; too large" in told.err
    assert planned(REFERENCE, "--hardware=h100:8") == 1
    out = capsys.readouterr().out
    assert f"It does not fit: {name} is too large" in out and "What frees memory" in out


def test_a_config_error_costs_no_jax():
    code = (
        "import sys; from jaxrl_llm.commands import plan; "
        f"code = plan.run([{QUICK!r}, '--hardware=h100:8', '--rollout.n=1'], prog='x'); "
        "sys.exit(code if 'jax' not in sys.modules else 1)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=rig.ROOT, capture_output=True)
    assert done.returncode == 64


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["h100:2", "v5p:2x2x1"])
def test_a_tiny_run_is_compiled_for_real_devices(hardware, tmp_path):
    """The product's whole way, where the compilers are installed (extras `plan-gpu`, `plan-tpu`)."""
    module = {"h": "jax_plugins.xla_cuda12", "v": "libtpu"}[hardware[0]]
    try:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    except ModuleNotFoundError:
        pytest.skip(f"{module} is not installed")
    command = [sys.executable, "-m", "jaxrl_llm", "plan", QUICK, f"--hardware={hardware}", "--json"]
    done = subprocess.run(
        [*command, f"--cache={tmp_path}"], cwd=rig.ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["complete"] and all(row["source"] == "compiled" for row in found["programs"])
