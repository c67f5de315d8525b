"""Chat templates: the Jinja program of a model directory, run in a sandbox, for a bounded time, with refusals explained.

Dates. Llama 3 templates print today's date unless told one; here they always get `TEMPLATE_DATE`, so that a resumed run sees
the prompts it began with. (A template that asks for the clock itself still gets it.)

Left out on purpose: tools, documents and images; unfinished assistant turns.
"""

import threading
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxrl_llm.errors import ConfigError, DataError

TEMPLATE_DATE = "26 Jul 2024"
RENDER_SECONDS = 10.0
Chat = list[dict[str, str]]


def render(template: str, messages: Chat, special: Mapping[str, str]) -> str:
    """The text a template makes of a chat, with the opening of the assistant's turn; `special` names BOS, EOS and so on.

    Raises `ConfigError` when the template refuses the system role or leaves the system text out, `DataError` when it
    refuses the chat for another reason, does not end in time, or is no template.
    """
    try:
        rendered = _rendered(template, messages, special)
    except _Refusal as refusal:
        _explain(refusal, template, messages, special)
    system = messages[0]["content"].strip() if messages and messages[0]["role"] == "system" else ""
    if system not in rendered:
        raise ConfigError(
            f"the chat template drops the system message {system[:40]!r} without a word; need a template that shows it; "
            "set data.fold_system_prompt=true"
        )
    return rendered


def folded(messages: Chat) -> Chat:
    """The chat with a leading system message moved to the head of the user message after it."""
    if not messages or messages[0]["role"] != "system":
        return messages
    if len(messages) < 2 or messages[1]["role"] != "user":
        raise DataError(
            "a chat has a system message with no user message after it; need one to fold it into; repair the row"
        )
    joined = f"{messages[0]['content']}\n\n{messages[1]['content']}"
    return [{**messages[1], "content": joined}, *messages[2:]]


class _Refusal(Exception):
    """A template that raised, ran too long, or is no template."""


def _rendered(template: str, messages: Chat, special: Mapping[str, str]) -> str:
    """Render in transformers' sandbox, on a helper thread that is waited for `RENDER_SECONDS` at most."""
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError(
            "rendering a chat template needs the package jinja2, which is not installed; pip install 'jinja2>=3.1.6'"
        ) from error
    from transformers.utils.chat_template_utils import render_jinja_template

    variables: dict[str, Any] = {"date_string": TEMPLATE_DATE, **special}
    outcome: list[str | BaseException] = []

    def work() -> None:
        try:
            texts: Any = render_jinja_template(
                [messages], chat_template=template, add_generation_prompt=True, **variables
            )[0]
            outcome.append(texts[0])
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="chat-template", daemon=True)
    thread.start()
    thread.join(RENDER_SECONDS)
    if not outcome:
        raise _Refusal(f"it did not finish within {RENDER_SECONDS:g} seconds")
    result = outcome[0]
    if isinstance(result, str):
        return result
    if isinstance(
        result,
        jinja2.TemplateError | TypeError | ValueError | ArithmeticError | LookupError | MemoryError,
    ):
        raise _Refusal(f"{type(result).__name__}: {result}") from result
    raise result


def _explain(
    refusal: _Refusal,
    template: str,
    messages: Chat,
    special: Mapping[str, str],
) -> NoReturn:
    """Blame the system role when the same chat renders with it folded away; otherwise the row or template."""
    if messages and messages[0]["role"] == "system" and "did not finish" not in str(refusal):
        try:
            _rendered(template, folded(messages), special)
        except (_Refusal, DataError):
            pass
        else:
            raise ConfigError(
                f"the chat template refuses the system role ({refusal}); need a chat without it; set "
                "data.fold_system_prompt=true or clear data.system_prompt"
            ) from refusal
    roles = [message["role"] for message in messages]
    raise DataError(
        f"the chat template cannot render a chat with roles {roles} ({refusal}); need a chat it accepts; correct the row, or "
        "choose data.prompt_format=plain"
    ) from refusal
