"""Who may import whom, read from the source; what a fresh process loads; and how long files and functions may be.

The table names every module or folder of the package: a new module has to be placed in it.
"""

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "jaxrl_llm"
ROOT = Path(__file__).parent.parent
SOURCE = ROOT / PACKAGE

FLOOR = "errors masking records knobs"
TABLE: dict[str, str] = {
    # floor: jax, flax.struct and the standard library
    "errors": "",
    "knobs": "knobs",
    "masking": "errors",
    "records": "",
    "fault": "errors",
    # settings: standard library only; everyone may read them
    "algorithms.names": "errors",
    "values": "",
    "config": "errors knobs values algorithms.names",
    "notices": "config",
    "checks": "errors config notices algorithms.names rewards.table",
    "presets": "config",
    "summary": "config checks",
    "cli": "errors config checks",
    "paths": "errors",
    # text in, numbers out; no JAX
    "rewards": "errors knobs rewards",
    "templates": "errors",
    "tokenizer_files": "errors",
    "tokenizer": "errors paths templates tokenizer_files models.gguf",
    "data": "errors knobs records data",
    # arrays in, arrays out
    "algorithms": "errors knobs masking records algorithms",
    "models": "errors models",
    "sharding": "errors checks",
    "packing": "errors records models",
    "flops": "models",
    "hardware": "",
    "rollout": f"{FLOOR} models packing sharding rollout",
    "optimizer": "knobs records sharding",
    "scoring": f"{FLOOR} models packing sharding",
    "learner": f"{FLOOR} algorithms models packing optimizer scoring sharding",
    # happenings, one by one
    "sinks": "errors",
    "console": "sinks",
    "plots": "sinks",
    "diagnostics": "sinks",
    "metrics": "errors records sinks",
    "checkpoint": "errors fault processes checkpoint",
    "evaluation": "records rewards",
    # processes of one run
    "processes": "errors",
    "roll_call": "errors",
    "joining": "errors knobs roll_call",
    "watchdog": "errors processes",
    "exchange": "processes records rewards rollout",
    # the loop and what it is made of
    "compilation_cache": "",
    "runtime": "errors knobs config checks console checkpoint compilation_cache paths processes",
    "networks": f"{FLOOR} config checks paths tokenizer models scoring sharding optimizer learner",
    "replicas": "errors networks processes records sharding",
    "layouts": "config learner networks packing records rollout scoring sharding",
    "programs": f"{FLOOR} config checks networks layouts learner models rollout scoring sharding",
    "assembly": f"{FLOOR} config checks summary console data rewards.table tokenizer models processes sharding checkpoint networks programs",
    "report": f"{FLOOR} assembly config flops hardware metrics networks console processes rewards rollout",
    "step": f"{FLOOR} config assembly checkpoint console evaluation exchange fault metrics layouts packing processes report rewards rollout "
    "runtime sharding",
    "trainer": f"{FLOOR} config checks notices networks assembly checkpoint console diagnostics evaluation fault joining metrics models plots "
    "processes replicas report rewards runtime sharding step watchdog",
    # plans for absent hardware
    "planning": "errors config checks paths records models packing sharding scoring networks rollout programs assembly flops hardware planning",
    # the front
    "commands": "errors config checks cli planning presets summary commands trainer",
    "main": "commands",
    "__main__": "commands",
}
"""Module or folder -> what it may import inside the package, at the top of the file or inside a function. A folder stands for
all of its modules; `a.b` is one module of a folder and has an entry of its own, which wins over the folder's."""

PURE = (
    "algorithms",
    "models",
    "rollout",
    "packing",
    "scoring",
    "flops",
    "optimizer",
    "learner",
    "sharding",
    "masking",
    "records",
)
NO_JAX = (
    "rewards",
    "tokenizer",
    "tokenizer_files",
    "templates",
    "data",
    "errors",
    "knobs",
    "paths",
    "fault",
)
LIGHT = (
    "main", "__main__", "cli", "config", "checks", "notices", "values", "presets", "summary", "knobs", "errors", "commands",
    "algorithms.names", "rewards.table",
)  # fmt: skip
HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "grain", "transformers")
MOST_LINES, MOST_FUNCTION_LINES = 500, 90


@dataclass(frozen=True)
class Import:
    """One imported module: its full name, the line, and whether it happens when the file is imported."""

    name: str
    line: int
    at_import: bool


@cache
def modules() -> dict[str, Path]:
    """Modules of the package by dotted name without the package; the package itself is ''."""
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if _for_types_only(child):
            continue
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_import)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"relative import in line {child.lineno}"
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                known = full.removeprefix(f"{PACKAGE}.") in modules()
                yield Import(full if known else child.module or "", child.lineno, at_import)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, at_import and not function)


@cache
def imports(module: str) -> tuple[Import, ...]:
    """All imports of a module; those for type checkers alone are left out."""
    return tuple(_walk(ast.parse(modules()[module].read_text()), True))


def inside(name: str) -> str | None:
    """The module of this package that an import names, or None."""
    if name == PACKAGE:
        return ""
    return name.removeprefix(f"{PACKAGE}.") if name.startswith(f"{PACKAGE}.") else None


def entry(module: str) -> str:
    """The row of the table that a module belongs to."""
    return module if module in TABLE else module.partition(".")[0]


def where(module: str, found: Import) -> str:
    return f"{modules()[module].relative_to(ROOT)}:{found.line} imports {found.name}"


def test_every_module_is_in_the_table_and_every_row_has_a_module():
    rows = {entry(module) for module in modules() if module}
    assert rows - set(TABLE) == set(), "place these modules in the table"
    assert set(TABLE) - rows == set(), "these rows have no module"
    for allowed in TABLE.values():
        assert {name for name in allowed.split() if entry(name) not in TABLE} == set()


def test_arrows_point_down_only():
    """The table itself has no cycle, so no two rows can import each other."""
    above: dict[str, set[str]] = {
        row: {entry(name) for name in allowed.split()} - {row} for row, allowed in TABLE.items()
    }
    above["algorithms"] |= {"algorithms.names"}
    done: set[str] = set()
    while len(done) < len(above):
        ready = {row for row in above if row not in done and above[row] <= done}
        assert ready, f"a cycle among {sorted(set(above) - done)}"
        done |= ready


@pytest.mark.parametrize("module", [module for module in modules() if module])
def test_a_module_imports_what_its_row_allows(module):
    allowed = set(TABLE[entry(module)].split())
    wrong = []
    for found in imports(module):
        target = inside(found.name)
        if target and not {target, entry(target), target.partition(".")[0]} & allowed:
            wrong.append(where(module, found))
    assert wrong == []


def test_algorithms_and_models_do_not_know_each_other():
    assert "models" not in TABLE["algorithms"].split()
    assert "algorithms" not in TABLE["models"].split()


@pytest.mark.parametrize("module", [module for module in modules() if entry(module) in NO_JAX])
def test_text_modules_never_import_jax(module):
    wrong = [
        where(module, found)
        for found in imports(module)
        if found.name.partition(".")[0] in ("jax", "jaxlib", "flax", "optax", "orbax", "chex")
    ]
    late_only = [
        where(module, found)
        for found in imports(module)
        if found.at_import and found.name.partition(".")[0] in ("grain", "transformers")
    ]
    assert wrong + late_only == []


@pytest.mark.parametrize("module", [module for module in modules() if entry(module) in PURE])
def test_functions_on_arrays_read_no_clock_file_or_environment(module):
    wrong = {"time", "datetime", "logging", "random", "socket", "subprocess", "threading"}
    if module not in ("models.weights", "models.tensor_files", "models.gguf", "models.families"):
        wrong |= {"os", "pathlib", "json"}
    assert [
        where(module, found) for found in imports(module) if found.name.partition(".")[0] in wrong
    ] == []


def test_no_library_outside_the_declared_ones():
    declared = {
        "jax",
        "flax",
        "optax",
        "orbax",
        "chex",
        "transformers",
        "grain",
        "tensorboardX",
        "safetensors",
        "tyro",
        "rich",
    }
    declared |= {"math_verify", "pyarrow", "matplotlib"}
    carried = {"numpy", "jaxlib", "tokenizers", "huggingface_hub", "jinja2"}  # come with the above
    optional = {"wandb", "datasets", "gguf"}  # extras
    tops = {
        found.name.partition(".")[0]
        for module in modules()
        for found in imports(module)
        if inside(found.name) is None
    }
    assert tops - declared - carried - optional - set(sys.stdlib_module_names) == set()
    for module in modules():
        assert [
            where(module, f)
            for f in imports(module)
            if f.at_import and f.name.partition(".")[0] in optional
        ] == []


# Fresh processes ------------------------------------------------------------------------------------------------------------


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_PLATFORMS", "PYTHONPATH")
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def names(modules_wanted: list[str]) -> str:
    return ", ".join(f"{PACKAGE}.{module}" for module in modules_wanted)


def test_settings_and_commands_load_no_library():
    light = [module for module in modules() if module in LIGHT or entry(module) in LIGHT]
    loaded = json.loads(
        fresh(f"import sys, json, {names(light)}; print(json.dumps(sorted(sys.modules)))")
    )
    assert len(light) > 20
    assert set(HEAVY).isdisjoint(loaded)
    assert {"numpy", "chex", "rich", "tyro", "math_verify", "sympy", "pyarrow"}.isdisjoint(loaded)


def test_rewards_and_tokenizer_load_no_jax():
    wanted = [
        module
        for module in modules()
        if entry(module)
        in ("rewards", "rewards.table", "tokenizer", "tokenizer_files", "templates", "paths")
    ]
    loaded = json.loads(
        fresh(f"import sys, json, {names(wanted)}; print(json.dumps(sorted(sys.modules)))")
    )
    assert len(wanted) > 10
    assert {"jax", "flax", "chex", "orbax", "grain", "transformers", "math_verify"}.isdisjoint(
        loaded
    )


def test_importing_everything_touches_no_device_flag_file_or_thread():
    everything = [module for module in modules() if module and not module.endswith("__main__")]
    code = f"""
import json, os, sys, threading
import jax, flax, optax, chex, numpy
before, threads, flags = dict(os.environ), threading.active_count(), dict(jax.config.values)
signals = __import__("signal")
handlers = [signals.getsignal(n) for n in (signals.SIGTERM, signals.SIGINT)]
written = []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        written.append(str(arguments[0]))
    if event in ("os.mkdir", "socket.connect", "subprocess.Popen", "os.fork"):
        written.append(event)
sys.dont_write_bytecode = True
sys.addaudithook(watch)
import {names(everything)}
print(json.dumps(dict(
    backends=sorted(jax._src.xla_bridge._backends),
    environment=dict(os.environ) == before,
    threads=threading.active_count() - threads,
    flags=[name for name, value in jax.config.values.items() if flags.get(name, value) != value],
    handlers=handlers == [signals.getsignal(n) for n in (signals.SIGTERM, signals.SIGINT)],
    written=written,
)))
"""
    seen = json.loads(fresh(code).splitlines()[-1])
    assert seen == {
        "backends": [],
        "environment": True,
        "threads": 0,
        "flags": [],
        "handlers": True,
        "written": [],
    }


def test_the_trainer_imports_in_a_fresh_process():
    out = fresh(f"import {PACKAGE}.trainer, jax; print(len(jax._src.xla_bridge._backends))")
    assert out.split() == ["0"]


@pytest.mark.parametrize(
    "module",
    [module for module in modules() if module and "." not in module and module != "__main__"],
)
@pytest.mark.slow
def test_every_module_imports_on_its_own(module):
    fresh(f"import {PACKAGE}.{module}")


# Sizes and sources -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", modules())
def test_files_and_functions_stay_short(module):
    text = modules()[module].read_text()
    long = [
        f"{node.name} has {lines} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MOST_FUNCTION_LINES
    ]
    if (count := len(text.splitlines())) > MOST_LINES:
        long.append(f"the file has {count} lines")
    assert long == []


@pytest.mark.parametrize(
    "module", [module for module in modules() if modules()[module].stat().st_size]
)
def test_every_module_and_public_function_has_a_docstring(module):
    tree = ast.parse(modules()[module].read_text())
    missing = [] if ast.get_docstring(tree) else ["the module"]
    missing += [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and node.name[0] != "_"
        and not ast.get_docstring(node)
    ]
    assert missing == []


UNSAFE_ARGUMENTS = ("shell", "trust_remote_code", "allow_pickle")
BANNED_CALLS = {"eval", "exec", "nan_to_num", "sympify", "parse_expr", "compile_expr"}


@pytest.mark.parametrize("module", modules())
def test_nothing_is_evaluated_unpickled_or_hidden(module):
    wrong = [
        where(module, f)
        for f in imports(module)
        if f.name.partition(".")[0] in ("pickle", "dill", "cloudpickle", "marshal")
    ]
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")
            bare = not called[0] or called[0] in ("jnp", "np", "builtins", "sympy")
            if called[2] in BANNED_CALLS and bare:
                wrong.append(f"line {node.lineno} calls {ast.unparse(node.func)}")
        if (
            isinstance(node, ast.keyword)
            and node.arg in UNSAFE_ARGUMENTS
            and ast.unparse(node.value) != "False"
        ):
            wrong.append(f"line {node.value.lineno} passes {node.arg}")
    assert wrong == []


def test_the_version_is_the_installed_one():
    package = {
        node.targets[0].id: node.value.value  # type: ignore[attr-defined]
        for node in ast.parse((SOURCE / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign)
    }
    if "__version__" in package:
        assert package["__version__"] == importlib.metadata.version(PACKAGE)
