"""docs/troubleshooting.md: every error that a user can get, made of the docstrings of the errors and of their messages.

`python tests/rules/troubleshooting_text.py --write` brings it up to date; without --write it only says whether it
differs.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence

from error_messages import ROOT, Message, Source
from pages import brought_up_to_date

from moert.command.console import SHORT

TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
_ANSWERS = ("moert.serve.fields", "Refused")
_PARTS = {
    ("moert.pack.messages", "NotASize"): "Sizes",
    ("moert.pack.tensors", "HeaderWrong"): "Safetensors files",
    ("moert.pack.text", "TokenizerUnfit"): "Tokenizers",
    ("moert.engine.archive", "_Unusable"): "Kept states",
    ("moert.kernels.build", "CompilerMissing"): "Compilers",
    ("moert.kernels.build", "CompilationFailed"): "Compilation",
    ("moeconv.calibration.rendering", "RenderFailed"): "Chat templates",
    ("moeconv.source.archs.config", "ShapeDiffers"): "Shapes",
    ("moeconv.source.gguf.container", "_Damaged"): "GGUF files",
    ("moeconv.strict_json", "NotJson"): "JSON",
}
"""Exceptions that other messages quote → the heading of their section."""
_TODO = (
    "add|allow|ask|check|choose|convert|copy|correct|cut|delete|did you mean|expected|fetch|free|give|install|is it|is "
    "the|is there|leave|make|mend|move|name|or use|put|read|redirect|remove|rename|run|save|say|send|set|shorten|start|"
    "sweep|take|tell|train|try|upgrade|use|wait|write|open|for one|pip install|/reset|/save|paths in|with moert|else|"
    "it must|it should|known are|there are|there is no|they should|each must|moeconv|moert run|have|supported|AGAIN"
)
_REMEDY = re.compile(rf"(?:[:;]| \((?=moeconv)|, (?=it should)) ?(?=(?:{_TODO})\b)")
_HEAD = f"""\
# Troubleshooting

A command that ends with 2 or 3 says why in one line on stderr. This page has these lines, by the error that `--json`
calls `kind` and Python raises. Search it for words of your line: where the page has a NAME in capitals, the line has a
name, a number or a path. If the second column is empty, the text above the table says what to do. `make readme` makes
the page from the errors' descriptions and from the source of both programs; a test compares.

Beside these errors there are:

- `UsageError`, exit status 2: an option or argument that the command does not have, or a value that it can't take.
  `--help` behind the command lists all; `--tune help` lists the settings.
- `OSError`, exit status 2: the system refuses a file or stream. The line says which, and the system's reason: free some
  space, or change the rights of the file.
{textwrap.fill(f"- `OutOfMemory`, exit status 2: {SHORT}.", 120, subsequent_indent="  ")}
- Ctrl-C ends with 130, SIGTERM ends `moert` with 143. The same `moeconv` command then goes on where it ended.

A traceback is a mistake of the program, not yours: please report it.
"""
_ABOUT_PARTS = (
    "Texts about a part of a file stand in other messages, as a rule in brackets or behind the name of the file. "
    "These have the reasons; the message around them says what to do."
)


def text(source: Source) -> str:
    """Returns the page."""
    errors = [at for at in shown(source) if at not in (_ANSWERS, *_PARTS)]
    errors.sort(key=lambda at: (not at[0].endswith(".errors"), at[0] != "moert.pack.errors"))
    parts = [_HEAD.rstrip("\n"), "<!-- reckoned: errors -->"]
    for program in ("moert", "moeconv"):
        own = [at for at in errors if at[0].startswith(f"{program}.")]
        sections = [section for at in own if (section := _section(source, at, at[1], _status(at[1])))]
        parts += [f"## Errors of {program}", *sections]
    parts += [_section(source, _ANSWERS, "Answers of the server", "HTTP status: 400, or the one in brackets.", "##")]
    parts += ["## Reasons in other messages", textwrap.fill(_ABOUT_PARTS, 120)]
    parts += [_section(source, at, heading, "") for at, heading in _PARTS.items()]
    return "\n\n".join([*parts, "<!-- end -->"]) + "\n"


def shown(source: Source) -> list[tuple[str, str]]:
    """Returns the classes of the page, by their modules and names."""
    return [at for at in source.classes if at in _PARTS or at == _ANSWERS or _is_error(source, at)]


def _is_error(source: Source, at: tuple[str, str]) -> bool:
    """Returns whether a class is one of the errors that the programs show."""
    bases = [source.named(source.modules[at[0]], getattr(base, "id", "")) for base in source.classes[at].bases]
    return at[1] == "Error" or any(base in source.classes and _is_error(source, base) for base in bases)


def _status(name: str) -> str:
    return f"Exit status: {3 if name == 'TargetMissed' else 2}."


def _section(source: Source, at: tuple[str, str], heading: str, status: str, level: str = "###") -> str:
    """Returns the section of a class; empty if it has no message of its own."""
    messages = sorted({*source.messages(at)}, key=lambda each: (each.room, each.text))
    if not messages:
        return ""
    about = " ".join((ast.get_docstring(source.classes[at]) or "").split())
    about = f"{about} {status}" if status and "Only Python programs" not in about else about
    return "\n\n".join([f"{level} {heading}", textwrap.fill(about, 120), "\n".join(_rows(messages))])


def _rows(messages: Sequence[Message]) -> Iterator[str]:
    yield from ("| message | what to do | from |", "|---|---|---|")
    for each in messages:
        fault, remedy = divided(each.text)
        status = f" ({each.status})" if each.status else ""
        yield f"| {_code(fault)}{status} | {_code(remedy)} | {each.room} |"


def divided(message: str) -> tuple[str, str]:
    """Returns the fault that a message names, and its remedy, if it names one behind the fault."""
    found = _REMEDY.search(message)
    if found is None:
        return message, ""
    fault, remedy = message[: found.start()], message[found.end() :].strip()
    return fault, remedy.replace(")", "", 1) if found[0] == " (" else remedy


def _code(words: str) -> str:
    words = words.replace("|", "\\|")
    return f"`` {words} ``" if "`" in words else words and f"`{words}`"


if __name__ == "__main__":
    raise SystemExit(brought_up_to_date(TROUBLESHOOTING, text(Source())))
