"""What a user of moeconv can get wrong, as one line each."""

from __future__ import annotations


class ConversionError(Exception):
    """The base of all of them. The message is one line that says what was wrong and what to do."""


class CalibrationError(ConversionError):
    """Calibration text that is missing, malformed, too short or overlapping."""


class SettingsError(ConversionError):
    """An option or a recipe entry that makes no sense."""


class TargetMissed(ConversionError):
    """No assignment of the allowed widths keeps the loss under the target."""


class WeightsUnusable(ConversionError):
    """Weights that no width can represent."""


class VerifyFailed(ConversionError):
    """A pack that does not hold what its source says it should."""
