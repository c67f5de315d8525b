"""Chat templates: what is rendered, what is refused and what the refusal advises."""

import pytest

from jaxrl_llm import templates
from jaxrl_llm.errors import ConfigError, DataError

USER = [{"role": "user", "content": "hi"}]
SYSTEM = [{"role": "system", "content": "be"}, *USER]
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}go{% endif %}"
)


def test_render_by_hand() -> None:
    assert templates.render(NO_SYSTEM, USER, {"eos_token": "$"}) == "user:hi$go"


def test_folding_by_hand() -> None:
    assert templates.folded(SYSTEM) == [{"role": "user", "content": "be\n\nhi"}]
    assert templates.folded(USER) == USER
    with pytest.raises(DataError, match="no user message after it"):
        templates.folded(SYSTEM[:1])


def test_refused_system_role_offers_folding() -> None:
    with pytest.raises(ConfigError, match=r"no system.*data\.fold_system_prompt=true"):
        templates.render(NO_SYSTEM, SYSTEM, {"eos_token": "$"})


def test_dropped_system_text_is_refused() -> None:
    silent = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="drops the system message 'be'"):
        templates.render(silent, SYSTEM, {})


def test_other_refusals_name_the_roles() -> None:
    strict = "{% if messages|length != 1 %}{{ raise_exception('one turn only') }}{% endif %}x"
    with pytest.raises(DataError, match=r"\['user', 'user'\].*one turn only"):
        templates.render(strict, USER + USER, {})


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include 'x' %}",
        "{{ 1 / 0 }}",
        "{% if %}",
    ],
)
def test_hostile_or_broken_templates_are_refused(template: str) -> None:
    with pytest.raises(DataError, match="cannot render"):
        templates.render(template, USER, {})


def test_endless_template_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "RENDER_SECONDS", 0.3)
    slow = (
        "{% set n = namespace(x=0) %}{% for a in range(3000) %}{% for b in range(1000) %}"
        "{% set n.x = n.x + 1 %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"did not finish within 0\.3 seconds"):
        templates.render(slow, USER, {})


def test_dates_do_not_move() -> None:
    dated = "{% if not date_string is defined %}{% set date_string = strftime_now('%Y') %}{% endif %}{{ date_string }}"
    assert templates.render(dated, USER, {}) == "26 Jul 2024"
