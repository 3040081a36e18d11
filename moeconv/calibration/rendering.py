"""Conversations as text, by the chat templates of models."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from moeconv.calibration.apart import Limits, Overlong, Process, say
from moeconv.calibration.samples import MAX_ROW_BYTES
from moeconv.errors import CalibrationError
from moeconv.tokenizers import chat_tokenizer

# Chat templates rendered in a process without access to files or network, with limited time and memory.
# A template comes with a model, and so from strangers. One process renders all conversations of a text as transformers
# would; moert renders single ones likewise (moert.chat.sandbox).

LIMITS = Limits(cpu_s=600, idle_s=60.0, data_bytes=1 << 29, line_bytes=7 * MAX_ROW_BYTES)
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_WARM = "{% for one in ['é'] %}{{ one|tojson|fromjson }}{{ strftime_now('%Y') }}{% endfor %}"


class RenderFailed(Exception):
    """A conversation that a template can't render; the message is a part of a line. Mend the messages, or give text."""


class Rendering:
    """The renderer of one template, with the special tokens that it may name."""

    def __init__(self, template: str, tokens: Mapping[str, Any], limits: Limits = LIMITS) -> None:
        self._template, self._tokens, self._limits = template, dict(tokens), limits
        self._process: Process | None = None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the conversation as text. Raises RenderFailed; the next call then starts a new process."""
        try:
            answer = self._answer(_plain(messages))
        except (TypeError, ValueError, RecursionError) as error:
            raise RenderFailed(f"messages should be what JSON can hold: {error}") from None
        except BaseException:
            self.close()
            raise
        if isinstance(text := answer.get("text"), str):
            return text
        self.close()
        raise RenderFailed("it takes too much memory" if "memory" in answer else str(answer.get("failed")))

    def close(self) -> None:
        if self._process is not None:
            self._process.__exit__(None, None, None)
            self._process = None

    def _answer(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        request = json.dumps(messages).encode()
        if len(request) > MAX_ROW_BYTES:
            raise RenderFailed(f"they take over {MAX_ROW_BYTES >> 20} MiB")
        if self._process is None:
            try:
                told = {name: os.environ[name] for name in ("TZ", "LD_LIBRARY_PATH") if name in os.environ}
                self._process = Process(__name__, [], self._limits, environment=told)
            except OSError as error:
                raise RenderFailed(f"no process can be started to render it ({error.strerror})") from None
            self._process.send(json.dumps({"template": self._template, "tokens": self._tokens}).encode())
        self._process.send(request)
        try:
            line = self._process.line()
        except TimeoutError:
            raise RenderFailed(f"it is not done after {self._limits.idle_s:g} s") from None
        except Overlong:
            raise RenderFailed(f"it makes over {MAX_ROW_BYTES >> 20} MiB of them") from None
        if line is None:
            raise RenderFailed(self._process.ended())
        found: dict[str, Any] = json.loads(line)
        return found


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as transformers hands them to a template: without fields that are None, thoughts under all their
    names."""
    found = []
    for message in messages:
        fields = {name: value for name, value in message.items() if value is not None}
        thought = next((fields[name] for name in _THOUGHTS if name in fields), None)
        found.append(fields if thought is None else {"thinking": thought, **fields, "reasoning_content": thought})
    return found


def main(bounds: str) -> None:
    """Runs the rendering process: reads a line with the template, then writes a line for each conversation that it
    reads."""
    from moert.chat.sandbox import confine, environment

    environment().from_string(_WARM).render()  # finds codecs and the time zone
    asked, limits = json.loads(sys.stdin.buffer.readline()), json.loads(bounds)
    confine(limits["cpu_s"], limits["data_bytes"])
    variables = {**asked["tokens"], "tools": None, "documents": None, "add_generation_prompt": False}
    compiled: Any = None
    with open(1, "wb", closefd=False) as out:
        for line in sys.stdin.buffer:
            try:
                compiled = compiled or environment().from_string(asked["template"])
                answer = {"text": compiled.render({**variables, "messages": json.loads(line)})}
                say(out, answer)
            except MemoryError:
                say(out, {"memory": ""})
            except Exception as error:  # a template may raise anything
                text = " ".join(str(error).split())[:300]
                say(out, {"failed": "".join(letter if letter.isprintable() else "?" for letter in text)})
            out.flush()
    os._exit(0)


# Chat messages as running text, by the chat template that comes with the model's tokenizer.

_DEFAULT = "default"


class ChatTemplate:
    """The chat template of a model, for use in a with block, which ends the rendering process too. `folder` holds the
    model's tokenizer, which is read with the first messages."""

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
        """Returns messages, a list of {"role", "content"}, as text in the form of the model's training text. Raises
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
