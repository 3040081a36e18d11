"""The text that a finished pack is worked on with: what was asked for, or what it was converted with."""

from __future__ import annotations

from dataclasses import dataclass

from moeconv.calibration import Splits, load_splits
from moeconv.conversion.settings import DEFAULT_CONTEXT
from moeconv.errors import CalibrationError, ConversionError, SettingsError
from moeconv.report.document import read_report
from moert.pack.reader import Pack


@dataclass(frozen=True)
class PackText:
    """`context`: tokens in a window of running text."""

    splits: Splits
    context: int


def text_of(pack: Pack, calib: str | None, heldout: str | None, seed: int | None) -> PackText:
    """Raises ConversionError."""
    if calib is None and (heldout is not None or seed is not None):
        raise SettingsError("--heldout and --seed go with --calib: without it the pack's own text is used")
    try:
        report = read_report(pack)
    except ConversionError as error:
        if calib is None:
            raise SettingsError(
                f"the pack does not say what text it was converted with ({error}): give --calib"
            ) from None
        report = None
    context = DEFAULT_CONTEXT if report is None else report.context
    if calib is not None:
        return PackText(load_splits(calib, heldout, seed=seed or 0, tokenizer=pack.root), context)
    assert report is not None
    if not report.calibration_source:
        raise SettingsError("--calib is missing: the pack does not say what text it was converted with")
    try:
        splits = load_splits(
            report.calibration_source, report.heldout_source, seed=report.seed, fields=report.fields,
            tokenizer=pack.root,
        )  # fmt: skip
    except CalibrationError as error:
        raise SettingsError(f"the pack's own calibration text can't be used ({error}): give --calib") from None
    return PackText(splits, context)
