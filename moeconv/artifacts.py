"""What the stages hand to each other: small frozen values, each a JSON file that can be read by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moert.pack.manifest import Measured
from moert.pack.model_spec import ExpertKey

SCHEMA = 1


@dataclass(frozen=True)
class Measurement:
    """One evaluation: value of the metric, its loss against the unquantised model, and the mean NLL (nats a token)."""

    what: str
    value: float
    loss: float
    nll: float
    seconds: float


@dataclass(frozen=True)
class SensitivityTable:
    """What each expert costs when it alone is at `probe_bits` and all others are at `base_bits` (EdgeMoE §3.2).

    `importance` is the loss above that of the base, `nll_rise` the same in nats a token, which breaks ties.
    """

    base_bits: int
    probe_bits: int
    base: Measurement
    importance: Mapping[ExpertKey, float]
    nll_rise: Mapping[ExpertKey, float]

    def ranking(self) -> list[ExpertKey]:
        """Least important first."""
        return sorted(self.importance, key=lambda key: (self.importance[key], self.nll_rise[key], key))


@dataclass(frozen=True)
class BitBounds:
    """`high` is the narrowest width at which all experts together meet the target; `low` the next narrower one,
    which does not, or None where `high` is already the narrowest. `losses` has what was measured at each width."""

    target_loss: float
    high: int
    low: int | None
    losses: Mapping[int, float]


@dataclass(frozen=True)
class BitPlan:
    """The width of every expert, and each step of the search: how many experts at the lower width, what loss."""

    widths: Mapping[ExpertKey, int]
    low_count: int
    steps: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class ConversionReport:
    """Everything a conversion measured; stored in the pack as report.json and printed by `moeconv quantize`.

    `evaluations` are the assignments of widths that it took, `evaluation_seconds` what they took when they were
    measured, now or in an earlier run; `seconds` is this run from its start to the report.
    """

    model: str
    calibration_source: str
    heldout_source: str | None
    seed: int
    metric: str
    quantizer: str
    group_size: int
    target_loss: float
    calibration: Measured | None
    heldout: Measured | None
    bits_histogram: Mapping[int, int]
    effective_bits: float
    expert_bytes: Mapping[str, int]
    context: int
    evaluations: int
    evaluation_seconds: float
    seconds: float
    sensitivity: SensitivityTable | None
    bounds: BitBounds | None
    plan_steps: tuple[tuple[int, float], ...]
    samples: tuple[Mapping[str, str], ...]


def to_json(artifact: Any) -> dict[str, Any]:
    """A dataclass or a dict as plain JSON values; expert keys become text like D03/E005."""
    values = artifact if isinstance(artifact, dict) else asdict(artifact)
    return {"schema": SCHEMA, **_plain(values)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, ExpertKey):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, ExpertKey) else value
