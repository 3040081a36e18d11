"""What the pictures of `moert bench --plot` show, as numbers; each is also printed as a table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moert.bench.bound import furthest_first
from moert.bench.choices import Choices, Shares
from moert.bench.measure import BenchRun
from moert.bench.summary import percentile
from moert.experts.names import succession_of
from moert.experts.policy import EVICTION
from moert.experts.replay import replay
from moert.pack.messages import in_one_line
from moert.pack.model_spec import StackName
from moert.stats import size

Points = Sequence[tuple[str, float]]
Kind = Literal["lines", "counts", "bars", "shares"]

CACHE_SHARES = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9)
_LATENCY_STEPS = (10, 25, 50, 75, 90, 95, 100)


@dataclass(frozen=True)
class Figure:
    """Series of (place, value), all with the same places where they have any; `places` and `values` say what they are.

    Lines have percentages for places, on the x axis, or whole numbers ("counts"); bars have names. Where places are
    shares of all values ("shares"), values lie along the x axis and shares grow upwards. `caption`: what is seen, of
    which packs, on which machine.
    """

    name: str
    title: str
    places: str
    values: str
    kind: Kind
    series: Mapping[str, Points]
    caption: str = ""

    def table(self) -> str:
        places = list(dict.fromkeys(place for points in self.series.values() for place, _ in points))
        values = {name: dict(points) for name, points in self.series.items()}
        rows = [(self.places, *values)]
        for place in places:
            rows.append((place, *(f"{one[place]:.4g}" if place in one else "" for one in values.values())))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        return "\n".join([f"{self.title} ({self.values})", *lines, *filter(None, [self.caption])])


def token_ms(measured: BenchRun) -> float:
    """Mean time of a token after the first, or of the first where there is no other."""
    later = [seconds for sample in measured.samples for seconds in sample.later_s]
    times = later or [sample.first_s for sample in measured.samples]
    return 1000 * sum(times) / len(times)


def label_of(measured: BenchRun) -> str:
    return measured.pack.root.resolve().name


def pack_of(measured: BenchRun) -> str:
    """The pack's name, size and bits, for captions."""
    bits = measured.pack.manifest.effective_bits()
    return f"{label_of(measured)}: {size(measured.expert_bytes)} of experts at {bits:.2f} bits"


def _packs_of(measured: Sequence[BenchRun]) -> str:
    return "; ".join(map(pack_of, measured))


def _work_of(measured: BenchRun) -> str:
    count = len(measured.samples)
    return f"{count} prompt{'s' * (count != 1)}, {measured.settings.new_tokens} tokens written after each"


def target_of(measured: BenchRun) -> str:
    """The loss that the conversion aimed at, or where it aimed at none, the bits."""
    manifest = measured.pack.manifest
    if manifest.quality is not None and manifest.quality.target_loss is not None:
        return f"{100 * manifest.quality.target_loss:g}% loss"
    return f"{manifest.effective_bits():.2f} bits"


def latencies(measured: Sequence[BenchRun]) -> Figure:
    """How long samples take (EdgeMoE Fig. 12)."""
    series = {}
    for each in measured:
        seconds = [sample.total_s for sample in each.samples]
        series[label_of(each)] = [(f"{step}%", percentile(seconds, step)) for step in _LATENCY_STEPS]
    seen = f"Share of samples that were done after so long, prompt and all ({_work_of(measured[0])})"
    caption = f"{seen}. {_packs_of(measured)}."
    return Figure("latencies", "Time of a sample", "share of samples within", "s", "shares", series, caption)


def hit_rates(measured: BenchRun) -> Figure:
    """Hit rates of every policy, and of Belady's rule, which knows the future, over cache sizes (EdgeMoE Fig. 13), by
    replaying what the run demanded."""
    order = measured.pack.manifest.model.moe_layers()
    known = succession_of(measured.pack, lambda note: print(in_one_line(note), file=sys.stderr))
    largest, series = max(measured.nbytes.values()), dict[str, list[tuple[str, float]]]()
    for share in CACHE_SHARES:
        room, place = max(largest, int(share * measured.expert_bytes)), f"{100 * share:g}%"
        for name, policy in EVICTION.items():
            found = replay(measured.trace, measured.nbytes, room, policy(order, known))
            series.setdefault(name, []).append((place, 100 * found.hit_rate))
        best = furthest_first(measured.trace, measured.nbytes, room)
        series.setdefault("furthest-first", []).append((place, 100 * best.hit_rate))
    label = label_of(measured)
    caption = (
        "Demands that found their expert in memory, replayed from one run, nothing in memory at first and nothing read "
        f"ahead ({_work_of(measured)}); furthest-first knows the future. {pack_of(measured)}."
    )
    name, title = f"hit-rates-{label}", f"Hit rate, {label}"
    return Figure(name, title, "cache, of the experts' bytes", "% of demands", "lines", series, caption)


def budgets(measured: Sequence[BenchRun], runs: Mapping[str, Points]) -> Figure:
    """Time of a token over cache sizes (EdgeMoE Fig. 14); `runs`: pack → (share, ms)."""
    seen = f"Mean time of a token after the first, by how much room experts have ({_work_of(measured[0])})"
    caption = f"{seen}. {_packs_of(measured)}."
    return Figure("budgets", "Time of a token", "cache, of the experts' bytes", "ms", "lines", runs, caption)


def targets(measured: Sequence[BenchRun]) -> Figure:
    """Time of a token over what the conversions aimed at (EdgeMoE Fig. 15)."""
    points = [(f"{target_of(each)} ({label_of(each)})", token_ms(each)) for each in measured]
    seen = f"Mean time of a token after the first, by what the conversion aimed at ({_work_of(measured[0])})"
    caption = f"{seen}. {_packs_of(measured)}."
    return Figure("targets", "Time of a token", "target", "ms", "bars", {"time": points}, caption)


def ablation(measured: Sequence[BenchRun], runs: Mapping[str, Points]) -> Figure:
    """Time of a token as parts of the engine are added one by one (EdgeMoE Fig. 16); `runs`: pack → (step, ms)."""
    seen = f"Mean time of a token after the first, each step with all that comes before it ({_work_of(measured[0])})"
    caption = f"{seen}. {_packs_of(measured)}."
    return Figure("ablation", "Time of a token, part by part", "step", "ms", "bars", runs, caption)


def idle_experts(measured: Sequence[BenchRun], found: Sequence[Choices]) -> Figure:
    """Experts that an input leaves idle, over its length (SiDA Fig. 4)."""
    series = _by_stack(measured, [each.idle for each in found])
    seen = (
        "Experts of a layer that no token of an input goes to, by how many tokens of it are read (prompts; by the "
        "decoder of an encoder-decoder, what it wrote); mean over layers and all inputs that are so long"
    )
    title, caption = "Experts that stay idle", f"{seen}. {_packs_of(measured)}."
    return Figure("idle-experts", title, "tokens read", "% of a layer's experts", "counts", series, caption)


def dependence(measured: Sequence[BenchRun], found: Sequence[Choices]) -> Figure | None:
    """How far a token's experts depend on other tokens (SiDA Fig. 7); None where no token has others."""
    series = _by_stack(measured, [each.same for each in found])
    if not series:
        return None
    seen = (
        "Experts that a token still goes to when all tokens at this distance and beyond are random ones, in a decoder "
        "of those before it; mean over layers and all tokens that have others so far away. At 1 all others are random"
    )
    title, caption = "Experts that stay when tokens further away change", f"{seen}. {_packs_of(measured)}."
    place = "distance from which on tokens are random"
    return Figure("dependence", title, place, "% of a token's experts", "counts", series, caption)


def _by_stack(measured: Sequence[BenchRun], found: Sequence[Mapping[StackName, Shares]]) -> dict[str, Points]:
    return {
        f"{label_of(each)}, {name}": [(str(tokens), share) for tokens, share in shares.items()]
        for each, stacks in zip(measured, found, strict=True)
        for name, shares in stacks.items()
        if shares
    }
