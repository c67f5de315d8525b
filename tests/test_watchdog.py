"""Where processes stand, in words, and when a watchdog barks; the store of the processes is made up."""

import threading

import jax
import pytest
from jax._src import distributed

from jaxrl_llm import watchdog
from jaxrl_llm.errors import EXIT_INTERNAL
from jaxrl_llm.processes import Meetings, Pulse
from jaxrl_llm.watchdog import Watchdog, standing
from tests.test_processes import Store


def test_a_pulse_counts_places_and_signs_of_life():
    pulse = Pulse()
    with pulse.within("gen"):
        pulse.beat()
        assert (pulse.passed, pulse.beats, pulse.place) == (1, 1, "gen")
    assert (pulse.passed, pulse.place) == (2, "the end of gen")
    assert Meetings().pulse == Pulse()


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ({0: (9, 4, "update_actor"), 1: (8, 99, "adv")}, "process 1 holds it up"),
        ({0: (9, 0, "a"), 2: (9, 0, "a")}, "process 1 holds it up"),
        ({0: (9, 0, "a"), 1: (9, 5, "a"), 2: (9, 5, "a")}, "all stand at the same place"),
        ({0: (3, 0, "a"), 1: (3, 5, "a"), 2: (9, 5, "b")}, "process 0, 1 holds it up"),
    ],
)
def test_who_has_passed_the_fewest_places_holds_up_the_run(places, said):
    count = 2 if len(places) == 2 and 2 not in places else 3
    text = standing(places, count, 12.3)
    assert said in text and "no process has got on for 12 s" in text
    assert f"process 0 at {places[0][2]}" in text


def test_the_limit_follows_slow_steps(monkeypatch):
    times = iter([0.0, 10.0, 20.0, 50.0, 60.0, 70.0])
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: next(times))
    dog = Watchdog(Pulse(), 30.0)
    assert dog.limit() == 600.0, "the first step compiles"
    for _ in range(4):
        dog.finished()
    assert dog.limit() == 100.0
    assert Watchdog(Pulse(), 900.0).limit() == 900.0


def watched(monkeypatch, others, seconds=0.4, moving=False):
    """What a watchdog of process 0 of 2 ends with; `others` is what process 1 has told."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(watchdog, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(distributed.global_state, "client", Store(others))
    codes, barked, pulse = [], threading.Event(), Pulse(place="here")

    def end(code):
        codes.append(code)
        barked.set()

    with Watchdog(pulse, seconds, end):
        for _ in range(20):
            if moving:
                pulse.beat()
            barked.wait(0.1)
    return codes


def test_it_barks_where_nothing_moves(monkeypatch, capfd):
    assert watched(monkeypatch, {"jaxrl_llm/pulses/1": '[0, 3, "there"]'}) == [EXIT_INTERNAL]
    told = capfd.readouterr().err
    assert "process 0: no process has got on" in told and "process 1 at there" in told
    assert "most recent call first" in told, "stacks"


def test_it_is_silent_where_something_moves(monkeypatch):
    assert watched(monkeypatch, {"jaxrl_llm/pulses/1": '[0, 3, "there"]'}, moving=True) == []


def test_it_can_be_switched_off_and_is_for_several_processes_only(monkeypatch):
    assert watched(monkeypatch, {}, seconds=None) == []
    monkeypatch.undo()
    with Watchdog(Pulse(), 0.01, lambda code: None) as dog:
        assert dog._thread is None
