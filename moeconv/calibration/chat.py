"""Chat messages as running text, by the chat template that comes with the model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from moeconv.calibration.rendering import RenderFailed, Rendering
from moeconv.chat_tokenizer import chat_tokenizer
from moeconv.errors import CalibrationError

_DEFAULT = "default"


class ChatTemplate:
    """`folder` holds the model's tokenizer; it is read when the first messages are. Use it in a with block, at whose
    end what renders has ended too."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._rendering: Rendering | None = None

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rendering is not None:
            self._rendering.close()

    def render(self, messages: Any, place: str) -> str:
        """Messages, a list of {"role", "content"}, as the text that the model was trained on. Raises
        CalibrationError."""
        if not isinstance(messages, (list, tuple)) or not messages or not all(map(_is_message, messages)):
            raise CalibrationError(f"{place}: expected a list of {{role, content}} in the field 'messages'")
        if self._rendering is None:
            self._rendering = self._loaded(place)
        try:
            return self._rendering.render(messages)
        except RenderFailed as error:
            raise CalibrationError(
                f"{place}: the model's chat template refuses the messages ({error}): mend them or the template, or "
                "give the field 'text' instead"
            ) from None

    def _loaded(self, place: str) -> Rendering:
        if self.folder is None:
            raise CalibrationError(f"{place}: chat messages need the model's chat template, and there is no model here")
        try:
            tokenizer = chat_tokenizer(self.folder)
        except Exception as error:  # the library raises nothing more precise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CalibrationError(f"{self.folder}: the tokenizer can't be loaded ({reason[:200]})") from None
        found = tokenizer.chat_template
        if isinstance(found, dict):
            found = found.get(_DEFAULT)
        if not found or not isinstance(found, str):
            raise CalibrationError(f"{place}: {self.folder} has no chat template: give the field 'text' instead")
        return Rendering(found, tokenizer.special_tokens_map)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
