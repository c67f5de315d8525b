"""Our steps and a peer's on the same work, in turn, as a table: python benchmarks/compare.py --peer tunix --python P --script S.

`--python` is the interpreter of the environment that has the peer, `--script` the script that trains it and prints JSON: Tunix
a line that begins with `SUMMARY`, TRL one line with `trl_step_s`. For each variant the two run A B A B, one process at a time,
without a warm compilation cache; the table holds medians over the rounds, and `ratio` is ours over theirs. `--out` keeps what
every run printed last, written after each run, so that an interrupted comparison loses one run. Left out on purpose: plots, and
any judgement whether the machine was quiet (each run's entry has the load average before it).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

OURS = Path(__file__).parent / "grpo_step.py"

Numbers = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One compared number, and how to read it from our last line and from the peer's; `None` where a side lacks it."""

    name: str
    ours: Callable[[Numbers], float]
    theirs: Callable[[Numbers], float]
    digits: int = 2


@dataclass(frozen=True)
class Peer:
    """How a peer is called for each of our variants, which line of its output counts, and what is compared."""

    variants: dict[str, str]
    common: str
    mark: str
    columns: tuple[Column, ...]


def _key(*names: str) -> Callable[[Numbers], float]:
    """Read a number by its path."""

    def read(numbers: Numbers) -> float:
        found: Any = numbers
        for name in names:
            found = found[name]
        return float(found)

    return read


def _steady(name: str) -> Callable[[Numbers], float]:
    return _key("steady", name)


TUNIX = Peer(
    variants={
        "base": "",
        "ragged": "--early-eos 1 --vary-prompts 1",
        "cache1024": "--kv-cache 1024",
        "nokl": "--beta 0",
        "micro2": "--micro 2",
        "vocab32k": "--vocab 32768",
    },
    common="--steps {steps}",
    mark="SUMMARY ",
    columns=(
        Column("step CPU s", _key("step_cpu"), _steady("total_cpu")),
        Column("rollout CPU s", _key("rollout_cpu"), _steady("rollout_cpu")),
        Column("reference CPU s", _key("ref_cpu"), _steady("ref_logps_cpu")),
        Column("update CPU s", _key("update_cpu"), _steady("update_cpu")),
        Column("step wall s", _key("step_wall"), _steady("total")),
        Column("peak RSS MB", _key("peak_rss_mb"), _key("max_rss_mb"), 0),
        Column("compilations", _key("compilations"), _key("compile_count"), 0),
        Column("first step wall s", _key("first_step_wall"), _key("first_step_s"), 1),
    ),
)
TRL = Peer(
    variants={
        "trl_tiny": "--shape tiny --prompts 4 --group 8",
        "trl_base": "--shape 4,256,1024,4,2,4096 --prompts 8 --group 8 --beta 0.04",
        "smollm2": "--model {model} --prompts 1 --group 4",
        "smollm2_long": "--model {model} --prompts 1 --group 8 --response-len 128 --micro 4",
    },
    common="--trainer-only --warmup {warmup} --steps {measured}",
    mark="{",
    columns=(
        Column("step wall s", _key("step_wall"), _key("trl_step_s")),
        Column("decode tokens/s", _key("generated_tokens_per_wall_s"), _key("trl_gen_tok_s"), 0),
        Column("peak RSS MB", _key("peak_rss_mb"), _key("trl_peak_mb"), 0),
        Column("step CPU s (theirs: the best)", _key("step_cpu"), _key("trl_min", "step_cpu")),
    ),
)
PEERS = {"tunix": TUNIX, "trl": TRL}


def commands(given: argparse.Namespace, variant: str) -> dict[str, tuple[list[str], str]]:
    """Command and mark of the line that counts, for our script and the peer's; both leave out the same number of first steps."""
    peer, steps = PEERS[given.peer], given.steps
    ours = [sys.executable, str(OURS), "--steps", str(steps), "--variant", variant]
    found = {"ours": (ours, "{")}
    if not given.ours_only:
        words = {"steps": steps, "warmup": steps // 3, "measured": steps - steps // 3}
        arguments = f"{peer.common} {peer.variants[variant]}".split()
        filled = [word.format(**words, model=given.model) for word in arguments]
        found["theirs"] = ([given.python, given.script, *filled], peer.mark)
    return found


def measure(command: Sequence[str], mark: str, limit: float) -> Numbers:
    """Run a command and read the last line that begins with the mark; the entry says what went wrong where there is none."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    entry: Numbers = {"command": list(command), "load": os.getloadavg()}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return entry | {"failed": str(problem)}
    entry["wall"] = time.perf_counter() - start
    lines = [line for line in done.stdout.splitlines() if line.startswith(mark)]
    if done.returncode or not lines:
        return entry | {"failed": f"exit {done.returncode}: {done.stderr[-2000:]}"}
    return entry | {"numbers": json.loads(lines[-1].removeprefix("SUMMARY "))}


def table(peer: Peer, runs: Sequence[Numbers]) -> str:
    """Markdown: per variant and number ours, theirs and the ratio, medians over the runs that worked."""
    lines = ["| variant | number | ours | theirs | ratio |", "|---|---|---|---|---|"]
    for variant in dict.fromkeys(run["variant"] for run in runs):
        for column in peer.columns:
            cells, values = [], []
            for side, read in (("ours", column.ours), ("theirs", column.theirs)):
                own = [run for run in runs if (run["variant"], run["side"]) == (variant, side)]
                found = [read(run["numbers"]) for run in own if "numbers" in run]
                cells.append(
                    f"{median(found):,.{column.digits}f}" if found else "failed" if own else "–"
                )
                values += [median(found)] if found else []
            ratio = f"{values[0] / values[1]:.2f}" if len(values) == 2 and values[1] else "–"
            lines.append(f"| {variant} | {column.name} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def read_arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peer", choices=sorted(PEERS), required=True)
    parser.add_argument("--python", help="interpreter of the peer's environment")
    parser.add_argument("--script", help="the peer's script")
    parser.add_argument("--model", default="", help="TRL: folder with SmolLM2-135M-Instruct")
    parser.add_argument("--variants", help="comma-separated; default: all that the peer has")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit", type=float, default=1800, help="seconds per process")
    parser.add_argument("--out", type=Path, help="JSON file of all runs")
    parser.add_argument("--ours-only", action="store_true")
    given = parser.parse_args()
    known = PEERS[given.peer].variants
    given.variants = given.variants.split(",") if given.variants else list(known)
    unknown = [name for name in given.variants if name not in known]
    if unknown:
        parser.error(f"--variants {','.join(unknown)}: {given.peer} has {', '.join(known)}")
    if not given.ours_only:
        if not given.python or not given.script:
            parser.error("a comparison needs --python and --script; or give --ours-only")
        if not given.model and any("{model}" in known[name] for name in given.variants):
            parser.error("the smollm2 variants need --model; or name others with --variants")
    return given


def main() -> None:
    """Run everything in turn, keep it, print the table."""
    given, runs = read_arguments(), list[Numbers]()
    for variant in given.variants:
        for number in range(given.rounds):
            for side, (command, mark) in commands(given, variant).items():
                entry = measure(command, mark, given.limit)
                runs.append({"variant": variant, "round": number, "side": side, **entry})
                state = entry.get("failed") or f"{entry['wall']:.0f} s"
                print(f"{variant}, round {number}, {side}: {state}", file=sys.stderr, flush=True)
                if given.out:
                    given.out.write_text(json.dumps(runs, indent=1) + "\n")
    print(table(PEERS[given.peer], runs))
    sys.exit(any("failed" in run for run in runs))


if __name__ == "__main__":
    main()
