"""Tables of speed: small devices, peers, kernels, large models, packs of thousands of experts, the demo."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial

from recipes.bench.result import Result
from recipes.bench.tables import Line, Part

# `make bench-stream`: imitated small devices.

DEVICES = {"board": "100 MB/s", "ssd": "500 MB/s", "nvme": "unthrottled"}
ROOMS = (25, 50, 75)
UNBUDGETED, BUDGETED = ("IO-EXP", "IO-QEXP"), ("STI-like", "INT4, LRU", "INT4, LFU")
LARGE, TRAINED = "olmoe-shaped", ("g2p", "wiki")
PROMPT = "first token after a prompt of 128 tokens"
HALF = 50
LLAMA_COLUMNS = "moert: room for experts", "hits in memory", "read for a token, MB", "llama.cpp"
BESIDE_LLAMA = re.compile(rf"(?P<where>{LARGE} \(own routers\), (?P<device>\w+), (?P<size>\d+) MB): moert: decode")


def shaped(result: Result) -> Sequence[Part]:
    """The model of OLMoE's shape: writing, reading a prompt and starting, beside llama.cpp, and memory."""
    writing = [decode_head(), *(decode(LARGE, device, share) for device in DEVICES for share in ROOMS)]
    reading: list[Line] = [
        ("drive", *(f"moert {share}%" for share in ROOMS), *UNBUDGETED, *(f"{name} {HALF}%" for name in BUDGETED),
         f"moert {HALF}% from its start, one token"),
        *(first_tokens(device) for device in DEVICES),
    ]  # fmt: skip
    memory = (
        f"The second table has the seconds to the {PROMPT}. At 500 MB/s and 75% the process takes "
        f"{{{LARGE}, ssd: moert 75% to IO-FREE: memory of the process|.1f}} times less memory than with all experts at "
        f"16 bits in memory, at {{{LARGE}, ssd: moert 75% to IO-FREE: speed|%}} of its speed."
    )
    return [writing, reading, ablation(result), beside_llama(result), f"{llama_bits(result)} {memory}"]


STEPS = ("IO-EXP", "IO-QEXP", "mixed bits, on demand", "mixed bits, + preload", "mixed bits, + cache", "moert 50%")
"""EdgeMoE's ablation: each part of the engine in turn. A cache without reading ahead, and with it, have equal room."""


def ablation(result: Result) -> Sequence[Line]:
    """Tokens a second with one part after the other, for all models; steps that the result has."""
    steps = [step for step in STEPS if _step(LARGE, next(iter(DEVICES)), step) in result.by_name]
    there = [model for model in (LARGE, *TRAINED) if any(name.startswith(f"{model}, ") for name in result.by_name)]
    models = [(model, device) for model in there for device in DEVICES]
    return [
        ("tokens/s", "drive", *steps),
        *(
            (model, DEVICES[device], *(f"{{{_step(model, device, step)}}}" for step in steps))
            for model, device in models
        ),
    ]


def _step(model: str, device: str, step: str) -> str:
    room = " 50%" if step.endswith("cache") else ""
    return f"{model}, {device}: {step}{room}: decode"


def trained(result: Result) -> Sequence[Part]:
    """The two trained models."""
    lines = [(model, *decode(model, device, share)) for model in TRAINED for device in DEVICES for share in ROOMS]
    starts = [
        (model, *(f"{{{model}, {device}: moert {HALF}%: start to first token|.1f}} s" for device in DEVICES))
        for model in TRAINED
    ]
    return [[("model", *decode_head()), *lines], [("start to first token", *DEVICES.values()), *starts]]


def decode_head() -> Line:
    ratios = (f"× {baseline}" for baseline in (*UNBUDGETED, *BUDGETED))
    found = ("in memory", "still being read")
    return ("drive", "room for experts", "tokens/s", *ratios, *found, "share of the bound", "with its own reads")


def decode(model: str, device: str, share: int) -> Line:
    mine = f"{model}, {device}: moert {share}%"
    return (
        DEVICES[device],
        f"{share}%",
        f"{{{mine}: decode}}",
        *(f"{{{mine} to {baseline}}}" for baseline in (*UNBUDGETED, *BUDGETED)),
        f"{{{mine}: hits in memory|%}}",
        f"{{{mine}: hits still being read|%}}",
        f"{{{mine}: share of the bound|%}}",
        f"{{{mine}: share of the bound with what it read|%}}",
    )


def first_tokens(device: str) -> Line:
    sides = (*(f"moert {share}%" for share in ROOMS), *UNBUDGETED, *(f"{name} {HALF}%" for name in BUDGETED))
    start = f"{{{LARGE}, {device}: moert {HALF}%: start to first token|.1f}}"
    return (DEVICES[device], *(f"{{{LARGE}, {device}: {side}: {PROMPT}|.1f}}" for side in sides), start)


def llama_bits(result: Result) -> str:
    """Of an expert's weight on both sides, on any of the devices."""
    row = "{{{where}: effective bits of an expert's weight: {side}|.2f}}"
    where = next((match["where"] for match in map(BESIDE_LLAMA.fullmatch, result.by_name) if match), "llama")
    mine, other = (row.format(where=where, side=side) for side in ("moert", "Q2_K"))
    return f"Beside llama.cpp, an expert's weight has {mine} bits in ours and {other} in its file, scales counted."


def beside_llama(result: Result) -> Sequence[Line]:
    """Both in processes of the same size, which the names of the rows tell."""
    lines: list[Line] = [
        ("drive", "memory", "moert, tokens/s", "llama.cpp", "ratio", f"moert, {PROMPT}, s", "llama.cpp", *LLAMA_COLUMNS)
    ]
    found = {match["device"]: match for match in map(BESIDE_LLAMA.fullmatch, result.by_name) if match}
    for device in DEVICES:
        where, size = found[device].group("where", "size") if device in found else (f"llama, {device}", "?")
        mine, other = f"{where}: moert", f"{where}: llama.cpp Q2_K"
        lines.append(
            (DEVICES[device], f"{size} MB", f"{{{mine}: decode}}", f"{{{other}: decode}}",
             f"{{{where}: moert to llama.cpp Q2_K|.1f}}", f"{{{mine}: {PROMPT}|.1f}}", f"{{{other}: {PROMPT}|.1f}}",
             *(f"{{{row}}}{unit}" if row in result.by_name else "" for row, unit in
               ((f"{mine}: room for experts", "%"), (f"{mine}: hits in memory", "%"),
                (f"{mine}: read for a token", ""), (f"{other}: read for a token", ""))))
        )  # fmt: skip
    return lines


# The demo: what its conversions came to, and how the packs ran.

MODELS = ("g2p", "wiki")
"""Of the demo itself."""
SHARES = (100, 50, 25)
_TARGET = ": target"
EVICTIONS = ("auto", "paper", "lru", "lfu")


def demo_parts(result: Result) -> Sequence[Part]:
    """All models that the result has."""
    models = [name.removesuffix(_TARGET) for name in result.by_name if name.endswith(_TARGET)]
    conversions: list[Line] = [
        ("model", "target", "metric", "reference", "pack", "promised at 95%",
         "held-out loss (95% interval)", "matrices × bits", "expert bytes", "of FP16", "of INT4"),
    ]  # fmt: skip
    conversions += [conversion(name, result) for name in models]
    policies = [f"hit rate: {EVICTIONS[0]}", *EVICTIONS[1:]]
    runs: list[Line] = [("model", "room for experts", *policies, "knowing the future", "tokens/s", "process")]
    runs += [run(f"{name}, {share}%", name, share) for name in models for share in SHARES]
    return [conversions, runs]


def conversion(name: str, result: Result) -> Line:
    widths = re.compile(rf"{name}: matrices at ([\d.]+) bits")
    counts = [f"{{{found[0]}}}×{found[1]}" for found in map(widths.fullmatch, result.by_name) if found]
    lost = f"{{{name}: held-out loss|interval.1%}}{above_promise(name, result)}"
    return (
        name, f"{{{name}: target|%}}", f"{{{name}: pack@unit}}", value_of(name, "reference", result),
        value_of(name, "pack", result), f"under {{{name}: promised|.1%}}", lost,
        ", ".join(counts), f"{{{name}: expert bytes|.2f}} MB", f"{{{name}: expert bytes of FP16|%}}",
        f"{{{name}: expert bytes of INT4|%}}",
    )  # fmt: skip


def value_of(name: str, which: str, result: Result) -> str:
    """Returns the metric's value; behind a perplexity per word that per token, where it was kept."""
    by_tokens = f"{name}: {which} per token"
    return f"{{{name}: {which}|.4g}}" + f" (per token {{{by_tokens}|.4g}})" * (by_tokens in result.by_name)


def above_promise(name: str, result: Result) -> str:
    """Returns what is said behind a held-out loss that is larger than its bound."""
    lost, promised = result.by_name.get(f"{name}: held-out loss"), result.by_name.get(f"{name}: promised")
    return ", above the promise" if lost and promised and lost.value > promised.value else ""


def run(what: str, name: str, share: int) -> Line:
    """With room for all nothing is ever evicted, and there are no hit rates."""
    rates = [f"{what}: hit rate, {policy}" for policy in (*EVICTIONS, "knowing the future")]
    return (
        name,
        f"{share}% ({{{what}: room for experts|.1f}} MB)",
        *(f"{{{rate}|.1%}}" if share < 100 else "" for rate in rates),
        f"{{{what}: decode|,.0f}}",
        f"{{{what}: process|.0f}} MB",
    )


# `make bench-ahead`: reading ahead beside not doing so, and beside LRU over experts of two bits.

AHEAD_SIDES = ("gate", "none", "INT2, LRU")


def ahead_parts(_: Result) -> Sequence[Part]:
    lines = [("drive", "room for experts", *AHEAD_SIDES, *(f"gate × {other}" for other in AHEAD_SIDES[1:]))]
    for device, drive in DEVICES.items():
        for share in ROOMS:
            where = f"{LARGE}, {device}:"
            speeds = (f"{{{where} {side} {share}%: decode}}" for side in AHEAD_SIDES)
            ratios = (f"{{{where} gate {share}% to {other}|.2f}}" for other in AHEAD_SIDES[1:])
            lines.append((drive, f"{share}%", *speeds, *ratios))
    return [lines]


# What a newcomer sees first: the demo's two models in one small table, and the picture in words.

LLAMA = "llama.cpp Q2_K"
ABOUT = {"g2p": "spelling → phonemes", "wiki": "Wikipedia text"}


def two_models(result: Result) -> Sequence[Part]:
    """A column for each model of the demo."""

    def line(what: str, template: str) -> Line:
        return (what, *(template.replace("NAME", name) for name in MODELS))

    lines: list[Line] = [
        ("", *(f"{name}: {ABOUT[name]}" for name in MODELS)),
        line("loss asked for", "{NAME: target|%} of {NAME: pack@unit}"),
        line("promised for further text, at 95%", "under {NAME: promised|.1%}"),
        (
            "measured on text kept apart (95% interval)",
            *(f"{{{name}: held-out loss|interval.1%}}{above_promise(name, result)}" for name in MODELS),
        ),
        line(
            "all experts, with their scales",
            "{NAME: expert bytes|.2f} MB, {NAME: expert bytes of FP16|%} of 16 bits",
        ),
        *(
            line(
                f"tokens/s with room for {share}% of the experts"
                if share < 100
                else "tokens/s with room for all experts",
                f"{{NAME, {share}%: decode|,.0f}}",
            )
            for share in SHARES
        ),
    ]
    return [lines]


def front_beside_llama(result: Result) -> Sequence[Part]:
    """One sentence: both in the same memory, drive by drive."""
    found = {match["device"]: match for match in map(BESIDE_LLAMA.fullmatch, result.by_name) if match}
    pieces = []
    for device, drive in DEVICES.items():
        where = found[device]["where"] if device in found else f"llama, {device}"
        mine, other = f"{{{where}: moert: decode}}", f"{{{where}: {LLAMA}: decode}}"
        pieces.append(f"{mine} tokens/s beside {other} ({drive})")
    size = next(iter(found.values()))["size"] if found else "?"
    return [f"In {size} MB, moert beside llama.cpp: {'; '.join(pieces)}."]


# `make bench-peers`: moert beside llama.cpp and transformers.

LEVELS = {"4.5 bits": "Q4_K", "2.6 bits": "Q2_K"}


SIDES = {"": "llama.cpp", ", not repacked": "its weights as in the file", ", as released": "compiled as its wheels are"}
"""How the rows of llama.cpp's settings end → the heads of their columns."""


def peers_parts(result: Result) -> Sequence[Part]:
    both = partial(_both, result)
    lines: list[Line] = [
        ("", "moert", *SIDES.values(), "ratio to the best"),
        both("4.5 bits, tokens/s", "4.5 bits: decode"),
        both("the same beside one busy process", "4.5 bits: decode with one busy process", ""),
        both("prompt of 512 tokens, tokens/s", "4.5 bits: prefill of 512"),
        both("prompt of 4,096 tokens, tokens/s", "4.5 bits: prefill of 4096"),
        both("behind 8,000 tokens, tokens/s", "4.5 bits: decode behind 8000"),
        both("first token after a prompt of 128, s", "4.5 bits: first token after 128"),
        both("start to first token, 16 tokens of prompt, s", "4.5 bits: start to first token"),
        both("2.6 bits, tokens/s", "2.6 bits: decode"),
        both("prompt of 512 tokens, tokens/s", "2.6 bits: prefill of 512"),
        both("first token after a prompt of 128, s", "2.6 bits: first token after 128"),
    ]
    trained: list[Line] = [
        ("tokens/s", "moert", "transformers", "ratio"),
        source("g2p", "g2p: 24 tokens after a prompt"),
        source("wiki", "wiki: 32 tokens after a prompt"),
    ]
    whole: list[Line] = [
        ("`moert run`, all experts in memory", *MODELS),
        (
            "start of the program to first token, s",
            *(f"{{{name}: start of the program to first token|.2f}}" for name in MODELS),
        ),
        ("the most that the process holds, MB", *(f"{{{name}: most that the process holds|.0f}}" for name in MODELS)),
        (
            "of it beside weights, experts, keys and values",
            *(f"{{{name}: beside weights, experts, keys and values|.0f}}" for name in MODELS),
        ),
    ]
    return [lines, trained, whole, bits(), f"{traffic()} {build(result)}"]


def _both(result: Result, said: str, row: str, only: str | None = None) -> Line:
    """Ours and llama.cpp's settings, or `only` one of them; a setting that was not run has no figure."""
    rows = [f"{row}: {LEVELS[row.split(':')[0]]}{side}" for side in SIDES if only in (None, side)]
    cells = [f"{{{each}}}" if each in result.by_name else "" for each in rows]
    return said, f"{{{row}: moert}}", *cells, *[""] * (len(SIDES) - len(cells)), f"{{{row}: ratio|.2f}}"


def source(name: str, row: str) -> Line:
    return name, f"{{{row}: moert}}", f"{{{row}: transformers}}", f"{{{row}: ratio|.1f}}"


def bits() -> str:
    """Of an expert's weight on both sides."""
    row = "{{{level}: effective bits of an expert's weight: {side}|.3f}}"
    sides = [
        f"{row.format(level=level, side='moert')} bits in ours and {row.format(level=level, side=peer)} in {peer}"
        for level, peer in LEVELS.items()
    ]
    return f"An expert's weight has, scales counted, {', and '.join(sides)}."


def traffic() -> str:
    row = "{{{level}: read for each token: {side}|.0f}}"
    sides = [
        f"{row.format(level=level, side='moert')} MB where {peer} reads {row.format(level=level, side=peer)}"
        for level, peer in LEVELS.items()
    ]
    return f"For each token ours reads {', and '.join(sides)}."


def build(result: Result) -> str:
    """How llama.cpp was compiled, from the settings."""
    settings = result.context["settings"]
    said = "; ".join(f"{how}: {found}" for how, found in settings.get("llama_cpp_built", {}).items() if found)
    return f"llama.cpp is llama-cpp-python {settings['llama_cpp_python']}" + (f" ({said})." if said else ".")


# `make bench-kernels`: the native kernels beside the bandwidth of memory and onnxruntime.

WIDTHS = (2, 3, 4, 8)


def kernels_parts(result: Result) -> Sequence[Part]:
    lines: list[Line] = [
        ("", *(f"{bits} bits" for bits in WIDTHS)),
        ("one matrix of 1024 × 2048, one token", *(share(f"linear, {bits} bits, groups of 64") for bits in WIDTHS)),
        ("eight experts, one token, one call", *(share(f"mixture, {bits} bits") for bits in WIDTHS)),
        ("the matrix beside onnxruntime's MatMulNBits", *(beside(bits, "1 token", result) for bits in WIDTHS)),
        ("the same, 512 tokens", *(beside(bits, "512 tokens", result) for bits in WIDTHS)),
        *(line for line in trellis_lines(result) if any(line[1:])),
    ]
    bandwidth = (
        "The first two lines are shares of plain reading in the same run, which reached {read bandwidth|.1f} GB/s."
    )
    return [lines, bandwidth]


def trellis_lines(result: Result) -> Iterator[Line]:
    """Yields lines without figures where a result has none of trellis codes."""

    def each(of: str, form: str) -> Iterator[str]:
        for bits in WIDTHS:
            row = next((name for name in result.by_name if name.startswith(f"trellis, {bits} bits, {of}")), None)
            yield "" if row is None else f"{{{row}|{form}}}" + " ×" * ("ratio" in of)

    yield "trellis codes, one token, billion weights a second", *each("1 token: moert", ".0f")
    yield "trellis codes beside llama.cpp's formats, one token", *each("1 token: ratio to llama.cpp", ".1f")
    yield "the same, 512 tokens", *each("512 tokens: ratio to llama.cpp", ".1f")


def share(row: str) -> str:
    return f"{{{row}: share|%}}"


def beside(bits: int, tokens: str, result: Result) -> str:
    """Nothing where onnxruntime has not this width."""
    row = f"{bits} bits, {tokens}: ratio to onnxruntime {bits} bits, groups of 64"
    return f"{{{row}|.1f}} ×" if row in result.by_name else ""


# `make bench-large`: whole models of published sizes, by device and memory.

DECODE = re.compile(
    r"(?P<where>(?P<model>\w+), (?P<device>\w+), (?P<memory>[\d.]+ GB( \(persistent routing\))?)): moert: decode"
)
RATIO = re.compile(
    r"(?P<where>(?P<model>\w+), (?P<device>\w+), (?P<memory>[\d.]+ GB) \(own routers\)): moert to (?P<other>[^:]+)"
)
LARGE_MODELS = {"olmoe": "OLMoE-1B-7B", "qwen3": "Qwen3-30B-A3B"}


def large_parts(result: Result) -> Sequence[Part]:
    found = [match for row in result.rows if (match := DECODE.fullmatch(row.name))]
    head = (
        "", "drive, `--memory`", "tokens/s", "of the bound", "prompt of 2,048, to reading or computing",
        "start to first token", "Python", "deciding",
    )  # fmt: skip
    lines = [
        (
            f"{LARGE_MODELS[each['model']]}, {{{each['model']}: experts}} GB",
            f"{each['device']}, {each['memory']}",
            f"{{{each['where']}: moert: decode}}",
            f"{{{each['where']}: share of the bound}}",
            f"{{{each['where']}: prompt of 2048 tokens to the longer of both}} ×",
            f"{{{each['where']}: start to first token}} s",
            f"{{{each['where']}: share of a token: Python}}%",
            f"{{{each['where']}: share of a token: deciding}}%",
        )
        for each in found
    ]
    return [[head, *lines], _beside_llama(result)]


def _beside_llama(result: Result) -> Part:
    """Where both have figures."""
    named = {row.name: match for row in result.rows if (match := RATIO.fullmatch(row.name))}
    lines = [
        (
            LARGE_MODELS[each["model"]],
            f"{each['device']}, {each['memory']}",
            f"{{{each['where']}: moert: decode}}",
            f"{{{each['where']}: {each['other']}: decode}}",
            f"{{{name}}} ×",
        )
        for name, each in named.items()
    ]
    return [("random routers", "drive, memory", "moert, tokens/s", "llama.cpp, tokens/s", "moert to llama.cpp"), *lines]


# `make bench-many`: packs of thousands of experts until the first token.

READY = ": engine ready"


def serve_parts(result: Result) -> Sequence[Part]:
    speeds = [("", "through the server", "the engine alone", "ratio")]
    starts = [("", "the server answers after", "memory beside `moert run`'s")]
    for name in ("OLMoE's shape", "wiki"):
        speeds.append((
            f"{name}, tokens/s", f"{{{name}: tokens/s through the server}}", f"{{{name}: tokens/s of the engine}}",
            f"{{{name}: through the server, of the engine's}} ×",
        ))  # fmt: skip
        starts.append((name, f"{{{name}: the server answers after}} s", f"{{{name}: memory beside moert run's}} MB"))
    crowd = "8 clients at once"
    little = f"{crowd}, half of the experts in memory, 500 MB/s"
    more = [
        ("OLMoE's shape", ""),
        (little, f"{{{little}}} tokens/s"),
        ("of the same one after another", f"{{{crowd}, of one after another}} ×"),
        ("first token behind 8,000 tokens", "{first token behind 8000 tokens, first turn} s"),
        ("the same in the second turn", "{first token behind 8000 tokens, second turn} s"),
        ("of the first", "{second turn, of the first} ×"),
    ]  # fmt: skip
    return [speeds, more, starts]


def many_parts(result: Result) -> Sequence[Part]:
    head = (
        "",
        "manifest",
        "an engine is ready after",
        "memory that it holds beside weights",
        "all hashes checked in",
        "copied in",
    )
    lines = [
        (
            name,
            f"{{{name}: manifest}} MB",
            f"{{{name}{READY}}} s",
            f"{{{name}: memory of the engine beside weights}} MB",
            f"{{{name}: all hashes checked}} s",
            f"{{{name}: copied}} s",
        )
        for name in (row.name.removesuffix(READY) for row in result.rows if row.name.endswith(READY))
    ]
    return [[head, *lines]]
