"""What settings are called, and what a user of moert can get wrong beside the pack (moert.pack.errors)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, get_type_hints

from moert.pack.errors import Error
from moert.pack.messages import fits, unknown, wanted

_OPTIONS = {"n_return": "--return"}  # others are called alike
_command_line = ContextVar("command_line", default=False)


@contextmanager
def command_line() -> Iterator[None]:
    """Messages made inside speak of options."""
    before = _command_line.set(True)
    try:
        yield
    finally:
        _command_line.reset(before)


def said(name: str, value: object = None) -> str:
    """A setting, or one with a value, for messages: `--memory 450000000`, or `memory=450000000`."""
    if _command_line.get():
        option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
        return option if value is None else f"{option} {value}"
    return name if value is None else f"{name}={value!r}"


class RunError(Error):
    """A run can't be done as asked. The message is one line that says what was wrong and what to do."""


class BudgetTooSmall(RunError):
    """--memory or --cache can't hold what is needed at least, which `smallest_bytes` says."""

    def __init__(self, message: str, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes

    def __reduce__(self) -> tuple[type[BudgetTooSmall], tuple[str, int]]:
        """So that it comes through from another process."""
        return type(self), (str(self), self.smallest_bytes)


class InvalidMemory(RunError):
    """A --memory or --cache that is no size."""


class PathsMissing(RunError):
    """A predictor needs the pack's path tables, and the pack has none."""


class HashMissing(RunError):
    """Something needs the pack's hash function, and the pack has none."""


class PredictorMissing(RunError):
    """Neurons are to be predicted, and the pack has nothing that does."""


class SettingInvalid(RunError):
    """A setting that can't be. The message is one line that begins with its name."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{said(name)} {problem}")
        self.name, self.problem = name, problem

    def __reduce__(self) -> tuple[type[SettingInvalid], tuple[str, str]]:
        """So that it comes through from another process."""
        return type(self), (self.name, self.problem)


class OutOfMemory(RunError):
    """The system has no memory left for what is asked."""


@contextmanager
def memory_shortage() -> Iterator[None]:
    """Where the system refuses memory: OutOfMemory."""
    try:
        yield
    except MemoryError:
        raise OutOfMemory(f"there is not enough memory: give a smaller {said('memory')} or a shorter prompt") from None


class NotFinite(RunError):
    """The model gave something else than numbers."""


class TokenizerMissing(RunError):
    """The pack has no tokenizer, or one that can't be read."""


class ChatImpossible(RunError):
    """The pack can't hold a conversation: it has no chat template, or reads with an encoder."""


class TemplateFailed(RunError):
    """The pack's chat template refuses a conversation, is wrong, or takes more time or memory than it may."""


class InputInvalid(RunError):
    """A prompt or a line of an input file that can't be used."""


class PromptTooLong(InputInvalid):
    """A prompt that leaves no room in the model's context."""


class Closed(RunError):
    """An engine or a session was closed before it was asked."""


class Busy(RunError):
    """A thread asks an engine in the middle of its own request."""


_Settings = TypeVar("_Settings", bound="Adjustable")


class Adjustable:
    """The base of settings: a frozen dataclass whose annotations say what each can be."""

    @classmethod
    def of(cls: type[_Settings], settings: _Settings | None, changes: Mapping[str, Any]) -> _Settings:
        """Returns the settings, or those that are usual, with these changes by name. Raises SettingInvalid."""
        if settings is not None and not isinstance(settings, cls):
            raise SettingInvalid("settings", f"is {settings!r}: it should be {cls.__name__}(...), or settings by name")
        return (settings or cls()).but(**changes)

    def but(self: _Settings, **changes: Any) -> _Settings:
        """Returns these settings with some changed. Raises SettingInvalid for a name that there is not, and for what
        one can't be."""
        assert is_dataclass(self)
        known = [each.name for each in fields(self)]
        for name in changes:
            if name not in known:
                raise SettingInvalid(name, unknown(name, known))
        return replace(self, **changes) if changes else self

    def check_types(self) -> None:
        """Raises SettingInvalid for the first setting of another type than its annotation says."""
        for name, hint in get_type_hints(type(self)).items():
            if not fits(value := getattr(self, name), hint):
                raise SettingInvalid(name, f"is {value!r}: it should be {wanted(hint)}")
