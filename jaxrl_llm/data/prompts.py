"""Rows -> the token ids that are rolled out: `build_prompts`.

Every row is rendered and encoded once, here, and never again: the length test, the filter and the vocabulary test look at
exactly the ids that are rolled out. Cuts are made on token ids inside the user's text, by the tokenizer, so that role
markers and template stay whole (no decode and encode again).

A ready-made chat prompt in plain format is used where it is one single user turn; more turns have no plain form and are
refused by name.

Left out on purpose: padding (the rollout's), the escape policy for control-token text and how a chat template is rendered
(the tokenizer's), and removal of duplicates: two rows with the same text are two prompts with their own ids.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxrl_llm.data.rows import Row, RowSet, shorten
from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.knobs.data import DataKnobs
from jaxrl_llm.records import Prompt

Messages = tuple[dict[str, str], ...]


class PromptTokenizer(Protocol):
    """What is used of a tokenizer; `limit` counts all ids, template and BOS included."""

    @property
    def digest(self) -> str: ...

    def plain(self, text: str, *, template: str = ...) -> list[int]: ...

    def chat(self, messages: Any, *, fold_system: bool = False) -> list[int]: ...

    def plain_truncated(
        self, text: str, limit: int, side: Any, *, template: str = ...
    ) -> list[int]: ...

    def chat_truncated(
        self, messages: Any, limit: int, side: Any, *, fold_system: bool = False
    ) -> list[int]: ...


@dataclass(frozen=True)
class PromptSet:
    """Encoded prompts in load order. `total = len(prompts) + filtered` rows were usable.

    `filtered` rows were too long and dropped, `truncated` of the prompts were cut, `skipped` rows were broken. A
    `prompt_id` is the index of its row among the usable rows, so it does not move when other rows are filtered.
    `fingerprint` is a sha256 over everything that shapes the ids and the answers.
    """

    prompts: tuple[Prompt, ...]
    total: int
    filtered: int
    truncated: int
    skipped: int
    fingerprint: str


@dataclass(frozen=True)
class Rendering:
    """How one row becomes ids: `whole()` encodes it, `cut(limit, side)` encodes it with the user's text shortened."""

    text: str
    messages: Messages
    whole: Callable[[], list[int]]
    cut: Callable[[int, str], list[int]]


def build_prompts(
    rows: RowSet, tokenizer: PromptTokenizer, knobs: DataKnobs, *, vocab_size: int | None = None
) -> PromptSet:
    """Render, encode, filter or cut all rows.

    A prompt over `knobs.max_prompt_length` is dropped and counted with `filter_overlong_prompts`, else refused
    (`truncation="error"`) or cut. Raises `DataError` for overlong rows, ids outside `vocab_size` and rows that cannot be
    rendered (the first 20 by name, then a count) and where no row is left; `ConfigError` for settings that cannot be used.
    """
    render = choose_renderer(tokenizer, knobs)
    limit = knobs.max_prompt_length
    prompts: list[Prompt] = []
    problems: list[str] = []
    filtered = truncated = 0
    for prompt_id, row in enumerate(rows.rows):
        try:
            rendering = render(row)
            ids = rendering.whole()
            if len(ids) > limit:
                if knobs.filter_overlong_prompts:
                    filtered += 1
                    continue
                ids = shorten_ids(rendering, len(ids), knobs)
                truncated += 1
            check_ids(ids, vocab_size)
        except DataError as error:
            problems.extend(f"row {row.row_id}: {problem}" for problem in error.problems)
            continue
        prompts.append(
            Prompt(
                ids=tuple(ids),
                text=rendering.text,
                messages=rendering.messages,
                answer=row.answer,
                data_source=row.data_source,
                extra_info=row.extra_info,
                prompt_id=prompt_id,
                row_id=row.row_id,
            )
        )
    if problems:
        raise DataError(shorten(problems))
    if not prompts:
        raise DataError(
            f"got 0 prompts ({len(rows.rows)} usable rows, {filtered} filtered as longer than {limit} tokens, "
            f"{len(rows.skipped)} broken, {rows.excluded} excluded), need at least 1; name files with rows or raise "
            "data.max_prompt_length"
        )
    return PromptSet(
        prompts=tuple(prompts),
        total=len(rows.rows),
        filtered=filtered,
        truncated=truncated,
        skipped=len(rows.skipped),
        fingerprint=fingerprint(rows, tokenizer, knobs, prompts),
    )


def shorten_ids(rendering: Rendering, length: int, knobs: DataKnobs) -> list[int]:
    """The ids of an overlong prompt, cut to `max_prompt_length` on the side that `truncation` names."""
    limit = knobs.max_prompt_length
    if knobs.truncation == "error":
        raise DataError(
            f"got a prompt of {length} tokens, need at most {limit}; raise data.max_prompt_length, set "
            "data.filter_overlong_prompts=True or choose a data.truncation"
        )
    ids = rendering.cut(limit, knobs.truncation)
    if len(ids) > limit:
        raise DataError(
            f"got {len(ids)} tokens after cutting, need at most {limit}; raise data.max_prompt_length above the template"
        )
    return ids


def check_ids(ids: Sequence[int], vocab_size: int | None) -> None:
    """Raise `DataError` for a prompt of no ids or with an id that has no embedding."""
    if not ids:
        raise DataError("got a prompt of 0 tokens, need at least 1; correct or exclude the row")
    if min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise DataError(
            f"got token id {wrong}, need ids from 0 to below the model's vocabulary of {vocab_size}; use the model's tokenizer"
        )


# Rendering


def choose_renderer(tokenizer: PromptTokenizer, knobs: DataKnobs) -> Callable[[Row], Rendering]:
    """The renderer of `prompt_format`; `ConfigError` where the settings around it cannot be used."""
    problems = []
    if knobs.prompt_format not in RENDERERS:
        problems.append(
            f"got data.prompt_format {knobs.prompt_format!r}, need one of {', '.join(RENDERERS)}; set it to one of them"
        )
    if knobs.max_prompt_length < 1:
        problems.append(
            f"got data.max_prompt_length {knobs.max_prompt_length}, need 1 or more; raise it"
        )
    if knobs.prompt_format == "plain":
        if knobs.plain_template.count("{prompt}") != 1:
            problems.append(
                f"got data.plain_template {knobs.plain_template!r}, need {{prompt}} exactly once; put it in"
            )
        if knobs.system_prompt is not None:
            problems.append(
                'got data.system_prompt with data.prompt_format="plain", need chat format for a system message; write it '
                "into data.plain_template or unset it"
            )
    if problems:
        raise ConfigError(problems)
    return RENDERERS[knobs.prompt_format](tokenizer, knobs)


def question_text(row: Row, knobs: DataKnobs) -> str:
    """A plain question with the instruction after one blank."""
    assert row.question is not None
    return f"{row.question} {knobs.instruction}" if knobs.instruction else row.question


def plain_renderer(tokenizer: PromptTokenizer, knobs: DataKnobs) -> Callable[[Row], Rendering]:
    """Rows as text inside `plain_template`; `text` of the prompt is the user's text without the template."""
    template = knobs.plain_template

    def render(row: Row) -> Rendering:
        if row.question is not None:
            text = question_text(row, knobs)
        elif [turn["role"] for turn in row.messages] == ["user"]:
            text = row.messages[0]["content"]
        else:
            roles = ", ".join(turn["role"] for turn in row.messages)
            raise DataError(
                f'got chat turns ({roles}), need one user turn in plain format; set data.prompt_format="chat"'
            )
        return Rendering(
            text=text,
            messages=({"role": "user", "content": text},),
            whole=lambda: tokenizer.plain(text, template=template),
            cut=lambda limit, side: tokenizer.plain_truncated(text, limit, side, template=template),
        )

    return render


def chat_renderer(tokenizer: PromptTokenizer, knobs: DataKnobs) -> Callable[[Row], Rendering]:
    """Rows as chat turns; `text` of the prompt is the user's text, for more turns all of them with their roles."""
    fold = knobs.fold_system_prompt

    def render(row: Row) -> Rendering:
        turns = row.messages or ({"role": "user", "content": question_text(row, knobs)},)
        text = turns[0]["content"]
        if len(turns) > 1:
            text = "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
        if knobs.system_prompt is not None and all(turn["role"] != "system" for turn in turns):
            turns = ({"role": "system", "content": knobs.system_prompt}, *turns)
        return Rendering(
            text=text,
            messages=turns,
            whole=lambda: tokenizer.chat(turns, fold_system=fold),
            cut=lambda limit, side: tokenizer.chat_truncated(turns, limit, side, fold_system=fold),
        )

    return render


RENDERERS = {"chat": chat_renderer, "plain": plain_renderer}


# Identity


def fingerprint(
    rows: RowSet, tokenizer: PromptTokenizer, knobs: DataKnobs, prompts: Sequence[Prompt]
) -> str:
    """sha256 over rows, excluded ids, format, limits, tokenizer and the resulting ids."""
    settings = {
        "rows": rows.digest,
        "exclude_ids": sorted(knobs.exclude_ids),
        "prompt_format": knobs.prompt_format,
        "plain_template": knobs.plain_template,
        "instruction": knobs.instruction,
        "system_prompt": knobs.system_prompt,
        "fold_system_prompt": knobs.fold_system_prompt,
        "max_prompt_length": knobs.max_prompt_length,
        "filter_overlong_prompts": knobs.filter_overlong_prompts,
        "truncation": knobs.truncation,
        "tokenizer": tokenizer.digest,
    }
    total = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for prompt in prompts:
        total.update(json.dumps([prompt.prompt_id, prompt.ids]).encode())
    return total.hexdigest()


def shared_rows(a: PromptSet, b: PromptSet) -> int:
    """How many distinct prompt texts occur in both sets; above 0 a validation on one of them measures memory."""
    return len({prompt.text for prompt in a.prompts} & {prompt.text for prompt in b.prompts})
