"""Where processes stand, in words, and when a watchdog barks; the store of the processes is made up."""

import threading
import time
from types import SimpleNamespace

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
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: next(times)))
    dog = Watchdog(Pulse(), 30.0)
    assert dog.limit() == 600.0, "the first step compiles"
    for _ in range(4):
        dog.finished()
    assert dog.limit() == 100.0
    assert Watchdog(Pulse(), 900.0).limit() == 900.0


class Clock:
    """A clock, and the event that a watchdog waits for: every wait takes as long as it may and then does `between`."""

    def __init__(self, monkeypatch, seconds, between=lambda clock: None):
        self.now, self.seconds, self.between = 0.0, seconds, between
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: self.now))

    def wait(self, seconds):
        self.now += seconds
        self.between(self)
        return self.now > self.seconds


def playing(monkeypatch, store):
    """Be process 0 of 2."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(watchdog, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(distributed.global_state, "client", store)


def watched(monkeypatch, between=lambda clock, pulse: None):
    """What a watchdog with a limit of 40 s ends with in 1000 s of a clock; process 1 stands where it stands."""
    playing(monkeypatch, Store({"jaxrl_llm/pulses/1": '[0, 3, "there"]'}))
    codes, pulse = [], Pulse(place="here")
    dog = Watchdog(pulse, 40.0, codes.append)
    clock = Clock(monkeypatch, 1000.0, lambda clock: between(clock, pulse))
    dog._over = clock
    dog._watch()
    return codes, clock.now


def test_it_barks_where_nothing_moves(monkeypatch, capfd):
    """First seen after 10 s, at rest for more than 40 s after 60 s; process 0 ends last, 60 s later."""
    assert watched(monkeypatch) == ([EXIT_INTERNAL], 120.0)
    told = capfd.readouterr().err
    assert "process 0: no process has got on for 50 s" in told and "process 1 at there" in told
    assert "most recent call first" in told, "stacks"


def test_it_is_silent_where_something_moves(monkeypatch):
    assert watched(monkeypatch, lambda clock, pulse: pulse.beat()) == ([], 1010.0)


def test_time_in_which_it_slept_itself_does_not_count(monkeypatch):
    """A machine that was stopped for a while has seen no place pass: 100 s at once, every 30 s."""

    def stopped(clock, pulse):
        clock.now += 100.0 * (clock.now % 40 == 0)

    assert watched(monkeypatch, stopped)[0] == []


def test_its_thread_has_ended_with_the_block(monkeypatch):
    """Also when it was just asking the service, which answers slowly."""
    asked, store = threading.Event(), Store()

    def slow(key, value, allow_overwrite):
        asked.set()
        time.sleep(0.3)

    store.key_value_set = slow
    playing(monkeypatch, store)
    with Watchdog(Pulse(), 0.04, lambda code: None) as dog:
        assert asked.wait(60)
    assert not dog._thread.is_alive()


def test_it_can_be_switched_off_and_is_for_several_processes_only(monkeypatch):
    playing(monkeypatch, Store())
    with Watchdog(Pulse(), None) as dog:
        assert dog._thread is None
    monkeypatch.undo()
    with Watchdog(Pulse(), 0.01) as dog:
        assert dog._thread is None
