"""Text to token ids and back: one loader, one escape policy, one BOS, all stop ids.

Where the vocabulary comes from. `tokenizer.json` is what the authors of a model publish, so it is loaded as it stands, by
the `tokenizers` library; the class named in `tokenizer_config.json` is never consulted. (Releases of transformers 5 rebuilt
tokenizers labelled `LlamaTokenizerFast` as SentencePiece; over DeepSeek's byte-level file every space vanished.) Folders
without it (`vocab.json` + `merges.txt`, `tokenizer.model`) go through transformers; `.gguf` files through `models.gguf`.
A round trip of probe strings is checked at load in every case.

Escape policy. *Control tokens* are the tokens flagged special, the named ones (BOS, EOS, pad, unk), stop ids that are added
tokens, and added tokens written `<|...|>` (role markers are not always flagged). They arise from the chat template or `plain_template`, never from
text inside a row: `<|im_end|>` in a question becomes ordinary ids that spell it. Other added tokens (`<think>`,
`<tool_call>`) are vocabulary, which a prompt may write. How: a second copy of the tokenizer knows each control token
under a random name; in template output the true names are replaced by the random ones, in user text never.

Left out on purpose: padding, batching, tools and images, and any state that changes after load (threads share a tokenizer).
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxrl_llm import templates, tokenizer_files
from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.paths import is_gguf

if TYPE_CHECKING:
    import tokenizers

Message = Mapping[str, str]
Side = Literal["left", "right", "middle"]

PROBES = (
    "two  spaces   and three",
    "line one\nline two\n\nline four",
    "if:\n    four\n\ttab\n        eight",
    "0123456789 3.14159 1,000",
    "d\u00e9j\u00e0 vu, \u00fcber na\u00efve \u00f1",
    "\u4eca\u5929\u5929\u6c14\u5f88\u597d \u6771\u4eac \uc548\ub155",
    "smile \U0001f642 rocket \U0001f680",
    "def f(x):\n    return {'a': x[0] ** 2}  # ok",
)
"""Spaces, newlines, indentation, digits, accents, CJK, emoji, code; none starts with a space, of which SentencePiece
vocabularies may lose one."""

MUST_KNOW = " 0123456789"
"""Characters that every vocabulary has to represent, even one that may answer with unk elsewhere."""


@dataclass(frozen=True)
class Tokenizer:
    """A fast tokenizer with its template and special ids; immutable, shared by threads. Made by `load`."""

    fast: "tokenizers.Tokenizer" = field(repr=False)
    """Decodes; truncation and padding are off and stay off."""
    escaped: "tokenizers.Tokenizer" = field(repr=False)
    """Encodes: the same vocabulary with control tokens under random names."""
    control: Mapping[str, str] = field(repr=False)
    """Random name by control token text."""
    secret: str = field(repr=False)
    misread: Mapping[int, str] = field(repr=False)
    """Texts of added tokens that `fast` takes for raw bytes (see `_misread`)."""
    template: str | None = field(repr=False)
    """Jinja chat template, if the model has one."""
    special: Mapping[str, str]
    """Texts of the named special tokens, as the template sees them."""
    bos_id: int | None
    """The id of BOS where the tokenizer names one, used or not."""
    eos_id: int
    pad_id: int
    """May equal `eos_id`: masks come from lengths, never from ids."""
    stop_ids: tuple[int, ...]
    """All ids that end a response, never empty."""
    adds_bos: bool
    """Whether the tokenizer puts BOS before plain text."""
    vocab_size: int
    """Largest id + 1; the model's embedding may have more rows."""
    digest: str
    """SHA-256 of the vocabulary file and the chat template."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text alone: no BOS, and text that spells a control token stays text."""
        return list(self._encoding(text).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ids, without clean-up of spaces; ids past the vocabulary (padded embedding rows) give nothing.

        Rewards read `decode(response)`, with special tokens skipped.
        """
        text, start = "", 0
        numbers = [int(i) for i in ids]
        for at, number in enumerate(numbers):
            if number in self.misread:
                text += self.fast.decode(numbers[start:at], skip_special_tokens=skip_special)
                text, start = text + self.misread[number], at + 1
        return text + self.fast.decode(numbers[start:], skip_special_tokens=skip_special)

    def plain(self, text: str, *, template: str = "{prompt}") -> list[int]:
        """Ids of a prompt without chat roles: exactly one BOS where the tokenizer adds one, else none.

        `template` holds `{prompt}`, replaced by the text; control tokens written in the template count as such.
        """
        return self._with_bos(self.encode(self._plain(text, template)[0]))

    def plain_truncated(
        self, text: str, limit: int, side: Side, *, template: str = "{prompt}"
    ) -> list[int]:
        """`plain`, cut to at most `limit` ids by dropping ids of the text only (BOS and template stay)."""
        return self._truncated(*self._plain(text, template), limit, side)

    def chat(self, messages: Sequence[Message], *, fold_system: bool = False) -> list[int]:
        """Ids of a conversation with the prompt for the assistant's turn: exactly one BOS where the tokenizer has one to add.

        Raises `ConfigError` when there is no chat template, or it refuses (or drops) the system role; `fold_system` then
        puts the system text, a blank line between, at the head of the first user turn. `DataError` for other refusals.
        """
        return self._with_bos(self.encode(self._named(self._render(messages, fold_system))))

    def chat_truncated(
        self, messages: Sequence[Message], limit: int, side: Side, *, fold_system: bool = False
    ) -> list[int]:
        """`chat`, cut to at most `limit` ids by dropping ids inside the last user text only.

        The ids left of and right of the cut are those of the whole prompt, so roles and earlier turns stay. `left` drops the
        beginning of the text, `right` its end, `middle` its middle. A character of several ids is dropped whole, so the
        result may be shorter than `limit`. Raises `DataError` when everything around the text is already too long.
        """
        whole = self._render(messages, fold_system)
        text = self._named(whole)
        ids = self._with_bos(self.encode(text))
        if len(ids) <= limit:
            return ids
        users = [n for n, message in enumerate(messages) if message.get("role") == "user"]
        if not users:
            raise DataError(
                f"a chat of {len(messages)} messages has no user message; need one to truncate; drop the row"
            )
        hole = f"{self.secret}u"
        marked = [dict(message) for message in messages]
        marked[users[-1]]["content"] = hole
        before, found, after = self._render(marked, fold_system).partition(hole)
        if not found or hole in after or not (whole.startswith(before) and whole.endswith(after)):
            raise DataError(
                "the chat template does not show the last user text exactly once, so it cannot be cut alone; need shorter "
                "prompts; set data.filter_overlong_prompts"
            )
        span = (len(self._named(before)), len(text) - len(self._named(after)))
        return self._truncated(text, span, limit, side)

    def files(self) -> dict[str, str]:
        """The texts of the files that Hugging Face loads this tokenizer from, with every stop id in `generation_config.json`."""
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self.adds_bos,
            **self.special,
        }
        if self.template is not None:
            settings["chat_template"] = self.template
        ends = {"eos_token_id": list(self.stop_ids), "pad_token_id": self.pad_id}
        if self.bos_id is not None:
            ends["bos_token_id"] = self.bos_id
        return {
            "tokenizer.json": self.fast.to_str(),
            "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
            "generation_config.json": json.dumps(ends, indent=2) + "\n",
        }

    def _encoding(self, text: str) -> Any:
        try:
            text.encode()
            return self.escaped.encode(text, add_special_tokens=False)
        except UnicodeEncodeError as error:
            around = text[max(0, error.start - 10) : error.end + 10]
            raise DataError(
                f"text {around!a} holds half of a surrogate pair at character {error.start}, which no tokenizer can encode; "
                "need valid Unicode; repair or drop the row"
            ) from error
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"text {text[:40]!r} cannot be encoded ({error}); need characters the vocabulary has, or one with an unknown "
                "token; set model.tokenizer_path"
            ) from error

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Leading BOS ids become exactly one (added where the tokenizer adds it)."""
        start = 0
        while start < len(ids) and ids[start] == self.bos_id:
            start += 1
        if self.bos_id is None or (start == 0 and not self.adds_bos):
            return ids
        return [self.bos_id, *ids[start:]]

    def _plain(self, text: str, template: str) -> tuple[str, tuple[int, int]]:
        """The text in its template, and where in it the text lies."""
        before, found, after = template.partition("{prompt}")
        if not found:
            raise ConfigError(
                f"data.plain_template {template!r} has no {{prompt}}; put it where the question belongs"
            )
        before, after = self._true_names(before), self._true_names(after)
        return before + text + after, (len(before), len(before) + len(text))

    def _true_names(self, text: str) -> str:
        """Trusted text with every control token replaced by its random name."""
        return _pattern(self.control).sub(lambda match: self.control[match[0]], text)

    def _named(self, rendered: str) -> str:
        """A rendered template, ready for `escaped`: the template's control tokens renamed, the user's spelled out again."""
        words = list(self.control)
        restored = re.compile(f"{self.secret}x([0-9]+)x")
        return restored.sub(lambda match: words[int(match[1])], self._true_names(rendered))

    def _render(self, messages: Sequence[Message], fold_system: bool) -> str:
        """The template's text, with control tokens inside messages hidden from it (see `_named`)."""
        if self.template is None:
            raise ConfigError(
                "the tokenizer has no chat template; need one for data.prompt_format=chat; choose data.prompt_format=plain"
            )
        hidden = {text: f"{self.secret}x{number}x" for number, text in enumerate(self.control)}
        pattern = _pattern(self.control)
        safe = []
        for message in messages:
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise DataError(
                    f"chat message {str(dict(message))[:80]!r} needs a text under role and content; repair the row"
                )
            values = {key: value for key, value in message.items() if isinstance(value, str)}
            safe.append({k: pattern.sub(lambda m: hidden[m[0]], v) for k, v in values.items()})
        if fold_system:
            safe = templates.folded(safe)
        return templates.render(self.template, safe, self.special)

    def _truncated(self, text: str, span: tuple[int, int], limit: int, side: Side) -> list[int]:
        encoding = self._encoding(text)
        ids, offsets = list(encoding.ids), list(encoding.offsets)
        extra = len(self._with_bos(ids)) - len(ids)
        drop = _dropped(offsets, span, len(ids) + extra - limit, limit, side)
        return self._with_bos(ids[: drop.start] + ids[drop.stop :])


def _dropped(
    offsets: Sequence[tuple[int, int]], span: tuple[int, int], excess: int, limit: int, side: Side
) -> range:
    """Which ids to leave out: at least `excess` of those lying wholly inside characters `span`."""
    if excess <= 0:
        return range(0)
    inside = [n for n, (start, end) in enumerate(offsets) if span[0] <= start < end <= span[1]]
    if excess >= len(inside):
        raise DataError(
            f"a prompt has {limit + excess - len(inside)} ids around the user's text and {len(inside)} in it; need at "
            f"least one of the text within {limit}; raise data.max_prompt_length"
        )
    low, high = inside[0], inside[-1] + 1
    keep = len(inside) - excess
    head = {"left": 0, "right": keep, "middle": (keep + 1) // 2}[side]
    start, stop = low + head, low + head + excess
    while low < start < high and offsets[start - 1][1] > offsets[start][0]:
        start -= 1
    while low < stop < high and offsets[stop][0] < offsets[stop - 1][1]:
        stop += 1
    return range(start, stop)


def load(path: str | os.PathLike[str], *, extra_stop_ids: Sequence[int] = ()) -> Tokenizer:
    """Load a tokenizer from a folder or a `.gguf` file and check that text survives the way through ids.

    Stop ids are the tokenizer's EOS, the EOS ids of `generation_config.json` and `config.json` (or of the GGUF metadata) and
    `extra_stop_ids`. A vocabulary that declares an unknown token and has no bytes to fall back on may turn characters
    it lacks into that token; spaces and digits and everything else it has must come back exactly.

    Raises `DataError` when files are missing or broken, no EOS is known, or the round trip fails. Never runs code from the
    folder.
    """
    path = Path(path)
    if is_gguf(path):
        from jaxrl_llm.models import gguf

        fast, config = gguf.tokenizer_files(path)
        ends, source = list(config["stop_ids"]), config["digest"].encode()
    else:
        if not path.is_dir():
            raise DataError(
                f"{path} is no folder and no .gguf file; set model.tokenizer_path to one"
            )
        fast, config, source = tokenizer_files.from_folder(path)
        ends = tokenizer_files.ends(path)
    tokenizer = _build(path, fast, config, [*ends, *extra_stop_ids], source)
    check_round_trip(tokenizer, str(path))
    return tokenizer


def check_round_trip(tokenizer: Tokenizer, where: str) -> None:
    """Raise `DataError` unless every probe decodes to itself, up to characters outside a byte-less vocabulary."""
    unknown = _unknown_id(tokenizer.escaped)
    lacking = "".join(c for c in set("".join(PROBES)) if unknown in tokenizer.encode(c))
    for probe in (*PROBES, f"1{MUST_KNOW}"):
        ids = tokenizer.encode(probe)
        expected = "".join(c for c in probe if c in MUST_KNOW or c not in lacking)
        decoded = tokenizer.decode([i for i in ids if i != unknown], skip_special=False)
        if decoded != expected:
            raise DataError(
                f"tokenizer {where}: {probe!r} became ids {ids}, which decode to {decoded!r}; need {expected!r}; point "
                "model.tokenizer_path at the tokenizer.json that the model was trained with"
            )


def _unknown_id(fast: "tokenizers.Tokenizer") -> int | None:
    """The id that stands for characters outside the vocabulary, where there is one and no byte fallback."""
    model = json.loads(fast.to_str())["model"]
    if model.get("byte_fallback"):
        return None
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    return fast.token_to_id(model["unk_token"]) if model.get("unk_token") else None


def _build(
    path: Path,
    fast: "tokenizers.Tokenizer",
    config: Mapping[str, Any],
    ends: list[int],
    source: bytes,
) -> Tokenizer:
    """Name the special ids, make the escaped copy, and check ids against the vocabulary."""
    from tokenizers import AddedToken

    fast.no_truncation()
    fast.no_padding()
    special = {
        name: text
        for name in tokenizer_files.NAMED
        if (text := _text(config.get(name))) is not None
    }
    flagged = {token.content for token in fast.get_added_tokens_decoder().values() if token.special}
    for text in special.values():
        if text not in flagged and fast.token_to_id(text) is not None:
            fast.add_special_tokens([AddedToken(text, normalized=False, special=True)])
    found = {name: fast.token_to_id(text) for name, text in special.items()}
    ids = {name: number for name, number in found.items() if number is not None}
    eos = [ids["eos_token"]] if "eos_token" in ids else []
    stop = tuple(dict.fromkeys([*eos, *map(int, ends)]))
    if not stop:
        raise DataError(
            f"tokenizer {path} names no end-of-text token that is in its vocabulary (eos_token {special.get('eos_token')!r}); "
            "need at least one stop id; set rollout.stop_token_ids"
        )
    size = max(fast.get_vocab(with_added_tokens=True).values()) + 1
    if outside := [end for end in stop if not 0 <= end < size]:
        raise DataError(
            f"tokenizer {path}: stop ids {outside} are outside its {size} tokens; correct the ids"
        )
    control = _control_texts(fast, list(special.values()), stop)
    secret = secrets.token_hex(8)
    names = {text: f"{secret}c{number}c" for number, text in enumerate(control)}
    template = config.get("chat_template")
    bos = ids.get("bos_token")
    adds = config.get("add_bos_token")
    if adds is None:
        adds = bos is not None and fast.encode("a").ids[:1] == [bos]
    return Tokenizer(
        fast=fast,
        escaped=_escaped_copy(path, fast, names),
        control=names,
        secret=secret,
        misread=_misread(fast),
        template=template,
        special={name: text for name, text in special.items() if name in ids},
        bos_id=bos,
        eos_id=stop[0],
        pad_id=ids.get("pad_token", stop[0]),
        stop_ids=stop,
        adds_bos=bool(adds) and bos is not None,
        vocab_size=size,
        digest=hashlib.sha256(source + b"\0" + (template or "").encode()).hexdigest(),
    )


def _control_texts(
    fast: "tokenizers.Tokenizer", named: list[str], stop: Sequence[int]
) -> list[str]:
    """Texts of all control tokens, by the policy of the module docstring."""
    marker = re.compile(r"<[|\uff5c].+[|\uff5c]>")
    decoder = fast.get_added_tokens_decoder()
    texts = [
        token.content
        for token in decoder.values()
        if token.special or marker.fullmatch(token.content)
    ]
    texts += [text for text in named if fast.token_to_id(text) is not None]
    # A stop id may also be ordinary text that ends a response (a newline): that stays writable.
    texts += [token.content for number, token in decoder.items() if number in stop]
    return list(dict.fromkeys(texts))


def _misread(fast: "tokenizers.Tokenizer") -> dict[int, str]:
    """Added tokens that a byte-level decoder spoils, with their true text.

    DeepSeek's vocabulary adds letters such as ü, ö, ú as tokens; the library reads them as the byte they stand for in
    the byte alphabet and answers U+FFFD (its issue 1392).
    """
    if "ByteLevel" not in json.dumps(json.loads(fast.to_str())["decoder"]):
        return {}
    model = fast.get_vocab(with_added_tokens=False)
    added = fast.get_added_tokens_decoder().items()
    plain = {n: token.content for n, token in added if not token.special}
    return {n: t for n, t in plain.items() if t not in model and fast.decode([n]) != t}


def _escaped_copy(
    path: Path, fast: "tokenizers.Tokenizer", names: Mapping[str, str]
) -> "tokenizers.Tokenizer":
    """The tokenizer with control tokens renamed (same ids), so that no text of a user can spell one."""
    from tokenizers import Tokenizer

    data = json.loads(fast.to_str())
    data["post_processor"] = None  # it would add BOS, and trims offsets that truncation needs whole
    for token in data["added_tokens"]:
        if token["content"] in names:
            token.update(content=names[token["content"]], normalized=False)
    model = data["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): number for text, number in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    try:
        copy = Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"tokenizer {path} builds a control token out of ordinary text ({error}); need control tokens that no "
            "merge produces; repair tokenizer.json"
        ) from error
    wrong = [
        text for text, name in names.items() if copy.token_to_id(name) != fast.token_to_id(text)
    ]
    if wrong:
        raise DataError(
            f"tokenizer {path} gives control tokens {wrong} no fixed id; need fixed ids; repair tokenizer.json"
        )
    return copy


def _text(token: Any) -> str | None:
    """A token's text, written plainly or as a record with flags."""
    return token.get("content") if isinstance(token, Mapping) else token


def _pattern(control: Mapping[str, str]) -> re.Pattern[str]:
    return re.compile(
        "|".join(re.escape(text) for text in sorted(control, key=len, reverse=True)) or "(?!)"
    )
