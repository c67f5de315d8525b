"""Values of settings: from the text of a command line, in words, and held against a declared type. Standard library only.

Left out on purpose: any guess. `yes`, `010`, `1_000`, `1e3` for a whole number, NaN and infinities are refused.
"""

import difflib
import json
import math
import re
import sys
import types
import typing
from typing import Any, Literal, Union


def describe_type(kind: Any) -> str:
    """A type in words, for error texts and tables."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(kind))
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(arg) for arg in typing.get_args(kind))
    if origin is tuple:
        args = typing.get_args(kind)
        if len(args) == 2 and args[1] is Ellipsis:
            return f"a list of {describe_type(args[0])}"
        return f"a list of {len(args)} values ({', '.join(describe_type(arg) for arg in args)})"
    return {
        int: "int",
        float: "float (finite)",
        bool: "true or false",
        str: "str",
        type(None): "none",
    }.get(kind, getattr(kind, "__name__", str(kind)))


ITEM = re.compile(r"""\s*(?:("(?:[^"\\]|\\.)*")|'([^']*)'|([^,"']*?))\s*(,|$)""", re.DOTALL)
NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def _split(text: str) -> list[str]:
    """The items of a list: `[a,b]`, `(a,b)` or `a,b`; an item in double quotes is read as a JSON string, one in single
    quotes as it stands. `ValueError` for a bracket or quote without its partner and for an empty item."""
    inner = text.strip()
    pair = inner[:1] + inner[-1:] if len(inner) > 1 else inner
    if pair in ("[]", "()"):
        inner = inner[1:-1]
    elif inner[:1] in ("[", "(") or (pair[-1:] == "]" and inner.count("[") != inner.count("]")):
        raise ValueError("a bracket without its partner")
    if not inner.strip():
        return []
    items, position = [], 0
    while position < len(inner):
        found = ITEM.match(inner, position)
        if found is None:
            raise ValueError("a quote inside an item or without its partner")
        double, single, plain, _ = found.groups()
        if plain == "":
            raise ValueError("an empty item; write '' for an empty text")
        if plain and plain[0] in "[(":
            raise ValueError("a list inside a list; quote a text that starts with a bracket")
        items.append(json.loads(double) if double else single if single is not None else plain)
        position = found.end()
    return items


def parse(kind: Any, text: str) -> Any:
    """Turn the text of one setting into a value of its declared type; `ValueError` with *got / need* otherwise."""
    bad = ValueError(f"got {text!r}, need {describe_type(kind)}")
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        options = typing.get_args(kind)
        if type(None) in options and text.strip().lower() in ("none", "null"):
            return None
        for option in options:
            if option is type(None):
                continue
            try:
                return parse(option, text)
            except ValueError:
                continue
        raise bad
    if origin is Literal:
        for choice in typing.get_args(kind):
            if text == str(choice):
                return choice
        close = difflib.get_close_matches(text, [str(c) for c in typing.get_args(kind)], n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{bad}{hint}")
    if origin is tuple:
        args = typing.get_args(kind)
        if text.strip().lower() in ("none", "null"):
            raise ValueError(f"{bad}; [] is the empty list")
        try:
            items = _split(text)
        except ValueError as problem:
            raise ValueError(f"{bad} ({problem})") from None
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(parse(args[0], item) for item in items)
        if len(items) != len(args):
            raise bad
        return tuple(parse(arg, item) for arg, item in zip(args, items, strict=True))
    if kind is bool:
        if text.strip() in ("true", "True", "false", "False"):
            return text.strip() in ("true", "True")
        raise bad
    if kind is int:
        if re.fullmatch(r"[+-]?(0|[1-9][0-9]{0,999})", text.strip()):
            return int(text)
        raise bad
    if kind is float:
        if NUMBER.fullmatch(text.strip()) and math.isfinite(float(text)):
            return float(text)
        raise bad
    if kind is str:
        return text
    raise TypeError(f"no parser for {kind}")


def type_problem(kind: Any, value: Any) -> str | None:
    """What is wrong with a value that Python code put into a setting, or None."""
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        problems = [type_problem(option, value) for option in typing.get_args(kind)]
        ok = any(problem is None for problem in problems)
    elif origin is Literal:
        ok = any(
            type(value) is type(choice) and value == choice for choice in typing.get_args(kind)
        )
    elif origin is tuple:
        args = typing.get_args(kind)
        if not isinstance(value, tuple):
            ok = False
        elif len(args) == 2 and args[1] is Ellipsis:
            ok = all(type_problem(args[0], item) is None for item in value)
        else:
            ok = len(args) == len(value) and all(
                type_problem(arg, item) is None for arg, item in zip(args, value, strict=True)
            )
    elif kind is float:
        ok = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and abs(value) <= sys.float_info.max
        )
    elif kind is int:
        ok = isinstance(value, int) and not isinstance(value, bool)
    elif kind is type(None):
        ok = value is None
    else:
        ok = isinstance(value, kind)
    return None if ok else f"got {value!r}, need {describe_type(kind)}"


def normal_value(kind: Any, value: Any) -> Any:
    """One spelling per value: a list of a tuple setting as a tuple, a whole number of a float setting as a float."""
    args = typing.get_args(kind)
    if typing.get_origin(kind) in (Union, types.UnionType):
        options = [option for option in args if option is not type(None)]
        return normal_value(options[0], value) if len(options) == 1 and value is not None else value
    if typing.get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(normal_value(args[0], item) for item in value)
    if kind is float and type(value) is int and type_problem(float, value) is None:
        return float(value)
    return value
