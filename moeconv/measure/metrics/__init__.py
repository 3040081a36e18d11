"""How good is a model on its samples? Metrics behind one type, found by name or by the path of a module."""

from __future__ import annotations

from moeconv.errors import SettingsError
from moeconv.measure.metrics.generated import GENERATED
from moeconv.measure.metrics.likelihood import LIKELIHOOD, likeliest
from moeconv.measure.metrics.local import is_module, local_metric, unjudged
from moeconv.measure.metrics.metric import F64, Metric

METRICS: dict[str, Metric] = {metric.name: metric for metric in (*GENERATED, *LIKELIHOOD)}


def find_metric(named: str) -> Metric:
    """A name in METRICS, or the path of a local `evaluate` module (see `local_metric`). Raises SettingsError."""
    if named in METRICS:
        return METRICS[named]
    if is_module(named):
        return local_metric(named)
    raise SettingsError(
        f"--metric {named}: not known; there are {', '.join(METRICS)}, or give path/to/metric.py of an evaluate module"
    )


def recorded_metric(named: str) -> Metric:
    """The same for what was judged before: no module is run, and none need be there. Raises SettingsError."""
    return unjudged(named) if is_module(named) else find_metric(named)


def default_metric(seq2seq: bool, choices: bool = False) -> str:
    """The name of the metric for samples of this kind (see `Splits`)."""
    if choices:
        return "accuracy"
    return "rouge2" if seq2seq else "perplexity"


__all__ = ["F64", "METRICS", "Metric", "default_metric", "find_metric", "is_module", "likeliest", "recorded_metric"]
