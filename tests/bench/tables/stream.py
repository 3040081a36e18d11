"""`make bench-stream`: imitated small devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.bench.result import Result
from tests.bench.tables import Line, Part

DEVICES = {"board": "100 MB/s", "ssd": "500 MB/s", "nvme": "unthrottled"}
SHARES = (25, 50, 75)
BASELINES = ("IO-EXP", "IO-QEXP", "STI-like")
LARGE, TRAINED = "olmoe-shaped", ("g2p", "wiki")


def shaped(result: Result) -> Sequence[Part]:
    """The model of OLMoE's shape, and llama.cpp beside it."""
    return [table([LARGE], result)]


def trained(result: Result) -> Sequence[Part]:
    """The two trained models."""
    return [table(TRAINED, result)]


def table(models: Sequence[str], result: Result) -> Sequence[Line]:
    baselines = [f"× {baseline}" for baseline in BASELINES]
    named = ("model",) if len(models) > 1 else ()
    head = (*named, "drive", "room for experts", "tokens/s", *baselines, "hits", "share of the bound",
            "with its own reads")  # fmt: skip
    return [head, *lines(models, result)]


def lines(models: Sequence[str], result: Result) -> Iterator[Line]:
    for model in models:
        named = (model,) if len(models) > 1 else ()
        for device, drive in DEVICES.items():
            for share in SHARES:
                mine = f"{model}, {device}: moert {share}%"
                ratios = [f"{{{mine} to {baseline}}}" for baseline in BASELINES]
                yield (
                    *named, drive, f"{share}%", f"{{{mine}: decode}}", *ratios, f"{{{mine}: hits|%}}",
                    f"{{{mine}: share of the bound|%}}", f"{{{mine}: share of the bound with what it read|%}}",
                )  # fmt: skip
