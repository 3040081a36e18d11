"""docs/troubleshooting.md has every error that a user can get, with its remedy."""

from __future__ import annotations

import ast
import re

import pytest
from error_messages import Source
from troubleshooting_text import TROUBLESHOOTING, divided, shown, text

PAGE = TROUBLESHOOTING.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def source() -> Source:
    return Source()


def test_the_page_is_what_the_source_says(source: Source) -> None:
    assert text(source) == PAGE, "run make readme"


def test_every_text_of_an_error_is_on_the_page(source: Source) -> None:
    """Of the longest piece of each message that a program raises, without values, and where no mark divides it."""
    named = {at[1] for at in shown(source)}
    pieces = {
        max(re.split(r"[:;()|]\s?|, it should", constant.value), key=len).strip()
        for name in named
        for call, _ in source.by_name.get(name, [])
        for argument in call.args
        for constant in ast.walk(argument)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    }
    long = {piece for piece in pieces if piece.count(" ") > 2}
    assert len(long) > 600
    page = " ".join(PAGE.split())
    assert sorted(piece for piece in long if " ".join(piece.split()) not in page) == []


def test_every_error_says_what_to_do(source: Source) -> None:
    """In a sentence of its docstring behind the one that says when it is raised."""
    for at in shown(source):
        docstring = ast.get_docstring(source.classes[at]) or ""
        assert re.search(r"\.\s+[A-Z]\w+\s.*\.$", docstring, re.DOTALL), at


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ("PATH: has 3 rows: give a part of it", ("PATH: has 3 rows", "give a part of it")),
        ("no paths (moeconv adds them); or use none", ("no paths", "moeconv adds them; or use none")),
        ("the field: it is empty", ("the field: it is empty", "")),
    ],
)
def test_messages_are_divided_where_the_remedy_begins(message: str, parts: tuple[str, str]) -> None:
    assert divided(message) == parts


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("OutOfMemory", "there is not enough memory: give a smaller --memory or a shorter prompt"),
        ("SettingInvalid", "--tune top-k is TOP K: it should be 0 (no limit) or more"),
        ("HeaderInvalid", "NAME: both stacks should have as many features: AGAIN again"),
        ("CalibrationError", "PATH: no such file"),
        ("CalibrationError", "PATH: not a file"),
    ],
)
def test_messages_are_read_through_functions_and_classes_that_word_them(
    source: Source, kind: str, message: str
) -> None:
    texts = [each.text for at in source.classes if at[1] == kind for each in source.messages(at)]
    assert message in texts, [text for text in texts if text[:6] == message[:6]]
