"""Which neurons of a reference model's experts fire: ``python -m recipes.train.activity NAME``.

Prints for each layer, over held-out text, how many of an expert's neurons fire for a token, how many of those had
fired within the last few tokens as well, how many of all firings the most frequent neurons cover, and how many blocks
of neurons a token needs something of; writes build/report/activity_NAME.json. Experts whose activation has no exact
zeros have nothing to leave out, which is said.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from recipes.train import loop, report, train

TOP = (0.1, 0.2, 0.5)  # of a layer's neurons
CONTEXT = 512  # tokens in a window of running text, at most


def figures(activity: Any) -> dict[str, Any]:
    """Of one layer (moeconv.measure.firing.Activity), as JSON values."""
    from moeconv.measure.firing import BLOCKS, LATELY

    known = activity.by_expert[activity.asked > 0]
    return {
        "tokens": activity.tokens,
        "firing": activity.share,
        "least of an expert": float(known.min()),
        "most of an expert": float(known.max()),
        **{f"fired within {n}": float(share) for n, share in zip(LATELY, activity.again, strict=True)},
        **{f"of the most frequent {most:.0%}": activity.covered(most) for most in TOP},
        **{f"blocks of {n}": float(share) for n, share in zip(BLOCKS, activity.block_share, strict=True)},
    }


def table_of(layers: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of name and value: each figure's mean over the layers, then the share that fires in each layer."""
    names = [name for name in next(iter(layers.values())) if name != "tokens"]
    rows = [{"name": name, "value": float(np.mean([found[name] for found in layers.values()]))} for name in names]
    return rows + [{"name": f"{layer} firing", "value": found["firing"]} for layer, found in layers.items()]


def measured(folder: Path, rows: list[dict[str, str]], limit: int) -> dict[str, dict[str, Any]] | None:
    """Figures of each layer of a checkpoint, over at most ``limit`` rows or windows spread over the text."""
    from moeconv.calibration import Sample
    from moeconv.measure.firing import activity_of
    from moeconv.measure.metrics import find_metric
    from moeconv.measure.scoring import Extent, build_scorer, load_tokenizer
    from moeconv.measure.trial import LoadedModel
    from moeconv.progress import unseen
    from moeconv.source.checkpoint import TOKENIZER, Checkpoint

    loaded = LoadedModel(Checkpoint.open(folder))
    samples = [Sample(row.get("text", row.get("input", "")), row.get("target", "")) for row in rows]
    extent = Extent(limit, CONTEXT, None)
    scorer = build_scorer(loaded, load_tokenizer(folder / TOKENIZER), samples, find_metric("perplexity"), extent)
    with unseen("", limit) as bar:
        found = activity_of(loaded, scorer, bar)
    if found is None:
        return None
    return {f"{place.stack} {place.layer}": figures(activity) for place, activity in found.items()}


def main(argv: list[str] | None = None) -> int:
    """Measure one model, print the table and write the report."""
    parser = argparse.ArgumentParser(description="Which neurons of a trained reference model fire.")
    parser.add_argument("name", choices=sorted(train.PLANS))
    parser.add_argument("--model", type=Path, help="another checkpoint's folder, on the same text")
    parser.add_argument("--rows", type=int, default=200, help="held-out rows, or windows of running text")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    folder = args.model or report.model_folder(args.name)
    layers = measured(folder, train.rows_of(train.PLANS[args.name].data, "heldout"), args.rows)
    if layers is None:
        table = [{"name": "firing", "value": "all: its activation has no exact zeros, there is nothing to leave out"}]
    else:
        table = table_of(layers)
    report.publish(f"activity_{args.name}", table, {"layers": layers}, loop.ROOT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
