import io
import os
import subprocess
import sys

import pytest

from jaxrl_llm.rewards import worker


def test_lone_surrogates_and_strangers_survive_the_protocol():
    data = worker.pack({"text": "a\ud800\x00é", "set": {1}})
    stream = io.BytesIO(data)
    read, write = os.pipe()
    os.write(write, stream.getvalue())
    os.close(write)
    assert worker._receive(read) == {"text": "a\ud800\x00é", "set": "{1}"}
    assert worker._receive(read) is None
    os.close(read)


@pytest.fixture
def talk(tmp_path):
    """Start one worker with these functions in a file and exchange messages with it by hand."""
    started = []

    def start(source, timeout_s=5.0, memory_limit_mb=1024):
        path = tmp_path / "fn.py"
        path.write_text(source)
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxrl_llm.rewards.worker", *map(str, (request_read, reply_write, os.getpid()))],
            pass_fds=(request_read, reply_write),
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(request_read)
        os.close(reply_write)
        started.append((process, request_write, reply_read))
        entry = {"kind": "custom", "spec": f"{path}:f", "sha256": None}
        setup = {
            "functions": {"f": entry},
            "timeout_s": timeout_s,
            "memory_limit_mb": memory_limit_mb,
        }
        worker._send(request_write, setup)

        def ask(response=None):
            if response is not None:
                sample = dict.fromkeys(("prompt", "answer", "data_source"), "") | {
                    "response": response, "extra_info": {}, "response_length": 1,
                }  # fmt: skip
                worker._send(request_write, {"id": 1, "function": "f", "sample": sample})
            return worker._receive(reply_read)

        return ask, process, request_write

    yield start
    for process, *descriptors in started:
        process.kill()
        process.wait()
        for descriptor in descriptors:
            os.close(descriptor)


def test_one_call_and_end_of_file(talk):
    ask, process, request = talk("def f(response): return len(response)\n")
    assert ask() == {"ready": True}
    assert ask("abc") == {"id": 1, "value": 3.0, "parts": {}, "found": None, "error": None}
    read, write = os.pipe()
    os.dup2(read, request)  # the request pipe ends
    os.close(read)
    os.close(write)
    assert process.wait(timeout=60) == 0


def test_no_jax_and_few_descriptors_inside(talk):
    source = (
        "import os, sys\n"
        "def f(response):\n"
        "    if response == 'jax': return any(n.split('.')[0] in ('jax', 'flax') for n in sys.modules)\n"
        "    return len(os.listdir('/proc/self/fd')) - 1\n"
    )
    ask, _, _ = talk(source)
    ask()
    assert ask("jax")["value"] == 0.0
    if sys.platform == "linux":
        assert ask("descriptors")["value"] == 5.0  # three standard streams, two pipes


def test_draws_depend_on_the_sample_alone(talk):
    ask, _, _ = talk(
        "import random\nimport numpy as np\ndef f(response): return random.random() + np.random.rand()\n"
    )
    ask()
    values = [ask(text)["value"] for text in ("a", "b", "a")]
    assert values[0] == values[2] != values[1]


def test_exit_calls_end_the_call_only(talk):
    ask, process, _ = talk(
        "import sys\ndef f(response): sys.exit(3) if response == 'exit' else None\n"
    )
    ask()
    assert "SystemExit" in ask("exit")["error"]
    assert ask("")["error"] is None and process.poll() is None


def test_a_file_that_fails_to_import_is_told(talk):
    ask, process, _ = talk("raise RuntimeError('no such judge')\ndef f(response): pass\n")
    reply = ask()
    assert reply["ready"] is False and "no such judge" in reply["error"]
    assert process.wait(timeout=60) == 1
