"""docs/python.md: the interface for Python programs, made of docstrings and of what the options' help says.

`python tests/rules/python_text.py --write` brings it up to date; without --write it only says whether it differs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer
from pages import brought_up_to_date

import moeconv
import moert
from moeconv.command.cli import app as moeconv_app
from moeconv.conversion.settings import Options
from moeconv.tuned import TUNED
from moert.command.cli import app as moert_app
from moert.command.settings import SETTINGS
from moert.engine.session import Request, Session

PYTHON = Path(__file__).resolve().parents[2] / "docs" / "python.md"
HEAD = """\
# Python

Python programs can do everything that the commands do. Settings are keyword arguments with the names of the options;
type checkers know them. Every mistake raises a `moert.Error`: one line that says what was wrong and what to do
([all of them](troubleshooting.md)). This page is made from docstrings (`make readme`).

    import asyncio
    import moert

    with moert.load("model.pack", memory="1.5GB") as engine:
        answer = engine.generate("Once upon a time", max_new_tokens=64, stop="The end")
        print(answer.text, answer.stop_reason, len(answer.tokens))

        schema = {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}
        print(engine.generate("The year of the moon landing:", json_schema=schema).text)

        async def tell():
            async for piece in engine.astream("Once upon a time"):
                print(piece, end="")

        asyncio.run(tell())
"""


def text() -> str:
    """Returns the page."""
    parts = [HEAD, "<!-- reckoned: docstrings -->", "## moert", *_function("moert.load", moert.load)]
    for kind in (moert.EngineSettings, moert.GenerationSettings):
        types = {each.name: str(each.type) for each in fields(kind)}
        defaults = {each.name: repr(each.default) for each in fields(kind)}
        parts += [
            f"### {kind.__name__}",
            _plain(kind.__doc__),
            _table(types, defaults, _helps(moert_app, "run", types)),
        ]
    for kind in (moert.Engine, moert.Grammar, moert.Answer, moert.Conversation, moert.Reply, Session, Request):
        parts += [f"### {kind.__name__}", _plain(kind.__doc__), *_members(kind)]
    parts += ["### Errors", "\n".join(_errors(moert.Error, 0))]
    parts += ["## moeconv", *_function("moeconv.quantize", moeconv.quantize)]
    types = {name: kind.__forward_arg__ for name, kind in Options.__annotations__.items()}
    parts += [_table(types, {}, _helps(moeconv_app, "quantize", types)), "<!-- end -->"]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _plain(doc: str | None) -> str:
    return inspect.cleandoc(doc or "")


def _function(name: str, function: Callable[..., Any]) -> list[str]:
    parameters = (
        str(inspect.signature(function))
        .replace("'", "")
        .replace("(self, ", "(")
        .replace("(self)", "()")
        .replace("(cls, ", "(")
    )
    return [f"#### `{name}{parameters}`", _plain(function.__doc__)]


def _members(kind: type[Any]) -> Iterator[str]:
    for name, found in vars(kind).items():
        made = found.__func__ if isinstance(found, classmethod) else found
        if name.startswith("_"):
            continue
        if inspect.isfunction(made):
            yield from _function(name, made)
        elif isinstance(found, property) and found.__doc__:
            yield f"#### `{name}`"
            yield _plain(found.__doc__)


def _helps(app: typer.Typer, command: str, settings: Collection[str]) -> Mapping[str, str]:
    """Returns the help of each option and setting; those that are settings have their names."""
    options = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    names = {option: each.name for each in options for option in each.opts if each.name in settings}
    described = [each for each in (*SETTINGS, *TUNED) if command in each.commands]

    def named(found: re.Match[str]) -> str:
        return f"`{names.get(found[0], found[0])}`"

    return {
        each.name: re.sub(r"--[a-z][a-z-]*", named, getattr(each, "help", "") or "") for each in (*options, *described)
    }


def _table(types: Mapping[str, str], defaults: Mapping[str, str], helps: Mapping[str, str]) -> str:
    lines = ["| setting | type | default | |" if defaults else "| setting | type | |"]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for name, kind in types.items():
        cells = [f"`{name}`", f"`{kind}`", *([f"`{defaults[name]}`"] if defaults else []), helps.get(name, "")]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _errors(kind: type[BaseException], depth: int) -> Iterator[str]:
    """The classes below one, as they derive."""
    yield f"{'  ' * depth}- `{kind.__name__}`: {' '.join(_plain(kind.__doc__).split())}"
    for below in sorted(kind.__subclasses__(), key=lambda each: each.__name__):
        if below.__module__ in _SHOWN:
            yield from _errors(below, depth + 1)


_SHOWN = {"moert.pack.errors", "moert.errors", "moeconv.errors"}
"""Modules whose errors are listed, whatever else has been imported."""


if __name__ == "__main__":
    raise SystemExit(brought_up_to_date(PYTHON, text()))
