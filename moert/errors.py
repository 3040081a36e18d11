"""Errors that a user of moert can cause beside those of the pack (moert.pack.errors), and the base class of
settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, get_type_hints

from moert.pack.errors import Error
from moert.pack.messages import fits, unknown, wanted

_options: ContextVar[Mapping[str, str] | None] = ContextVar("options", default=None)


@contextmanager
def command_line(options: Mapping[str, str] | None) -> Iterator[None]:
    """Makes messages name settings as options of the command line while the with block runs. `options`: settings → the
    words for them there; a setting that it lacks is an option by its own name. With None they are named as in Python
    again: for who called a server."""
    before = _options.set(options)
    try:
        yield
    finally:
        _options.reset(before)


def said(name: str, value: object = None) -> str:
    """Returns the words for a setting, or for one with a value: `--memory 450000000`, `--tune cache=50%`, or in Python
    `memory=450000000`."""
    options = _options.get()
    if options is None:
        return name if value is None else f"{name}={value!r}"
    option = options.get(name, f"--{name.replace('_', '-')}")
    if value is None:
        return option
    return f"{option}{'=' if ' ' in option else ' '}{value}"


class RunError(Error):
    """A run can't be done as asked. Change the option that the message names; `--help` explains it."""


class BudgetTooSmall(RunError):
    """The memory or the cache is less than the run needs at least. Give the smallest size that the message names, which
    is `smallest_bytes` in Python, or a shorter prompt or answer; `moert info PACK` prints the size beforehand."""

    def __init__(self, message: str, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes

    def __reduce__(self) -> tuple[type[BudgetTooSmall], tuple[str, int]]:
        """Returns the parts that another process makes the error from again (pickle)."""
        return type(self), (str(self), self.smallest_bytes)


class InvalidMemory(RunError):
    """A memory or a cache that is no size. Write it like `1.5GB`, `800MB` or `50%`."""


class PathsMissing(RunError):
    """A predictor needs the pack's path tables, and the pack has none. Add them by `moeconv profile-paths`, or choose
    another predictor."""


class HashMissing(RunError):
    """A setting needs the pack's hash function, and the pack has none. Add one by `moeconv train-hash`, or leave the
    setting out."""


class PredictorMissing(RunError):
    """Neurons are to be predicted, and the pack has no predictor. Add one by `moeconv train-neurons`, or leave the
    setting out."""


class SettingInvalid(RunError):
    """A setting is unknown, has an impossible value, or excludes another one. The message begins with its name: change
    the value, or leave the setting out."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{said(name)} {problem}")
        self.name, self.problem = name, problem

    def __reduce__(self) -> tuple[type[SettingInvalid], tuple[str, str]]:
        """Returns the parts that another process makes the error from again (pickle)."""
        return type(self), (self.name, self.problem)


class OutOfMemory(RunError):
    """The system refuses the memory that a pack or a request needs. Give a smaller `--memory`, or end other
    programs."""


@contextmanager
def memory_shortage() -> Iterator[None]:
    """Raises OutOfMemory where the system refuses memory inside the with block."""
    try:
        yield
    except MemoryError:
        raise OutOfMemory(f"there is not enough memory: give a smaller {said('memory')} or a shorter prompt") from None


class NotFinite(RunError):
    """The model, or the pack's predictor or hash function, gave numbers that are not finite. Check the pack by `moeconv
    verify`; if it is whole, convert the model again."""


class TokenizerMissing(RunError):
    """The pack has no tokenizer, or one that can't be read. Convert the model again, with its tokenizer beside its
    weights."""


class ChatImpossible(RunError):
    """The pack can't hold a conversation: it has no chat template, or reads with an encoder. Give prompts as they are,
    by `moert run`."""


class TemplateFailed(RunError):
    """The pack's chat template refuses a conversation, is wrong, or takes more time or memory than it may. Name another
    one by `--tune template`, or give prompts as they are, by `moert run`."""


class InputInvalid(RunError):
    """A prompt, a file or a line of it can't be used. Correct it at the place that the message names."""


class PromptTooLong(InputInvalid):
    """A prompt leaves no room in the model's context. Shorten it."""


class Closed(RunError):
    """An engine or a session was called after it had been closed. Only Python programs see this: open another one."""


class Busy(RunError):
    """A thread called an engine in the middle of its own request. Only Python programs see this: wait for the end, or
    use a session."""


_Settings = TypeVar("_Settings", bound="Adjustable")


class Adjustable:
    """The base class of settings: a frozen dataclass whose annotations say which values each setting can have."""

    @classmethod
    def of(cls: type[_Settings], settings: _Settings | None, changes: Mapping[str, Any]) -> _Settings:
        """Returns `settings`, or the default ones, with these changes by name. Raises SettingInvalid."""
        if settings is not None and not isinstance(settings, cls):
            raise SettingInvalid("settings", f"is {settings!r}: it should be {cls.__name__}(...), or settings by name")
        return (settings or cls()).but(**changes)

    def but(self: _Settings, **changes: Any) -> _Settings:
        """Returns these settings with some changed. Raises SettingInvalid for an unknown name or an impossible
        value."""
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
