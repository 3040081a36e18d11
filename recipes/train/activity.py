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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeconv.measure.firing import Reads, heard
from moeconv.measure.scorers import Subject
from moeconv.progress import Bar
from moeconv.source.experts import Call, ExpertCalls
from moert.pack.model_spec import LayerKey
from recipes.train import loop, report, train

TOP = (0.1, 0.2, 0.5)  # of a layer's neurons
CONTEXT = 512  # tokens in a window of running text, at most


# Firing neurons of a model's experts: how many for a token, how many of them lately as well, how unevenly.
# A neuron fires where its input to the down matrix is not zero; only some activations give exact zeros. Neurons of
# different experts are different neurons.

LATELY = (1, 2, 5, 10, 20)  # tokens back
BLOCKS = (2, 4, 8, 16, 32)  # neurons side by side
_NEVER = -(1 << 40)

F64, I64 = npt.NDArray[np.float64], npt.NDArray[np.int64]


@dataclass(frozen=True)
class Activity:
    """Firings of one layer's experts, counted over `tokens`: `asked` [experts] are the rows of each expert, `fired`
    [experts, d_ff] the firings of each neuron, `lately` [LATELY] the firings whose neuron had also fired within that
    many tokens before, `touched` [BLOCKS] the blocks of that many neurons in which one fired, of `blocks` [BLOCKS].
    Tokens before go on from sample to sample, as in a cache."""

    tokens: int
    asked: I64
    fired: I64
    lately: I64
    touched: I64
    blocks: I64

    @property
    def share(self) -> float:
        """The share of an expert's neurons that fire for a token, on average. 0..1; nan if no token went to an
        expert."""
        rows = int(self.asked.sum()) * self.fired.shape[1]
        return int(self.fired.sum()) / rows if rows else float("nan")

    @property
    def by_expert(self) -> F64:
        """`share` for each expert [experts]; nan for experts that no token went to."""
        rows = np.where(self.asked > 0, self.asked * self.fired.shape[1], np.nan)
        return np.asarray(self.fired.sum(axis=1) / rows, dtype=np.float64)

    @property
    def again(self) -> F64:
        """The share of firings whose neuron had also fired within LATELY tokens before. [LATELY], 0..1"""
        return np.asarray(self.lately / max(1, int(self.fired.sum())), dtype=np.float64)

    @property
    def block_share(self) -> F64:
        """The share of blocks of BLOCKS neurons in which a neuron fires for a token. [BLOCKS], 0..1"""
        return np.asarray(self.touched / np.maximum(1, self.blocks), dtype=np.float64)

    def covered(self, most: float) -> float:
        """Returns the share of all firings that belong to the `most` frequent (0..1) of the layer's neurons. 0..1"""
        counts = np.sort(self.fired, axis=None)[::-1]
        return float(counts[: round(most * len(counts))].sum() / max(1, int(counts.sum())))


def activity_of(subject: Subject, scorer: Reads, bar: Bar) -> dict[LayerKey, Activity] | None:
    """Returns the firings in each layer with experts while a model in memory reads a scorer's text, and writes its
    outputs if it has an encoder; None for experts whose activation has no exact zeros. The bar counts samples."""
    if not subject.spec.moe.ffn.act.exact_zeros:
        return None
    counts = {place: _Counts(subject.calls, place) for place in subject.spec.moe_layers()}
    heard(subject, scorer, lambda place, call: counts[place].see(call), bar)
    return {place: count.activity() for place, count in counts.items()}


class _Counts:
    """Counters of one layer's firings, call by call."""

    def __init__(self, calls: ExpertCalls, place: LayerKey) -> None:
        shape = calls.spec.moe.n, calls.spec.moe.ffn.d_ff
        self.calls, self.place, self.tokens = calls, place, 0
        self.asked, self.fired = np.zeros(shape[0], np.int64), np.zeros(shape, np.int64)
        self.last = torch.full(shape, _NEVER)  # the token for which each neuron fired last
        self.lately = np.zeros(len(LATELY), np.int64)
        self.touched, self.blocks = np.zeros((2, len(BLOCKS)), np.int64)

    def see(self, call: Call) -> None:
        """Counts the firings of one call: tokens with experts, sample after sample."""
        chosen = call.chosen
        there = (chosen >= 0).any(dim=1)
        times = self.tokens + there.cumsum(0) - 1
        for expert in set(chosen[there].flatten().tolist()):
            if expert >= 0:
                rows = (chosen == expert).any(dim=1)
                self._fire(expert, self.calls.inner(self.place.expert(expert), call.x[rows]) != 0, times[rows])
        self.tokens += int(there.sum())

    def _fire(self, expert: int, on: Tensor, times: Tensor) -> None:
        """Counts the firings of an expert's rows: `on` [rows, d_ff], `times` [rows] ascending."""
        self.asked[expert] += len(on)
        self.fired[expert] += on.sum(0).numpy()
        seen = torch.cat([self.last[expert][None], torch.where(on, times[:, None], _NEVER)]).cummax(0).values
        ages = (times[:, None] - seen[:-1])[on]
        self.last[expert] = seen[-1]
        self.lately += [int((ages <= most).sum()) for most in LATELY]
        for place, size in enumerate(BLOCKS):
            padded = torch.nn.functional.pad(on, (0, -on.shape[1] % size))
            blocks = padded.view(len(on), -1, size).any(-1)
            self.touched[place] += int(blocks.sum())
            self.blocks[place] += blocks.numel()

    def activity(self) -> Activity:
        return Activity(self.tokens, self.asked, self.fired, self.lately, self.touched, self.blocks)


# The figures of one model as a table and a report.


def figures(activity: Activity) -> dict[str, Any]:
    """Of one layer, as JSON values."""
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
