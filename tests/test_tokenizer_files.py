"""Settings of a tokenizer folder with values that they never should have: refused by name, never a traceback."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm import tokenizer as tok
from jaxrl_llm.errors import DataError
from tests.tiny_tokenizers import USER, deepseek

ODD = [True, -1, 1.5, 10**30, [1, "x"], [[1]], [None], {"content": 5}]


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "pad_token", "unk_token"])
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_named_tokens_are_texts(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(DataError, match=f"tokenizer setting {name}: got .* need a text"):
        tok.load(deepseek(tmp_path / "d", **{name: value}))


@pytest.mark.parametrize("value", [True, 5, {"content": 5}, [{"name": "default", "template": 5}]])
def test_a_template_is_a_text(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError, match="tokenizer setting chat_template: got"):
        tok.load(deepseek(tmp_path / "d", chat_template=value))


def test_a_list_of_templates_without_a_default_is_no_template(tmp_path: Path) -> None:
    for value in ([], [1, "x"], [{"name": "tool", "template": "x"}]):
        assert tok.load(deepseek(tmp_path / "d", chat_template=value)).template is None


@pytest.mark.parametrize(
    "value", [["x"], 5, {"x": {"content": "a"}}, {"7": "a"}, {"7": {"content": 1}}]
)
def test_late_tokens_are_named_by_id(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError, match="tokenizer setting added_tokens_decoder: got"):
        tok.load(deepseek(tmp_path / "d", added_tokens_decoder=value))


def test_every_wrong_setting_is_listed(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        tok.load(deepseek(tmp_path / "d", bos_token=1, eos_token=2, chat_template=3))
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("value", ["x", True, 1.5, {}, [1, "x"], [None], ""], ids=repr)
def test_end_ids_are_whole_numbers(tmp_path: Path, file: str, value: Any) -> None:
    folder = deepseek(tmp_path / "d")
    (folder / file).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(DataError, match=f"{file}: got eos_token_id .* need one id or a list"):
        tok.load(folder)


@pytest.mark.parametrize("value", [None, [], 260, [260, 259]])
def test_end_ids_may_be_missing_one_or_many(tmp_path: Path, value: Any) -> None:
    folder = deepseek(tmp_path / "d")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": value}))
    assert tok.load(folder).stop_ids == ((260, 259) if value == [260, 259] else (260,))


def test_deep_nesting_is_no_traceback(tmp_path: Path) -> None:
    folder = deepseek(tmp_path / "d")
    (folder / "config.json").write_text('{"a":' + "[" * 100_000)
    with pytest.raises(DataError, match=r"config\.json is not valid JSON"):
        tok.load(folder)


def test_files_that_are_not_utf8(tmp_path: Path) -> None:
    for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json"):
        folder = deepseek(tmp_path / name)
        (folder / name).write_bytes(b"{\xff\xfe}")
        with pytest.raises(DataError, match=f"{name} is not UTF-8"):
            tok.load(folder)
    assert tok.load(deepseek(tmp_path / "d")).chat(USER)[0] == 259
