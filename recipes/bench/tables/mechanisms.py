"""Tables of routing ahead, single neurons, routing that prefers residents, two devices and forecasts."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from recipes.bench.result import Result, Row
from recipes.bench.tables import Line, Part
from recipes.bench.tables.speed import DEVICES, ROOMS

# `make bench-hash`: SiDA's tables, Mixtral-offloading's figures, and what is won over what was there.

LENGTHS = ("short", "middle", "long")
HALF = 50
PREDICTORS = ("gate", "hash", "both", "tables")
TIMES = (1, 2, 3)
POLICIES = ("auto", "foreseen", "foreseen without error", "Belady")
AT_HALF = ("on demand", "gate", "tables", "hash", "none, foreseen", "hash, foreseen", "auto, foreseen")
ABLATION = {
    "everything": f"auto {HALF}%", "without reading ahead": f"none {HALF}%", "without the cache": "without the cache",
    "naive": "naive",
}  # fmt: skip


class Rows:
    """The rows of a result by their names; cells of those that a model does not have are empty."""

    def __init__(self, result: Result) -> None:
        self._names = list(result.by_name)

    def cell(self, name: str, form: str = "") -> str:
        return f"{{{name}{f'|{form}' if form else ''}}}" if name in self._names else ""

    def found(self, pattern: str) -> list[str]:
        """What the first group of a pattern was in names of rows, each once, in their order."""
        matches = (re.fullmatch(pattern, name) for name in self._names)
        return list(dict.fromkeys(match[1] for match in matches if match))

    @property
    def models(self) -> list[str]:
        return self.found(r"(\w+): hash function")


def names(result: Result) -> Sequence[Part]:
    """SiDA's Table 4 and Mixtral-offloading's recall."""
    rows = Rows(result)
    return [_hash_hits(rows), _recall(rows)]


def _hash_hits(rows: Rows) -> Sequence[Line]:
    head = ("choices among the first named", *(f"{length}{times}" for length in LENGTHS for times in ("", ", 3 times")))
    lines: list[Line] = [head]
    for where in rows.found(r"(\w+, (?:encoder|decoder)), short: among the first(?: \d+)?"):
        (first, more) = rows.found(rf"{where}, short: (among the first(?: \d+)?)")
        cells = (rows.cell(f"{where}, {length}: {each}", "%") for length in LENGTHS for each in (first, more))
        lines.append((where, *cells))
    return lines


def _recall(rows: Rows) -> Sequence[Line]:
    whens = ["before the first layer", *(f"{count} ahead" for count in rows.found(r".*, (\d+) ahead: .*"))]
    lines: list[Line] = [("recall", "named by", *(f"{when}, {times} ×" for when in whens for times in TIMES))]
    for where in rows.found(r"(\w+, (?:encoder|decoder)), before the first layer: hash, 1 × as many"):
        for who in PREDICTORS:
            cells = [rows.cell(f"{where}, {when}: {who}, {times} × as many", "%") for when in whens for times in TIMES]
            if any(cells):
                lines.append((where, who, *cells))
    return lines


def routing(result: Result) -> Sequence[Part]:
    """SiDA's Table 3, Figures 3 and 8; and what its thread for the next batch brings."""
    rows = Rows(result)
    lines: list[Line] = [
        ("", "function", "of the pack", "with routers", "with the function", "kept", "choosing, routers",
         "choosing, function", *(f"not needed, {length}" for length in LENGTHS), "speed with 80% saved")
    ]  # fmt: skip
    for model in rows.models:
        metric = next(iter(rows.found(rf"{model}: (\w+) with routers")), "")
        lines.append(
            (f"{model}, {metric}" + " per token" * (metric == "perplexity"),
             rows.cell(f"{model}: hash function", ".2f") + " MB",
             rows.cell(f"{model}: hash function, of the pack", "%"), rows.cell(f"{model}: {metric} with routers"),
             rows.cell(f"{model}: {metric} with hash"), rows.cell(f"{model}: kept", ".1%"),
             *(rows.cell(f"{model}: choosing experts, with {what}", "%") for what in ("routers", "hash")),
             *(rows.cell(f"{model}, {length}: expert memory that is not needed", "%") for length in LENGTHS),
             rows.cell(f"{model}, short: speed with 80% of expert memory saved", ".2f"))
        )  # fmt: skip
    return [lines]


def beforehand(result: Result) -> Sequence[Part]:
    """`make bench-beforehand`: the speed of batches whose next one is worked on, to that without."""
    rows = Rows(result)
    lines: list[Line] = [("speed, to that without", "with routers", "with the function")]
    for where in rows.found(r"(\w+: batches of .* beforehand), with \w+"):
        lines.append((where, *(rows.cell(f"{where}, with {what}", ".2f") for what in ("routers", "hash"))))
    return [lines]


def hits(result: Result) -> Sequence[Part]:
    """Eviction, without reading ahead; and k of each layer."""
    rows = Rows(result)
    lines: list[Line] = [("hits", "room", *POLICIES, "encoder, behind Belady", "won by foreseen")]
    for model in rows.models:
        for share in ROOMS:
            where = f"{model}, {share}%"
            cells = (rows.cell(f"{where}: hits under {policy}", "%") for policy in POLICIES)
            behind = rows.cell(f"{model}, encoder, {share}%: foreseen, behind Belady", ".1f")
            won = rows.cell(f"{where}: won by foreseen", "%")
            lines.append((model, f"{share}%", *cells, behind, won))
    ks = sorted(rows.found(r".*, k = (\d+): hits under lru"), key=int)
    latest: list[Line] = [("k experts of each layer", *ks)]
    for model in rows.models:
        for policy in ("layer-lru", "lru"):
            cells = (rows.cell(f"{model}, k = {k}: hits under {policy}", "%") for k in ks)
            latest.append((f"{model}, {policy}", *cells))
    return [lines, latest]


def hash_speeds(result: Result) -> Sequence[Part]:
    """SiDA's Figures 9 and 11, the ablation, and whether the default is ever slower."""
    rows = Rows(result)
    places = [(model, device) for model in rows.models for device in DEVICES]
    half: list[Line] = [
        ("tokens/s", "drive", *AT_HALF, "all in memory", "hash, foreseen to on demand", "hash, foreseen to naive")
    ]
    parts: list[Line] = [("tokens/s", "drive", *ABLATION)]
    never: list[Line] = [("auto to none", "drive", *(f"{share}%" for share in ROOMS))]
    for model, device in places:
        where, begins = f"{model}, {device}", (model, DEVICES[device])
        best = f"{where}: hash, foreseen {HALF}% to"
        half.append(
            (*begins, *(rows.cell(f"{where}: {side} {HALF}%: decode") for side in AT_HALF),
             rows.cell(f"{where}: all in memory: decode"), rows.cell(f"{best} on demand", ".2f"),
             rows.cell(f"{best} naive", ".2f"))
        )  # fmt: skip
        parts.append((*begins, *(rows.cell(f"{where}: {side}: decode") for side in ABLATION.values())))
        never.append((*begins, *(rows.cell(f"{where}: auto {share}% to none", ".2f") for share in ROOMS)))
    return [half, parts, never]


# `make bench-flash`: single neurons in place of whole experts.

FLASH_SHARES = ("25%", "50%", "75%")
SPENT = ("reading", "deciding", "computing")
ORDERS = ("as given", "in the pack", "by frequency on calibration text", "by frequency", "together")
KEPT = ("window", "lru", "lfu", "recent", "Belady")


def nbytes(result: Result) -> Sequence[Part]:
    """Bytes a token beside whole experts."""
    rows = Rows(result)
    models = rows.found(r"(\w+): columns, of whole experts")
    asked: list[Line] = [
        ("model", "neurons that fire", "whole experts ask for, kB a token", "columns of what fires", "ratio",
         "answers that differ")
    ]  # fmt: skip
    for name in models:
        differ = ", ".join(rows.cell(f"{name}, {share}: answers that differ") for share in FLASH_SHARES)
        asked.append(
            (name, rows.cell(f"{name}: neurons that fire", "%"), rows.cell(f"{name}: whole experts ask for"),
             rows.cell(f"{name}: columns ask for"), rows.cell(f"{name}: columns, of whole experts", ".2f"), differ)
        )  # fmt: skip
    read: list[Line] = [
        ("model", "room", "whole experts read, kB a token", "what fires", "of whole experts", "what is predicted",
         "of whole experts", "of what whole experts ask for")
    ]  # fmt: skip
    for name in models:
        for where, share in ((f"{name}, {share}", share) for share in FLASH_SHARES):
            read.append(
                (name, share, rows.cell(f"{where}: whole experts read"), rows.cell(f"{where}: neurons read"),
                 rows.cell(f"{where}: neurons, of whole experts", ".2f"), rows.cell(f"{where}: predicted read"),
                 rows.cell(f"{where}: predicted, of whole experts", ".2f"),
                 rows.cell(f"{where}: predicted, of what whole experts ask for", ".2f"))
            )  # fmt: skip
    return [asked, read, *_in_order(rows), *_predictors(rows)]


def _in_order(rows: Rows) -> Sequence[Part]:
    """Nothing of results that have no packs in the checkpoint's order."""
    beside = "of those in the checkpoint's order"
    names = rows.found(rf"(\w+): columns asked for, {beside}")
    rooms = (f"read, room {share}" for share in FLASH_SHARES)
    lines: list[Line] = [(f"in the pack's order, {beside}", "asked for", *rooms)]
    for name in names:
        read = (rows.cell(f"{name}, {share}: neurons read, {beside}", ".2f") for share in FLASH_SHARES)
        lines.append((name, rows.cell(f"{name}: columns asked for, {beside}", ".2f"), *read))
    return [lines] if names else []


def _predictors(rows: Rows) -> Sequence[Part]:
    """Nothing where none was trained."""
    names = rows.found(r"(\w+): predictor: size")
    lines: list[Line] = [("predictor", "of the pack", "of what fires it names", "of all neurons", "of blocks", "lost")]
    for name in names:
        whats = ("size", "firing neurons that it names", "neurons that it names", "blocks")
        cells = (rows.cell(f"{name}: predictor: {what}", "%") for what in whats)
        lines.append((name, *cells, rows.cell(f"{name}: loss by the predictor", "interval.1%")))
    return [lines] if names else []


def flash_speeds(result: Result) -> Sequence[Part]:
    """The steps, beside today's engine, and at published shapes."""
    rows = Rows(result)
    return [_steps(rows), _today(rows), _shapes(rows)]


def _steps(rows: Rows) -> Sequence[Line]:
    lines: list[Line] = [("model", "drive", "step", "tokens/s", "× naive", "kB a token", *SPENT)]
    for where in rows.found(r"(\w+, \w+, steps): naive: decode"):
        name, device, _ = where.split(", ")
        for step in rows.found(rf"{where}: (.+): decode"):
            lines.append((name, DEVICES[device], step, *_cells(rows, where, step, f"{where}: {step} to naive")))
    return lines


def _cells(rows: Rows, where: str, what: str, *ratios: str) -> Sequence[str]:
    """Speed, its ratios, what was read for a token, where its time went."""
    spent = (rows.cell(f"{where}: {what}: {part}", "%") for part in SPENT)
    beside = (rows.cell(each, ".2f") for each in ratios)
    return (
        rows.cell(f"{where}: {what}: decode"), *beside, rows.cell(f"{where}: {what}: read for a token"), *spent
    )  # fmt: skip


def _today(rows: Rows) -> Sequence[Line]:
    lines: list[Line] = [("model", "drive", "room", "read", "tokens/s", "× whole experts", "kB a token", *SPENT)]
    for where in rows.found(r"(\w+, \w+): whole experts \d+%: decode"):
        name, device = where.split(", ")
        for what in rows.found(rf"{where}: (.+ \d+%): decode"):
            read, _, share = what.rpartition(" ")
            cells = _cells(rows, where, what, f"{where}: {what} to whole experts")
            lines.append((name, DEVICES[device], share, read, *cells))
    return lines


def _shapes(rows: Rows) -> Sequence[Line]:
    lines: list[Line] = [
        ("shape and firings", "fire", "drive", "room", "read", "tokens/s", "× naive", "× whole experts", "kB a token",
         *SPENT, "of naive's bytes", "process, MB")
    ]  # fmt: skip
    for where in rows.found(r"(.+ like \w+, \w+, \d+%): naive: decode"):
        shape, device, room = where.split(", ")
        for what in rows.found(rf"{re.escape(where)}: ([\w ,+-]+): decode"):
            ratios = (f"{where}: {what} to naive", f"{where}: {what} to whole experts")
            lines.append(
                (shape, rows.cell(f"{shape}: neurons that fire", "%"), DEVICES[device], room, what,
                 *_cells(rows, where, what, *ratios), rows.cell(f"{where}: {what}: read, of naive", ".2f"),
                 rows.cell(f"{where}: {what}: peak memory of the process", ".0f"))
            )  # fmt: skip
    return lines


def curves(result: Result) -> Sequence[Part]:
    """What a window leaves to be loaded, hits, and orders."""
    rows = Rows(result)
    return [_windows(rows), _flash_hits(rows), _orders(rows), _friends(rows)]


def _windows(rows: Rows) -> Sequence[Line]:
    sizes = rows.found(r".+: window of (\d+): loaded")
    lines: list[Line] = [("tokens in the window", "fire", *sizes)]
    for name in rows.found(r"(\w+): window of \d+: loaded"):
        lines += [
            (f"{name}, loaded", rows.cell(f"{name}: fire for a token", ".1%"),
             *(rows.cell(f"{name}: window of {size}: loaded", ".1%") for size in sizes)),
            (f"{name}, kept of a layer", "", *(rows.cell(f"{name}: window of {size}: kept", "%") for size in sizes)),
        ]  # fmt: skip
    return lines


def _flash_hits(rows: Rows) -> Sequence[Line]:
    lines: list[Line] = [("hits", "room for blocks", *KEPT)]
    for name in rows.found(r"(\w+): room for \d+% of blocks: lru"):
        for room in rows.found(rf"{name}: room for (\d+%) of blocks: lru"):
            cells = (rows.cell(f"{name}: room for {room} of blocks: {way}", "%") for way in KEPT)
            lines.append((f"{name}, blocks of {rows.cell(f'{name}: block')}", room, *cells))
    return lines


def _orders(rows: Rows) -> Sequence[Line]:
    sizes = rows.found(r".+, blocks of (\d+): as given")
    lines: list[Line] = [("blocks that a token asks for", *(f"of {size} neurons" for size in sizes))]
    for name in rows.found(r"(\w+), blocks of \d+: as given"):
        for order in ORDERS:
            cells = [rows.cell(f"{name}, blocks of {size}: {order}", "%") for size in sizes]
            lines += [(f"{name}, {order}", *cells)] if any(cells) else []
    return lines


def _friends(rows: Rows) -> str:
    what = "neurons that are anyone's closest friend"
    found = (f"{rows.cell(f'{name}: {what}', '%')} of {name}'s" for name in rows.found(rf"(\w+): {what}"))
    return f"The closest friend of some other neuron of its expert are {', '.join(found)}."


# `make bench-less`: routing that prefers what was used lately, beside exact routing.

MODELS = ("wiki", "wikids", "g2p", "marks")
LESS_SHARES = ("25%", "50%")
DRIVES = {"ssd": "500 MB/s", "nvme": "unthrottled"}
_LEVEL = re.compile(r"(?P<where>(?P<model>.+): (?P<beyond>\S+) beyond, (?P<share>\S+) in memory): asks for")
_RACED = re.compile(r"(?P<where>(?P<model>[\w-]+), (?P<drive>\w+)): (?P<what>\S+) (?P<share>\d+%) to exact")


def less_parts(result: Result) -> Sequence[Part]:
    return [asked(result), resident(), raced(result), sentences(result)]


def asked(result: Result) -> Sequence[Line]:
    """Routing beside widths that are there, on held-out text."""
    lines: list[Line] = [
        ("model", "in memory", "may lose beyond the widths", "lost, held-out", "asks for, kB a token", "exact routing",
         "ratio")
    ]  # fmt: skip
    for found in filter(None, map(_LEVEL.fullmatch, result.by_name)):
        where = found["where"]
        lines.append(
            (found["model"], found["share"], found["beyond"], f"{{{where}: held-out loss beyond the widths'|.2f}}%",
             f"{{{where}: asks for|.0f}}", f"{{{where}: exact routing asks for|.0f}}",
             f"{{{where}: asks for, of exact|.2f}}")
        )  # fmt: skip
    return lines


def resident() -> Sequence[Line]:
    """Whole conversions."""
    lines: list[Line] = [
        ("model", "--resident", "promised at 95%", "held-out loss", "kB a token", "same widths, exact routing",
         "of --loss 5% alone")
    ]  # fmt: skip
    for model in MODELS:
        for share in LESS_SHARES:
            where = f"{model}: --resident {share}"
            lines.append(
                (model, share, f"under {{{where}: promised|.1f}}%", f"{{{where}: held-out loss|interval.1f}}%",
                 f"{{{where}: reads|.0f}}", f"{{{where}: the same widths routed exactly|.0f}}",
                 f"{{{where}: to widths alone|.2f}}")
            )  # fmt: skip
    return lines


def raced(result: Result) -> Sequence[Line]:
    """On imitated drives."""
    lines: list[Line] = [
        ("model", "drive", "room for experts", "routing", "tokens/s", "exact routing", "ratio", "bytes a token",
         "of the bound of exact routing")
    ]  # fmt: skip
    for found in filter(None, map(_RACED.fullmatch, result.by_name)):
        where, what, share = found["where"], found["what"], found["share"]
        bound = f"{where}: {what} {share} to the bound of exact routing"
        lines.append(
            (found["model"], DRIVES[found["drive"]], share, what if what == "--resident" else f"{what} beyond",
             f"{{{where}: {what} {share}: decode}}", f"{{{where}: exact {share}: decode}}",
             f"{{{where}: {what} {share} to exact|.2f}}", f"{{{where}: {what} {share} to exact: bytes|.2f}}",
             f"{{{bound}|%}}" if bound in result.by_name else "")
        )  # fmt: skip
    return lines


def sentences(result: Result) -> str:
    llama = next((name for name in result.by_name if name.endswith("preferring 50% to llama.cpp")), None)
    above = "decision of a layer above exact|.1f"
    same = "answers that differ over room, drive, batch and threads"
    words = over_routings("g2p, {}: words right|.1f", "%")
    written = ("wiki", "wikids")
    likely = {name: over_routings(f"{name}, {{}}: perplexity of what it writes, unquantized|.0f") for name in written}
    again = {name: over_routings(f"{name}, {{}}: repeated|.1f", "%") for name in written}
    said = [
        f"A layer's decision takes {{wiki: {above}}} µs more than exact routing's on wiki, {{wikids: {above}}} µs on "
        "wikids.",
        f"With exact routing, with that for half and with that for a quarter of the experts {words} of g2p's held-out "
        "words come out right. A thousand tokens that wiki writes freely have a perplexity per token of "
        f"{likely['wiki']} under the unquantized model, wikids' {likely['wikids']}; four tokens in a row were there "
        f"before in {again['wiki']} of places, {again['wikids']}.",
        "Answers that differ over room for experts, drive, batch and threads: "
        + ", ".join(f"{{{model}: {same}}} ({model})" for model in MODELS) + ".",
    ]  # fmt: skip
    larger = "experts of --resident to those of --loss alone|.2f"
    said.append(
        f"Fitted to a quarter of the experts in memory, widths are larger: experts take {{wiki: {larger}}} times the "
        f"bytes of those of --loss 5% alone on wiki, {{wikids: {larger}}} times on wikids."
    )
    if llama is not None:
        said.append(
            "Preferring what was used lately, moert has in the same memory as llama.cpp, at 500 MB/s, both with random "
            f'routers, {{{llama}|.1f}} × its speed; "Small devices" has what exact routing has.'
        )
    return " ".join(said)


def over_routings(row: str, unit: str = "") -> str:
    """The same figure of all three."""
    first, second, third = (f"{{{row.format(routing)}}}{unit}" for routing in ("exact", "50%", "25%"))
    return f"{first}, {second} and {third}"


# `make bench-devices`: experts on a simulated card, in memory and on a drive.

OURS, BEST = "two devices", ": by the best of the others"
OTHERS = (
    "all on the processor", "LRU offloading", "layers split", "experts of layers split, all else on the card",
)  # fmt: skip
HITS = "hits on the card with room for "
ALONE = "by the clock that times it"


def devices_parts(result: Result) -> Sequence[Part]:
    rows = result.by_name
    raced = [name.removesuffix(BEST) for name in rows if name.endswith(BEST)]
    raced = [what for what in raced if f"{what}: {OURS}" in rows]
    shown = {f"{what}{BEST}" for what in raced}
    single = [row.name for row in result.rows if row.aim is not None or ALONE in row.name]
    lines = [(name, f"{{{name}}} {rows[name].unit}") for name in single if name not in shown]
    head = "tokens/s", OURS, *OTHERS, "by the best of these"
    aimed = [("", "measured"), *lines]
    tables = [head, *(_raced(what, rows) for what in raced)], aimed, _device_hits(rows), _published(rows)
    return [table for table in tables if len(table) > 1]


def _raced(what: str, rows: Mapping[str, Row]) -> Line:
    there = [f"{what}: {name}" for name in OTHERS if f"{what}: {name}" in rows]
    best = rows[f"{what}: {OURS}"].value / max(rows[name].value for name in there)
    cells = (f"{{{what}: {name}}}" if f"{what}: {name}" in rows else "" for name in OTHERS)
    return what, f"{{{what}: {OURS}}}", *cells, f"{best:.2f} ×"


def _device_hits(rows: Collection[str]) -> Sequence[Line]:
    names = [name.removeprefix(HITS) for name in rows if name.startswith(HITS)]
    rooms, ways = (list(dict.fromkeys(name.split(": ")[at] for name in names)) for at in (0, 1))
    return [
        ("hits on the card with room for", *ways),
        *((room, *(f"{{{HITS}{room}: {way}}}%" for way in ways)) for room in rooms),
    ]


def _published(rows: Collection[str]) -> Sequence[Line]:
    theirs = ": their method"
    where = [name.removesuffix(theirs) for name in rows if name.endswith(theirs)]
    return [
        ("tokens/s", "Mixtral-offloading's method", OURS),
        *((what, f"{{{what}{theirs}}}", f"{{{what}: {OURS}}}") for what in where),
    ]


# `make bench-fiddler`: more of simulated cards.


def fiddler_parts(result: Result) -> Sequence[Part]:
    """Returns the rows, each called `line: column`, in a table for each unit with its columns."""
    lines: dict[str, list[str]] = {}
    for row in result.rows:
        line, _, column = row.name.rpartition(": ")
        lines.setdefault(line, []).append(column)
    tables: dict[tuple[str, ...], list[Line]] = {}
    for line, columns in lines.items():
        head = result.by_name[f"{line}: {columns[0]}"].unit, *columns
        tables.setdefault(head, [head]).append((line, *(f"{{{line}: {column}}}" for column in columns)))
    return list(tables.values())


# `make check-gpu`: what a real card gave.


JUDGED = {
    "wiki pack: tokens that the device likes best too": "|%",
    "wiki pack: largest difference of logits": "",
    "make test-cuda: exit status": "",
}
"""Rows of a card beside its speeds, and how they are written."""


def card_parts(result: Result) -> Sequence[Part]:
    raced = [row.name.split(": ") for row in result.rows if row.name not in JUDGED]
    whats, ways = (list(dict.fromkeys(each[at] for each in raced)) for at in (0, 1))
    head = f"tokens/s beside an {result.context['settings']['device']}", *ways
    speeds = [head, *((what, *(f"{{{what}: {way}}}" for way in ways)) for what in whats)]
    return [speeds, [("", "measured"), *((name, f"{{{name}{form}}} {{{name}@unit}}") for name, form in JUDGED.items())]]


# `make bench-outlook`: tokens a second that `moeconv plan` expects, beside those that were measured.

OFF = ": off by"


def outlook_parts(result: Result) -> Sequence[Part]:
    names = [row.name.removesuffix(OFF) for row in result.rows if row.name.endswith(OFF)]
    runs = [
        (
            name,
            f"{{{name}: measured}}",
            f"{{{name}: expected}}",
            f"{{{name}: off by}}%",
            f"{{{name}: off by, with the hits of that run}}%",
        )
        for name in names
    ]
    whole = [
        (name, f"{{{name}: measured}}", f"{{{name}: expected}}", f"{{{name}: off by, all in memory}}%", "")
        for name in (row.name.removesuffix(": off by, all in memory") for row in result.rows)
        if f"{name}: off by, all in memory" in result.by_name
    ]
    head = ("tokens/s", "measured", "expected", "off by", "the same with the hits of that run")
    said = (
        "{all: within the aim} {all: within the aim@unit} were within the aim; the median was off by "
        "{all: off by, median}%, and with the hit rates of those runs by "
        "{all: off by, median, with the hits of those runs}%."
    )
    return [[head, *runs, *whole], said]


# `make bench-methods`: the papers' methods beside each other, on the same model and drive.

METHODS = {
    "4 bits, on demand": "IO-QEXP, EdgeMoE's baseline", "mixed bits, on demand": "EdgeMoE, §3.2",
    "the cache alone": "", "the latest of each layer": "Mixtral-offloading",
    "eviction by frequency and distance": "EdgeMoE, §3.3.3", "eviction by expected use": "ours, or the pack's choice",
    "path tables read ahead": "EdgeMoE, §3.3", "routers read ahead": "Mixtral-offloading",
    "everything by default": "`auto`",
}  # fmt: skip


def methods(_: Result) -> Sequence[Part]:
    """A line for each method, a pair of columns for each model."""
    models = ("wiki", "g2p", "olmoe-shaped")
    heads = (head for model in models for head in (f"{model}, tokens/s", "× the cache", "MB a token"))
    lines: list[Line] = [("method", "from", *heads)]
    for name, source in METHODS.items():
        cells = (
            cell
            for model in models
            for cell in (
                f"{{{model}: {name}: decode}}",
                "" if name == "the cache alone" else f"{{{model}: {name}: to the cache|.2f}}",
                f"{{{model}: {name}: read@value|.3g}}",
            )
        )
        lines.append((name, source, *cells))
    beside = ", ".join(f"{{{model}: default to nothing read ahead|.2f}} ({model})" for model in models)
    return [lines, f"The default beside the same without reading ahead: {beside} times the speed."]
