"""A command line as a process: its streams, its signals, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from moert.command.settings import OPTIONS
from moert.errors import RunError, command_line
from moert.pack.errors import PackError
from moert.pack.fence import left_behind, owned_stderr
from moert.pack.messages import (
    USAGE,
    asks_json,
    complain,
    in_one_line,
    own_streams,
    print_failure,
    refused_stream,
    short_of_memory,
    shown,
    silence,
    without_reader,
)

SHORT = "the system gives no more memory: give a smaller --memory, or this process a higher limit (ulimit -v)"
INTERRUPTED = 130


def prepare() -> None:
    """Prepares the process: SIGTERM closes everything that is open; the streams are its own (see own_streams).
    Tokenizers use the calling thread, unless the environment says otherwise."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, _terminate)
    own_streams()


def exit_code(command: Callable[[], Any], arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 2 for a user's mistake, which is one line on stderr and with
    --json among the `arguments` (None: those of the process) an object on stdout, 130 after Ctrl-C, 141 where the
    reader of stdout went away. Other errors are raised."""
    try:
        with command_line(OPTIONS), owned_stderr():
            code = command()  # 130 after Ctrl-C
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (BrokenPipeError, SystemExit) as error:
        return without_reader(error)
    except Exception as error:
        if refused_stream(error):
            silence(sys.stdout)
        if (found := _mistake(error)) is None:
            if interrupted(error):
                return INTERRUPTED
            raise
        kind, message = found
        complain(message if message.startswith("Usage:") else in_one_line(f"moert: {message}"))
        if asks_json(arguments):
            print_failure(kind, message)
        return USAGE


def _mistake(error: Any) -> tuple[str, str] | None:
    """Returns the name and the message of a user's mistake; None for any other error."""
    if isinstance(error, (PackError, RunError)):
        return type(error).__name__, str(error)
    if isinstance(error, OSError) and not short_of_memory(error):  # files name themselves
        return "OSError", f"{error.filename or 'stdout'}: {error.strerror or error}"
    if hasattr(error, "format_message"):  # a mistake in the command line, as the parser saw it
        return "UsageError", _usage(error)
    if short_of_memory(error) and not interrupted(error):
        return "OutOfMemory", SHORT
    return None


def leave(command: Callable[[], int]) -> NoReturn:
    """Ends the process with the status that the command returns; at once, if work that was left behind goes on."""
    try:
        code = command()
    except SystemExit as end:  # SIGTERM
        code = int(end.code or 0)
    if left_behind():
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def writer(raw: bool) -> Callable[[str], None]:
    """Returns a function that prints text to stdout as a model makes it: on a terminal without characters that it would
    obey, unless `raw`."""
    hides = sys.stdout.isatty() and not raw

    def write(text: str) -> None:
        print(shown(text) if hides else text, end="", flush=True)

    return write


def note(line: str) -> None:
    """Prints one line on stderr: about a mistake, or about something that works, but not as a user may think. Text that
    it quotes of a pack can't look like another line."""
    complain(in_one_line(f"moert: {line}"))


def _terminate(number: int, frame: object) -> None:
    """Ends the process at SIGTERM as sys.exit would, so that everything open is closed."""
    sys.exit(128 + number)


def interrupted(error: BaseException) -> bool:
    """Returns whether an error came because Ctrl-C broke off something else."""
    before: BaseException | None = error
    while before is not None and not isinstance(before, KeyboardInterrupt):
        before = before.__context__
    return before is not None


def _usage(error: Any) -> str:
    """Returns the message of a mistake in the command line, with the place to look at."""
    message = error.format_message()
    if message.startswith("Usage:"):
        return str(message)  # no arguments at all: the help
    return f"{' '.join(message.split()).rstrip('.')} (see {error.ctx.command_path if error.ctx else 'moert'} --help)"
