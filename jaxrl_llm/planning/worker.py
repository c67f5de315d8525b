"""A child process that compiles: the settings come as one line of JSON, then names of programs; an answer per line goes back.

Its environment is set before it starts (see `crew`), because JAX and its compilers read theirs when they load.

Left out on purpose: time-outs (the parent ends a child that takes too long).
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_llm.config import from_dict
from jaxrl_llm.planning import facts, hlo, lower, site, targets, topology

KEPT: dict[str, Callable[[Any], Any]] = {
    "arguments": int,
    "results": int,
    "temporaries": int,
    "host_arguments": int,
    "abroad": float,
    "seconds": float,
    "cpu_seconds": float,
    "digest": str,
}
"""What a file of the cache holds besides `sent`."""


def analysis(
    lowering: lower.Lowering, target: targets.Target, cache: Path | None
) -> dict[str, Any]:
    """Bytes, traffic and seconds of a compiled program, per device; from the cache where the same program was compiled before."""
    begun, spent = time.monotonic(), time.process_time()
    lowered = lowering.lower()
    digest = _digest(lowered.as_text(), lowering, target)
    kept = cache / f"{digest}.json" if cache else None
    if kept is not None and (known := _remembered(kept)):
        return known | {"cached": True}
    compiled = lowered.compile()
    found: dict[str, Any] = _memory(compiled.memory_analysis())
    per_node = target.count // (target.hosts if not target.grid else target.slices)
    moved = hlo.traffic(
        compiled.as_text(), planned=lowering.runs, per_node=per_node, devices=target.count
    )
    found |= {
        "sent": moved.sent,
        "abroad": moved.abroad,
        "seconds": time.monotonic() - begun,
        "cpu_seconds": time.process_time() - spent,
        "digest": digest,
    }
    if kept is not None:
        with contextlib.suppress(OSError):  # figures that cannot be kept are still figures
            kept.parent.mkdir(parents=True, exist_ok=True)
            aside = kept.with_suffix(f".{os.getpid()}")
            aside.write_text(json.dumps(found))
            os.replace(aside, kept)
    return found | {"cached": False}


def _remembered(kept: Path) -> dict[str, Any] | None:
    """An analysis from the cache; `None` where there is none, or a file that is torn or somebody else's."""
    with contextlib.suppress(
        OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError
    ):
        found = json.loads(kept.read_text())
        sent = {str(name): float(size) for name, size in found["sent"].items()}
        return {name: kind(found[name]) for name, kind in KEPT.items()} | {"sent": sent}
    return None


def _digest(text: str, lowering: lower.Lowering, target: targets.Target) -> str:
    """What decides the analysis: the program's text, the compiler and its flags, the device, and the planned runs of open loops."""
    compiler = [_version(name) for name in ("jax", "jaxlib", "jax-cuda12-plugin", "libtpu")]
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    known = [repr(target), str(lowering.runs), *flags, *compiler]
    return hashlib.sha256("\n".join([text, *known]).encode()).hexdigest()[:32]


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _memory(stats: Any) -> dict[str, Any]:
    """Bytes per device: arguments, results in places of their own, temporaries; those in host memory apart."""
    return {
        "arguments": int(stats.argument_size_in_bytes),
        "results": int(stats.output_size_in_bytes) - int(stats.alias_size_in_bytes),
        "temporaries": int(stats.temp_size_in_bytes),
        "host_arguments": int(stats.host_argument_size_in_bytes),
    }


def main() -> None:
    """Serve until the parent closes the line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    order = json.loads(sys.stdin.readline())
    config, problems = from_dict(order["config"])
    if problems:
        raise ValueError(problems)
    target = targets.parse(order["target"])
    cache = Path(order["cache"]) if order["cache"] else None
    facts.offline()
    made = site.build(config, facts.from_plain(order["facts"]), target, topology.devices(target))
    prompts = site.prompts_per_host(config, target)
    known = {one.name: (one, target) for one in lower.step_programs(made, prompts)}
    host = targets.decodes_on(target)
    if host != target:
        alone = site.on_a_host(made, topology.devices(host))
        known |= {one.name: (one, host) for one in lower.engine_programs(alone, prompts)}
    print(json.dumps({"ready": sorted(known)}), file=answers, flush=True)
    for line in sys.stdin:
        name = json.loads(line)
        try:
            found = analysis(*known[name], cache)
        except Exception as problem:
            found = {"error": f"{type(problem).__name__}: {problem}"[:2000]}
        print(json.dumps({"name": name} | found), file=answers, flush=True)


if __name__ == "__main__":
    main()
