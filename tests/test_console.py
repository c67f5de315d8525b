import io
import math
import subprocess
import sys

import pytest

from jaxrl_llm.console import (
    LINE,
    Progress,
    clock,
    completions_table,
    say,
    say_apart,
    start_table,
    step_line,
    visible,
)

ROW = {
    "critic/score/mean": 0.53125,
    "response_length/mean": 127.6,
    "actor/kl_loss": 0.00123,
    "actor/entropy": 0.8312,
    "actor/pg_clipfrac": 0.021,
    "actor/grad_norm": 0.512,
    "perf/throughput": 1234.5,
    "timing_s/step": 12.34,
    "timing_s/gen": 8.1,
    "timing_s/update_actor": 3.21,
    "timing_s/adv": 0.01,
    "perf/compilations": 3,
}


def test_step_line_by_hand():
    assert step_line(7, 100, ROW, eta=83) == (
        "step   7/100 | reward 0.531 | len 128 | kl 0.0012 | ent 0.831 | clip 0.021 | grad 0.512 | "
        "1,234 tok/s | 12.3s (gen 8.1 upd 3.2) | 3 compiled | eta 1:23"
    )


def test_missing_keys_are_absent_and_nan_shows():
    assert step_line(1, 9, {}) == "step 1/9"
    assert step_line(1, 9, {"actor/grad_norm": math.nan}) == "step 1/9 | grad nan"
    assert step_line(1, 9, {"perf/compilations": 0}) == "step 1/9"
    val = {"val/a/acc/mean@1": 0.2, "val/b/acc/mean@1": 0.4, "val/a/acc/maj@8": 1.0}
    assert step_line(0, 9, val) == "step 0/9 | val acc 0.300"


def test_step_line_drops_the_shortest_phases_first_and_keeps_its_length():
    many = ROW | {f"timing_s/phase_{i}": float(i) for i in range(1, 30)}
    line = step_line(7, 100, many, eta=83)
    assert len(line) <= LINE and "phase_29 29.0" in line and "phase_1 1.0" not in line
    assert line.endswith("| eta 1:23")
    assert len(step_line(10**80, 10**90, ROW)) <= LINE


@pytest.mark.parametrize(
    "seconds, text", [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (7283, "2:01:23"), (-5, "0:00")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_visible_escapes_what_a_terminal_would_obey():
    assert visible("a\n\t\x1b[31m\x00\x9b\u202e\u2028\ud800é数") == (
        r"a\n\t\x1b[31m\x00\x9b\u202e\u2028\ud800é数"
    )
    assert visible("x" * 12, 10) == "x" * 10 + "... (+2 characters)"


def test_completions_table_shows_model_text_as_it_is():
    text = completions_table(
        [
            {
                "prompt": "What is [bold]2+2[/bold]?",
                "response": "\x1b]0;evil\x07 :smile: [/nonsense]",
                "answer": 4,
                "score": 1.0,
            },
            {"response": "y" * 1_000_000, "score": math.nan},
            {},
        ],
        width=200,
    )
    assert (
        "[bold]2+2[/bold]" in text and ":smile: [/nonsense]" in text and r"\x1b]0;evil\x07" in text
    )
    assert "\x1b" not in text and "nan" in text and len(text) < 10_000
    assert all(name in text for name in ("prompt", "response", "answer", "score"))
    assert max(map(len, text.splitlines())) <= 200


def test_a_long_prompt_keeps_its_end():
    text = completions_table([{"prompt": "start" + "-" * 1000 + "finish"}], width=400)
    assert "finish" in text and "start" not in text


def test_start_table_lists_everything():
    text = start_table("Run [x]", [("devices", "8", "cpu [fake]"), ("weights", "1.2 GB", "")])
    assert "Run [x]" in text and "cpu [fake]" in text
    assert any(line.split() == ["weights", "1.2", "GB"] for line in text.splitlines())


def test_say_survives_a_stream_that_lacks_the_characters():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    say("数 \ud800 ok", stream)
    assert raw.getvalue() == b"\\u6570 \\ud800 ok\n"


def test_progress_without_a_terminal_prints_plain_lines_with_the_time_left():
    times = iter([0.0, 100.0, 110.0, 130.0])
    out = io.StringIO()
    with Progress(10, 2, file=out, now=lambda: next(times)) as progress:
        for step in (3, 4, 5):
            progress.step(step, {"actor/grad_norm": 1.0})
        progress.say("[red]not markup[/red]")
    assert out.getvalue().splitlines() == [
        "step  3/10 | grad 1",
        "step  4/10 | grad 1 | eta 1:00",
        "step  5/10 | grad 1 | eta 1:15",
        "[red]not markup[/red]",
    ]


def test_time_left_follows_the_last_twenty_steps():
    times = iter([0.0, *(1000.0 * i for i in range(1, 31)), *(30_000.0 + i for i in range(1, 22))])
    progress = Progress(100, file=io.StringIO(), now=lambda: next(times))
    for step in range(1, 52):
        progress.step(step, {})
    assert progress.eta(51) == pytest.approx(49.0)


def test_another_process_prints_warnings_alone_with_its_number():
    out = io.StringIO()
    with Progress(9, process=2, file=out) as progress:
        progress.step(1, {"timing_s/step": 1.0})
        progress.say("held-out at step 1")
        progress.say("Warning: recompiled\nat step 1")
    say_apart(3, "warning: x", out)
    assert out.getvalue() == "process 2: Warning: recompiled\nat step 1\nprocess 3: warning: x\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal_has_a_bar_and_no_markup(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    times = iter([0.0, 1.0, 2.0])
    out = Terminal()
    with Progress(4, file=out, now=lambda: next(times)) as progress:
        progress.step(1, {"actor/grad_norm": 1.0})
        progress.step(2, {})
        progress.say("[red]x[/red] :smile:")
    assert "step 1/4 | grad 1" in out.getvalue() and "[red]x[/red] :smile:" in out.getvalue()
    assert "2/4" in out.getvalue() and "eta 0:02" in out.getvalue()


def test_importing_loads_neither_rich_nor_jax():
    code = "import sys, jaxrl_llm.console; assert not {'rich', 'jax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
