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
    """The base of moeconv's errors. The message is one line that says what was wrong and what to do."""


class CalibrationError(ConversionError):
    """Calibration text that is missing, malformed, too short or overlapping."""


class SettingsError(ConversionError):
    """An option or a recipe entry that makes no sense."""


class TargetMissed(ConversionError):
    """No assignment of the allowed widths keeps the loss under the target."""


class WeightsUnusable(ConversionError):
    """Weights that no width can represent."""


class VerifyFailed(ConversionError):
    """A pack whose contents differ from those that its source leads to."""


class ExtraMissing(ConversionError):
    """A package that is not installed, and that comes with an extra."""


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Returns one line that names the extra to install; None if no extra has the package: then it is our own bug."""
    package = (error.name or "").partition(".")[0]
    extra = next((name for name, packages in _EXTRAS.items() if package in packages), None)
    return extra and f"this needs the package {package}, which is not installed: run pip install 'moert[{extra}]'"
