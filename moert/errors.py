"""What a user of moert can get wrong, beside the pack itself (moert.pack.errors)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moert.pack.errors import Error
from moert.wording import said


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


class DrawingImpossible(RunError):
    """Pictures can't be made or written here."""
