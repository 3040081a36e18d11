"""`make bench-stream`: imitated small devices."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Line, Part

DEVICES = {"board": "100 MB/s", "ssd": "500 MB/s", "nvme": "unthrottled"}
SHARES = (25, 50, 75)
UNBUDGETED, BUDGETED = ("IO-EXP", "IO-QEXP"), ("STI-like", "INT4, LRU", "INT4, LFU")
LARGE, TRAINED = "olmoe-shaped", ("g2p", "wiki")
PROMPT = "first token after a prompt of 128 tokens"
HALF = 50
LLAMA_COLUMNS = "moert: room for experts", "hits in memory", "read for a token, MB", "llama.cpp"
BESIDE_LLAMA = re.compile(rf"(?P<where>{LARGE} \(own routers\), (?P<device>\w+), (?P<size>\d+) MB): moert: decode")


def shaped(result: Result) -> Sequence[Part]:
    """The model of OLMoE's shape: writing, reading a prompt and starting, beside llama.cpp, and memory."""
    writing = [decode_head(), *(decode(LARGE, device, share) for device in DEVICES for share in SHARES)]
    reading: list[Line] = [
        ("drive", *(f"moert {share}%" for share in SHARES), *UNBUDGETED, *(f"{name} {HALF}%" for name in BUDGETED),
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
    lines = [(model, *decode(model, device, share)) for model in TRAINED for device in DEVICES for share in SHARES]
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
    sides = (*(f"moert {share}%" for share in SHARES), *UNBUDGETED, *(f"{name} {HALF}%" for name in BUDGETED))
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
