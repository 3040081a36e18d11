"""moeconv: turns a Mixture-of-Experts checkpoint into a model.pack."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from moeconv.artifacts import ConversionReport
    from moeconv.conversion.settings import Options
    from moeconv.errors import ConversionError
    from moert.pack.errors import Error

__version__ = "0.2.0"
_PLACES = {  # imported at their first use: main comes first, which handles Ctrl-C
    "ConversionError": "moeconv.errors", "Error": "moert.pack.errors",
}  # fmt: skip
__all__ = ["ConversionError", "Error", "__version__", "quantize"]


def quantize(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str] = "model.pack",
    *,
    work: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] | None = None,
    progress: bool = True,
    **settings: Unpack[Options],
) -> ConversionReport:
    """Converts a model as `moeconv quantize` does: `quantize("checkpoint", loss="5%", calib="text.txt")`.

    `settings`: the command's options by name, as text like on the command line, or as numbers. `work`: the folder that
    keeps measurements for a rerun, by default beside `out`. A line about each step, and the progress of long steps, go
    to stderr; with `progress=False` nothing does. `say` gets the lines in the place of stderr. A held-out loss above
    the target raises nothing: look at the report's `heldout`.

    Raises Error, which names arguments: ConversionError if the model, the text or a setting does not allow the
    conversion, or a PackError of moert.
    """
    from moeconv.errors import ExtraMissing, missing_extra
    from moeconv.progress import bar, unseen
    from moeconv.progress import say as on_stderr

    lines = say or (on_stderr if progress else lambda line: None)
    try:
        from moeconv.conversion.conversion import quantize as run

        return run(model, out, work, (lines, bar if progress else unseen), settings)
    except ModuleNotFoundError as error:
        if (advice := missing_extra(error)) is None:
            raise
        raise ExtraMissing(advice) from None


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
