"""What a Hugging Face folder says about its tokenizer: the fast tokenizer, its settings, its template, its end ids.

Left out on purpose: code that a folder brings along (`auto_map`), which is never run.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_llm.errors import DataError

if TYPE_CHECKING:
    import tokenizers

NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def from_folder(folder: Path) -> tuple["tokenizers.Tokenizer", dict[str, Any], bytes]:
    """The fast tokenizer of a Hugging Face folder, its settings, and the bytes that identify it."""
    config = {
        **read_json(folder / "special_tokens_map.json"),
        **read_json(folder / "tokenizer_config.json"),
    }
    template = config.get("chat_template") or read_json(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(template, list):
        named = [e for e in template if isinstance(e, dict) and e.get("name") == "default"]
        template = named[0].get("template") if named else None
    if (folder / "chat_template.jinja").is_file():
        template = _read(folder / "chat_template.jinja")
    config["chat_template"] = template or None
    check_settings(folder, config)
    file = folder / "tokenizer.json"
    if not file.is_file():
        return _converted(folder, config)
    from tokenizers import AddedToken, Tokenizer

    source = file.read_bytes()
    try:
        fast = Tokenizer.from_str(source.decode())
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"{file} ({len(source)} bytes) is not a tokenizer that can be read ({error}); need a complete tokenizer.json; "
            "copy it again"
        ) from error
    late = config.get("added_tokens_decoder") or {}
    for number, entry in sorted(late.items(), key=lambda item: int(item[0])):
        if fast.id_to_token(int(number)) is None and fast.get_vocab_size() == int(number):
            flags = {
                key: bool(entry[key])
                for key in ("special", "lstrip", "rstrip", "single_word")
                if key in entry
            }
            fast.add_tokens([AddedToken(entry["content"], normalized=False, **flags)])
    return fast, config, source


def check_settings(folder: Path, config: dict[str, Any]) -> None:
    """Raise one `DataError` for every setting that is used here and has another type than it should."""
    problems = []

    def need(name: str, value: Any, good: bool, what: str) -> None:
        if not good:
            problems.append(
                f"{folder}: tokenizer setting {name}: got {value!r}, need {what}; correct tokenizer_config.json"
            )

    for name in NAMED:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        need(name, value, text is None or isinstance(text, str), "a text")
    template = config["chat_template"]
    need("chat_template", template, template is None or isinstance(template, str), "a text")
    late = config.get("added_tokens_decoder") or {}
    good = isinstance(late, dict) and all(
        number.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str)
        for number, entry in late.items()
    )
    need("added_tokens_decoder", late, good, "tokens by id, each with its content")
    if problems:
        raise DataError(problems)


def _converted(
    folder: Path, config: dict[str, Any]
) -> tuple["tokenizers.Tokenizer", dict[str, Any], bytes]:
    """A folder without `tokenizer.json`: transformers builds the fast tokenizer from the older files it knows."""
    if config.get("auto_map"):
        raise DataError(
            f"{folder} has no tokenizer.json and asks to run its own tokenizer code, which is never done; need a "
            "tokenizer.json; convert the tokenizer once and save it there"
        )
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        fast = loaded.backend_tokenizer
    except Exception as error:  # missing files, missing packages and bad labels all end here
        found = sorted(entry.name for entry in folder.iterdir())[:12]
        raise DataError(
            f"{folder} has no tokenizer.json and transformers cannot make a fast tokenizer of it ({type(error).__name__}: "
            f"{str(error)[:200]}); it holds {found}; give model.tokenizer_path a folder with tokenizer.json"
        ) from error
    for name in NAMED:
        config.setdefault(name, getattr(loaded, name, None))
    return fast, config, fast.to_str().encode()


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file as a dict; empty when there is no such file."""
    if not file.is_file():
        return {}
    try:
        data = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file} is not valid JSON ({error}); need a complete file; copy it again"
        ) from error
    return data if isinstance(data, dict) else {}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 ({error}); copy it again") from error


def ends(folder: Path) -> list[int]:
    """EOS ids of `generation_config.json` and `config.json`; each holds one number, a list, or nothing."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(number) is int for number in ids):
            raise DataError(
                f"{folder / name}: got eos_token_id {value!r}, need one id or a list of ids; correct the file"
            )
        found += ids
    return found
