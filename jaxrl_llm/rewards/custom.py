"""Reward functions of the user: load them from a local file, call them by parameter name, read what they return.

A specification is `FILE.py:FUNCTION`. The file is read and imported inside a reward worker only; the parent looks at its
syntax tree and digest (`problems`, `digest`), and a worker refuses a file whose content changed since.

Parameters are filled by name from `KNOWN`; `solution_str` and `ground_truth` are verl's names for `response` and
`answer`; a parameter with a default may have any name; `**kwargs` receives everything that has a name. The folder of the
file is put at the end of the import path, so that it can import its neighbours.

Left out on purpose: packages, URLs and notebooks as sources, coroutines, and functions of whole batches.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import ConfigError

ALIASES = {"solution_str": "response", "ground_truth": "answer"}
"""verl's parameter names and ours."""
KNOWN = ("prompt", "response", "answer", "data_source", "extra_info", "response_length", *ALIASES)
"""Parameter names that are filled."""
EXPECTED = "one number, None (abstain) or a dict with a numeric 'score'"


@dataclass(frozen=True)
class Loaded:
    """A loaded reward function, callable with a sample's fields by keyword; `sha256` is the digest of its file."""

    function: Callable[..., Any]
    path: str
    name: str
    sha256: str
    parameters: tuple[str, ...]
    positional_only: tuple[str, ...]
    takes_everything: bool

    def __call__(self, **sample: Any) -> Any:
        values = {**sample, **{theirs: sample[ours] for theirs, ours in ALIASES.items()}}
        positional = [values[name] for name in self.positional_only]
        names = KNOWN if self.takes_everything else self.parameters
        keywords = {name: values[name] for name in names if name not in self.positional_only}
        return self.function(*positional, **keywords)


def is_custom(name: str) -> bool:
    """Whether a function name is meant as `FILE.py:FUNCTION`."""
    return ":" in name or name.endswith(".py") or "/" in name


def problems(spec: str) -> list[str]:
    """What is wrong with a specification, from its text and the file's syntax tree; nothing is imported."""
    import ast

    path, _, name = spec.rpartition(":")
    if "://" in spec or "\0" in spec or not path.endswith(".py") or not name.isidentifier():
        return [
            f"reward.functions: got {spec!r}, need a built-in name or FILE.py:FUNCTION of a local file"
        ]
    if not Path(path).is_file():
        return [f"reward.functions: got {spec!r}, but there is no file {path!r}; give its path"]
    try:
        tree = ast.parse(Path(path).read_bytes(), path)
    except (SyntaxError, ValueError, OSError) as error:
        return [f"reward.functions: {path!r} cannot be read as Python: {error}"]
    for node in tree.body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name == name:
            return [f"reward.functions: {spec!r} is a coroutine, need a plain function (def)"]
        if isinstance(node, ast.FunctionDef) and node.name == name:
            if node.decorator_list:
                return []  # the decorator decides; the worker looks at the finished function
            plain = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
            required = plain[: len(plain) - len(node.args.defaults)]
            keyword_only = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            required += [argument.arg for argument, default in keyword_only if default is None]
            return _unknown(spec, required)
    if name in _bound_names(tree):
        return []  # imported, assigned or defined inside an `if`: only the worker can look at it
    defined = sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    return [
        f"reward.functions: {path!r} defines no function {name!r}; it has {', '.join(defined) or 'none'}"
    ]


def digest(spec: str) -> str:
    """SHA-256 of the content of the file named in `FILE.py:FUNCTION`, in hex."""
    import hashlib

    return hashlib.sha256(Path(spec.rpartition(":")[0]).read_bytes()).hexdigest()


def load(spec: str, expected_sha256: str | None = None) -> Loaded:
    """Import `FILE.py` and return its `FUNCTION`, ready to be called with the fields of a sample.

    Args:
        spec: `FILE.py:FUNCTION`.
        expected_sha256: digest the file must have; `None` accepts any.

    Raises:
        ConfigError: no such file or function, a required parameter that is not in `KNOWN`, or another digest. What the
            file itself raises while it is imported comes through as it is.
    """
    import importlib.util
    import inspect
    import sys

    if found := problems(spec):
        raise ConfigError(found)
    path, _, name = spec.rpartition(":")
    path = str(Path(path).absolute())
    sha256 = digest(spec)
    if expected_sha256 not in (None, sha256):
        raise ConfigError(
            f"reward function file {path}: its content changed during the run (SHA-256 {sha256[:12]}, was"
            f" {str(expected_sha256)[:12]}); start again to use the new one"
        )
    if (folder := str(Path(path).parent)) not in sys.path:
        sys.path.append(folder)
    module_spec = importlib.util.spec_from_file_location(f"reward_file_{sha256[:12]}", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ConfigError(f"reward.functions: {spec!r} is {function!r}, need a plain function")
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if found := _unknown(spec, [p.name for p in named if p.default is p.empty]):
        raise ConfigError(found)
    fillable = [p for p in named if p.name in KNOWN]
    return Loaded(
        function=function,
        path=path,
        name=name,
        sha256=sha256,
        parameters=tuple(p.name for p in fillable),
        positional_only=tuple(p.name for p in fillable if p.kind is p.POSITIONAL_ONLY),
        takes_everything=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def convert(result: Any, name: str) -> tuple[float | None, dict[str, float], str | None]:
    """What a reward function returned, as `(value, parts, problem)`.

    `None` stays `None` (abstain). Accepted: `bool`, `int`, `float` and every scalar or zero-dimensional array that turns
    into a float (NumPy, bfloat16). A dict needs a numeric `score`; its other finite numbers become parts `name/key`.
    NaN and infinities pass through: `grader` decides about them. Anything else gives a problem text that names the
    function, what it returned and what is expected.
    """
    if isinstance(result, dict):
        if "score" not in result:
            return None, {}, _refused(name, result)
        value, _, problem = convert(result["score"], name)
        parts = {}
        for key, entry in result.items():
            number = None if key == "score" or entry is None else _number(entry)
            if number is not None and math.isfinite(number):
                parts[f"{name}/{key}"] = number
        return value, parts, problem
    if result is None:
        return None, {}, None
    number = _number(result)
    return (None, {}, _refused(name, result)) if number is None else (number, {}, None)


def _number(value: Any) -> float | None:
    if isinstance(value, str | bytes | bytearray | complex) or not hasattr(value, "__float__"):
        return None
    if getattr(value, "shape", ()) != ():
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        return None


def _refused(name: str, value: Any) -> str:
    shape = getattr(value, "shape", None)
    if isinstance(value, dict):
        got = f"a dict with the keys {', '.join(sorted(map(str, value)))[:200] or '(none)'}"
    elif shape:
        got = f"a {type(value).__name__} of shape {tuple(shape)}"
    elif isinstance(value, list | tuple | set):
        got = f"a {type(value).__name__} of length {len(value)}"
    elif isinstance(value, str | bytes):
        got = f"the {type(value).__name__} {value[:60]!r}"
    else:
        got = f"a value of type {type(value).__name__}"
    return f"reward function {name!r} returned {got}, expected {EXPECTED}"


def _unknown(spec: str, required: list[str]) -> list[str]:
    unknown = [name for name in required if name not in KNOWN]
    if not unknown:
        return []
    return [
        f"reward.functions: {spec!r} requires the parameter{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}, known"
        f" are {', '.join(KNOWN)}; rename or give a default (one call sees one sample)"
    ]


def _bound_names(tree: Any) -> set[str]:
    """Names that a module binds at its top level by other means than `def`: imports, assignments, inside `if`/`try`."""
    import ast

    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node not in tree.body:
            names.add(node.name)
    return names
