"""The roll call before `jax.distributed` starts: every process tells process 0 its number, and all learn who is missing.

JAX ends a process with an abort when another one does not come; here the same becomes words. It happens on the coordinator's own
port, which JAX takes over afterwards, so no other port has to be open. Standard library only.

Left out on purpose: secrets. Whoever reaches the coordinator's port can reach JAX's service on it as well.
"""

import errno
import json
import socket
import time
from collections.abc import Collection
from contextlib import suppress

from jaxrl_llm.errors import ConfigError

GREETING = "jaxrl_llm"
LINE_BYTES = 4096
RETRY_SECONDS = 0.2
WORD_SECONDS = 10.0
"""How long process 0 waits for the line of a process that has connected; a port scanner has none."""


def meet(address: str, number: int, count: int, seconds: float) -> None:
    """Return when all `count` processes are here; `ConfigError` says on each of them who was not within `seconds`.

    `address` is `HOST:PORT` of process 0. Refused as well: two processes with one number, and processes that count differently.
    """
    host, _, port = address.rpartition(":")
    if number == 0:
        _call(address, int(port), count, seconds)
    else:
        _answer(host.strip("[]"), int(port), number, count, seconds)


def _listen(port: int) -> socket.socket:
    """A listening socket on all addresses of this host, IPv6 and IPv4 where there are both."""
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port))
    try:
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise
        return socket.create_server(("", port))


def _call(address: str, port: int, count: int, seconds: float) -> None:
    try:
        server = _listen(port)
    except (OSError, OverflowError) as problem:
        raise ConfigError(
            f"distributed.coordinator_address: process 0 cannot listen on port {port} of {address} ({problem}), need a free port of "
            "this host; end what uses it or choose another port on every process"
        ) from problem
    deadline, present = time.monotonic() + seconds, dict[int, socket.socket]()
    wrong: str | None = None
    with server:
        while wrong is None:
            _forget_the_gone(present)
            if len(present) == count - 1:
                break
            server.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                peer = server.accept()[0]
            except (TimeoutError, BlockingIOError):
                wrong = _absent(count, present, seconds)  # nor does anybody stand at the door
            except ConnectionAbortedError:
                continue
            else:
                wrong = _admit(peer, count, present)
    verdict = json.dumps({"problem": wrong}).encode() + b"\n"
    for peer in present.values():
        with suppress(OSError):
            peer.sendall(verdict)
        peer.close()
    if wrong:
        raise ConfigError(wrong)


def _absent(count: int, present: Collection[int], seconds: float) -> str:
    missing = [str(number) for number in range(1, count) if number not in present]
    names = ", ".join(missing[:20]) + (", …" if len(missing) > 20 else "")
    return (
        f"distributed: {1 + len(present)} of {count} processes came within {seconds:.0f} s, need all; process {names} did not: look at "
        "what it printed, or start it with the same coordinator_address; more time is distributed.initialization_timeout"
    )


def _admit(peer: socket.socket, count: int, present: dict[int, socket.socket]) -> str | None:
    """Enter a process into the list; returns what is wrong with it. What is no process of a run is sent away."""
    peer.settimeout(WORD_SECONDS)
    try:
        said = json.loads(peer.makefile("rb").readline(LINE_BYTES))
        assert said["greeting"] == GREETING
        number, theirs = int(said["process"]), int(said["count"])
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        peer.close()
        return None
    _forget_the_gone(present)
    if theirs != count or not 0 < number < count:
        problem: str | None = (
            f"distributed.num_processes: process {number} says {theirs}, process 0 says {count}, need the same everywhere; start "
            "all processes with the same number"
        )
    elif number in present:
        problem = (
            f"distributed.process_id: two processes say they are number {number} of {count}, need each number once; give them numbers "
            f"from 0 to {count - 1}"
        )
    else:
        present[number] = peer
        return None
    with suppress(OSError):
        peer.sendall(json.dumps({"problem": problem}).encode() + b"\n")
    peer.close()
    return problem


def _forget_the_gone(present: dict[int, socket.socket]) -> None:
    """Strike out who came and ended again: counted as here, it would be missing when all set off, and refused when it comes back."""
    for number in [number for number, peer in present.items() if _gone(peer)]:
        present.pop(number).close()


def _gone(peer: socket.socket) -> bool:
    """Whether a process that answered has closed its connection: it ended, and may have been started anew."""
    peer.setblocking(False)
    try:
        return peer.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        peer.settimeout(WORD_SECONDS)


def _answer(host: str, port: int, number: int, count: int, seconds: float) -> None:
    """Knock until process 0 opens, then wait for its verdict as long as *its* time may last: it may have started much later."""
    deadline, last = time.monotonic() + seconds, "no answer"
    word = json.dumps({"greeting": GREETING, "process": number, "count": count}).encode() + b"\n"
    while True:
        try:
            with socket.create_connection((host, port), max(0.1, deadline - time.monotonic())) as s:
                s.sendall(word)
                s.settimeout(seconds + WORD_SECONDS)
                verdict = json.loads(s.makefile("rb").readline(LINE_BYTES))["problem"]
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as problem:
            last = str(problem) or type(problem).__name__
            if time.monotonic() > deadline:
                break
            time.sleep(RETRY_SECONDS)
            continue
        if verdict:
            raise ConfigError(verdict)
        return
    raise ConfigError(
        f"distributed.coordinator_address: process {number} of {count} could not reach process 0 at {host}:{port} within "
        f"{seconds:.0f} s ({last}), need a running process 0 there; look at what process 0 printed, at the address, and at firewalls"
    )
