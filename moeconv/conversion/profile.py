"""One profiling run from start to end: calibration text through the pack, transition tables and a trace into it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from moeconv.conversion.limits import context_note, samples_note
from moeconv.conversion.pack_text import text_of
from moeconv.conversion.room import check_least, room_in, whole_bytes, within
from moeconv.conversion.settings import check_counts
from moeconv.errors import SettingsError
from moeconv.measure.metrics import default_metric, find_metric
from moeconv.measure.passes import PASSAGES
from moeconv.measure.scorers import Routed
from moeconv.measure.scorers.build import Extent, build_scorer, check_fit, load_tokenizer, volume
from moeconv.packing.layers import PackedLayers
from moeconv.packing.packed import PackedModel, described
from moeconv.packing.paths import LEAST_BYTES, MOST_SHARE, PathFigures, bounded, figures, routes_of, trace_of
from moeconv.progress import Progress, unseen
from moeconv.report.units import size
from moeconv.source.archs.errors import transformers_model
from moeconv.source.skeleton import by_layers
from moert.experts.policy.selection import with_eviction
from moert.pack.files import beside
from moert.pack.paths import PATHS, TRACE, build
from moert.pack.reader import Pack
from moert.pack.tensors import TOKENIZER
from moert.pack.writer import add_files, check_addable


def profile_paths(
    pack: Pack,
    *,
    calib: str | None,
    heldout: str | None,
    seed: int | None,
    samples: int | None,
    context: int | None,
    say: Callable[[str], None],
    show: Progress = unseen,
    memory_bytes: int | None = None,
) -> tuple[PathFigures, int]:
    """Adds paths.safetensors and trace.safetensors to the pack; returns the figures and the bytes of both.

    Without `calib`, the text that the pack was converted with. A model that does not fit `memory_bytes`, or what is
    free, is run layer by layer. Raises ConversionError or PackError.
    """
    check_counts(samples=samples, context=context, seed=seed)
    check_addable(pack.root, PATHS, TRACE)
    source = text_of(pack, calib, heldout, seed)
    splits = source.splits
    metric = find_metric(default_metric(splits.seq2seq, splits.choices))
    check_fit(pack.manifest.model, splits, metric)
    tokenizer = load_tokenizer(pack.file(TOKENIZER))
    packed = _subject(pack, show, memory_bytes)
    extent = Extent(samples, context or source.context, None)
    if note := context_note(context, packed.spec):
        say(note)

    named = {"calibration": "calibration", "heldout": "held-out"}

    def routed(split: str) -> list[Routed]:
        texts = getattr(splits, split)
        there = volume(packed.spec, tokenizer, texts, extent).samples
        if note := samples_note("--samples", samples, there, f"samples of the {named[split]} text"):
            say(note)
        scorer = build_scorer(packed, tokenizer, texts, metric, extent)
        say(f"routing of {scorer.n_samples} samples of the {named[split]} text")
        with transformers_model(pack.root):
            return list(scorer.routes())

    num_experts = packed.spec.moe.n
    parts = routed("calibration")
    seen = routes_of(parts)
    kept = bounded(build(num_experts, seen), pack.manifest.nbytes(without=(PATHS, TRACE)))
    if kept.least > 1:
        say(
            f"tables take at most {MOST_SHARE:.0%} of a pack, or {size(LEAST_BYTES)}: what followed after an expert or "
            f"two less than {kept.least} times is left out, {kept.left_out:.1%} of what was counted"
        )
    table = kept.table
    found = figures(table, seen, routes_of(routed("heldout")))
    nbytes = {entry.key: entry.file_bytes for entry in pack.manifest.experts}
    trace = with_eviction(trace_of(parts, num_experts), pack.manifest.model, nbytes)
    chosen = ", ".join(f"{name} at {percent}%" for percent, name in trace.eviction.items())
    say(f"eviction that finds most experts in memory, by the room for them: {chosen}")
    bodies = {PATHS: table.to_bytes(), TRACE: trace.to_bytes()}
    add_files(pack.root, pack.manifest, bodies)
    if not _others(_passes(pack)):
        shutil.rmtree(_passes(pack), ignore_errors=True)
    return found, sum(map(len, bodies.values()))


def _subject(pack: Pack, show: Progress, memory_bytes: int | None) -> PackedModel | PackedLayers:
    spec, limit = pack.manifest.model, within(memory_bytes)
    if limit is None or whole_bytes(spec) <= limit or not by_layers(described(pack)[0], spec):
        return PackedModel.open(pack)
    check_least(limit, spec)
    if others := _others(_passes(pack)):
        raise SettingsError(f"{_passes(pack)} holds {others[0]}, which no run has left: move it away")
    return PackedLayers(pack, room_in(limit, spec, _passes(pack)), show)


def _others(folder: Path) -> list[str]:
    """Returns the files and folders in the folder of passes that no run of them has left."""
    return sorted({path.name for path in folder.iterdir()} - {*PASSAGES}) if folder.is_dir() else []


def _passes(pack: Pack) -> Path:
    """Where what goes from layer to layer is kept until a run has ended well: one that was killed goes on there."""
    return beside(pack.root, "passes")
