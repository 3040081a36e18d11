"""How messages become a prompt: the source model's chat templates, and the tokens that they name, in chat.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from moert.pack.bounds import bound_of
from moert.pack.documents import parsed
from moert.pack.errors import ChatInvalid, FormatTooNew, ManifestInvalid
from moert.pack.reader import Pack
from moert.pack.reading import Read, brief, mapping, plain, read

CHAT = "chat.json"
MAX_CHAT_BYTES = bound_of(CHAT).most_bytes
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Names that every template is given, so that no token has them."""
_FORMAT, _VERSION = "model.pack chat", 1
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_MOST_TOKENS, _LONGEST_TOKEN = 64, 256


def _template(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value or not _encodable(value):
        raise ManifestInvalid(f"{where} should be a template, found {brief(value)}")
    return value


def _no_or_template(value: Any, where: str) -> str | None:
    return None if value is None else _template(value, where)


def _tokens(value: Any, where: str) -> dict[str, str]:
    tokens = mapping(value, where)
    if len(tokens) > _MOST_TOKENS:
        raise ManifestInvalid(f"{where} should be at most {_MOST_TOKENS} tokens, found {len(tokens)}")
    for name, token in tokens.items():
        if _NAME.fullmatch(name) is None or name in GIVEN:
            raise ManifestInvalid(f"{where}: {name[:60]!r} is no name that a template can call a token by")
        if not isinstance(token, str) or len(token) > _LONGEST_TOKEN or not _encodable(token):
            raise ManifestInvalid(
                f"{where}: {name} should be text of at most {_LONGEST_TOKEN} letters, found {brief(token)}"
            )
    return tokens


def _encodable(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


@dataclass(frozen=True)
class ChatFormat:
    """`template` is in the language of Jinja; `tool_template`, if any, takes its place where tools are given. `tokens`:
    special tokens by the names that templates call them by, such as bos_token."""

    template: Annotated[str, Read(_template)]
    tokens: Annotated[Mapping[str, str], Read(_tokens)]
    tool_template: Annotated[str | None, Read(_no_or_template)] = None

    @property
    def ends(self) -> list[str]:
        """Tokens that end a reply beside those that end any text of the model: the tokenizer's own end."""
        return [token for token in (self.tokens.get("eos_token"),) if token]


def dump_chat(chat: ChatFormat) -> bytes:
    """The file. Raises ChatInvalid for what no reader takes."""
    body = json.dumps({"format": _FORMAT, "version": _VERSION, **plain(chat)}, ensure_ascii=True, indent=1) + "\n"
    if len(body) > MAX_CHAT_BYTES:
        raise ChatInvalid(f"the chat template takes {len(body)} bytes, at most {MAX_CHAT_BYTES} go into {CHAT}")
    parse_chat(body.encode())
    return body.encode()


def load_chat(pack: Pack) -> ChatFormat | None:
    """None where the pack has no such file. Raises ChatInvalid, FormatTooNew, SizeOverflow, or as `read_file` does."""
    return parse_chat(pack.read_file(CHAT)) if CHAT in pack.manifest.files else None


def parse_chat(body: bytes) -> ChatFormat:
    """Raises ChatInvalid or FormatTooNew."""
    try:
        raw = parsed(body)
    except ValueError as error:
        raise ChatInvalid(f"{CHAT} is not JSON ({error}); convert the model again") from None
    try:
        document = mapping(raw, CHAT)
        _check_version(document)
        return read(ChatFormat, document, CHAT)
    except ManifestInvalid as error:
        raise ChatInvalid(str(error)) from None


def _check_version(document: dict[str, Any]) -> None:
    if document.get("format") != _FORMAT:
        raise ManifestInvalid(f"{CHAT} has format {brief(document.get('format'))}, expected {_FORMAT!r}")
    version = document.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ManifestInvalid(f"{CHAT}: version should be {_VERSION}, found {brief(version)}")
    if version > _VERSION:
        raise FormatTooNew(f"{CHAT} has version {version}, this program reads up to {_VERSION}: upgrade moert")
