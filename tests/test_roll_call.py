"""The roll call over loopback, every process a thread: all come, one does not, two say the same number, strangers call."""

import socket
import threading
import time
from contextlib import suppress
from itertools import chain, repeat
from types import SimpleNamespace

import pytest

from jaxrl_llm import roll_call
from jaxrl_llm.errors import ConfigError
from tests.loopback import free_port


@pytest.fixture
def clock(monkeypatch):
    """The clock of the roll call, which a test may put forward by `ahead` seconds."""
    made = SimpleNamespace(ahead=0.0, sleep=time.sleep)
    made.monotonic = lambda: time.monotonic() + made.ahead
    monkeypatch.setattr(roll_call, "time", made)
    return made


def call(numbers, count, seconds=60.0, port=None, counts=None):
    """What each process gets: `None`, or the text of its refusal; `counts` are what single ones believe."""
    address = f"127.0.0.1:{port or free_port()}"
    results = {}

    def one(place, number):
        try:
            roll_call.meet(address, number, (counts or {}).get(number, count), seconds)
            results[place] = None
        except ConfigError as problem:
            results[place] = str(problem)

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(numbers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return [results[place] for place in range(len(numbers))]


def test_all_come_in_any_order():
    assert call([2, 0, 3, 1], 4) == [None] * 4


def test_one_process_calls_nobody():
    assert call([0], 1) == [None]


def test_who_does_not_come_is_named_to_all_who_did(clock, monkeypatch):
    """Time is up as soon as both have come."""
    admit = roll_call._admit

    def last(peer, count, present):
        problem = admit(peer, count, present)
        clock.ahead = 100.0 if len(present) == 2 else 0.0
        return problem

    monkeypatch.setattr(roll_call, "_admit", last)
    texts = call([0, 1, 3], 5)
    assert len(set(texts)) == 1
    assert texts[0].startswith(
        "distributed: 3 of 5 processes came within 60 s, need all; process 2, 4 did not"
    )


def test_who_stands_at_the_door_when_time_is_up_is_let_in(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, results = server.getsockname()[1], []
        monkeypatch.setattr(roll_call, "_listen", lambda _: server)
        with socket.create_connection(("127.0.0.1", port), 60) as peer:
            peer.sendall(b'{"greeting": "jaxrl_llm", "process": 1, "count": 2}\n')
            roll_call.meet(f"127.0.0.1:{port}", 0, 2, 0.0)
            results.append(peer.recv(100))
    assert results == [b'{"problem": null}\n']


def test_who_has_come_waits_as_long_as_the_time_of_process_0_may_last(clock, monkeypatch):
    """Process 0 opens when this one has nearly given up, and the last one comes later still."""
    times = chain([0.0, 59.9, 59.9, 59.9], repeat(61.0))
    clock.monotonic = lambda: next(times)
    monkeypatch.setattr(roll_call, "WORD_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def first():
            with server.accept()[0] as peer, suppress(OSError):
                time.sleep(0.6)
                peer.sendall(b'{"problem": "number 2 is missing"}\n')

        thread = threading.Thread(target=first)
        thread.start()
        with pytest.raises(ConfigError, match="number 2 is missing"):
            roll_call.meet(f"127.0.0.1:{server.getsockname()[1]}", 1, 3, 60.0)
        thread.join(60)


def test_nobody_calls():
    (text,) = call([1], 2, seconds=0.5)
    assert "process 1 of 2 could not reach process 0 at 127.0.0.1:" in text
    assert "within 0 s" in text or "within 1 s" in text
    assert "refused" in text


def test_two_processes_with_one_number_are_refused():
    texts = call([0, 1, 1], 3)
    assert "two processes say they are number 1 of 3" in texts[0]
    assert all(
        text is None or "number 1 of 3" in text or "could not reach" in text for text in texts
    )


def test_processes_that_count_differently_are_refused():
    texts = call([0, 1], 2, counts={1: 3})
    assert texts[0] == texts[1]
    assert "distributed.num_processes: process 1 says 3, process 0 says 2" in texts[0]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)], ids=str)
def test_a_process_that_ended_and_came_again_is_not_counted_twice(order):
    """Also when all others have come before it is back: whoever has ended is not here."""
    port, results = free_port(), {}

    def dies():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as peer:
                peer.sendall(b'{"greeting": "jaxrl_llm", "process": 1, "count": 3}\n')
                time.sleep(0.3)
                return
            time.sleep(0.05)

    def comes(number, after):
        time.sleep(after)
        results[number] = call([number], 3, port=port)[0]

    def rest():
        dies()
        pair = [threading.Thread(target=comes, args=(n, 0.5 * k)) for k, n in enumerate(order)]
        for one in pair:
            one.start()
        for one in pair:
            one.join(60)

    later = threading.Thread(target=rest)
    later.start()
    roll_call.meet(f"127.0.0.1:{port}", 0, 3, 60.0)
    later.join(120)
    assert results == {1: None, 2: None}


@pytest.mark.parametrize(
    "word", [b"GET / HTTP/1.1\r\n\r\n", b"", b'{"greeting": "other"}\n', b"\xff\n"]
)
def test_strangers_are_sent_away(word):
    port = free_port()

    def stranger():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", port), 1) as peer:
                    peer.sendall(word)
                return
            except OSError:
                time.sleep(0.05)

    thread = threading.Thread(target=stranger)
    thread.start()
    results = []

    def rest():
        thread.join(60)
        results.extend(call([1], 2, port=port))

    later = threading.Thread(target=rest)
    later.start()
    roll_call.meet(f"127.0.0.1:{port}", 0, 2, 60.0)
    later.join(120)
    assert results == [None]


def test_a_port_in_use_is_named():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"process 0 cannot listen on port {port}.*in use"):
            roll_call.meet(f"127.0.0.1:{port}", 0, 2, 1.0)


def test_a_host_without_ipv6_is_listened_on(monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    assert call([1, 0], 2) == [None, None]
