"""The end of a conversion: its report, and the pack with the report in it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import moeconv
from moeconv import artifacts
from moeconv.artifacts import (
    REPORT,
    Assignment,
    ConversionReport,
    CurvePoint,
    DenseReport,
    NeuronsReport,
    Residence,
    RouteReport,
    SensitivityTable,
    Standing,
    Step,
    SweepCost,
    TrainedReport,
)
from moeconv.calibration import Splits
from moeconv.conversion.measuring import Account
from moeconv.conversion.room import check_room
from moeconv.conversion.settings import Settings, files_of
from moeconv.errors import ConversionError, SettingsError
from moeconv.measure.trial import Evaluation
from moeconv.order import NeuronOrder
from moeconv.packing.emit import Label, Profile, emit
from moeconv.plan.outlook import expert_files, quantization_of, table_numbers
from moeconv.plan.problem import Storage
from moeconv.plan.search import assigned_bytes, uniform_bytes, weights_of
from moeconv.quantizers.coder import DenseCoder, ExpertCoder
from moeconv.report.writer import read_report
from moeconv.source.outline import CONFIG
from moeconv.writer import choose_page_bytes, partial_of
from moert.pack.codec import Width
from moert.pack.errors import PackError
from moert.pack.files import placed
from moert.pack.learnt import HASH, PREDICTOR
from moert.pack.manifest import LossEstimate, Manifest, Preference, Quality
from moert.pack.model_spec import ExpertKey, ModelSpec
from moert.pack.paths import PATHS, TRACE
from moert.pack.reader import Pack, is_pack, strangers

# A pack that stands where a new one goes: without --overwrite it is replaced only if it is an unchanged pack of the
# same model.


def check_replaced(settings: Settings, source: Path) -> str | None:
    """Returns the note that a pack at `out` is replaced; None where no pack stands there. `source`: the folder of the
    model. Raises SettingsError for a pack that may not be replaced."""
    out = settings.out
    if not is_pack(out):
        return None
    if not settings.overwrite and (reason := _lost(out, source, placed(settings.model).name)) is not None:
        raise SettingsError(f"{out} {reason}, and would be lost: choose another --out, or give --overwrite")
    return f"note: {out} is a pack already: the new one takes its place at the end"


def _lost(out: Path, source: Path, name: str) -> str | None:
    """Returns the reason why replacing a pack would lose something: a foreign file, another model; None without one."""
    if others := strangers(out):
        return f"holds {others[0]}, which no conversion wrote"
    try:
        pack = Pack.open(out)
    except PackError as error:
        return f"is a pack that can't be read ({error})"
    config = pack.manifest.files.get(CONFIG)
    try:
        called = read_report(pack).model
    except (ConversionError, PackError):
        called = name
    same = config is not None and config.sha256 == hashlib.sha256((source / CONFIG).read_bytes()).hexdigest()
    return None if same and called == name else f"is a pack of another model{f' ({called})' if called != name else ''}"


PROFILE_PATHS = "profile-paths"
ADDED_BY: Mapping[str, str] = {
    PATHS: PROFILE_PATHS, TRACE: PROFILE_PATHS, HASH: "train-hash", PREDICTOR: "train-neurons",
}  # fmt: skip
"""File that is added to a finished pack → the command that adds it."""


@dataclass(frozen=True)
class Outcome:
    """The decisions and measurements of a conversion; only widths where nothing was measured."""

    widths: Assignment
    metric: str = ""
    calibration: LossEstimate | None = None
    upper_bound: float | None = None
    heldout: LossEstimate | None = None
    splits: Splits | None = None
    table: SensitivityTable | None = None
    sweep_cost: SweepCost | None = None
    curve: tuple[CurvePoint, ...] = ()
    steps: tuple[Step, ...] = ()
    samples: tuple[Mapping[str, str], ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    dense_alone: LossEstimate | None = None
    confidence: float | None = None
    standing: Standing | None = None
    preferences: tuple[Preference, ...] = ()
    residences: tuple[Residence, ...] = ()
    learnt: Mapping[str, bytes] = field(default_factory=dict)
    taught: RouteReport | NeuronsReport | None = None
    order: NeuronOrder | None = None
    scales: TrainedReport | None = None

    def importance(self) -> dict[ExpertKey, float] | None:
        """Returns the importance of each expert for the manifest: its sensitivity at the narrowest width that was
        probed for whole experts. None without a sweep, or where the unquantized model scores nothing on the ranking
        text."""
        if self.table is None:
            return None
        bits = self.table.probed_bits
        found = {} if bits is None else self.table.importance(bits)
        return {key: cost for key, cost in found.items() if math.isfinite(cost)} or None


def deliver(
    settings: Settings,
    coder: ExpertCoder,
    dense: DenseCoder,
    outcome: Outcome,
    account: Account,
    lost: Callable[[Sequence[str]], None],
) -> tuple[Manifest, ConversionReport]:
    """Writes the pack; returns its manifest and the report. Raises CheckpointError, WeightsUnusable or a PackError.

    Files that the commands of `ADDED_BY` added to a pack at `out` are kept where the new pack has the same weights;
    else `lost` is called at the end with the commands that had added the lost files.
    """
    profile = _profile_in(settings.out, [name for name in ADDED_BY if name not in outcome.learnt])
    report = replace(
        _report(settings, coder, outcome, account.seconds()),
        dense=_dense_report(dense, outcome.dense_alone, settings.purpose),
    )
    document = artifacts.to_json(report)
    for name in ("dense", "standing", "residences", "route", "neurons", "scales"):
        if not document[name]:
            del document[name]
    quality = None
    if outcome.splits is not None:
        target = settings.target.value if settings.target.kind == "loss" else None
        quality = Quality(
            outcome.metric, target, outcome.calibration, outcome.heldout,
            outcome.splits.digest("calibration"), outcome.splits.digest("heldout"),
        )  # fmt: skip
    body = (json.dumps(document, indent=1) + "\n").encode()
    files = {REPORT: body, **outcome.learnt}
    preferences = tuple(sorted(outcome.preferences, key=lambda one: one.share))
    label = Label(
        f"moeconv {moeconv.__version__}{'' if (coded := coder.checkpoint.coded_as) is None else f' of GGUF ({coded})'}",
        outcome.importance() or {},
        quality,
        files,
        profile,
        preferences,
    )
    needed_bytes = _needed_bytes(coder, outcome.widths, dense, settings.laid_out)
    check_room(settings.out, needed_bytes, "--out", partial_of(settings.out))
    with account.progress("writing", len(outcome.widths), "expert") as bar:
        manifest = emit(
            coder, outcome.widths, settings.out, seed=settings.seed, label=label, dense=dense, bar=bar,
            files=files_of(settings.laid_out), order=outcome.order,
        )  # fmt: skip
    if profile is not None and (gone := [name for name in profile.files if name not in manifest.files]):
        lost(list(dict.fromkeys(ADDED_BY[name] for name in gone)))
    return manifest, report


def _needed_bytes(coder: ExpertCoder, widths: Assignment, dense: DenseCoder, layout: str) -> int:
    """Returns the most bytes that a pack takes on the disk; the experts of one layer lie there twice while they are
    written into one file."""
    spec = coder.checkpoint.spec
    if coder.neurons is None:
        experts = _expert_bytes(spec, widths, _storage(coder))["pack"] + len(widths) * choose_page_bytes(spec)
    else:
        quantization, names = quantization_of(_storage(coder), None), spec.moe.ffn.projections
        files = expert_files(spec, quantization, lambda key: dict(zip(names, widths[key], strict=True)))
        experts = sum(map(sum, files.values()))
    twice = 2 * experts // len(spec.moe_layers()) if files_of(layout) == "layer" else 0
    return experts + twice + dense.backbone_bytes()[0] + 2 * table_numbers(spec)


def _storage(coder: ExpertCoder) -> Storage:
    return Storage(coder.quantizer.group_size, coder.mxfp4, coder.neurons, coder.quantizer.codes)


def _profile_in(root: Path, names: Sequence[str]) -> Profile | None:
    """Returns the files among `names` that a pack has; None without a pack that can be read, or without these files."""
    if not is_pack(root):
        return None
    try:
        pack = Pack.open(root)
        bodies = {name: pack.read_file(name) for name in names if name in pack.manifest.files}
    except PackError:
        return None
    return Profile(pack.manifest, bodies) if bodies else None


def _report(settings: Settings, coder: ExpertCoder, outcome: Outcome, seconds: float) -> ConversionReport:
    spec, quantizer = coder.checkpoint.spec, coder.quantizer
    sizes = _expert_bytes(spec, outcome.widths, _storage(coder))
    counts: dict[Width, int] = {}
    for bits in outcome.widths.values():
        for width in bits:
            counts[width] = counts.get(width, 0) + 1
    return ConversionReport(
        model=placed(settings.model).name,
        calibration_source=settings.calib or "",
        heldout_source=settings.heldout,
        fields=settings.fields,
        seed=settings.seed,
        metric=outcome.metric,
        quantizer=quantizer.name,
        group_size=quantizer.group_size,
        allocation=settings.allocation,
        signal=settings.signal,
        target=settings.target,
        margin=settings.margin,
        confidence=outcome.confidence,
        calibration=outcome.calibration,
        upper_bound=outcome.upper_bound,
        heldout=outcome.heldout,
        bits_histogram=dict(sorted(counts.items())),
        effective_bits=8 * sizes["pack"] / weights_of(spec),
        expert_bytes=sizes,
        context=settings.context,
        evaluations=len(outcome.evaluations),
        evaluation_seconds=round(sum(record.seconds for record in outcome.evaluations), 2),
        seconds=round(seconds, 2),
        sensitivity=outcome.table,
        sweep_cost=outcome.sweep_cost,
        fallbacks=tuple(f"{key} {projection}" for key, projection in coder.fallbacks),
        curve=outcome.curve,
        steps=outcome.steps,
        samples=outcome.samples,
        standing=outcome.standing,
        residences=outcome.residences,
        route=outcome.taught if isinstance(outcome.taught, RouteReport) else None,
        neurons=outcome.taught if isinstance(outcome.taught, NeuronsReport) else None,
        scales=outcome.scales,
    )


def _dense_report(coder: DenseCoder, alone: LossEstimate | None, purpose: str) -> DenseReport | None:
    if coder.dense is None:
        return None
    stored, source = coder.backbone_bytes()
    dense = coder.dense
    return DenseReport(
        dense.quantizer, dense.group_size, dense.bits, stored, source, alone, dense.matrices,
        purpose if coder.chooses else None,
    )  # fmt: skip


def _expert_bytes(spec: ModelSpec, widths: Assignment, storage: Storage) -> dict[str, int]:
    """Returns the bytes of all experts' tensors, scales counted: as planned, and uniform per channel at 4, 8 and 16
    bits."""
    uniform = {name: uniform_bytes(spec, bits) for name, bits in (("int4", 4), ("int8", 8), ("fp16", 16))}
    return {"pack": assigned_bytes(spec, widths, storage), **uniform}
