import json
import math
import subprocess
import sys

import pytest

from jaxrl_llm import plots


def write(run_dir, rows, tail=""):
    run_dir.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run_dir / "metrics.jsonl").write_text(text + tail)


def drawn(run_dir):
    path = plots.draw(run_dir)
    assert path is not None
    return path


def full_row(step):
    return {
        "step": step,
        "critic/score/mean": 0.1 * step,
        "response_length/mean": 100.0 + step,
        "response_length/max": 128,
        "actor/entropy": 1.0 / step,
        "actor/kl_loss": 0.01 * step,
        "actor/pg_clipfrac": 0.02,
        "actor/grad_norm": 0.5,
        "critic/grad_norm": 40.0,
        "timing_s/gen": 3.0,
        "timing_s/update_actor": 1.0,
        "timing_s/step": 4.5,
        "val/gsm8k/acc/mean@1": 0.3,
        "note": "text",
    }


def shown(path):
    """The picture's size and how many different colours it has."""
    from matplotlib.image import imread

    image = imread(path)
    colours = {tuple(pixel) for pixel in (image[::3, ::3, :3].reshape(-1, 3) * 255).astype(int)}
    return image.shape[:2], len(colours)


def test_draws_a_run_and_leaves_nothing_else(tmp_path):
    write(tmp_path, [full_row(step) for step in range(1, 6)])
    path = drawn(tmp_path)
    assert path == tmp_path / "plots" / "training.png"
    (height, width), colours = shown(path)
    assert height > 1000 and width > 1000 and colours > 20
    assert [file.name for file in path.parent.iterdir()] == ["training.png"]


def test_drawing_again_replaces_the_picture(tmp_path):
    write(tmp_path, [full_row(1)])
    first = drawn(tmp_path).read_bytes()
    write(tmp_path, [full_row(step) for step in range(1, 30)])
    assert drawn(tmp_path).read_bytes() != first


@pytest.mark.parametrize("rows", [None, []])
def test_nothing_logged_draws_nothing(tmp_path, rows):
    if rows is not None:
        write(tmp_path, rows)
    assert plots.draw(tmp_path) is None and not (tmp_path / "plots").exists()


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": 0, "val/a/acc/mean@1": 0.0}],
        [{"step": 3}],
        [
            {
                "step": 1,
                "actor/entropy": math.nan,
                "val/a/acc/mean@1": math.nan,
                "timing_s/gen": math.nan,
            }
        ],
        [{"step": s, "actor/grad_norm": math.inf if s == 9 else 10.0**s} for s in range(1, 30)],
        [{"step": s, "val/$x^{/acc/mean@1": 0.5, "timing_s/_$y_{": 1.0} for s in range(1, 3)],
        [{"step": s, "timing_s/gen": 100.0 if s == 1 else 1.0} for s in range(1, 500)],
        [
            {"step": s, "actor/ppo_kl": 0.0, "actor/pg_clipfrac": 0.0, "timing_s/gen": 0}
            for s in (1, 2)
        ],
    ],
)
def test_odd_runs_are_drawn_without_a_warning(tmp_path, rows):
    run_dir = tmp_path / "odd $name 数"
    write(run_dir, rows, tail='{"step": 99, "torn')
    assert drawn(run_dir).stat().st_size > 10_000


def test_series_takes_the_first_name_that_any_row_holds():
    rows: list[plots.Row] = [
        {"step": 1, "b": 2},
        {"step": 2, "b": 3, "a": True},
        {"step": 3, "b": "text", "c": 1},
    ]
    assert plots.series(rows, ("a", "b", "c")) == ([1, 2], [2.0, 3.0])
    assert plots.series(rows, "missing") == ([], [])


def test_smoothing_by_hand_ignores_a_spike_and_nan():
    assert plots.smooth([1.0, 900.0, 3.0, math.nan, 5.0], 3) == [450.5, 3.0, 451.5, 4.0, 5.0]
    assert math.isnan(plots.smooth([math.nan], 3)[0])


def test_phases_are_ranked_and_the_rest_is_other():
    rows: list[plots.Row] = [
        {
            "step": 1,
            "timing_s/gen": 2.0,
            "timing_s/upd": 5.0,
            "timing_s/adv": 0.01,
            "timing_s/step": 8.0,
        },
        {"step": 2, "timing_s/gen": 2.0, "timing_s/save": 1.0, "timing_s/step": 3.0},
        {"step": 2, "val/x": 1},
    ]
    steps, table = plots.phase_table(rows)
    assert steps == [1, 2] and list(table) == ["upd", "gen", "save", "other"]
    assert table["upd"] == [5.0, 0.0] and table["save"] == [0.0, 1.0]
    assert table["other"] == pytest.approx([1.0, 0.0])


def test_importing_loads_neither_matplotlib_nor_jax_and_drawing_not_pyplot(tmp_path):
    write(tmp_path, [full_row(1)])
    code = (
        "import sys; from pathlib import Path; from jaxrl_llm import plots;"
        "assert not {'matplotlib', 'jax'} & set(sys.modules);"
        f"plots.draw(Path({str(tmp_path)!r})); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
