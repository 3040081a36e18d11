"""One profiling run from start to end: calibration text through the pack, transition tables into it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from moeconv.calibration import load_splits
from moeconv.errors import SettingsError
from moeconv.metrics import METRICS, default_metric
from moeconv.packed import PackedModel
from moeconv.paths import PathFigures, Routes, figures, routes_of
from moeconv.scorers.build import build_scorer, check_fit
from moert.pack.paths import PATHS, build
from moert.pack.reader import Pack
from moert.pack.writer import add_to_pack


def profile_paths(
    pack: Pack,
    *,
    calib: str | None,
    heldout: str | None,
    seed: int,
    samples: int | None,
    context: int,
    say: Callable[[str], None],
) -> tuple[PathFigures, int]:
    """Adds paths.safetensors to the pack; returns the figures and the bytes of the tables.

    Without `calib`, the text that the pack was converted with. Raises ConversionError or PackError.
    """
    if calib is None:
        calib, heldout, seed = _recorded_source(pack)
    splits = load_splits(calib, heldout, seed=seed)
    metric = METRICS[default_metric(splits.seq2seq)]
    check_fit(pack.manifest.model, splits, metric)
    packed = PackedModel.open(pack)

    def routes(split: str) -> Routes:
        scorer = build_scorer(
            packed, pack.root / "tokenizer.json", getattr(splits, split), metric,
            limit=samples, context=context, max_new_tokens=None,
        )  # fmt: skip
        say(f"routing of {scorer.n_samples} samples of the {split} text")
        return routes_of(packed, scorer)

    seen = routes("calibration")
    table = build(packed.spec.moe.num_experts, seen)
    found = figures(table, seen, routes("heldout"))
    body = table.to_bytes()
    add_to_pack(pack.root, pack.manifest, PATHS, body)
    return found, len(body)


def _recorded_source(pack: Pack) -> tuple[str, str | None, int]:
    try:
        report = json.loads(pack.read_file("report.json"))
    except KeyError:
        report = {}
    if not report.get("calibration_source"):
        raise SettingsError("--calib is missing: the pack does not say what text it was converted with")
    source = report["calibration_source"]
    if Path(source).suffix and not Path(source).is_file():
        raise SettingsError(f"the pack was converted with {source}, which is not there: give --calib")
    return source, report["heldout_source"], report["seed"]
