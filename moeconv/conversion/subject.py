"""Which measurements and which conversions are the same: digests of all that decides them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from moeconv.conversion.coding import Coding
from moeconv.conversion.lessons import course_values
from moeconv.conversion.material import Material
from moeconv.conversion.neuron_lessons import neuron_course_values
from moeconv.conversion.settings import Settings

MEASURES = 2  # goes up when quantizers or scorers change what they give, so that old journals are left alone
_ASKED = (
    "margin", "confidence", "allocation", "signal", "per_projection", "bits", "samples", "sweep_samples",
    "heldout_samples", "racing",
)  # fmt: skip
"""Settings that decide a conversion, beside its target and what its journal is about."""


def subject_of(material: Material, coding: Coding) -> dict[str, Any]:
    """What a journal is about, as JSON values: if anything of this changes, its measurements no longer hold."""
    settings, checkpoint, quantizer, dense = material.settings, coding.checkpoint, coding.quantizer, coding.dense_widths
    return {
        "model_sha256": checkpoint.sha256,
        "tokenizer_sha256": checkpoint.tokenizer_sha256,
        "quantizer": quantizer.name,
        "group_size": quantizer.group_size,
        "metric": material.metric_name,
        "metric_sha256": material.metric_sha256,
        "measures": MEASURES,
        "calibration_sha256": material.splits.digest("calibration"),
        "heldout_sha256": material.splits.digest("heldout"),
        "seed": settings.seed,
        "context": settings.context,
        "max_new_tokens": settings.max_new_tokens,
        "documents_sha256": material.documents_sha256,
        **({} if dense is None else {"dense": asdict(dense)}),
        **({} if coding.neurons is None else {"down": "columns"}),  # whose codes are others
        **({} if not settings.by_hash else {"route": course_values(settings, coding.spec)}),
        **({} if not settings.predicts else {"predicted": neuron_course_values(settings, coding.spec)}),
    }


def directory_of(subject: dict[str, Any]) -> str:
    """Name of the folder in the work directory that holds the measurements of this subject."""
    return hashlib.sha256(json.dumps(subject).encode()).hexdigest()[:12]


def conversion_of(subject: dict[str, Any], settings: Settings) -> str:
    """sha256 of all that a conversion is decided by: equal for the same command, resumed or repeated."""
    asked = {name: getattr(settings, name) for name in _ASKED} | {"target": asdict(settings.target)}
    if settings.resident:
        asked["resident"] = list(settings.resident)
    return hashlib.sha256(json.dumps([subject, asked]).encode()).hexdigest()
