"""How the source model takes a conversation: its chat templates and special tokens, as transformers knows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeconv.chat_tokenizer import chat_tokenizer
from moeconv.source.outline import MAX_JSON_BYTES, CheckpointError
from moeconv.strict_json import NotJson, bounded, parse
from moert.pack.errors import ChatInvalid
from moert.pack.text import ChatFormat, dump_chat

_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_DEFAULT, _TOOLS = "default", "tool_use"


def chat_of(folder: Path) -> bytes | None:
    """What becomes chat.json in a pack of the model in `folder`; None where that has no chat template.

    Raises CheckpointError for a template or tokenizer that can't be used.
    """
    if not _has_template(folder):
        return None
    tokenizer = _tokenizer(folder)
    templates = tokenizer.chat_template
    if isinstance(templates, str):
        templates = {_DEFAULT: templates}
    if not isinstance(templates, dict) or not templates.get(_DEFAULT):
        named = f" (there are {', '.join(sorted(map(str, templates)))[:100]})" if isinstance(templates, dict) else ""
        raise CheckpointError(
            f"{folder} has chat templates, and none of them is called {_DEFAULT}{named}: name the usual one so in "
            f"{_CONFIG}, or take them out"
        )
    chat = ChatFormat(templates[_DEFAULT], dict(tokenizer.special_tokens_map), templates.get(_TOOLS))
    try:
        return dump_chat(chat)
    except ChatInvalid as error:
        raise CheckpointError(f"{folder}: {error}: mend {_CONFIG}, or take the template out") from None


def _has_template(folder: Path) -> bool:
    if (folder / _TEMPLATE).is_file():
        return True
    try:
        config = parse(bounded(folder / _CONFIG, MAX_JSON_BYTES), finite=False)
    except FileNotFoundError:
        return False
    except (OSError, NotJson) as error:
        raise CheckpointError(f"{folder / _CONFIG} can't be read as JSON ({_line(error)}): fetch it again") from None
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _tokenizer(folder: Path) -> Any:
    try:
        return chat_tokenizer(folder)
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(
            f"{folder} has a chat template, and its tokenizer can't be loaded ({_line(error)}): mend it, or take the "
            f"template out of {_CONFIG} to convert without"
        ) from None


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
