"""Text for people, for both programs: sizes, guesses at the name that was meant, text of strangers, failures, and the
streams that all this goes to."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TextIO, Union, get_args, get_origin

from moert.machine import ROOT, control_groups, limit_of, text

EXAMPLES = "1.5GB, 800MB or 512MiB"
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}
_SIZE = re.compile(r"([0-9]+|[0-9]*\.[0-9]+)\s*([A-Za-z]*)")
_TOO_FEW = 100  # bytes: who writes at most this number without a unit meant gigabytes
NO_MEMORY = 100_000  # bytes that no process can live in: who writes at most this number for memory meant megabytes


class NotASize(ValueError):
    """A text that is no size: the message quotes it, and has the expected form. The name of the option goes before
    it."""


def parse_size(text: str, too_few: int = _TOO_FEW) -> int:
    """Returns the bytes of '2GB' or '2g' (powers of 1000), '512MiB' (powers of 1024), '123456' (bytes). Raises
    NotASize, also for `too_few` bytes or less without a unit."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise NotASize(f"{text!r} is not a size: expected one like {EXAMPLES}")
    (whole, _, part), unit = match[1].partition("."), match[2].upper()
    number, one = int(whole + part), 10 ** len(part)  # the size is number / one
    if not unit and (0 < number <= too_few * one or number % one):
        meant = "MB" if _TOO_FEW * one < number <= NO_MEMORY * one else "GB"
        raise NotASize(f"{text!r} is a number of bytes: did you mean {match[1]}{meant}")
    nbytes: int = number * _UNITS[unit] // one
    if not 0 < nbytes < 1 << 62:
        raise NotASize(f"{text!r} is not a size that a machine can have: expected one like {EXAMPLES}")
    return nbytes


_WORDS: Mapping[Any, str] = {
    bool: "True or False", int: "a whole number", float: "a number", str: "text", types.NoneType: "None",
}  # fmt: skip


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a value is of a declared type. Whole numbers are numbers, True is none, and text is no list of
    texts."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
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
    """Returns a declared type in words: "a whole number or text". Types that a user has no words for are left out."""
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
    """Returns a message that a name is no setting, with the known names, and with the one that was meant if one is like
    it."""
    from difflib import get_close_matches

    longer = [each for each in known if each.startswith(name) or name.startswith(each)]
    likely = longer or get_close_matches(name, known, 1)
    return f"is no setting: {f'did you mean {likely[0]}? There' if likely else 'there'} are {', '.join(known)}"


def nearest(name: str, known: Collection[str]) -> str:
    """Returns, for a name that is not among many known ones, those of them that are like it, and where all stand."""
    from difflib import get_close_matches

    found = ", ".join(get_close_matches(name[:60], known, 3))
    return f"{f'like it are {found}; ' if found else ''}docs/models.md lists all {len(known)} that are"


_CONTROLS = "\x00-\x1f\x7f-\x9f"
_INVISIBLE = (
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff"
    "\ufeff\uffa0\ufff0-\ufffb\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e00ff\U000e01f0-\U000e0fff"
)
_JOINERS = "\u200b-\u200f"  # many languages are spelt with them, and pictures joined
_IN_TEXT = re.compile(f"(?![\n\t])[{_CONTROLS}{_INVISIBLE}]")
_IN_LINE = re.compile(f"[{_CONTROLS}{_INVISIBLE}{_JOINERS}]")
_MOST = 4000  # letters of a line


def shown(text: str) -> str:
    """Returns a text of several lines with hidden letters written out; line breaks and tabs stay."""
    return text if text.isprintable() else _IN_TEXT.sub(_written_out, text)


def in_one_line(text: str) -> str:
    """Returns a message that can't end or leave its line, whatever text it quotes; the middle of a very long one is
    left out."""
    if not text.isprintable():
        text = _IN_LINE.sub(_written_out, text)
    if len(text) > _MOST:
        text = f"{text[: _MOST // 2]} … {text[-_MOST // 2 :]}"
    return text


def json_line(value: Any) -> str:
    """Returns JSON on one line, whose text is readable but for letters that are hidden."""
    return _IN_LINE.sub(_escaped, json.dumps(value, ensure_ascii=False))


def _written_out(found: re.Match[str]) -> str:
    return f"<U+{ord(found[0]):04X}>"


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


USAGE = 2
NO_READER = 141
"""The exit status where the reader of stdout went away, which is also a shell's for a program that SIGPIPE ended. Here
that signal stays ignored, as Python has it: it would let each client end a server by leaving in the middle."""


def own_streams() -> None:
    """Makes the streams of this process UTF-8 whatever the locale. One that the caller closed reads as empty, fails as
    stdout, and is silent as stderr."""
    for name, mode, flags in (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode, errors="backslashreplace"))
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")


def without_reader(error: BaseException) -> int:
    """Returns the exit status for an error that says that the reader of stdout went away; click makes it an end of the
    program. Raises any other error."""
    if not isinstance(error.__context__ if isinstance(error, SystemExit) else error, BrokenPipeError):
        raise error
    silence(sys.stdout)
    return NO_READER


def refused_stream(error: BaseException) -> bool:
    """Returns whether the system refused a stream, after which nothing more can be written to stdout. Errors of files
    name them."""
    return isinstance(error, OSError) and not short_of_memory(error) and error.filename is None


def complain(line: str) -> None:
    """Prints the line to stderr if it can: a broken stderr does not change how the process ends."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Sends a stream's unwritten text to nowhere, so that writing it can't fail when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def asks_json(arguments: Sequence[str] | None) -> bool:
    """Returns whether --json is among the options of a command line; None: the command line of this process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return "--json" in given[: given.index("--")] if "--" in given else "--json" in given


def failure(kind: str, message: str, code: int = USAGE) -> dict[str, Any]:
    """Returns the object that stands for a failure: `kind` is the name of the error in Python, or UsageError."""
    return {"error": {"code": code, "kind": kind, "message": message}}


def print_failure(kind: str, message: str, code: int = USAGE) -> None:
    """Prints the object of `failure` as a line on stdout, if stdout can be written to."""
    with suppress(OSError, ValueError):
        print(json.dumps(failure(kind, message, code)), flush=True)


def begins_not(program: str, reason: str) -> NoReturn:
    """Ends a process that has too little memory to load its program."""
    sys.stderr.write(f"{program}: {reason}\n")
    if asks_json(None):
        print_failure("OutOfMemory", reason)
    raise SystemExit(USAGE) from None


class Least(NamedTuple):
    """The least that a program needs to begin: memory that its control group allows, and addresses (ulimit -v). With
    less, the system or a library ends the program in a way of its own."""

    memory_bytes: int
    address_bytes: int


_SIGNS = ("failed to map segment", "cannot allocate", "can't allocate", "can't start new thread")


def refusal(least: Least, root: Path = ROOT) -> str | None:
    """Returns the reason why a program can't begin here; None if it can. Where addresses are limited, numpy's library
    is kept from setting some aside for every core."""
    if (limit := limit_of("RLIMIT_AS")) is not None:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        if limit < least.address_bytes:
            return f"{_needs(least.address_bytes, limit)} of addresses: raise the limit (ulimit -v)"
    for folder in control_groups(root, "memory"):
        found = (text(folder / "memory.max") or text(folder / "memory.limit_in_bytes")).strip()
        if found.isdecimal() and int(found) < least.memory_bytes:
            return f"{_needs(least.memory_bytes, int(found))} of memory in its control group: raise the limit"
    return None


def _needs(least_bytes: int, nbytes: int) -> str:
    least, found = least_bytes // 1_000_000, nbytes // 1_000_000
    return f"at least {least} MB are needed to begin, and this process may have {found} MB"


def short_of_memory(error: BaseException | None) -> bool:
    """Returns whether a lack of memory is behind an error, or behind the one that brought it about."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(error, (ImportError, OSError, RuntimeError)):
            text = str(error).lower()
            if any(sign in text for sign in _SIGNS):
                return True
        error = error.__cause__ or error.__context__
    return False
