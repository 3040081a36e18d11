"""`make bench-many`: packs of thousands of experts until the first token."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Part

READY = ": engine ready"


def parts(result: Result) -> Sequence[Part]:
    head = (
        "",
        "manifest",
        "an engine is ready after",
        "memory that it holds beside weights",
        "all hashes checked in",
        "copied in",
    )
    lines = [
        (
            name,
            f"{{{name}: manifest}} MB",
            f"{{{name}{READY}}} s",
            f"{{{name}: memory of the engine beside weights}} MB",
            f"{{{name}: all hashes checked}} s",
            f"{{{name}: copied}} s",
        )
        for name in (row.name.removesuffix(READY) for row in result.rows if row.name.endswith(READY))
    ]
    return [[head, *lines]]
