"""What processes tell each other, where one process plays all: a made-up store stands for the coordination service.

Real processes tell each other things in `test_several.py`.
"""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax._src import distributed

from jaxrl_llm import processes
from jaxrl_llm.errors import EXIT_DATA, EXIT_INTERNAL, ConfigError, DataError


class Store:
    """The key-value store; `late` are keys that appear when somebody waits for them."""

    def __init__(self, values=None, late=None):
        self.values, self.late, self.waits = dict(values or {}), dict(late or {}), []

    def key_value_set(self, key, value, allow_overwrite=False):
        if key in self.values and not allow_overwrite:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
        self.values[key] = value

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.values.items() if key.startswith(f"{folder}/")]

    def key_value_delete(self, key):
        del self.values[key]

    def blocking_key_value_get(self, key, milliseconds):
        self.waits.append((key, milliseconds))
        if key in self.late:
            self.values[key] = self.late.pop(key)
            return self.values[key]
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: timed out")


@pytest.fixture
def store(monkeypatch):
    """Be process 0 of 3, with a store that can be filled."""
    made = Store()
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(distributed.global_state, "client", made)
    monkeypatch.setattr(distributed.global_state, "num_processes", 3)
    monkeypatch.setattr(processes, "CLOSING_SECONDS", 0.05)
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.01)
    return made


def problem(code=65, text="bad data", own=True):
    return json.dumps({"code": code, "text": text, "own": own})


def test_one_process_has_its_own_value_as_json_data():
    assert processes.gather("alone", (1, {"a": 2})) == [[1, {"a": 2}]]
    assert any(processes.gather("alone", True)) and not any(processes.gather("alone", False))
    processes.barrier("alone")
    rows = {"a": np.zeros(3)}
    assert processes.gather_rows(rows) is rows
    assert processes.Meetings().first("alone", lambda: 3) == 3
    processes.post_stop()
    assert not processes.stop_posted()


def test_values_come_in_the_order_of_the_processes(store):
    store.values["jaxrl_llm/t/2"] = '"two"'
    store.late["jaxrl_llm/t/1"] = '"one"'
    assert processes.gather("t", "zero", 5.0) == ["zero", "one", "two"]
    assert [key for key, _ in store.waits] == ["jaxrl_llm/t/1"]


def test_who_is_missing_is_named(store):
    store.values["jaxrl_llm/t/1"] = "1"
    with pytest.raises(
        processes.Missing, match=r"t: process 0 of 3 waited 0 s for process 2, need all"
    ):
        processes.gather("t", 0, 0.03)


def test_a_posted_problem_ends_the_wait(store):
    store.values["jaxrl_llm/problems/2"] = problem()
    with pytest.raises(processes.Elsewhere, match=r"process 2: bad data") as ended:
        processes.gather("t", 0, 60.0)
    assert ended.value.exit_code == EXIT_DATA and ended.value.report() == "process 2: bad data"


def test_a_process_with_a_problem_waits_no_longer_than_closing_takes(store):
    store.values["jaxrl_llm/problems/0"] = problem()
    with pytest.raises(processes.Missing):
        processes.gather("t", 0, 60.0)


def test_a_coordinator_that_is_gone_is_said(store):
    def gone(*arguments):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect\nmore")

    store.key_value_dir_get = gone
    with pytest.raises(
        processes.Missing,
        match=r"lost the coordinator, process 0 \(UNAVAILABLE: failed to connect\)",
    ):
        processes.gather("t", 0)


def test_meetings_are_numbered_and_forgotten(store):
    meet = processes.Meetings(5.0)
    for number, name in enumerate(["a", "b", "a"]):
        for other in (1, 2):
            store.values[f"jaxrl_llm/loop/{number:09d} {name}/{other}"] = str(other)
        assert meet.gather(name, 0) == [0, 1, 2]
    mine = [key for key in store.values if key.endswith("/0")]
    assert mine == ["jaxrl_llm/loop/000000002 a/0"]


def test_stops_are_posted_once(store):
    assert not processes.stop_posted()
    processes.post_stop()
    processes.post_stop()
    assert processes.stop_posted()


# Ending together --------------------------------------------------------------------------------------------------------------


def failing(error):
    def action():
        raise error

    return lambda: processes.end_together(action)


def test_without_other_processes_an_error_is_only_an_error():
    with pytest.raises(DataError, match="mine"):
        failing(DataError("mine"))()
    assert processes.end_together(lambda: 7) == 7


def test_the_same_problem_everywhere_is_raised_on_process_0_only(store, monkeypatch):
    text = DataError("mine").report()
    for other in (1, 2):
        store.values[f"jaxrl_llm/problems/{other}"] = problem(text=text)
    with pytest.raises(DataError, match="mine"):
        failing(DataError("mine"))()
    monkeypatch.setattr(distributed.global_state, "process_id", 1)
    store.values["jaxrl_llm/problems/0"] = store.values.pop("jaxrl_llm/problems/1")
    with pytest.raises(processes.Elsewhere, match="process 1: ended with the others, exit 65"):
        failing(DataError("mine"))()


def test_different_problems_are_told_with_their_processes(store):
    store.values["jaxrl_llm/problems/1"] = problem(code=70, text="Traceback: x")
    store.values["jaxrl_llm/problems/2"] = problem(text="process 1: …", own=False)
    with pytest.raises(processes.Elsewhere) as ended:
        failing(ConfigError("mine"))()
    assert ended.value.exit_code == 64
    assert str(ended.value) == (
        "process 0: Configuration refused (1 problem):\n  - mine\nprocess 1: Traceback: x"
    )


def test_the_problem_of_another_keeps_its_code(store):
    store.values["jaxrl_llm/problems/1"] = problem(code=75, text="a signal")
    store.values["jaxrl_llm/problems/2"] = problem(text="heard", own=False)
    with pytest.raises(processes.Elsewhere, match="process 1: a signal") as ended:
        failing(processes.Elsewhere("heard", 75))()
    assert ended.value.exit_code == 75


def test_a_process_nobody_listens_to_says_its_problem_itself_and_ends_hard(
    store, monkeypatch, capsys
):
    class Exit(BaseException):
        pass

    codes = []

    def end(code):
        codes.append(code)
        raise Exit

    monkeypatch.setattr(processes.os, "_exit", end)
    with pytest.raises(Exit):
        failing(ValueError("inside"))()
    assert codes == [EXIT_INTERNAL]
    told = capsys.readouterr().err
    assert told.startswith("process 0: Traceback") and "ValueError: inside" in told
    assert json.loads(store.values["jaxrl_llm/problems/0"])["code"] == EXIT_INTERNAL


# Rows ---------------------------------------------------------------------------------------------------------------------------


def test_rows_of_one_process_are_whole():
    host = {"a": np.arange(6).reshape(3, 2), "b": jax.numpy.ones((3,))}
    found = processes.own_rows(host, "a")
    assert np.array_equal(found["a"], host["a"]) and found["b"].tolist() == [1, 1, 1]
    found = processes.own_rows(host, "b")
    assert isinstance(found["b"], np.ndarray)


def test_a_problem_elsewhere_is_heeded_by_a_process_that_works_on_its_own(monkeypatch):
    posted = []
    store = SimpleNamespace(key_value_dir_get=lambda folder: posted)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "client", lambda: store)
    processes.heed()
    said = {"code": 65, "text": "a row is broken", "own": True, "known": True}
    posted.append((f"{processes.PROBLEMS}/1", json.dumps(said)))
    with pytest.raises(processes.Elsewhere, match="process 1: a row is broken") as caught:
        processes.heed()
    assert caught.value.exit_code == 65
