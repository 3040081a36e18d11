"""Whether a value may stand where a type is declared, and which name was meant, for settings of both programs."""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin

_WORDS: Mapping[Any, str] = {
    bool: "True or False", int: "a whole number", float: "a number", str: "text", types.NoneType: "None",
}  # fmt: skip


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a declared type. Whole numbers are numbers, True is none, and text is no list of texts."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in arguments)
    if origin is Literal:
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in arguments)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(fits(each, arguments[1]) for each in value.values())
    if origin in (tuple, Sequence):
        kind = tuple if origin is tuple else (list, tuple)
        return isinstance(value, kind) and all(fits(each, arguments[0]) for each in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, {int: Integral, float: Real}.get(hint, hint))


def wanted(hint: Any) -> str:
    """Names a declared type in words: "a whole number or text". Types that a user has no words for are left out."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(words for each in arguments if (words := wanted(each))))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is Mapping:
        return "a table"
    if origin in (tuple, Sequence):
        return f"a list, each {wanted(arguments[0])}"
    return _WORDS.get(hint, "")


def unknown(name: str, known: Collection[str]) -> str:
    """Says that a name is none of those that there are, and which of them was meant if one is like it."""
    from difflib import get_close_matches

    longer = [each for each in known if each.startswith(name) or name.startswith(each)]
    likely = longer or get_close_matches(name, known, 1)
    return f"is no setting: {f'did you mean {likely[0]}? There' if likely else 'there'} are {', '.join(known)}"
