"""One picture of a run, `plots/training.png`, drawn from its metrics.jsonl.

Left out on purpose: comparing runs (experiments do), interaction (TensorBoard does), a display (none is ever touched).
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from jaxrl_llm.sinks import NAMES, read_rows

Row = Mapping[str, Any]
Series = tuple[list[int], list[float]]

BLUE, ORANGE, GREEN, RED, GREY = "#1f5fa8", "#d9731a", "#2b8a4b", "#c0392b", "#8a8f98"
BARS = 150
"""Most bars of the time panel; longer runs show means of several steps."""
PALETTE = (
    BLUE,
    ORANGE,
    GREEN,
    "#8e5bb5",
    "#b08d1e",
    "#2a9d9d",
    RED,
    "#6b4a3a",
    "#d16ba5",
    "#55606e",
)


def series(rows: Sequence[Row], names: str | Sequence[str]) -> Series:
    """Steps and values of a metric (or of the first of several that any row holds); NaN and infinities stay."""
    for name in (names,) if isinstance(names, str) else names:
        found = [(row["step"], float(row[name])) for row in rows if _is_number(row.get(name))]
        if found:
            return [step for step, _ in found], [value for _, value in found]
    return [], []


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred moving median over the finite values within `window` points (fewer at the ends); NaN where there is none."""
    half, result = window // 2, []
    for index in range(len(values)):
        near = [v for v in values[max(0, index - half) : index + half + 1] if math.isfinite(v)]
        result.append(median(near) if near else math.nan)
    return result


def phase_table(rows: Sequence[Row]) -> tuple[list[int], dict[str, list[float]]]:
    """Seconds of each phase per step, for a stacked plot, longest phase first; a phase that a step lacks is 0 there.

    `other` is what `timing_s/step` holds beyond the phases, together with phases of less than half a percent of the time.
    """
    timed = [row for row in rows if any(key.startswith("timing_s/") for key in row)]
    totals: dict[str, float] = {}
    for row in timed:
        for key, value in row.items():
            if key.startswith("timing_s/") and key != "timing_s/step" and _is_finite(value):
                totals[key] = totals.get(key, 0.0) + value
    ranked = sorted(totals, key=lambda key: (-totals[key], key))
    kept = [key for key in ranked[:9] if totals[key] >= 0.005 * sum(totals.values())]
    table = {key.removeprefix("timing_s/"): [_seconds(row, key) for row in timed] for key in kept}
    other = []
    for row in timed:
        inside = sum(_seconds(row, key) for key in totals)
        whole = max(_seconds(row, "timing_s/step"), inside)
        other.append(whole - sum(_seconds(row, key) for key in kept))
    if sum(other) > 0.01 * sum(totals.values()):
        table["other"] = other
    return [row["step"] for row in timed], table


def draw(run_dir: Path) -> Path | None:
    """Draw `plots/training.png` of a run folder and return its path; `None` for a run that has logged nothing yet.

    Panels: held-out accuracy, reward, response length, entropy, KL and clip share, gradient norm, seconds per phase. Thin
    lines are the raw values, thick ones a moving median; red marks on the axis are steps whose value was NaN or infinite.
    """
    run_dir = Path(run_dir)
    rows = read_rows(run_dir)
    if not rows:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(12, 13), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    grid = figure.add_gridspec(4, 2)
    steps = [row["step"] for row in rows]
    name = _literal(f"{run_dir.resolve().parent.name} / {run_dir.resolve().name}")
    figure.suptitle(
        f"{name}   (steps {min(steps)} to {max(steps)})", fontsize=13, fontweight="bold"
    )
    room = max(0.6, 0.015 * (max(steps) - min(steps)))
    for index, panel in enumerate(PANELS):
        axes = figure.add_subplot(grid[index // 2, index % 2] if index < 6 else grid[3, :])
        axes.set_xlabel("step")
        axes.grid(True, color="#e4e6ea", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        panel(axes, rows)
        axes.set_xlim(min(steps) - room, max(steps) + room)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
        if not axes.has_data():
            axes.set(xticks=[], yticks=[])
            axes.text(0.5, 0.5, "not logged", color=GREY, ha="center", transform=axes.transAxes)
    target = run_dir / "plots" / "training.png"
    target.parent.mkdir(exist_ok=True)
    aside = target.with_suffix(".tmp")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing")
        canvas.print_figure(str(aside), format="png")
    aside.replace(target)
    return target


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _seconds(row: Row, key: str) -> float:
    value = row.get(key)
    return float(value) if value is not None and _is_finite(value) else 0.0


def _literal(text: str) -> str:
    """A label that is not read as a formula, and that a legend does not skip for a leading underscore."""
    return text.replace("$", r"\$").lstrip("_")


def _line(
    axes: Any, points: Series, color: str, label: str | None = None, style: str = "-"
) -> None:
    steps, values = points
    if not steps:
        return
    bad = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    drawn = [value if math.isfinite(value) else math.nan for value in values]
    if len(steps) >= 20:
        axes.plot(steps, drawn, color=color, alpha=0.3 if len(steps) < 300 else 0.2, linewidth=0.9)
        drawn = smooth(drawn, max(3, len(steps) // 15))
    marker = "o" if len(steps) < 20 else ""
    axes.plot(
        steps,
        drawn,
        color=color,
        linewidth=1.9,
        label=label,
        marker=marker,
        markersize=4,
        linestyle=style,
    )
    if bad:
        place = axes.get_xaxis_transform()
        axes.plot(
            bad, [0.0] * len(bad), "|", color=RED, ms=12, mew=1.8, transform=place, clip_on=False
        )
        note = f"NaN or infinite in {len(bad)} step{'s' if len(bad) > 1 else ''}"
        axes.text(0.99, 0.03, note, color=RED, fontsize=9, ha="right", transform=axes.transAxes)


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=9, frameon=False)


def _accuracy(axes: Any, rows: Sequence[Row]) -> None:
    axes.set(title="Held-out accuracy", ylabel="share of problems right")
    keys = dict.fromkeys(
        key for row in rows for key in row if key.startswith("val/") and "/acc/" in key
    )
    for index, key in enumerate(list(keys)[: len(PALETTE)]):
        steps, values = series(rows, key)
        name = _literal(key.removeprefix("val/").replace("/acc/", " "))
        axes.plot(
            steps,
            values,
            color=PALETTE[index],
            marker="o" if len(steps) <= 40 else "",
            markersize=4.5,
            linewidth=1.9,
            label=f"{name}: {values[-1]:.3f}",
        )
    if keys:
        best = max(
            (v for key in keys for v in series(rows, key)[1] if math.isfinite(v)), default=0.0
        )
        axes.set_ylim(0.0, min(1.1, 1.3 * best) if best > 0 else 1.0)
    _legend(axes)


def _reward(axes: Any, rows: Sequence[Row]) -> None:
    axes.set(title="Reward of training samples", ylabel="mean reward per response")
    _line(axes, series(rows, NAMES["reward"]), BLUE)


def _length(axes: Any, rows: Sequence[Row]) -> None:
    axes.set(title="Response length", ylabel="tokens")
    _line(axes, series(rows, NAMES["length"]), BLUE, "mean")
    longest = series(rows, "response_length/max")
    axes.plot(
        *longest, color=GREY, alpha=0.6, linewidth=0.8, label="longest" if longest[0] else None
    )
    _legend(axes)
    if axes.has_data():
        axes.set_ylim(bottom=0)


def _entropy(axes: Any, rows: Sequence[Row]) -> None:
    axes.set(title="Entropy of the policy", ylabel="nats per token")
    _line(axes, series(rows, NAMES["entropy"]), GREEN)
    if axes.has_data():
        axes.set_ylim(bottom=0)


def _kl_and_clipping(axes: Any, rows: Sequence[Row]) -> None:
    axes.set(title="KL divergence and clipped tokens", ylabel="KL, nats per token")
    labels = {
        "actor/kl_loss": "KL to reference",
        "actor/reward_kl_penalty": "KL to reference",
        "actor/ppo_kl": "KL to sampling policy",
    }
    held = [key for key in NAMES["kl"] if series(rows, key)[0]]
    if held:
        axes.yaxis.label.set_color(BLUE)
        _line(axes, series(rows, held[0]), BLUE, labels[held[0]])
    steps, shares = series(rows, NAMES["clip"])
    if not steps:
        _legend(axes)
        return
    right = axes.twinx() if held else axes
    right.set_ylabel("clipped tokens, %", color=ORANGE)
    _line(right, (steps, [100 * share for share in shares]), ORANGE, "clipped tokens")
    right.set_ylim(bottom=0)
    if held:
        right.spines["top"].set_visible(False)
        for side in (axes, right):  # room for the legend above both lines
            low, high = side.get_ylim()
            side.set_ylim(low, high + 0.25 * (high - low))
        handles = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
        right.legend(handles=handles, fontsize=9, framealpha=0.8, edgecolor="none")


def _gradient(axes: Any, rows: Sequence[Row]) -> None:
    axes.set(title="Gradient norm before clipping", ylabel="global L2 norm")
    actor, critic = series(rows, NAMES["grad"]), series(rows, "critic/grad_norm")
    _line(axes, actor, BLUE, "policy")
    _line(axes, critic, ORANGE, "critic")
    positive = [v for v in (*actor[1], *critic[1]) if math.isfinite(v) and v > 0]
    if positive and max(positive) > 50 * min(positive):
        axes.set_yscale("log")
    elif positive:
        axes.set_ylim(bottom=0)
    if critic[0]:
        _legend(axes)


def _phases(axes: Any, rows: Sequence[Row]) -> None:
    axes.set(title="Time per step", ylabel="seconds")
    steps, table = phase_table(rows)
    if not table:
        return
    wide = math.ceil(len(steps) / BARS)
    groups = [slice(start, start + wide) for start in range(0, len(steps), wide)]
    places = [_mean(steps[group]) for group in groups]
    gap = (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else 1.0
    base = [0.0] * len(groups)
    for index, (name, seconds) in enumerate(table.items()):
        heights = [_mean(seconds[group]) for group in groups]
        color = GREY if name == "other" else PALETTE[index]
        axes.bar(places, heights, 0.9 * gap * wide, bottom=base, color=color, label=_literal(name))
        base = [low + high for low, high in zip(base, heights, strict=True)]
    longest, usual = max(base), sorted(base)[int(0.98 * (len(base) - 1))]
    if len(base) > 5 and longest > 3 * usual > 0:
        axes.set_ylim(0, 1.15 * usual)
        cut = sum(total > 1.15 * usual for total in base)
        bars = "one bar is" if cut == 1 else f"{cut} bars are"
        place = f"{places[base.index(longest)]:.0f}"
        axes.set_title(
            f"Time per step ({bars} cut off; the longest: {longest:.1f} s at step {place})"
        )
    axes.legend(fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=10)
    if wide > 1:
        axes.set_xlabel(f"step (mean of {wide} steps per bar)")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


PANELS: tuple[Callable[[Any, Sequence[Row]], None], ...] = (
    _accuracy,
    _reward,
    _length,
    _entropy,
    _kl_and_clipping,
    _gradient,
    _phases,
)
