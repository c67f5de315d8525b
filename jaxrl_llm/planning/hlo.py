"""What devices send each other in a compiled program: kinds and bytes of its collectives, loops multiplied out.

A loop whose condition compares with a constant runs so often; any other loop runs as often as the caller plans for (micro-batches,
decode steps). Of a condition's branches the one that sends more counts.

Left out on purpose: time. Collectives overlap with arithmetic, and only a trace says how far.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
BITS = {"pred": 8, "bf16": 16, "f8e4m3fn": 8, "f8e5m2": 8, "c64": 64, "c128": 128}
SHAPE = re.compile(r"\b(pred|bf16|f8\w+|[a-z]\d+)\[([\d,]*)\]")
HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
OP = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
CALL = re.compile(r"(?:calls|to_apply|async_computation|body|condition)=%?([\w.\-]+)")
BRANCHES = re.compile(
    r"(?:branch_computations=\{([^}]*)\}|true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+))"
)
TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
LISTS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}")


@dataclass
class Traffic:
    """Bytes that one device sends, by kind of collective, and those of them that leave its node."""

    sent: dict[str, float] = field(default_factory=dict)
    abroad: float = 0.0

    def add(self, other: "Traffic", times: float = 1) -> None:
        """Add another's bytes, so many times."""
        for kind, size in other.sent.items():
            self.sent[kind] = self.sent.get(kind, 0.0) + size * times
        self.abroad += other.abroad * times

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(self.sent.values())


def traffic(text: str, *, planned: int, per_node: int, devices: int) -> Traffic:
    """Bytes that a device of a compiled program sends: `text` is its HLO, `planned` the runs of a loop of unknown length, `per_node`
    the devices that a fast network joins (those of a host, or of a slice)."""
    parts, entry = _computations(text)
    done: dict[str, Traffic] = {}

    def of(name: str) -> Traffic:
        if name in done:
            return done[name]
        found = done[name] = Traffic()
        for line in parts.get(name, ()):
            op = _opcode(line)
            if op in KINDS or op.removesuffix("-start") in KINDS:
                found.add(_sent(line, op.removesuffix("-start"), per_node, devices))
            elif op == "while":
                condition, body = _named(line, "condition"), _named(line, "body")
                runs = _trips(line, parts.get(condition, ()), parts.get(body, ()), planned)
                found.add(of(body), runs)
            elif op == "conditional":
                found.add(max(map(of, _branches(line)), key=lambda each: each.total))
            elif op in ("call", "fusion", "async-start"):
                for inner in CALL.findall(line):
                    found.add(of(inner))
        return found

    return of(entry)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The instructions of every computation by its name, and the name of the one that is run."""
    parts: dict[str, list[str]] = {}
    current, entry = "", ""
    for line in text.splitlines():
        if head := HEAD.match(line):
            current = head[1]
            parts[current] = []
            entry = current if line.startswith("ENTRY") else entry
        elif current and " = " in line:
            parts[current].append(line)
    return parts, entry


def _result(line: str) -> str:
    """The type in front of the operation: balanced parentheses for a tuple."""
    match = OP.match(line)
    rest = match[2] if match else ""
    if not rest.startswith("("):
        return rest.split(" ", 1)[0]
    depth = 0
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return rest[: place + 1]
    return rest


def _opcode(line: str) -> str:
    match = OP.match(line)
    if match is None:
        return ""
    return match[2][len(_result(line)) :].strip().partition("(")[0]


def _named(line: str, what: str) -> str:
    found = re.search(rf"{what}=%?([\w.\-]+)", line)
    return found[1] if found else ""


def _branches(line: str) -> list[str]:
    found = BRANCHES.search(line)
    if found is None:
        return []
    names = found[1].split(",") if found[1] else found.groups()[1:]
    return [name.strip().lstrip("%") for name in names]


def _trips(line: str, condition: Sequence[str], body: Sequence[str], planned: int) -> int:
    """How often a loop runs: what the compiler knows, or a constant that its condition compares a counter with, or what is planned."""
    known = TRIPS.search(line)
    if known:
        return int(known[1])
    constants = _constants(condition)
    for row in condition:
        if _opcode(row) not in ("compare", "fusion"):
            continue
        operands = _operands(row)
        bounds = [constants[name] for name in operands if name in constants]
        if bounds:
            step = _step([_index(other) for other in condition if _name(other) in operands], body)
            return -(-max(bounds) // step)
    return planned


def _step(counters: Sequence[int | None], body: Sequence[str]) -> int:
    """By how much a loop's body raises its counter, whose place in the loop's tuple is the first of `counters` that is known."""
    place = next((index for index in counters if index is not None), None)
    root = next((row for row in body if row.lstrip().startswith("ROOT")), "")
    by_name = {_name(row): row for row in body}
    results = _operands(root)
    if place is None or _opcode(root) != "tuple" or place >= len(results):
        return 1
    raised = by_name.get(results[place], "")
    constants = _constants(body)
    added = [constants[name] for name in _operands(raised) if name in constants]
    return max(1, *added) if _opcode(raised) == "add" and added else 1


def _name(line: str) -> str:
    match = OP.match(line)
    return match[1] if match else ""


def _operands(line: str) -> list[str]:
    match = OP.match(line)
    called = match[2][len(_result(line)) :] if match else ""
    return re.findall(r"%([\w.\-]+)", called.partition(")")[0])


def _constants(lines: Sequence[str]) -> dict[str, int]:
    """The whole-number scalars of a computation by name."""
    found = (re.match(r"\s*%?([\w.\-]+) = [su]\d+\[\]\S* constant\((\d+)\)", row) for row in lines)
    return {match[1]: int(match[2]) for match in found if match}


def _index(line: str) -> int | None:
    found = re.search(r"index=(\d+)", line) if _opcode(line) == "get-tuple-element" else None
    return int(found[1]) if found else None


def _bytes(types: str) -> list[int]:
    sizes = []
    for kind, dims in SHAPE.findall(types):
        bits = BITS.get(kind) or int(re.sub(r"\D", "", kind))
        sizes.append(math.prod(map(int, dims.split(","))) * bits // 8 if dims else bits // 8)
    return sizes


def _sent(line: str, kind: str, per_node: int, devices: int) -> Traffic:
    """Bytes of one collective, each by the algorithm that sends least: a share `(n - 1) / n` of the whole, an all-reduce twice that."""
    sizes = _bytes(_result(line))
    if kind == "collective-permute":
        pairs = [tuple(map(int, pair.split(","))) for pair in re.findall(r"\d+,\d+", _pairs(line))]
        crossing = sum(a // per_node != b // per_node for a, b in pairs) / max(1, len(pairs))
        return Traffic({kind: float(max(sizes))}, crossing * max(sizes))
    group = _group(line, devices)
    whole = sum(sizes)
    started = f"{kind}-start(" in line
    if kind == "all-gather" and started:
        whole = whole * len(group) // (len(group) + 1)
    elif kind == "reduce-scatter":
        whole = whole * len(group) // (len(group) + 1) if started else whole * len(group)
    factor = 2 if kind == "all-reduce" else 1
    nodes = len({device // per_node for device in group})
    local = max(1, len(group) // nodes)
    share = (len(group) - 1) / len(group)
    abroad = whole * (nodes - 1) / nodes / local
    return Traffic({kind: factor * whole * share}, factor * abroad)


def _pairs(line: str) -> str:
    found = PAIRS.search(line)
    return found[1] if found else ""


def _group(line: str, devices: int) -> list[int]:
    """The devices of one group of a collective: the first one, all others are alike."""
    if lists := LISTS.search(line):
        return [int(number) for number in lists[1].split(",")]
    if iota := IOTA.search(line):
        count, size = int(iota[1]), int(iota[2])
        ids = np.arange(count * size).reshape([int(n) for n in iota[3].split(",")])
        if iota[4]:
            ids = ids.transpose([int(n) for n in iota[4].split(",")])
        return [int(n) for n in ids.reshape(count, size)[0]]
    if mesh := MESH.search(line):
        axes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        used = re.findall(r"'([^']+)'", mesh[2])
        if set(used) <= set(axes):
            ids = np.arange(math.prod(map(int, axes.values()))).reshape([*map(int, axes.values())])
            here = tuple(slice(None) if name in used else 0 for name in axes)
            return [int(n) for n in ids[here].ravel()]
    return list(range(devices))
