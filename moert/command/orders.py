"""Lines of a conversation that are not for the model."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from moert.chat.conversation import Conversation
from moert.chat.renderer import MAX_REQUEST_BYTES
from moert.command import console
from moert.errors import InputInvalid
from moert.generation.settings import GenerationSettings
from moert.pack.documents import parsed
from moert.pack.files import write_atomically

_HELP = """\
/reset         forget what was said
/undo          forget the last message and its answer
/system TEXT   tell the model how to answer; without TEXT nothing
/set NAME VALUE
               change a setting, as in /set temperature 0.8; alone, list them
/save FILE     write what was said to a new file; /save! FILE replaces one
/load FILE     go on from such a file
/help          this
/bye           end, as the end of the input does; so does /exit
//TEXT         say /TEXT to the model
Ctrl-C         stop an answer; twice at the prompt, end"""
_SETTABLE = (
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "presence_penalty",
    "frequency_penalty", "stop",
)  # fmt: skip


class Orders:
    """`settings`: as they are now."""

    def __init__(self, conversation: Conversation, settings: GenerationSettings) -> None:
        self._conversation, self.settings = conversation, settings
        self._file: Path | None = None  # where the conversation came from or was written to

    def obey(self, line: str) -> bool:
        """Does what a line says; False if that is to end. Raises InputInvalid or SettingInvalid, and then nothing has
        changed."""
        name, _, text = line.partition(" ")
        text = text.strip()
        if name in ("/bye", "/exit"):
            return False
        if name == "/reset":
            self._conversation.reset()
        elif name == "/undo":
            if not self._conversation.undo():
                console.note("there is nothing to undo: nothing was said")
        elif name == "/system":
            self._conversation.system = text or None
        elif name == "/set":
            self._set(text)
        elif name in ("/save", "/save!"):
            self._save(text, replace=name == "/save!")
        elif name == "/load":
            self._load(text)
        elif name == "/help":
            print(_HELP, file=sys.stderr, flush=True)
        else:
            console.note(f"{name} is no command: /help lists them, and /{name} says it to the model")
        return True

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        name = name.removeprefix("--").replace("-", "_")
        if name and name not in _SETTABLE:
            raise InputInvalid(f"/set {name}: there are {', '.join(_SETTABLE)}")
        if value.strip():
            self.settings = self.settings.but(**{name: value.strip() if name == "stop" else _number(value)})
            return
        for each in [name] if name else _SETTABLE:
            print(f"{each} {getattr(self.settings, each)}", file=sys.stderr, flush=True)

    def _save(self, text: str, replace: bool) -> None:
        path, talk = _path(text, "/save"), self._conversation
        if path.exists() and not path.is_file():
            raise InputInvalid(f"{text} is no file: name a new one")
        if path.exists() and not replace and path != self._file:
            raise InputInvalid(f"{text} is there already: /save! {text} replaces it")
        system = [] if talk.system is None else [{"role": "system", "content": talk.system}]
        body = json.dumps({"messages": [*system, *map(dict, talk.messages)]}, ensure_ascii=False, indent=1) + "\n"
        try:
            write_atomically(path, body.encode("utf-8", "backslashreplace"))
        except OSError as error:
            raise InputInvalid(f"{text} can't be written: {error.strerror or error}") from None
        self._file = path

    def _load(self, text: str) -> None:
        path = _path(text, "/load")
        try:
            if path.exists() and not path.is_file():
                raise InputInvalid(f"{text} is no file")
            with path.open("rb") as file:
                body = file.read(MAX_REQUEST_BYTES + 1)
            messages = parsed(body)["messages"] if len(body) <= MAX_REQUEST_BYTES else None
        except OSError as error:
            raise InputInvalid(f"{text} can't be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError):
            messages = None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise InputInvalid(f"{text} is no conversation that /save wrote: its messages need role and text")
        begins = bool(messages) and messages[0]["role"] == "system"
        self._conversation.system = messages[0]["content"] if begins else None
        self._conversation.messages[:] = messages[begins:]
        self._file = path


def _path(text: str, order: str) -> Path:
    """What is named, without links."""
    if not text:
        raise InputInvalid(f"{order} needs the name of a file")
    return Path(os.path.realpath(os.path.expanduser(text)))


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def _number(text: str) -> object:
    """Or the text, of which settings say that it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text
