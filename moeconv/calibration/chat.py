"""Chat messages as running text, by the chat template that comes with the model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeconv.errors import CalibrationError


class ChatTemplate:
    """`folder` holds the model's tokenizer; it is read when the first messages are."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._tokenizer: Any = None

    def render(self, messages: Any, place: str) -> str:
        """Messages, a list of {"role", "content"}, as the text that the model was trained on. Raises
        CalibrationError."""
        if not isinstance(messages, (list, tuple)) or not messages or not all(map(_is_message, messages)):
            raise CalibrationError(f"{place}: expected a list of {{role, content}} in the field 'messages'")
        if self._tokenizer is None:
            self._tokenizer = self._loaded(place)
        try:
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False))
        except Exception as error:  # a template raises what it likes
            raise CalibrationError(f"{place}: the model's chat template refuses the messages ({error})") from None

    def _loaded(self, place: str) -> Any:
        if self.folder is None:
            raise CalibrationError(f"{place}: chat messages need the model's chat template, and there is no model here")
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(self.folder), local_files_only=True)
        except Exception as error:  # the library raises nothing more precise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CalibrationError(f"{self.folder}: the tokenizer can't be loaded ({reason[:200]})") from None
        if not tokenizer.chat_template:
            raise CalibrationError(f"{place}: {self.folder} has no chat template: give the field 'text' instead")
        return tokenizer


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
