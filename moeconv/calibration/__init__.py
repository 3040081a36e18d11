"""Calibration text: read it, refuse what is unusable, divide it into parts that share no sample."""

from moeconv.calibration.division import RANKING_SHARE, divide
from moeconv.calibration.documents import runs
from moeconv.calibration.load import MIN_SAMPLES, load_splits
from moeconv.calibration.sample import Sample, Splits, samples_digest

__all__ = ["MIN_SAMPLES", "RANKING_SHARE", "Sample", "Splits", "divide", "load_splits", "runs", "samples_digest"]
