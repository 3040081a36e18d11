"""moert run: prompts from an argument, a file, stdin or JSON lines, and the places that answers are written to."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from moert.command import console
from moert.errors import BudgetTooSmall, InputInvalid, RunError, said
from moert.pack.errors import PackError
from moert.pack.messages import json_line

if TYPE_CHECKING:
    from moert.engine.engine import Engine
    from moert.engine.generation import GenerationResult, GenerationSettings
    from moert.engine.session import Answer
    from moert.engine.settings import EngineSettings

STDIN = Path("-")
PROMPT_FIELDS = ("prompt", "input", "text")


@dataclass(frozen=True)
class Longest:
    """The most `letters` of a text that memory has room to make tokens of: no more of one are read."""

    letters: int
    memory: str

    def checked(self, text: str, name: str) -> str:
        """Returns the text, if it is no longer than that. Raises InputInvalid."""
        if len(text) > self.letters:
            raise InputInvalid(
                f"{name} has more than {self.letters:,} letters, which is all that {self.memory} leaves room to make "
                f"tokens of: shorten it, or give more {said('memory')}"
            )
        return text


def longest_text(settings: EngineSettings) -> Longest:
    """Returns the length of the longest text that is read."""
    from moert.engine.budget import letters_within

    return Longest(*letters_within(settings.limit))


class Source(NamedTuple):
    """A file of JSON lines, and the longest line that is read."""

    path: Path
    longest: Longest


@dataclass(frozen=True)
class PromptRecord:
    """One line of a JSONL input: its prompt, and all its fields as they were."""

    prompt: str
    fields: dict[str, Any]


def read_prompt(prompt: str | None, file: Path | None, stdin: TextIO, most: Longest) -> str:
    """Returns one prompt, without the newline that ends a file. Raises InputInvalid."""
    if prompt is not None:
        return prompt
    if file is not None:
        return most.checked(_read(file, most.letters + 1), str(file)).removesuffix("\n")
    if stdin.isatty():
        raise InputInvalid("no prompt: give one as an argument, with --file or --input, or on stdin")
    with _readable("stdin"):
        return most.checked(stdin.read(most.letters + 1), "stdin").removesuffix("\n")


def _read(path: Path, most: int) -> str:
    """Returns the first letters of a file, at most `most`."""
    with _readable(str(path)), path.open(encoding="utf-8-sig") as file:
        return file.read(most)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Raises InputInvalid for a file that can't be read, or is no text."""
    try:
        yield
    except OSError as error:
        raise InputInvalid(f"{name} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputInvalid(f"{name} is not UTF-8 text ({error.reason})") from None


def check_output(source: Path, output: Path, stdin: TextIO, overwrite: bool = False) -> None:
    """Raises InputInvalid if answers would be written over the prompts, under whatever name, into a pack, or, without
    `overwrite`, over another file that is not empty. '-' is stdin."""
    from moert.pack.reader import pack_around

    if (pack := pack_around(Path(os.path.realpath(output)))) is not None:
        raise InputInvalid(f"--output {output} lies in the pack {pack}: choose another place")
    _check_source(source, output, stdin)
    with suppress(OSError):  # no file yet
        found = os.stat(output)
        if stat.S_ISREG(found.st_mode) and found.st_size and not overwrite:
            raise InputInvalid(
                f"--output {output} is there already, and would be lost: choose another name, or give --overwrite"
            )


def _check_source(source: Path, output: Path, stdin: TextIO) -> None:
    try:
        found = os.fstat(stdin.fileno()) if source == STDIN else os.stat(source)
        same = stat.S_ISREG(found.st_mode) and os.path.samestat(found, os.stat(output))
    except (OSError, ValueError):  # one of them is no file yet, or stdin is none
        return
    if same:
        raise InputInvalid(f"--output {output} is the file that --input reads: the answers would replace the prompts")


def read_records(source: Source, stdin: TextIO, check: Callable[[str], None]) -> Iterator[PromptRecord]:
    """Returns the records of JSON lines, read line by line; '-' is stdin. A file is checked whole before its first
    record is handed out, and read again then: no more than a line is kept.

    `check` raises InputInvalid or BudgetTooSmall for a prompt that can't run. Raises InputInvalid with the number of a
    bad line, or for an input without prompts.
    """
    path, most = source
    if path == STDIN:
        return _parse(_lines(stdin, "stdin", most), "stdin", check)
    if path.is_file():
        for _ in _parse(_lines_of(path, most), str(path), check):
            pass
        check = lambda prompt: None  # noqa: E731
    return _parse(_lines_of(path, most), str(path), check)


def grouped(records: Iterator[PromptRecord], size: int) -> Iterator[list[PromptRecord]]:
    """Yields records in groups of `size`, the last with the rest. Records before a bad line come before its error is
    raised."""
    group: list[PromptRecord] = []
    try:
        for record in records:
            group.append(record)
            if len(group) == size:
                yield group
                group = []
    except InputInvalid:
        if group:
            yield group
        raise
    if group:
        yield group


def followed(groups: Iterable[list[PromptRecord]]) -> Iterator[tuple[list[PromptRecord], list[PromptRecord]]]:
    """Yields each group with the one behind it, which is read before the first is handed out; the last with an empty
    one."""
    return pairwise(chain(groups, [[]]))


def _parse(lines: Iterable[str], name: str, check: Callable[[str], None]) -> Iterator[PromptRecord]:
    empty = True
    for number, line in enumerate(lines, start=1):
        if line.strip():
            empty = False
            record = _record(line, f"{name} line {number}")
            try:
                check(record.prompt)
            except (InputInvalid, BudgetTooSmall) as error:
                raise InputInvalid(f"{name} line {number}: {error}") from None
            yield record
    if empty:
        raise InputInvalid(f"{name} has no prompts: give a JSON object with the field prompt on a line for each")


def _record(line: str, where: str) -> PromptRecord:
    try:
        fields = json.loads(line)
        json.dumps(fields, allow_nan=False)  # the answer repeats them, and NaN is not JSON
    except (ValueError, RecursionError) as error:
        raise InputInvalid(f"{where} is not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise InputInvalid(f"{where} should be a JSON object, found {type(fields).__name__}")
    found = [name for name in PROMPT_FIELDS if name in fields]
    if not found:
        raise InputInvalid(f"{where} has no prompt: one of the fields {', '.join(PROMPT_FIELDS)} should hold it")
    prompt = fields[found[0]]
    if not isinstance(prompt, str):
        raise InputInvalid(f"{where}: {found[0]} should be text, found {type(prompt).__name__}")
    return PromptRecord(prompt, fields)


def _lines_of(path: Path, most: Longest) -> Iterator[str]:
    with _readable(str(path)), path.open(encoding="utf-8-sig") as file:
        yield from _lines(file, str(path), most)


def _lines(file: TextIO, name: str, most: Longest) -> Iterator[str]:
    with _readable(name):
        while line := file.readline(most.letters + 1):
            yield most.checked(line, f"a line of {name}")


class LineWriter:
    """A writer of JSON objects, one a line, each with a single write, so that a stop in between leaves no half line."""

    def __init__(self, path: Path | None) -> None:
        """`path` None is stdout. A file is emptied when the first line comes, or when the block ends without one."""
        self._path = path
        self._file: io.FileIO | None = None

    def write(self, fields: dict[str, Any]) -> None:
        """Raises InputInvalid if the file can't be written."""
        if self._path is None:
            sys.stdout.write(json_line(fields) + "\n")
            sys.stdout.flush()
            return
        line = json.dumps(fields, ensure_ascii=False) + "\n"
        body = line.encode("utf-8", "backslashreplace")  # a lone surrogate becomes the escape that JSON has for it
        with self._writing():
            file = self._opened()
            before = file.tell()
            if file.write(body) != len(body):
                os.ftruncate(file.fileno(), before)
                raise OSError("the disk is full")

    def __enter__(self) -> LineWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._path is not None:
            with self._writing():
                self._opened()
        if self._file is not None:
            self._file.close()

    def _opened(self) -> io.FileIO:
        if self._file is None:
            assert self._path is not None
            self._file = io.FileIO(self._path, "w")
        return self._file

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputInvalid(f"{self._path} can't be written: {error.strerror or error}") from None


def run_prompt(
    engine: Engine, prompt: str, settings: GenerationSettings, as_json: bool, show: Callable[[str], None]
) -> None:
    """Prints the text as it is made, by `show`, or at its end JSON with all figures. Raises the errors of
    Engine.generate."""
    from moert.engine.session import Interrupted

    begun = False

    def write(piece: str) -> None:
        nonlocal begun
        begun = True
        show(piece)

    interrupt = None
    try:
        answer = engine.generate(prompt, settings, None if as_json else write)
    except Interrupted as error:
        answer, interrupt = error.answers[0], error
    except (PackError, RunError):
        if begun:
            print(flush=True)  # so that the error has a line for itself
        raise
    for other in answer.others if not as_json else ():
        show(f"\n\n{other.text}")
    print(json_line({**_answer(answer), "stats": engine.stats().to_dict()}) if as_json else "", flush=True)
    note_ending(answer, "text")
    if interrupt is not None:
        raise interrupt


def note_ending(answer: Answer, name: str) -> None:
    """Prints a note where a text or an answer, as `name` says, ends before the model would have ended it."""
    if answer.stop_reason == "context_full":
        console.note(
            f"the {name} ends because the model's context is full: {answer.prompt_tokens} prompt tokens and "
            f"{len(answer.result.tokens)} new ones"
        )
    if answer.stop_reason == "grammar":
        console.note(f"the {name} ends because no token of the model goes on as the grammar or the schema demands")


def run_records(
    engine: Engine, source: Source, output: Path | None, batch: int, settings: GenerationSettings, as_json: bool
) -> None:
    """Writes a line of JSON for each line of an input. Raises the errors of Engine.generate_many, and InputInvalid."""

    def check(prompt: str) -> None:
        engine.check(prompt, settings.max_new_tokens, settings.beams)

    groups = grouped(read_records(source, sys.stdin, check), batch)
    # Whoever writes to stdin may wait for an answer first.
    pairs = ((group, list[PromptRecord]()) for group in groups) if source.path == STDIN else followed(groups)
    full = 0
    with LineWriter(output) as writer:
        for group, behind in pairs:
            for answer, record in zip(_answers(engine, group, behind, settings), group, strict=True):
                if answer.finished:
                    writer.write({**record.fields, **(_answer(answer) if as_json else _texts(answer))})
                full += answer.result.stop_reason == "context_full"
    if full:
        console.note(f"{full} of the texts end because the model's context is full (--json says which)")


def _answers(
    engine: Engine, group: Sequence[PromptRecord], behind: Sequence[PromptRecord], settings: GenerationSettings
) -> Iterator[Answer]:
    """Yields the answers to a group as they come, also those that Ctrl-C cuts short; `behind` is the next group."""
    from moert.engine.session import Interrupted

    prompts, coming = ([record.prompt for record in records] for records in (group, behind))
    try:
        yield from engine.generate_many(prompts, settings, coming=coming)
    except Interrupted as interrupt:
        yield from interrupt.answers
        raise


def _answer(answer: Answer) -> dict[str, Any]:
    found = {**_result(answer.result), "prompt_tokens": answer.prompt_tokens}
    return {**found, "others": [*map(_result, answer.others)]} if answer.others else found


def _result(result: GenerationResult) -> dict[str, Any]:
    found = {"output": result.text, "tokens": result.tokens, "stop_reason": result.stop_reason}
    score = {} if result.score is None else {"score": result.score}
    return {**found, **score, **logprobs_of(result)}


def logprobs_of(result: GenerationResult) -> dict[str, Any]:
    """Returns log-probabilities as JSON has them; nothing where the result has none."""
    if result.logprobs is None:
        return {}
    told = (
        {**each.chosen._asdict(), "likeliest": [one._asdict() for one in each.likeliest]} for each in result.logprobs
    )
    return {"logprobs": list(told)}


def _texts(answer: Answer) -> dict[str, Any]:
    others = [other.text for other in answer.others]
    return {"output": answer.text, "others": others} if others else {"output": answer.text}
