"""Pictures of terminals."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, LINE, TOP, LEFT = 760, 20, 30, 18
STYLE = (
    "rect{fill:#14181d}text{font:14px ui-monospace,Menlo,Consolas,monospace;fill:#e6e8eb;white-space:pre}"
    ".typed{fill:#5ab4e5}"
)
"""Terminals are dark on pages of every colour."""


def drawn(lines: Sequence[tuple[str, bool]]) -> str:
    """Returns an SVG picture of lines [text, whether somebody typed it]."""
    height = 2 * TOP + LINE * (len(lines) - 1) - 4
    name = escape(" / ".join(text for text, _ in lines), quote=True)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    drawing = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{name}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="8"/>',
    ]
    for at, (text, typed) in enumerate(lines):
        kind = ' class="typed"' if typed else ""
        drawing.append(f'<text x="{LEFT}" y="{TOP + LINE * at}"{kind}>{escape(text)}</text>')
    return "\n".join([*drawing, "</svg>\n"])
