"""Tables of losses and of what conversions take: quantizers, plans, promises, sweeps, models."""

from __future__ import annotations

import re
from collections.abc import Sequence

from moert.pack.manifest import in_words
from recipes.bench.result import Result
from recipes.bench.tables import Line, Part, listed

# `make report`: the reference models beside their baselines, and how they route.


def models_parts(result: Result) -> Sequence[Part]:
    lines: list[Line] = [
        ("", "task", "held-out", "baseline", "next expert guessed, two layers known"),
        (
            "g2p",
            "spelling → phonemes, CMUdict",
            "ROUGE-2 {g2p: model rouge2|.3f}, {g2p: model exact|.1%} of words exact",
            "nearest training word: {g2p: nearest neighbour, 400 words rouge2|.3f}, "
            "{g2p: nearest neighbour, 400 words exact|.1%}",
            "encoder {g2p: encoder next_given_2|%}, decoder {g2p: decoder next_given_2|%}",
        ),
        (
            "wiki",
            "Wikipedia text, WikiText-2",
            "perplexity per word {wiki: model word perplexity|.0f}",
            "5-gram, Kneser–Ney: {wiki: kneser-ney 5-gram word perplexity|.0f}",
            "{wiki: decoder next_given_2|%}",
        ),
        (
            "marks",
            "case and punctuation restored, WikiText-2",
            "F1 of marked words {marks: model f1|.3f}, {marks: model exact|.1%} of pieces exact",
            "first letter and full stop: {marks: first letter and full stop f1|.2f}; "
            "commonest form of each word: {marks: commonest forms f1|.2f}",
            "encoder {marks: encoder next_given_2|%}, decoder {marks: decoder next_given_2|%}",
        ),
        (
            "wikids",
            "as wiki",
            "perplexity per word {wikids: model word perplexity|.0f}",
            "as wiki",
            "{wikids: decoder next_given_2|%}",
        ),
    ]
    paths = (
        "The 20% most frequent paths carry {g2p: encoder top20_share|%} of the tokens in g2p's encoder and "
        "{g2p: decoder top20_share|%} in its decoder, {marks: encoder top20_share|%} and "
        "{marks: decoder top20_share|%} in those of marks, {wiki: decoder top20_share|%} in wiki and "
        "{wikids: decoder top20_share|%} in wikids."
    )
    return [lines, paths]


# `make bench-size` and `make bench-workers`: every row, as it is called there.


def size_parts(result: Result) -> Sequence[Part]:
    return [listed(result)]


# `make bench-quant`: our quantizers beside others at equal effective bits.

_BITS = re.compile(r"(?P<model>.+) against (?P<peer>.+): bits of the peer")


def quant_parts(result: Result) -> Sequence[Part]:
    """A line for each peer, in order of its bits; a column for each model, with empty cells for peers that can't
    quantize it."""
    found = [(match["model"], match["peer"], result.by_name[match[0]].value) for match in
             filter(None, map(_BITS.fullmatch, result.by_name))]  # fmt: skip
    models = sorted({model for model, _, _ in found})
    peers = dict(sorted(((peer, bits) for _, peer, bits in reversed(found)), key=lambda each: each[1]))
    lines: list[Line] = [("", *models)]
    lines += [(peer, *(_cell_of_quant(model, peer, result) for model in models)) for peer in peers]
    return [lines]


def _cell_of_quant(model: str, peer: str, result: Result) -> str:
    about = f"{model} against {peer}"
    failed = any(line.startswith(f"{model}, {peer}:") for line in result.context["settings"].get("failed", []))
    return duel(about, result) if failed or f"{about}: bits of the peer" in result.by_name else ""


def duel(about: str, result: Result) -> str:
    ratio, bits = f"{{{about}, heldout: divergence|interval.2f}}", f"{about}: bits of the peer"
    if bits not in result.by_name:
        return ratio
    return f"{ratio}, {{{about}: bits of ours|.2f}} to {{{bits}|.2f}} bits"


# `make bench-mixed`: a table for each model, what lies outside the experts down and the experts across.

_OUTSIDE = re.compile(r"(?P<model>\w+), (?P<outside>\w+ at \d+): size outside")
_EXPERTS = re.compile(r"(?P<model>\w+), experts at (?P<bits>\d+): size")


def mixed_parts(result: Result) -> Sequence[Part]:
    outside = [(found["model"], found["outside"]) for found in filter(None, map(_OUTSIDE.fullmatch, result.by_name))]
    experts = [(found["model"], found["bits"]) for found in filter(None, map(_EXPERTS.fullmatch, result.by_name))]
    return [
        _grid(model, [each for of, each in outside if of == model], [bits for of, bits in experts if of == model])
        for model in dict.fromkeys(model for model, _ in outside)
    ]


def _grid(model: str, outside: Sequence[str], experts: Sequence[str]) -> Sequence[Line]:
    heads = [f"experts {bits} ({{{model}, experts at {bits}: effective|.2f}})" for bits in experts]
    lines: list[Line] = [(model, *heads)]
    for each in outside:
        lines.append((each.replace(" at", ""), *(_cell(f"{model}, {each}, experts at {bits}") for bits in experts)))
    return lines


def _cell(where: str) -> str:
    return f"{{{where}: perplexity|,.1f}} ({{{where}: loss|+,.1f}}%), {{{where}: size|.1f}} MB"


# `make bench-plans`: plans of as many bytes by the sweep's ranking and by others, all experts at one width, and MC-MoE.

_UNIFORM = re.compile(r"(?P<model>\w+), all at (?P<bits>\d+) bits: loss")
_SWEPT = re.compile(r"(?P<model>\w+), (?P<bits>[\d.]+) bits, sweep: loss")
_COMPRESSED = re.compile(r"(?P<model>\w+), (?P<bits>[\d.]+) bits, MC-MoE: loss")


def plans_parts(result: Result) -> Sequence[Part]:
    lines: list[Line] = [("model", "bits a weight", "experts", "by the sweep", "by usage", "at random", "all alike")]
    for name in result.by_name:
        if found := _UNIFORM.fullmatch(name):
            where = name.removesuffix(": loss")
            size = f"{{{where}: experts|.2f}} MB"
            lines.append((found["model"], f"{found['bits']} and scales", size, "", "", "", f"{{{name}|interval.2%}}"))
        elif found := _SWEPT.fullmatch(name):
            lines.append(_mixed(found["model"], found["bits"]))
    beside = [_compressed(*found.groups()) for found in map(_COMPRESSED.fullmatch, result.by_name) if found]
    head: Line = ("model", "bits a weight", "by the sweep, of 1 to 3 bits", "MC-MoE", "experts, sweep and MC-MoE")
    return [lines, [head, *beside]] if beside else [lines]


def _compressed(model: str, bits: str) -> Line:
    """Loss and divergence of plans of 1 to 3 bits, by the sweep and by MC-MoE's integer programs."""
    places = [f"{model}, {bits} bits, {ranking}" for ranking in ("sweep of 1 to 3", "MC-MoE")]
    cells = [f"{{{where}: loss|interval.2%}}, {{{where}: divergence|.4f}} nats" for where in places]
    return model, bits, *cells, " and ".join(f"{{{where}: experts|.2f}}" for where in places) + " MB"


def _mixed(model: str, bits: str) -> Line:
    where = f"{model}, {bits} bits"
    return (
        model,
        bits,
        f"{{{where}, sweep: experts|.2f}} MB",
        *(f"{{{where}, {ranking}: loss|interval.2%}}" for ranking in ("sweep", "usage")),
        f"{{{where}, random: least loss|.2%}} to {{{where}, random: largest loss|.2%}}",
        "",
    )


# `make bench-answers`: what models write with all experts at some bits, by the quantizer.

_ANSWERED = re.compile(r"(?P<model>\w+), (?P<quantizer>\w+) at (?P<bits>[\d.]+): effective")


def answers_parts(result: Result) -> Sequence[Part]:
    """Lines in the order of the effective bits within each model."""
    lines: list[Line] = [("model", "quantizer", "bits a weight, scales counted", "answers", "unquantized", "loss")]
    found = [found for found in map(_ANSWERED.fullmatch, result.by_name) if found]
    models = list(dict.fromkeys(each["model"] for each in found))
    for each in sorted(found, key=lambda each: (models.index(each["model"]), result.by_name[each.string].value)):
        where, model = each.string.removesuffix(": effective"), each["model"]
        names = (name.split(": ")[-1] for name in result.by_name if name.startswith(f"{where}: "))
        (metric,) = set(names) - {"effective", "loss"}
        written = f"{metric.removesuffix('.py').replace('_', ' ')} {{{where}: {metric}|.2%}}"
        whole = f"{{{model}, unquantized, {each['quantizer']}: {metric}|.2%}}"
        coded = f"{each['quantizer']} {each['bits']}"
        lines.append((model, coded, f"{{{each.string}|.2f}}", written, whole, f"{{{where}: loss|interval.2%}}"))
    return [lines]


# `make bench-promise`: how often the held-out loss stayed under the target, and how often simulated bounds hold.

_CASE = re.compile(r"(?P<case>[^,]+): packs")
_SIMULATED = re.compile(
    r"(?P<documents>\d+) documents of (?P<sizes>\S+) sizes, .* (?P<confidence>\d+%)(?P<none>: no.*)?"
)


def promise_parts(result: Result) -> Sequence[Part]:
    """Cases in the order of the file."""
    head = ("", "packs", "held-out loss stayed under its bound", "median held-out loss", "median bound")
    cases = [found["case"] for found in map(_CASE.fullmatch, result.by_name) if found]
    lines: list[Line] = [head, *(_case(case, result) for case in cases)]
    return [lines, *_simulation(result)]


def _case(case: str, result: Result) -> Line:
    """Counted from the splits, each by the bound that its pack was printed with."""
    bounds = {
        name.removesuffix(": bound"): row.value
        for name, row in result.by_name.items()
        if name.startswith(f"{case}, split ") and name.endswith(": bound")
    }
    under = sum(result.by_name[f"{split}: held-out loss"].value <= bound for split, bound in bounds.items())
    promised = f"{case}: median bound at 95%" in result.by_name
    return (
        case.replace("perplexity", in_words("perplexity")),
        f"{{{case}: packs}} {{{case}: packs@unit}}",
        f"{under} of {len(bounds)}",
        f"{{{case}: median held-out loss|.2%}}",
        f"{{{case}: median bound at 95%|.2%}}" if promised else f"{{{case}: median bound|.2%}}, nothing promised",
    )


def _simulation(result: Result) -> list[list[Line]]:
    """Where a promise is given: for each number of documents and kind of sizes, the row that held least often."""
    lowest: dict[tuple[str, str, str], str] = {}
    for name, row in result.by_name.items():
        found = _SIMULATED.fullmatch(name)
        if found and not found["none"]:
            setting = found["documents"], found["sizes"], found["confidence"]
            if setting not in lowest or row.value < result.by_name[lowest[setting]].value:
                lowest[setting] = name
    head: Line = ("documents", "sizes", "promised at", "held at least in")
    return [[head, *((*setting, f"{{{name}|.1f}}%") for setting, name in lowest.items())]] if lowest else []


# `make bench-rounding`: what 8-bit activations, and keys and values of 16 bits, add to a pack's loss.


def rounding_parts(result: Result) -> Sequence[Part]:
    lines = [
        ("", "with native kernels"),
        ("wiki: rise of the perplexity per token (95% interval)",
         "{wiki: relative rise with native kernels|interval.3%}"),
        *((f"{name}: the same by keys and values of {bits} bits alone",
           f"{{{name}: relative rise with keys of {bits} bits|interval.3%}}")
          for name in ("wiki", "g2p") for bits in (16, 8)
          if f"{name}: relative rise with keys of {bits} bits" in result.by_name),
        ("g2p: words that come out differently", "{g2p: words that differ|.1%} of {g2p: words that differ@n}"),
    ]  # fmt: skip
    return [lines]


# `make bench-gradients`: every row of it, as it is called there.


def gradients_parts(result: Result) -> Sequence[Part]:
    return [listed(result)]


# `make bench-sweep`: the exact sweep beside full evaluations, and what ranks experts.

MODELS = ("g2p", "marks", "wiki", "wikids")
SIGNALS = ("kl", "nll", "metric")
_COMPARED = re.compile(r"(?P<model>.+), (?P<bits>\d+) bits: probes compared")


def sweep_parts(result: Result) -> Sequence[Part]:
    ranks = [f"ranks alike on other samples: {SIGNALS[0]}", *SIGNALS[1:]]
    costs: list[Line] = [("", "operations in experts", "least that is possible", "time", *ranks)]
    costs += [
        (
            name, f"{{{name}: operations in expert rows|%}}", f"{{{name}: those that no exact sweep can spare|%}}",
            f"{{{name}: wall time|%}}", *(f"{{{name}: {signal} on other samples|.2f}}" for signal in SIGNALS),
        )
        for name in MODELS
        if f"{name}: wall time" in result.by_name
    ]  # fmt: skip
    agreement: list[Line] = [
        ("", "bits", "probes compared", "largest difference, nats a token", "of the divergence", "outputs that differ")
    ]
    agreement += [
        agreed(found["model"], found["bits"], result)
        for found in map(_COMPARED.fullmatch, result.by_name)
        if found is not None and found["model"] in MODELS
    ]
    return [costs, agreement]


def agreed(model: str, bits: str, result: Result) -> Line:
    """Only models that write outputs have some that could differ."""
    about = f"{model}, {bits} bits"
    differ = f"{about}: outputs that differ"
    return (
        model,
        bits,
        f"{{{about}: probes compared}} {{{about}: probes compared@unit}}",
        f"{{{about}: largest difference|.1e}}",
        f"{{{about}: largest difference of the divergence|.1e}}",
        f"{{{differ}}} {{{differ}@unit}}" if differ in result.by_name else "",
    )
