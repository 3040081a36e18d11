"""Text from anyone as it may be printed: what a terminal would obey, or nobody would see, is written out. For both
programs.

A letter that is hidden stands as <U+001B>: control characters, what turns the direction of writing, what has no width,
line and paragraph separators, fillers, tags, and halves of letters.
"""

from __future__ import annotations

import json
import re
from typing import Any

_CONTROLS = "\x00-\x1f\x7f-\x9f"
_INVISIBLE = (
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff"
    "\ufeff\uffa0\ufff0-\ufffb\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e00ff\U000e01f0-\U000e0fff"
)
_JOINERS = "\u200b-\u200f"  # many languages are spelt with them, and pictures joined
_IN_TEXT = re.compile(f"(?![\n\t])[{_CONTROLS}{_INVISIBLE}]")
_IN_LINE = re.compile(f"[{_CONTROLS}{_INVISIBLE}{_JOINERS}]")
_MOST = 4000  # letters of a line


def shown(text: str) -> str:
    """Text of some lines: these and tabs stay."""
    return text if text.isprintable() else _IN_TEXT.sub(_written_out, text)


def in_one_line(text: str) -> str:
    """A message, which whatever it quotes can't end or leave; the middle of a very long one is left out."""
    if not text.isprintable():
        text = _IN_LINE.sub(_written_out, text)
    if len(text) > _MOST:
        text = f"{text[: _MOST // 2]} … {text[-_MOST // 2 :]}"
    return text


def json_line(value: Any) -> str:
    """JSON on one line, whose text is readable but for letters that are hidden."""
    return _IN_LINE.sub(_escaped, json.dumps(value, ensure_ascii=False))


def _written_out(found: re.Match[str]) -> str:
    return f"<U+{ord(found[0]):04X}>"


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]
