import json
import math
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from jaxrl_llm.metrics import open_sinks, read_rows, redact, redact_text, truncate
from tests import rig

CANARY = "canary-7f31ab09d2"


def events(run_dir: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, values) of every event, with a reader of its own that does not check checksums."""
    found = []
    for path in sorted((run_dir / "tensorboard").glob("*tfevents*")):
        data, start = path.read_bytes(), 0
        while start < len(data):
            size = int.from_bytes(data[start : start + 8], "little")
            event = Event.FromString(data[start + 12 : start + 12 + size])
            start += size + 16
            if event.summary.value:
                found.append((event.step, {v.tag: v.simple_value for v in event.summary.value}))
        assert start == len(data)
    return found


def opened(run_dir, loggers=(), **options):
    defaults: dict[str, Any] = {
        "project": "p",
        "experiment": "e",
        "config": {},
        "log": lambda text: None,
    }
    return open_sinks(run_dir, loggers, **(defaults | options))


class FakeWandb(types.ModuleType):
    """A W&B client that records its calls, and fails or hangs where told."""

    def __init__(self, fail_init=0, fail_log_at=(), fail_finish=False, hang_log_at=None):
        super().__init__("wandb")
        self.inits, self.logs, self.finished = [], [], threading.Event()
        self.fail_init, self.fail_log_at, self.fail_finish = fail_init, fail_log_at, fail_finish
        self.hang_log_at, self.release = hang_log_at, threading.Event()

    def init(self, **options):
        self.inits.append(options)
        if len(self.inits) <= self.fail_init:
            raise ConnectionError(f"no network, key {CANARY} refused")
        return self

    def log(self, row, step):
        if step == self.hang_log_at:
            self.release.wait(60)
        if step in self.fail_log_at:
            raise OSError("server says 500")
        self.logs.append((step, row))

    def finish(self):
        if self.fail_finish:
            raise SystemExit(3)
        self.finished.set()


@pytest.fixture
def wandb(monkeypatch):
    def install(**options):
        fake = FakeWandb(**options)
        monkeypatch.setitem(sys.modules, "wandb", fake)
        return fake

    return install


def test_jsonl_holds_every_kind_of_scalar_unrounded_and_step_first(tmp_path):
    row = {
        "nan": math.nan,
        "inf": float("-inf"),
        "f32": np.float32(0.1),
        "bf16": jnp.bfloat16(1.5),
        "jax": jnp.asarray(3),
        "one": np.asarray([2.0]),
        "third": 1 / 3,
        "text": "a\nb\x1b[31m",
        "flag": np.bool_(True),
        "none": None,
    }
    with opened(tmp_path) as sinks:
        sinks.write(np.int64(7), row)
        text = (tmp_path / "metrics.jsonl").read_text()  # before close: the line is out
    assert text.endswith("\n") and text.count("\n") == 1
    back = json.loads(text)
    assert next(iter(back)) == "step" and back["step"] == 7 and type(back["step"]) is int
    assert math.isnan(back["nan"]) and back["inf"] == -math.inf
    assert back["f32"] == float(np.float32(0.1)) and back["third"] == 1 / 3
    assert (back["bf16"], back["jax"], back["one"]) == (1.5, 3, 2.0)
    assert back["text"] == "a\nb\x1b[31m" and "\x1b" not in text
    assert back["flag"] is True and back["none"] is None


@pytest.mark.parametrize("bad", [np.zeros(3), [1, 2], object()])
def test_a_metric_that_is_no_scalar_is_named(tmp_path, bad):
    with opened(tmp_path) as sinks, pytest.raises(TypeError, match="actor/odd"):
        sinks.write(1, {"actor/odd": bad})
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_other_processes_write_nothing(tmp_path):
    with opened(tmp_path / "run", ("tensorboard",), process_index=1) as sinks:
        sinks.write(1, {"a": 1})
        sinks.completions(1, [{"prompt": "x"}])
    assert not (tmp_path / "run").exists()


def test_tensorboard_gets_numbers_only_and_at_once(tmp_path):
    with opened(tmp_path, ("tensorboard",)) as sinks:
        sinks.write(
            3, {"a": 0.5, "text": "no", "flag": True, "none": None, "nan": math.nan, "huge": 1e300}
        )
        ((step, values),) = events(tmp_path)
    assert step == 3 and values["a"] == 0.5 and set(values) == {"a", "nan", "huge"}
    assert math.isnan(values["nan"]) and values["huge"] == math.inf


def test_two_starts_within_a_second_keep_both_tensorboard_files(tmp_path):
    for step in (1, 2):
        with opened(tmp_path, ("tensorboard",)) as sinks:
            sinks.write(step, {"a": step})
    assert sorted(step for step, _ in events(tmp_path)) == [1, 2]


def test_completions_are_escaped_and_cut(tmp_path):
    rows: list[dict[str, Any]] = [
        {"prompt": "p", "response": "x" * 1_000_000, "score": np.float32(1.0), "ids": np.arange(3)},
        {"prompt": "[bold]\x07\x9b\u202e\ud800\u2028", "response": "é" * 10_001},
    ]
    with opened(tmp_path) as sinks:
        sinks.completions(12, rows[:1])
        sinks.completions(12, rows[1:])
    raw = (tmp_path / "completions" / "00000012.jsonl").read_bytes()
    assert raw.isascii() and raw.count(b"\n") == 2
    assert not any(byte < 32 and byte != 10 for byte in raw)
    first, second = map(json.loads, raw.splitlines())
    assert first["response"].startswith("x" * 20_000 + " [cut: 1000000 characters")
    assert first["score"] == 1.0 and first["ids"] == [0, 1, 2]
    assert second["prompt"] == rows[1]["prompt"]
    assert second["response"] == "é" * 10_000 + " [cut: 10001 characters in all]"


def filled(run_dir: Path, steps: int) -> None:
    with opened(run_dir, ("tensorboard",)) as sinks:
        for step in range(1, steps + 1):
            sinks.write(step, {"a": step / 3})
            sinks.completions(step, [{"prompt": str(step)}])


def test_truncate_then_continue_equals_an_undisturbed_run(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    filled(whole, 6)
    filled(cut, 5)
    assert truncate(cut, 3) == 2 + 2 + 2
    assert [row["step"] for row in read_rows(cut)] == [1, 2, 3]
    with opened(cut, ("tensorboard",)) as sinks:
        for step in (4, 5, 6):
            sinks.write(step, {"a": step / 3})
            sinks.completions(step, [{"prompt": str(step)}])
    assert (cut / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert sorted(events(cut), key=lambda event: event[0]) == events(whole)
    names = [{p.name: p.read_bytes() for p in d.glob("completions/*")} for d in (cut, whole)]
    assert names[0] == names[1]
    assert not list(cut.rglob("*.tmp"))


def test_truncate_drops_half_written_ends(tmp_path):
    filled(tmp_path, 3)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + b'{"step": 3, "a": 0.')
    (record,) = (tmp_path / "tensorboard").glob("*")
    good = record.read_bytes()
    for torn in (b"\x20", good[-20:-3], b"\x00" * 40):
        record.write_bytes(good + torn)
        assert truncate(tmp_path, 3) == (
            2 if metrics.read_bytes().count(b"\n") == 3 and torn == b"\x20" else 1
        )
        assert record.read_bytes() == good
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 3]


def test_truncate_cuts_at_a_flipped_bit(tmp_path):
    filled(tmp_path, 3)
    (record,) = (tmp_path / "tensorboard").glob("*")
    data = bytearray(record.read_bytes())
    data[-6] ^= 1  # inside the data of the last record
    record.write_bytes(bytes(data))
    assert truncate(tmp_path, 9) == 1
    assert [step for step, _ in events(tmp_path)] == [1, 2]


def test_truncate_leaves_alone_what_needs_no_change(tmp_path):
    assert truncate(tmp_path / "missing", 3) == 0
    filled(tmp_path, 3)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert truncate(tmp_path, 3) == 0
    assert before == {
        path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()
    }
    assert truncate(tmp_path, -1) == 9 and read_rows(tmp_path) == [] and events(tmp_path) == []


def test_a_line_torn_by_a_kill_does_not_swallow_the_next_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "a"')
    with opened(tmp_path) as sinks:
        sinks.write(3, {})
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 3]


def test_wandb_gets_rows_a_redacted_config_and_the_same_run_again(tmp_path, wandb):
    fake = wandb()
    for step in (1, 2):
        config = {"hub": {"hf_token": CANARY}, "url": f"https://me:{CANARY}@host/x", "lr": 0.5}
        with opened(tmp_path, ("wandb",), config=config) as sinks:
            sinks.write(step, {"a": step})
    assert fake.logs == [(1, {"a": 1}), (2, {"a": 2})] and fake.finished.is_set()
    assert fake.inits[0] == fake.inits[1] and fake.inits[0]["resume"] == "allow"
    assert fake.inits[0]["config"]["lr"] == 0.5 and CANARY not in repr(fake.inits)
    assert not any(CANARY.encode() in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


def test_without_network_wandb_goes_offline_with_one_line_and_no_secret(
    tmp_path, wandb, monkeypatch
):
    monkeypatch.setenv("SOME_API_KEY", CANARY)
    fake = wandb(fail_init=1)
    said: list[str] = []
    with opened(tmp_path, ("wandb",), log=said.append) as sinks:
        sinks.write(1, {"a": 1})
    assert fake.inits[1]["mode"] == "offline" and fake.logs == [(1, {"a": 1})]
    assert len(said) == 1 and "offline" in said[0] and CANARY not in said[0]


@pytest.mark.parametrize(
    "faults, kinds, logged",
    [
        ({"fail_init": 9}, ["init"], []),
        ({"fail_log_at": (5, 6)}, ["log"], [1, 2, 3, 4, 7, 8]),
        ({"fail_finish": True}, ["finish"], list(range(1, 9))),
    ],
)
def test_a_failing_backend_costs_one_warning_and_nothing_else(
    tmp_path, wandb, faults, kinds, logged
):
    fake = wandb(**faults)
    said: list[str] = []
    with opened(tmp_path, ("wandb", "tensorboard"), log=said.append) as sinks:
        for step in range(1, 9):
            sinks.write(step, {"a": step})
    assert [row["step"] for row in read_rows(tmp_path)] == list(range(1, 9))
    assert [step for step, _ in events(tmp_path)] == list(range(1, 9))
    assert [text.split()[1] for text in said] == kinds
    assert [step for step, _ in fake.logs] == logged


def test_a_hanging_backend_never_blocks_and_finish_is_bounded(tmp_path, wandb):
    fake = wandb(hang_log_at=2)
    said: list[str] = []
    sinks = opened(tmp_path, ("wandb",), log=said.append, finish_seconds=0.3)
    start = time.monotonic()
    for step in range(1, 1500):
        sinks.write(step, {"a": step})
    assert time.monotonic() - start < 30, "a backend that hangs does so for 60 s"
    start = time.monotonic()
    sinks.close()
    assert time.monotonic() - start < 7, "of 8 s that it may take else"
    fake.release.set()
    assert len(read_rows(tmp_path)) == 1499
    assert len(said) == 2 and "drops" in said[0] and "left behind" in said[1]


def test_a_missing_wandb_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    said: list[str] = []
    with opened(tmp_path, ("wandb",), log=said.append) as sinks:
        sinks.write(1, {"a": 1})
    assert len(said) == 1 and "W&B" in said[0] and len(read_rows(tmp_path)) == 1


@pytest.mark.parametrize(
    "key",
    [
        "api_key",
        "WANDB_API_KEY",
        "hf_token",
        "password",
        "client-secret",
        "token",
        "private_key",
        "auth",
    ],
)
def test_redact_by_key(key):
    assert redact({"a": {key: CANARY}, "b": [{key: [CANARY]}]}) == {
        "a": {key: "<redacted>"},
        "b": [{key: ["<redacted>"]}],
    }


def test_redact_keeps_what_is_no_secret():
    config = {
        "length_penalty_per_token": 0.001,
        "stop_token_ids": [1, 2],
        "tokenizer_path": "x/y",
        "loss_agg_mode": "token-mean",
        "prompt_key": "question",
        "eos_token": "</s>",
        "url": "https://host/path?step=3",
        "none_key": None,
        "empty_token": "",
        "functions": ["gsm8k"],
    }
    assert redact(config) == config
    assert redact({"functions": ("a", "b")}) == {"functions": ["a", "b"]}


@pytest.mark.parametrize(
    "text",
    [
        f"s3://user:{CANARY}@bucket/x",
        f"https://{CANARY}@host",
        f"https://host/x?a=1&api_key={CANARY}&b=2",
        f"Authorization: Bearer {CANARY}",
        f"hf_{CANARY}abcdef",
    ],
)
def test_redact_inside_texts(text):
    assert CANARY not in redact_text(text) and CANARY not in str(redact({"path": text}))


def test_no_secret_of_the_environment_reaches_a_file_or_a_stream(
    tmp_path, monkeypatch, capfd
):  # L5
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD"):
        monkeypatch.setenv(name, CANARY)
    monkeypatch.setitem(sys.modules, "wandb", None)
    reward = tmp_path / "mine.py"
    reward.write_text("def score(response, **rest):\n    raise ValueError('no grade')\n")
    settings = {
        "trainer.run_dir": tmp_path / "run",
        "trainer.total_training_steps": 1,
        "trainer.logger": "console,jsonl,tensorboard,wandb",
        "trainer.log_completions_freq": 1,
        "reward.functions": f"gsm8k,{reward}:score",
        "reward.num_workers": 1,
        "reward.max_failed_share": 1.0,
        "data.train_files": "arithmetic:train:8",
        "data.val_files": "[]",
    }
    assert rig.run_here(settings) == 0
    printed = "".join(capfd.readouterr())
    files = rig.everything(tmp_path / "run")
    assert {"config.json", "metrics.jsonl"} <= set(files) and "W&B" in printed
    assert any(name.startswith("checkpoints/") for name in files)
    assert any(name.startswith("tensorboard/") for name in files)
    assert [name for name, content in files.items() if CANARY.encode() in content] == []
    assert CANARY not in printed
