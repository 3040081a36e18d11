"""Rows of chat messages as running text, by a template that is sound."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import Tokenizer, models

from moeconv.calibration.rendering import ChatTemplate
from moeconv.calibration.samples import kind_of, to_sample
from moeconv.errors import ConversionError
from tests.fuzz.target import Target
from tests.fuzz.targets.packs import folder

_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.extra }}{% endfor %}"


@cache
def _template() -> ChatTemplate:
    root = folder() / "tokenizer"
    root.mkdir(exist_ok=True)
    Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(root / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE}
    (root / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return ChatTemplate(root)


def read(body: bytes) -> None:
    try:
        row = json.loads(body)
    except (ValueError, RecursionError):  # refused before
        return
    to_sample(row, kind_of(row, "text:1"), "text:1", _template().render)


def seeds() -> list[bytes]:
    said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Ħ", "extra": [1]}]
    return [
        json.dumps(row, separators=(",", ":")).encode() for row in ({"messages": said, "document": "a"}, {"text": "a"})
    ]


TARGET = Target(read, (ConversionError,), seeds)
