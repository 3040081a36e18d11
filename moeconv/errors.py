"""The errors that a user of moeconv can cause: each has a message of one line."""

from __future__ import annotations

from collections.abc import Mapping

from moert.pack.errors import Error

_EXTRAS: Mapping[str, tuple[str, ...]] = {
    "convert": (
        "datasets", "evaluate", "gguf", "huggingface_hub", "nltk", "pandas", "pyarrow", "rouge_score", "tomli",
        "torch", "transformers",
    ),
    "report": ("matplotlib",),
    "cluster": ("ray",),
}  # fmt: skip
"""Extra of the distribution → the packages that come with it."""


class ConversionError(Error):
    """A conversion can't go on: a file of the work directory, a disk or a library is in the way. Run the same command
    again when the cause is gone; all that was measured is kept."""


class CalibrationError(ConversionError):
    """Calibration text is missing, malformed, too short, or the same as the held-out text. Correct the file at the line
    that the message names; `moeconv quantize --help` lists the forms."""


class SettingsError(ConversionError):
    """An option or a recipe entry makes no sense, alone or beside another one. Change the one that the message names,
    or leave it out."""


class TargetMissed(ConversionError):
    """No assignment of the allowed widths keeps the loss or the size under the target, or the result is above it. Allow
    a larger `--loss` or `--size`, wider or narrower `--bits`, or give more text; measurements are used again."""


class WeightsUnusable(ConversionError):
    """Weights that no width can represent: they are not finite, or too large for float16. Fetch the model again, or
    have its makers mend it."""


class VerifyFailed(ConversionError):
    """A pack differs from the contents that its source leads to. Give the model that it was made from, or convert
    again."""


class ExtraMissing(ConversionError):
    """A package is not installed that comes with an extra. Install it as the message says."""


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Returns one line that names the extra to install; None if no extra has the package: then it is our own bug."""
    package = (error.name or "").partition(".")[0]
    extra = next((name for name, packages in _EXTRAS.items() if package in packages), None)
    return extra and f"this needs the package {package}, which is not installed: run pip install 'moert[{extra}]'"
