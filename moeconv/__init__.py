"""moeconv: turns a Mixture-of-Experts checkpoint into a model.pack."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moeconv.artifacts import ConversionReport

__version__ = "0.1.0"
__all__ = ["__version__", "quantize"]


def quantize(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str] = "model.pack",
    *,
    work: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] | None = None,
    **settings: Any,
) -> ConversionReport:
    """Converts a model as `moeconv quantize` does: `quantize("checkpoint", loss="5%", calib="text.txt")`.

    `settings`: its options by name, text as there or numbers. `work`: where measurements are kept for a rerun, by
    default beside `out`. `say` gets a line about each step. A held-out loss above the target raises nothing:
    look at the report's `heldout`.

    Raises moeconv.errors.ConversionError or a moert.pack.errors.PackError, which name arguments.
    """
    from moeconv.conversion.api import quantize as run

    return run(model, out, work, say or (lambda line: None), settings)
