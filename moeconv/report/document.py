"""report.json of a pack, as the value that the conversion wrote."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from moeconv.artifacts import (
    REPORT,
    SCHEMA,
    ConversionReport,
    CurvePoint,
    DenseReport,
    NeuronsReport,
    Probe,
    Residence,
    RouteReport,
    SensitivityTable,
    Standing,
    Step,
    Summary,
    SweepCost,
    Target,
)
from moeconv.errors import ConversionError
from moert.pack.manifest import LossEstimate
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack

_EXPERT = re.compile(r"([ED])(\d{2,})/E(\d{3,})")
_OPTIONAL = ("dense", "standing", "residences", "route", "neurons")
_PROBE = re.compile(r"(\S+) at (\d+(?:/\d+)*)")


def read_report(pack: Pack) -> ConversionReport:
    """Raises ConversionError if the pack has no report.json or one that this version does not read."""
    if REPORT not in pack.manifest.files:
        raise ConversionError(
            f"the pack at {pack.root} has no {REPORT}, so nothing is known of its conversion: convert the model again "
            "with moeconv quantize"
        )
    try:
        document = json.loads(pack.read_file(REPORT))
    except ValueError:
        raise ConversionError(f"{REPORT} in {pack.root} is not JSON: convert the model again") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ConversionError(
            f"{REPORT} in {pack.root} has schema {schema!r}, this version of moeconv reads {SCHEMA}: convert the model "
            "again (what was measured in its work directory is reused)"
        )
    try:
        return _report(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConversionError(
            f"{REPORT} in {pack.root} is not what moeconv quantize writes ({type(error).__name__}: {error}): convert "
            "the model again"
        ) from None


def _report(document: dict[str, Any]) -> ConversionReport:
    """Every field of the value must be there, but for _OPTIONAL, which only some packs have; fields that are not known
    are left out."""
    read: dict[str, Callable[[Any], Any]] = {
        "target": lambda value: Target(**value),
        "calibration": _measured,
        "heldout": _measured,
        "bits_histogram": lambda value: {int(bits): count for bits, count in value.items()},
        "expert_bytes": lambda value: {str(name): int(nbytes) for name, nbytes in value.items()},
        "sensitivity": _sensitivity,
        "sweep_cost": lambda value: None if value is None else SweepCost(**value),
        "fallbacks": lambda value: tuple(map(str, value)),
        "curve": lambda value: tuple(CurvePoint(**point) for point in value),
        "steps": lambda value: tuple(Step(**step) for step in value),
        "dense": lambda value: DenseReport(**{**value, "alone": _measured(value["alone"])}),
        "standing": lambda value: Standing(**{**value, "notes": tuple(map(str, value["notes"]))}),
        "route": lambda value: RouteReport(
            **{**value, "alone": LossEstimate(**value["alone"]), "routers": LossEstimate(**value["routers"])}
        ),
        "neurons": lambda value: NeuronsReport(
            **{**value, "alone": LossEstimate(**value["alone"]), "exact": LossEstimate(**value["exact"])}
        ),
        "residences": lambda value: tuple(map(Residence.from_json, value)),
        "samples": lambda value: tuple({str(name): str(text) for name, text in sample.items()} for sample in value),
    }
    names = [name for name in ConversionReport.__dataclass_fields__ if name not in _OPTIONAL or document.get(name)]
    return ConversionReport(**{name: read[name](document[name]) if name in read else document[name] for name in names})


def _measured(value: dict[str, Any] | None) -> LossEstimate | None:
    return None if value is None else LossEstimate(**value)


def _sensitivity(value: dict[str, Any] | None) -> SensitivityTable | None:
    if value is None:
        return None
    return SensitivityTable(
        base_bits=int(value["base_bits"]),
        base=Summary(**{name: _number(figure) for name, figure in value["base"].items()}),
        costs={_probe(text): _three(costs) for text, costs in value["costs"].items()},
        coverage={_expert(text): int(tokens) for text, tokens in value["coverage"].items()},
    )


def _three(costs: list[float | None]) -> tuple[float, float, float]:
    metric, nll, kl = map(_number, costs)
    return metric, nll, kl


def _number(figure: float | None) -> float:
    """What could not be measured is no number."""
    return math.nan if figure is None else float(figure)


def _probe(text: str) -> Probe:
    match = _PROBE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} names no expert and widths")
    return Probe(_expert(match[1]), tuple(map(int, match[2].split("/"))))


def _expert(text: str) -> ExpertKey:
    match = _EXPERT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} names no expert")
    return ExpertKey("encoder" if match[1] == "E" else "decoder", int(match[2]), int(match[3]))
