"""The artefacts that stages hand to each other: small frozen values, each a JSON file that a person can read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

from moeconv.strict_json import among, amount, listed, maybe, named, number, positive, share, text
from moert.pack.codec import Width
from moert.pack.documents import Read, brief, mapping
from moert.pack.errors import ManifestInvalid
from moert.pack.layout import PROJECTIONS
from moert.pack.manifest import WIDTHS_BY_TEXT, LossEstimate
from moert.pack.model_spec import ExpertKey, ModelSpec

SCHEMA = 2
REPORT = "report.json"  # of a pack: its ConversionReport
_EXPERT = re.compile(r"([ED])([0-9]{2,6})/E([0-9]{3,6})")
_PROBE = re.compile(r"(\S{1,20}) at ([0-9./]{1,20})")
Count = Annotated[int, Read(amount)]
Number = Annotated[float, Read(number)]
NoOrNumber = Annotated[float | None, Read(maybe(number))]

Bits = tuple[Width, ...]
"""The widths of one expert: one for each projection, in the order of `spec.moe.ffn.projections`."""

Assignment = Mapping[ExpertKey, Bits]
"""The widths of experts: of all experts, unless a docstring says otherwise."""


def uniform(spec: ModelSpec, bits: Width) -> dict[ExpertKey, Bits]:
    """Returns the assignment with every projection of every expert at the same width."""
    return dict.fromkeys(spec.expert_keys(), (bits,) * len(spec.moe.ffn.projections))


class Probe(NamedTuple):
    """One measurement of the sweep: this expert alone at these widths, all others as in the base."""

    key: ExpertKey
    bits: Bits

    def __str__(self) -> str:
        return f"{self.key} at {'/'.join(map(str, self.bits))}"


class DenseUnit(NamedTuple):
    """Matrices outside the experts that get one width: those of a role, of one layer unless `stack` is empty, and there
    a `part` of them."""

    role: str
    stack: str = ""
    layer: int = 0
    part: str = ""

    def __str__(self) -> str:
        name = self.part or self.role
        return f"{name} of {self.stack[0].upper()}{self.layer:02d}" if self.stack else name


SAVED: Mapping[str, str] = {"size": "of all matrices", "memory": "in memory", "speed": "read for a token"}
"""The purposes of plans, which bytes they save, with words for a person behind a number of these bytes."""
PURPOSES = tuple(SAVED)
DenseCosts = Mapping[DenseUnit, Mapping[int, tuple[float, float, float]]]
"""The costs of units alone at each width, above the unquantized model, in each of SIGNALS."""


@dataclass(frozen=True)
class Summary:
    """One evaluation over a list of samples, in a few figures.

    `value` is the metric's value, `loss` its loss against the unquantized model. `nll` is the mean negative
    log-likelihood of the samples' text (nats a token), `kl` the mean divergence of the next-token distribution from
    the unquantized model's (nats a token); both teacher-forced.
    """

    value: float
    loss: float
    nll: float
    kl: float


SIGNALS = ("metric", "nll", "kl")
LEAST_SEEN = 8
"""Tokens that an expert must have seen for its measured cost to be more than luck."""
FISHER = "fisher"
"""A signal that is not measured expert by expert: an estimate that takes the place of "kl"."""


@dataclass(frozen=True)
class SensitivityTable:
    """The sensitivities: the cost of each expert alone at other widths than the base's (EdgeMoE §3.2: base 4 bits,
    probe 2 bits).

    `costs` has for each probe its rise above the base in each of SIGNALS: loss of the metric, nats, divergence.
    `coverage` counts the tokens of the sweep's text that each expert saw.
    """

    base_bits: Width
    base: Summary
    costs: Mapping[Probe, tuple[float, float, float]]
    coverage: Mapping[ExpertKey, int]

    def cost(self, probe: Probe, signal: str) -> float:
        """Returns the cost of a probe in a signal; 0 at the base's own widths. Raises KeyError if it was not
        measured."""
        if set(probe.bits) == {self.base_bits}:
            return 0.0
        return self.costs[probe][SIGNALS.index("kl" if signal == FISHER else signal)]

    def barely_seen(self) -> list[ExpertKey]:
        """Returns the experts that fewer than LEAST_SEEN tokens reached."""
        return sorted(key for key, tokens in self.coverage.items() if tokens < LEAST_SEEN)

    @property
    def probed_bits(self) -> Width | None:
        """The least width that experts were probed at with all their projections; None without any."""
        return min((probe.bits[0] for probe in self.costs if len(set(probe.bits)) == 1), default=None)

    def importance(self, bits: Width) -> dict[ExpertKey, float]:
        """Returns expert → the loss of the metric with all of its projections at `bits`."""
        return {probe.key: cost[0] for probe, cost in self.costs.items() if set(probe.bits) == {bits}}


@dataclass(frozen=True)
class Target:
    """The aim of a conversion: a largest "loss" (a share), a "size" (bytes of all experts), or "bits" a weight."""

    kind: Annotated[str, Read(among("loss", "size", "bits"))]
    value: Number


@dataclass(frozen=True)
class CurvePoint:
    """One plan on the size–loss curve. `nbytes` counts all experts' tensors; a loss that was not measured is None.

    `upper` is the bound that the promise rests on: the loss stays under it with the stated confidence.
    """

    nbytes: Count
    predicted_loss: NoOrNumber
    loss: NoOrNumber
    upper: NoOrNumber
    chosen: bool


@dataclass(frozen=True)
class Step:
    """A part of the work and its time in this run. `reused_seconds` is the time of the measurements that it found in
    the journal of an earlier run."""

    name: str
    seconds: float
    reused_seconds: float = 0.0


@dataclass(frozen=True)
class SweepCost:
    """The work of the sweep in expert rows (`flops`), beside the work of evaluating each probe in full (`naive_flops`).

    `free_probes` are of experts that saw no token. `measured_share` is below 1 in some reports of earlier versions,
    whose sweeps could stop early. `near_ties` counts outputs that hung on a tie that the order of summation decides.
    """

    probes: Count
    free_probes: Count
    measured_share: float
    flops: Count
    naive_flops: Count
    seconds: float
    near_ties: Count


@dataclass(frozen=True)
class DenseReport:
    """The matrices outside the experts, where some have widths: `bits` of each role that has one, that of most of its
    matrices, and `matrices` with other widths, by their canonical names. `nbytes` are the bytes of all tensors outside
    the experts, `source_nbytes` their bytes in the source. `alone` is the loss with the experts unquantized, on the
    text of `ConversionReport.calibration`; None if it was not measured. `purpose`: the bytes that plans saved, where
    these widths were chosen together with the experts'; the curve then counts these bytes. None for given widths."""

    quantizer: str
    group_size: int
    bits: Annotated[Mapping[str, int], Read(named(amount))]
    nbytes: Count
    source_nbytes: Annotated[int, Read(positive)]
    alone: LossEstimate | None
    matrices: Annotated[Mapping[str, int] | None, Read(maybe(named(amount)))] = None
    purpose: Annotated[str | None, Read(maybe(among(*PURPOSES)))] = None


@dataclass(frozen=True)
class RouteReport:
    """Routing without the model's routers: `kind` "hash" is a hash function of `width` features, each token going to
    the `top_k` experts that it names first. All figures of the report but those of ranking are with it. `alone` is its
    loss with unquantized experts, on the text of `ConversionReport.calibration`; `routers` the loss of the pack on
    held-out text with its own routers."""

    kind: str
    top_k: int
    width: int
    alone: LossEstimate
    routers: LossEstimate


@dataclass(frozen=True)
class TrainedReport:
    """Trained numbers: of `norms` the weights, of `matrices` the scales. `before` and `after`: the losses without and
    with them of the plan that was chosen without, of `nbytes`, on the text of `ConversionReport.calibration`."""

    norms: Count
    matrices: Count
    before: float
    after: float
    nbytes: Count


@dataclass(frozen=True)
class NeuronsReport:
    """The predictor that names the neurons to compute, where not all are computed: of rank `rank`, with thresholds that
    leave at most the share `missed` of the firing neurons' output unnamed on the text that it learnt from. On text that
    it did not learn from it names the shares `firing` of firing neurons, `neurons` of all, and `blocks` of blocks of
    `per_block` neurons, as means over layers. All figures of the report but those of ranking are with it. `alone` is
    its loss with unquantized experts, on the text of `ConversionReport.calibration`; `exact` the loss of the pack on
    held-out text with all neurons computed."""

    rank: int
    missed: float
    firing: float
    neurons: float
    blocks: float
    per_block: int
    alone: LossEstimate
    exact: LossEstimate


@dataclass(frozen=True)
class Standing:
    """The evidence behind the promise. `asked` is the wanted confidence. Plans were judged on `documents`, worth
    `of_one_size` documents of equal size, the result on `heldout_documents`; `needed` and `heldout_needed` are the
    numbers of documents that the confidence takes. `looks` counts the conversions, this one included, that were judged
    on this text with the same work directory. `notes` are lines for a person: the limits of the promise, with
    reasons."""

    asked: float | None
    documents: int
    of_one_size: float
    heldout_documents: int
    needed: int | None
    heldout_needed: int | None
    looks: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ReadPoint:
    """A measured plan: the bytes that a token reads, the loss, and the bound of the loss."""

    bytes: Number
    loss: Number
    upper: NoOrNumber


@dataclass(frozen=True)
class Residence:
    """Cache-aware routing that was fitted to a `share` of the experts in memory; `recent`, `sure` and `bonus` as in
    moert.pack.manifest.Preference. `exact_bytes` and `bytes` are the bytes that a token of the held-out text reads, all
    layers together, if memory holds the last `recent` experts of each layer: with exact routing, and with this one.
    Widths and routing together lose `calibration`, stay under `upper_bound`, and lose `heldout`. `alone` are the plans
    of widths that were tried with exact routing, `together` this pack's widths with routing, on the calibration
    text."""

    share: Annotated[float, Read(share)]
    recent: int
    sure: int
    bonus: tuple[float, ...]
    exact_bytes: Number
    bytes: Number
    calibration: LossEstimate
    upper_bound: NoOrNumber
    heldout: LossEstimate
    alone: tuple[ReadPoint, ...]
    together: tuple[ReadPoint, ...]


def _histogram(value: Any, where: str) -> dict[Width, int]:
    table = mapping(value, where)
    if not WIDTHS_BY_TEXT.keys() >= table.keys():
        known = ", ".join(WIDTHS_BY_TEXT)
        raise ManifestInvalid(f"{where} should count matrices of widths among {known}, found {brief(list(table))}")
    return {WIDTHS_BY_TEXT[width]: amount(count, where) for width, count in table.items()}


def _expert_bytes(value: Any, where: str) -> Mapping[str, int]:
    found = named(amount)(value, where)
    if "pack" not in found:
        raise ManifestInvalid(f"{where} lacks the field 'pack'")
    return found


def _sensitivity(value: Any, where: str) -> SensitivityTable:
    """Returns a sensitivity table; a figure that could not be measured becomes NaN. Raises ManifestInvalid."""
    table = mapping(value, where)
    for name in ("base_bits", "base", "costs", "coverage"):
        if name not in table:
            raise ManifestInvalid(f"{where} lacks the field {name!r}")
    base = {name: _measured(each, f"{where}: base") for name, each in mapping(table["base"], where).items()}
    if set(base) != set(Summary.__dataclass_fields__):
        raise ManifestInvalid(f"{where}: base should have {', '.join(Summary.__dataclass_fields__)}")
    costs = {_probe(name, where): _costs(each, where) for name, each in mapping(table["costs"], where).items()}
    coverage = {_expert(name, where): amount(each, where) for name, each in mapping(table["coverage"], where).items()}
    return SensitivityTable(amount(table["base_bits"], where), Summary(**base), costs, coverage)


def _measured(value: Any, where: str) -> float:
    return math.nan if value is None else number(value, where)


def _costs(value: Any, where: str) -> tuple[float, float, float]:
    if not isinstance(value, list) or len(value) != len(SIGNALS):
        raise ManifestInvalid(f"{where}: costs should be {len(SIGNALS)} numbers each, found {brief(value)}")
    metric, nll, kl = (_measured(each, where) for each in value)
    return metric, nll, kl


def _probe(name: str, where: str) -> Probe:
    match = _PROBE.fullmatch(name)
    widths = [] if match is None else [WIDTHS_BY_TEXT.get(width) for width in match[2].split("/")]
    known = tuple(width for width in widths if width is not None)
    if match is None or len(known) < len(widths) or len(known) > len(PROJECTIONS):
        raise ManifestInvalid(f"{where}: {name[:60]!r} names no expert and widths")
    return Probe(_expert(match[1], where), known)


def _expert(name: str, where: str) -> ExpertKey:
    match = _EXPERT.fullmatch(name)
    if match is None:
        raise ManifestInvalid(f"{where}: {name[:60]!r} names no expert")
    return ExpertKey("encoder" if match[1] == "E" else "decoder", int(match[2]), int(match[3]))


@dataclass(frozen=True)
class ConversionReport:
    """All figures of a conversion: stored in the pack as report.json and printed by `moeconv quantize`.

    `calibration` is measured on the part of the calibration text that took no part in ranking. `upper_bound` is the
    loss that the promise's `confidence` goes with; with a bound and no confidence the text was of too few documents,
    and bound and intervals hold for more text of the same documents. `evaluations` counts the assignments of widths
    that the conversion used, `evaluation_seconds` is the time of their measurement, now or in an earlier run; `seconds`
    is the time of this run from its start to the report. `fallbacks` are matrices for which the quantizer saw too
    little text.
    """

    model: Annotated[str, Read(text)]
    calibration_source: Annotated[str, Read(text)]
    heldout_source: Annotated[str | None, Read(maybe(text))]
    fields: Annotated[Mapping[str, str] | None, Read(maybe(named(text)))]
    seed: Count
    metric: Annotated[str, Read(text)]
    quantizer: str
    group_size: int
    allocation: str
    signal: str
    target: Target
    margin: float
    confidence: float | None
    calibration: LossEstimate | None
    upper_bound: NoOrNumber
    heldout: LossEstimate | None
    bits_histogram: Annotated[Mapping[Width, int], Read(_histogram)]
    effective_bits: float
    expert_bytes: Annotated[Mapping[str, int], Read(_expert_bytes)]
    context: int
    evaluations: Count
    evaluation_seconds: float
    seconds: float
    sensitivity: Annotated[SensitivityTable | None, Read(maybe(_sensitivity))]
    sweep_cost: SweepCost | None
    fallbacks: tuple[str, ...]
    curve: tuple[CurvePoint, ...]
    steps: tuple[Step, ...]
    samples: Annotated[tuple[Mapping[str, str], ...], Read(listed(named(text)))]
    dense: DenseReport | None = None
    standing: Standing | None = None
    residences: tuple[Residence, ...] = ()
    route: RouteReport | None = None
    neurons: NeuronsReport | None = None
    scales: TrainedReport | None = None


def to_json(artifact: Any) -> dict[str, Any]:
    """Returns a dataclass or a dict as plain JSON values; expert keys become text like D03/E005."""
    values = artifact if isinstance(artifact, dict) else asdict(artifact)
    return {"schema": SCHEMA, **_plain(values)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, (ExpertKey, Probe)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no word for it
    return str(value) if isinstance(value, (ExpertKey, Probe)) else value
