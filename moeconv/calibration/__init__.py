"""Calibration text: reading it, refusing unusable text, dividing it into parts that share no sample."""

from moeconv.calibration.load import MIN_SAMPLES, load_splits
from moeconv.calibration.samples import RANKING_SHARE, Sample, Splits, divide, runs, samples_digest

__all__ = ["MIN_SAMPLES", "RANKING_SHARE", "Sample", "Splits", "divide", "load_splits", "runs", "samples_digest"]
