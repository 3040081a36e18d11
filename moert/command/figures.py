"""The figures of a run, printed at its end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from moert.errors import RunError
from moert.pack.errors import PackError

if TYPE_CHECKING:
    from moert.engine import Engine


@contextmanager
def figures(engine: Engine, as_json: bool) -> Iterator[None]:
    """Prints the figures of the run at the end, also if Ctrl-C or an error brings it after a token was made."""
    try:
        yield
    except (KeyboardInterrupt, PackError, RunError):
        if engine.times.new_tokens:
            _print_figures(engine, as_json)
        raise
    _print_figures(engine, as_json)


def _print_figures(engine: Engine, as_json: bool) -> None:
    found = engine.stats()
    print(json.dumps(found.to_dict()) if as_json else "\n".join(found.lines()), file=sys.stderr)
