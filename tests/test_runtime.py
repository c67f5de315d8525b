"""What surrounds a run: signals, the device count, the compilation cache, the saved configuration, the folder."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxrl_llm import runtime
from jaxrl_llm.config import Config, override_all
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.knobs import DistributedKnobs
from jaxrl_llm.processes import Meetings, Pulse
from tests import rig


def with_trainer(config: Config, **changes: Any) -> Config:
    return replace(config, trainer=replace(config.trainer, **changes))


# Signals -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_raised_at_the_next_poll(number, capfd):
    before = signal.getsignal(number)
    with runtime.Signals() as signals:
        signals.poll()
        os.kill(os.getpid(), number)
        assert signals.requested
        with pytest.raises(runtime.StopRequested):
            signals.poll()
    assert signal.getsignal(number) is before
    assert f"{signal.Signals(number).name}: saving the last finished step" in capfd.readouterr().err


def test_a_stop_is_no_exception_that_a_handler_swallows():
    assert not issubclass(runtime.StopRequested, Exception)


def test_the_second_signal_ends_the_process_at_once():
    code = (
        "import os, signal\nfrom jaxrl_llm.runtime import Signals\n"
        "with Signals():\n    os.kill(os.getpid(), signal.SIGINT)\n    print('one', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    print('two', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=rig.ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (75, "one\n")


@pytest.mark.parametrize(("seconds", "ended"), [(60.0, (0, "one\ntwo\n")), (0.0, (75, "one\n"))])
def test_the_same_signal_at_once_again_is_the_same_request(seconds, ended):
    code = (
        f"import os, signal\nfrom jaxrl_llm import runtime\nruntime.SAME_SECONDS = {seconds}\n"
        "with runtime.Signals():\n    os.kill(os.getpid(), signal.SIGTERM)\n    print('one', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    print('two', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=rig.ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == ended


def test_a_closed_standard_error_does_not_hurt():
    code = (
        "import os, signal\nfrom jaxrl_llm.runtime import Signals\nos.close(2)\n"
        "with Signals() as s:\n    os.kill(os.getpid(), signal.SIGTERM)\n    print(s.requested)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=rig.ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "True\n")


# Process -----------------------------------------------------------------------------------------------------------------


def test_another_device_count_than_expected_is_refused():
    config = with_trainer(rig.settings({}), nnodes=1, n_devices_per_node=3)
    with pytest.raises(ConfigError, match=r"1 x 3 = 3 devices, but there are 8"):
        runtime.start_process(config)
    runtime.start_process(with_trainer(config, n_devices_per_node=8))


def test_trajectories_that_do_not_divide_over_the_devices_are_refused():
    with pytest.raises(ConfigError, match=r"1 x 4 = 4 trajectories do not divide over 8"):
        runtime.start_process(
            rig.settings({"data.train_batch_size": 1, "actor.ppo_mini_batch_size": 1})
        )


def test_the_compilation_cache_is_switched_on(monkeypatch, tmp_path):
    updates = {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: updates.update({name: value}))
    config = with_trainer(rig.settings({}), compilation_cache_dir=str(tmp_path / "cache"))
    runtime.start_process(config)
    assert updates == {}, "the environment variable of this suite wins"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    runtime.start_process(with_trainer(config, compilation_cache_dir=None))
    assert updates == {}
    runtime.start_process(config)
    assert updates["jax_compilation_cache_dir"] == str(tmp_path / "cache")
    assert updates["jax_persistent_cache_min_compile_time_secs"] == 0
    monkeypatch.setenv("HOME", str(tmp_path))
    runtime.start_process(with_trainer(config, compilation_cache_dir="~/xla"))
    assert updates["jax_compilation_cache_dir"] == str(tmp_path / "xla")


# Several processes ---------------------------------------------------------------------------------------------------------


def test_one_process_compares_itself_with_nobody():
    config = rig.settings({})
    assert runtime.start_process(config, drawn_seed=True) == config
    assert runtime.facts(config)["devices of a process"] == 8
    runtime.compare_processes(Meetings(), {"train": "abc"})


def everyone(*changes, devices=4, **shared):
    """The facts of one process per change, on a host each unless the change names one."""
    base = {"devices of a process": devices, **shared}
    return [base | {"host": f"host{number}"} | change for number, change in enumerate(changes)]


def test_what_differs_between_processes_is_named():
    facts = everyone(
        {"actor.optim.lr": 1.0}, {"actor.optim.lr": 1.0}, {"actor.optim.lr": 2.0, "x": 1}
    )
    first, second = runtime.differences(facts)
    assert first.startswith(
        "actor.optim.lr: process 2 has 2.0, process 0 has 1.0, need the same on all 3"
    )
    assert second.startswith("x: process 2 has 1, process 0 has None")
    assert runtime.differences(facts[:2]) == [], "hosts may differ"
    many = everyone({}, {f"s{number}": 1 for number in range(30)})
    assert runtime.differences(many)[-1] == "and 10 more differences"


def test_what_is_compared_leaves_out_where_a_process_stands(monkeypatch):
    config = rig.settings({"distributed.process_id": 1, "trainer.compilation_cache_dir": "/here"})
    other = rig.settings({"distributed.process_id": 0, "trainer.compilation_cache_dir": "/there"})
    assert runtime.facts(config) == runtime.facts(other)
    assert runtime.facts(config)["data.train_batch_size"] == 8
    assert runtime.facts(config)["version of jax"] == jax.__version__
    monkeypatch.setattr(runtime.jax, "process_count", lambda: 2)
    assert len(runtime.facts(config)["program text of jaxrl_llm"]) == 16


@pytest.mark.parametrize(
    ("settings", "processes", "said"),
    [
        ({}, everyone({}, {}), None),
        ({"mesh.tensor": 4}, everyone({}, {}), None),
        (
            {"mesh.tensor": 8},
            everyone({}, {}),
            r"tensor 8 = 8 devices, but each of the 2 processes has 4",
        ),
        (
            {"mesh.tensor": 2, "mesh.context": 4},
            everyone({}, {}),
            r"context 4 x tensor 2 = 8 devices",
        ),
        ({"mesh.tensor": 3}, everyone({}, {}, {}, devices=4), r"need a divisor of 4"),
        (
            {"rollout.tensor_model_parallel_size": 8},
            everyone({}, {}),
            r"does not divide the 4 devices of a",
        ),
        ({}, everyone({}, {}, {}), r"8 prompts do not divide over 3 processes.* set it to 6 or 9"),
        ({"trainer.nnodes": 2}, everyone({}, {}), None),
        (
            {"trainer.nnodes": 2},
            everyone({}),
            r"nnodes = 2, but the processes run on 1 hosts \(host0\)",
        ),
        ({"trainer.nnodes": 2}, everyone({"host": "a"}, {"host": "a"}), r"run on 1 hosts \(a\)"),
        ({"trainer.n_devices_per_node": 8}, everyone({"host": "a"}, {"host": "a"}), None),
        (
            {"trainer.n_devices_per_node": 8},
            everyone({}, {}),
            r"host host0 has 4 devices in this run; set it to 4",
        ),
    ],
)
def test_what_the_division_into_processes_forbids(settings, processes, said):
    config = override_all(
        rig.settings({}), [(name, str(value)) for name, value in settings.items()]
    )[0]
    problems = runtime.misfits(config, processes)
    assert (problems == []) if said is None else re.search(said, "\n".join(problems))


def test_a_pod_slice_that_is_not_joined_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(
        ConfigError, match=r"one of 4 processes of a TPU pod slice, but they are not joined"
    ):
        runtime.start_process(rig.settings({"distributed.enable": "off"}))


def test_seeds_are_those_of_process_0(monkeypatch):
    """A drawn seed is taken from process 0; a given one is left alone, and compared."""
    meet = SimpleNamespace(first=lambda name, make: [77, 78], gather=lambda name, value: [value])
    config = rig.settings({})
    taken = runtime.start_process(config, meet, drawn_seed=True)
    assert (taken.trainer.seed, taken.data.seed) == (77, 78)
    assert runtime.start_process(config, meet) == config


def test_only_process_0_prints_what_is_no_warning(monkeypatch, capsys):
    runtime.voice()("hello")
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    speak = runtime.voice()
    speak("hello again")
    speak("warning: little memory")
    assert capsys.readouterr().out == "hello\nprocess 3: warning: little memory\n"


def test_with_several_processes_only_an_agreed_poll_stops(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    posted = []
    monkeypatch.setattr(runtime.processes, "post_stop", lambda: posted.append(1))
    monkeypatch.setattr(runtime.processes, "stop_posted", lambda: bool(posted))
    monkeypatch.setattr(runtime.processes, "heed", lambda: None)
    told = SimpleNamespace(gather=lambda name, value: [value, False], pulse=Pulse())
    signals, other = runtime.Signals(told), runtime.Signals(told)
    other.poll_apart()
    signals.requested = True
    signals.poll()
    with pytest.raises(runtime.StopRequested):
        signals.poll_apart()
    with pytest.raises(runtime.StopRequested):
        signals.agree("here")
    other.agree("here")
    other.poll_apart()
    other._looked = 0.0
    with pytest.raises(runtime.StopRequested):
        other.poll_apart()


def test_where_a_process_stands_is_not_saved(tmp_path):
    config = rig.settings({"distributed.process_id": 1, "distributed.coordinator_address": "a:1"})
    runtime.write_config(tmp_path, config)
    saved = runtime.read_config(tmp_path)
    assert saved == replace(config, distributed=DistributedKnobs())
    assert runtime.saved_config(tmp_path, Meetings()) == saved
    said: list[str] = []
    runtime.compare(saved, config, said.append)
    assert said == []


# Saved configuration -------------------------------------------------------------------------------------------------------


def test_the_saved_configuration_comes_back_equal(tmp_path):
    assert runtime.read_config(tmp_path) is None
    for settings in ({}, rig.ALGORITHMS["ppo"], {"rollout.stop": "a,b", "mesh.data": "none"}):
        config = rig.settings(settings)
        runtime.write_config(tmp_path, config)
        assert runtime.read_config(tmp_path) == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not readable"),
        ('{"actor": {"optim": {"lr": 1', "not readable"),
        ('{"actor": {"optim": {"learning_rate": 1.0}}}', "actor.optim.learning_rate"),
        ("[1]", "got a list"),
    ],
)
def test_a_broken_saved_configuration_is_named(tmp_path, text, said):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=said) as refused:
        runtime.read_config(tmp_path)
    assert str(tmp_path) in str(refused.value)


def test_the_slots_of_the_first_start_are_kept():
    asked = rig.settings({})
    saved = replace(asked, rollout=replace(asked.rollout, max_num_seqs=12))
    assert runtime.adopt(saved, asked) == saved
    other = replace(asked, rollout=replace(asked.rollout, max_num_seqs=16))
    assert runtime.adopt(saved, other) == other
    assert runtime.adopt(asked, asked) == asked


def test_all_changed_identity_settings_are_refused_together():
    saved = rig.settings({})
    now = rig.settings({"actor.clip_ratio_c": 9.0, "data.seed": 4, "trainer.save_freq": 1})
    said: list[str] = []
    with pytest.raises(ConfigError) as refused:
        runtime.compare(saved, now, said.append)
    assert len(refused.value.problems) == 2 and said == []
    assert refused.value.problems[0].startswith("data.seed: the run in this folder has 1, got 4")


def test_changed_operational_settings_are_said():
    saved = rig.settings({})
    now = rig.settings({"critic.optim.lr": 0.5, "trainer.save_freq": 1, "trainer.run_dir": "x"})
    said: list[str] = []
    runtime.compare(saved, now, said.append)
    assert said == [
        "critic.optim.lr: 0.001 -> 0.5; the configured learning rate wins over the stored one",
        "trainer.save_freq: 2 -> 1",
    ]
    said.clear()
    runtime.compare(saved, saved, said.append)
    assert said == []


# Folder ---------------------------------------------------------------------------------------------------------------------


def test_a_folder_is_made_and_held_by_one_run(tmp_path):
    config = with_trainer(rig.settings({}), run_dir=str(tmp_path / "deep" / "run"))
    with runtime.run_folder(config) as folder:
        assert folder == tmp_path / "deep" / "run" and folder.is_dir()
        with (
            pytest.raises(ConfigError, match="got a folder in use by process"),
            runtime.run_folder(config),
        ):
            pass
    assert list(folder.iterdir()) == []
    with runtime.run_folder(config):
        pass


def test_a_folder_that_cannot_be_made_is_a_configuration_error(tmp_path):
    (tmp_path / "file").write_text("")
    config = with_trainer(rig.settings({}), run_dir=str(tmp_path / "file" / "run"))
    with pytest.raises(ConfigError, match="choose another"), runtime.run_folder(config):
        pass
