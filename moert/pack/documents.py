"""JSON text from anyone → plain values: no field twice in one object, no number that is none."""

from __future__ import annotations

import json
from typing import Any


def parsed(body: bytes) -> Any:
    """The document. Raises ValueError, whose text is one short line, for what is no JSON or nested too deep. How much
    it may be is asked before (moert.pack.bounds)."""
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text: {error.reason}") from None
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())[:100]) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("it names a field twice in one object")
    return table


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")
