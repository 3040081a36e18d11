"""`make bench-less`: routing that prefers what was used lately, beside exact routing of the same packs.

What is asked for: bytes a token, and loss, with routing fitted to 0.5% and 1% beyond the widths' own loss; whole
conversions with --resident beside those without. What that gives: speed on imitated drives, with experts of the
reference models' size, of OLMoE's, and beside llama.cpp. What it must not touch: answers are the same with any room for
experts. And what the text is like that is written so.

Writes build/bench/less.json."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from moeconv.artifacts import ConversionReport, ReadPoint, Residence
from moeconv.conversion.choosing import Bonuses
from moeconv.conversion.conversion import Conversion
from moeconv.conversion.measuring import Account, References
from moeconv.conversion.settings import Settings
from moeconv.measure.trial import Preferred
from moeconv.plan.problem import Plan
from moeconv.plan.search import MeasuredPlan, search
from moeconv.progress import bar
from moeconv.writer import PREFERRING_MINOR, dump_manifest
from moert.bench.measure import bound_s
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.models.ffn import PreferringRouter
from moert.models.kv import Recent
from moert.models.model import Model
from moert.pack.files import atomic_write, write_atomically
from moert.pack.manifest import Preference
from moert.pack.reader import MANIFEST, Pack
from recipes.bench import routing as recorded
from recipes.bench.conversions import opened
from recipes.bench.llama import file_of
from recipes.bench.program import as_program, need, own_recipe
from recipes.bench.race import (
    MOERT,
    RESIDENT,
    Device,
    Entry,
    Outcome,
    memory_bytes,
    of_llama,
    of_setting,
    race,
    read_ahead,
)
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.shaped import OLMOE
from recipes.bench.sized import sized
from recipes.bench.stream import DEVICES, LLAMA, SAME_AS_Q2_K, alive, disk_bytes_per_s, tell
from recipes.bench.stream_packs import HELDOUT_WINDOWS, Packs, expert_bytes, prompts, shaped, texts
from recipes.bench.stream_rows import ratios
from recipes.bench.streamed import THREADS, Setting, beginnings
from tests.cgroups import missing

# The packs of `make bench-less`: conversions with --resident, and the demo's packs with routing fitted to a loss
# beyond that of their widths. What was measured for them before is not measured again.

FOLDER = Path("build/bench/less")
PLAIN = {name: Path(f"build/demo/{name}.pack") for name in ("wiki", "g2p")} | {
    name: Path(f"build/references/{name}.pack") for name in sized(("wikids", "marks"), ())
}
"""Packs of --loss 5% alone, as `make demo` and `make report` left them with their work directories."""
SHARES = sized((0.25, 0.5), (0.5,))
BEYOND = sized((0.005, 0.01), (0.01,))
"""What routing may lose beyond the widths."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def settings_of(name: str) -> Settings:
    """Those of the recipe that made the plain pack, and with --resident."""
    recipe = own_recipe(name, PLAIN[name].parent)
    return replace(recipe.settings, out=FOLDER / f"{name}.pack", resident=SHARES)


def text_of(name: str) -> str:
    """The set in calib_data/ that a model's recipe names."""
    named = settings_of(name).calib
    assert named is not None
    return named


def converted(name: str) -> tuple[Path, ConversionReport]:
    """A pack whose widths and routing keep the loss together."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    settings = settings_of(name)
    _, report = Conversion(settings, say, bar).run()
    return settings.out, report


# Widths as they are, and routing beside them --------------------------------------------------------------------------


@dataclass(frozen=True)
class Level:
    """Routing for a `share` of the experts that was let lose `beyond` more than the widths. `loss`: what it lost more
    on the held-out text; `read` and `exact_read`: bytes of experts a token there that are not among those used last,
    with it and with exact routing."""

    share: float
    beyond: float
    preference: Preference
    loss: float
    read: float
    exact_read: float


def levels(name: str) -> list[Level]:
    """Of the plain pack, for each of SHARES and BEYOND: what reads least."""
    manifest = Pack.open(PLAIN[name]).manifest
    names = manifest.model.moe.ffn.projections
    assignment = {entry.key: tuple(entry.bits[each] for each in names) for entry in manifest.experts}
    plan = Plan(assignment, sum(entry.tensor_bytes for entry in manifest.experts), 0.0)
    with opened(settings_of(name)) as bench:
        references = References.of(bench)
        return [
            _level(Bonuses(bench, share, Account(say, bar)), references, plan, beyond)
            for share in SHARES
            for beyond in BEYOND
        ]


def _level(bonuses: Bonuses, references: References, plan: Plan, beyond: float) -> Level:
    judge, heldout = references.judge, references.heldout

    def measured(routing: Plan) -> MeasuredPlan:
        found = judge.measure.preferring(plan.assignment, bonuses.preference(routing), "routing beside these widths")
        loss, read = judge.loss(found.evaluation), bonuses.read(plan, found)
        say(f"{bonuses.share:.0%}: {read:,.0f} bytes a token, loss {loss:.2%}")
        return MeasuredPlan(routing.nbytes, routing.cost, loss, None)

    alone = judge.loss(judge.measure.preferring(plan.assignment, bonuses.exact, "exact routing").evaluation)
    found = search(bonuses.frontier(plan), measured, (1 + alone) * (1 + beyond) - 1)
    preference = bonuses.preference(found.plan)
    held = {what: heldout.preferring(plan.assignment, one, "routing") for what, one in
            (("exact", bonuses.exact), ("preferring", preference))}  # fmt: skip

    def lost(one: Preferred) -> float:
        return 1 + heldout.summary(one.evaluation).loss

    return Level(
        bonuses.share, beyond, preference, lost(held["preferring"]) / lost(held["exact"]) - 1,
        bonuses.read(plan, held["preferring"]), bonuses.read(plan, held["exact"]),
    )  # fmt: skip


def with_preferences(source: Path, preferences: Sequence[Preference], out: Path) -> Path:
    """The same weights with other preferences, as links to the files of the source."""
    if out.exists():
        shutil.rmtree(out)
    shutil.copytree(source, out, copy_function=os.link)
    (out / MANIFEST).unlink()
    manifest = replace(Pack.open(source).manifest, preferences=tuple(preferences), minor=PREFERRING_MINOR)
    write_atomically(out / MANIFEST, dump_manifest(manifest).encode())
    return out


def level_packs(name: str, found: Sequence[Level]) -> Mapping[float, Path]:
    """By what routing may lose beyond the widths: the plain pack with a preference for each share."""
    return {
        beyond: with_preferences(
            PLAIN[name],
            [level.preference for level in found if level.beyond == beyond],
            FOLDER / f"{name}-{100 * beyond:g}.pack",
        )
        for beyond in BEYOND
    }


# What `make bench-less` found, as rows with the aims of each. Pure.

READ_AIMS = {0.005: 0.6, 0.01: 0.45}
SPEED_AIMS = {0.005: 1.6, 0.01: 2.0}
ALONE_AIM = 0.6
BOUND_AIM, BOUND_SHARE = 1.0, 0.5


def asked_rows(name: str, levels: Sequence[Level]) -> list[Row]:
    """What is not among the experts used last, on held-out text, and what that costs."""
    rows = []
    for level in levels:
        where = f"{name}: {100 * level.beyond:g}% beyond, {level.share:.0%} in memory"
        rows += [
            Row(f"{where}: held-out loss beyond the widths'", 100 * level.loss, "%"),
            Row(f"{where}: exact routing asks for", level.exact_read / 1e3, "kB a token"),
            Row(f"{where}: asks for", level.read / 1e3, "kB a token"),
            Row(f"{where}: asks for, of exact", level.read / level.exact_read, "of exact routing's"),
        ]
    return rows


def against_alone(name: str, report: ConversionReport) -> list[Row]:
    """--loss with --resident beside --loss alone: both keep the same promise."""
    rows = []
    for one in report.residences:
        where = f"{name}: --resident {one.share:.0%}"
        alone = least(one.alone, report.target.value)
        together = least(one.together, report.target.value)
        bound = report.target.value if one.upper_bound is None else one.upper_bound
        rows += [
            Row(f"{where}: reads", one.bytes / 1e3, "kB a token"),
            Row(f"{where}: the same widths routed exactly", one.exact_bytes / 1e3, "kB a token"),
            Row(f"{where}: held-out loss", 100 * one.heldout.loss, "%").within(
                100 * one.heldout.low, 100 * one.heldout.high, one.heldout.samples
            ),
            Row(f"{where}: promised", 100 * bound, "%"),
            Row(f"{where}: to widths alone", together / alone, "of the bytes").at_most(ALONE_AIM),
            *bonus_rows(where, one),
        ]
    return rows


def least(points: Sequence[ReadPoint], target: float) -> float:
    """Bytes a token of what reads least and keeps the target."""
    return min(one.bytes for one in points if (one.loss if one.upper is None else one.upper) <= target)


def bonus_rows(where: str, one: Residence) -> list[Row]:
    return [Row(f"{where}: layers with a bonus", sum(bonus > 0 for bonus in one.bonus) / len(one.bonus), "of all")]


def speed_rows(where: str, outcomes: Mapping[str, Outcome], bytes_per_s: float, limited: bool) -> list[Row]:
    """Speed, bytes and hits of each entry; levels and --resident beside exact routing with the same room, with aims
    where the drive is `limited`; and beside what no policy could have passed with exact routing."""
    rows = []
    for name, outcome in outcomes.items():
        tokens, read = (sum(getattr(each, what) for each in outcome.segments) for what in ("tokens", "bytes_read"))
        requests, hits = (sum(getattr(each, what) for each in outcome.segments) for what in ("requests", "hits"))
        rows += [
            row_of_runs(f"{where}: {name}: decode", outcome.speeds, "tokens/s"),
            Row(f"{where}: {name}: read for a token", read / tokens / 1e3, "kB"),
            Row(f"{where}: {name}: hits", 100 * hits / requests, "%"),
        ]
    for name, outcome in outcomes.items():
        what, _, share = name.rpartition(" ")
        exact = outcomes.get(f"exact {share}")
        if exact is None or outcome is exact:
            continue
        beyond = next((each for each in READ_AIMS if what == f"{100 * each:g}%"), None)
        read = Row(f"{where}: {name} to exact: bytes", bytes_a_token(outcome) / bytes_a_token(exact), "of its bytes")
        speed = row_of_runs(f"{where}: {name} to exact", ratios(outcome, exact), "× its speed")
        if beyond is not None and limited:
            read, speed = read.at_most(READ_AIMS[beyond]), speed.at_least(SPEED_AIMS[beyond])
        rows += [read, speed]
        if share == f"{BOUND_SHARE:.0%}" and RESIDENT.name in outcomes:
            shares = of_bound(outcome, exact, outcomes[RESIDENT.name], bytes_per_s)
            row = row_of_runs(f"{where}: {name} to the bound of exact routing", shares, "of the possible speed")
            rows.append(row.at_least(BOUND_AIM) if beyond is not None else row)
    return rows


def bytes_a_token(outcome: Outcome) -> float:
    return sum(each.bytes_read for each in outcome.segments) / sum(each.tokens for each in outcome.segments)


def of_bound(outcome: Outcome, exact: Outcome, resident: Outcome, bytes_per_s: float) -> list[float]:
    """In each round: speed as a share of what computing and the bytes that no policy can avoid allow exact routing."""
    found = []
    for mine, theirs, nbytes, whole in zip(
        outcome.speeds, exact.segments, exact.unavoidable, resident.speeds, strict=True
    ):
        possible = theirs.tokens / bound_s(theirs.tokens / whole, nbytes, bytes_per_s)
        found.append(mine / possible)
    return found


# What is written where routing prefers, whether it is the same everywhere, and what the decision takes.

LEAST = f"{min(SHARES):.0%}"
ROUTINGS = ("exact", *(f"{share:.0%}" for share in sorted(SHARES, reverse=True)))
WORDS = sized(1000, 8)
TEXTS, TEXT_TOKENS, TEXT_WORDS = sized((8, 125, 8), (1, 8, 8))  # that are written freely, a thousand tokens together
SHORT = {"max_new_tokens": 24, "ignore_eos": True}
DECISIONS, TURNS, DECISION_AIM = sized(2000, 20), sized(5, 1), 5.0


def function_rows(packs: Mapping[str, Path]) -> list[Row]:
    """`packs`: those of --resident."""
    found = [row for name, pack in packs.items() for row in same_rows(name, pack)]
    found += [row for name in ("wiki", "wikids") if name in packs for row in decision_rows(name, packs[name])]
    found += word_rows(packs["g2p"])
    return [*found, *(row for name in ("wiki", "wikids") if name in packs for row in text_rows(name, packs[name]))]


def function_texts(name: str, count: int) -> list[str]:
    """Held-out inputs, or beginnings of held-out texts."""
    path = Path(f"build/data/{text_of(name)}/heldout.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]
    return [row["input"] if "input" in row else " ".join(row["text"].split()[:TEXT_WORDS]) for row in rows]


def same_rows(name: str, pack: Path) -> list[Row]:
    """Answers that differ where room, threads, drive, prediction or batch do."""
    prompts = function_texts(name, 8)

    def answers(batch: bool = False, **changes: object) -> list[list[int]]:
        with Engine.open(pack, routing=LEAST, **changes) as engine:
            if batch:
                return [each.result.tokens for each in engine.generate_many(prompts, **SHORT)]
            return [engine.generate(prompt, **SHORT).result.tokens for prompt in prompts]

    expected = answers(cache="100%", threads=1, predict="none")
    differ = 0
    for changes in (
        {"cache": "25%"}, {"cache": "50%", "threads": 2}, {"cache": "25%", "io": "direct", "eviction": "expected"},
        {"cache": "40%", "io": "buffered", "predict": "none"}, {"cache": "50%", "batch": True},
    ):  # fmt: skip
        found = answers(**changes)
        differ += sum(one != other for one, other in zip(found, expected, strict=True))
    return [Row(f"{name}: answers that differ over room, drive, batch and threads", differ, "answers").at_most(0)]


def decision_rows(name: str, pack: Path) -> list[Row]:
    """Microseconds of a layer's decision for one token above exact routing, in turns."""
    with Engine.open(pack, routing=LEAST, threads=1) as engine:
        model: Model = engine.model
        at, router = next((at, each) for at, each in model.routers.items() if isinstance(each, PreferringRouter))
        assert model.preference is not None
        top_k, d_model = engine.spec.moe.router.top_k, engine.spec.d_model
        recent, chance = Recent(model.preference.recent, top_k), np.random.default_rng(0)
        tokens = chance.standard_normal((DECISIONS, 1, d_model), np.float32)
        exact = router._exact
        timed: dict[str, list[float]] = {"exact": [], "preferring": []}
        for _ in range(TURNS):
            for what in timed:
                started = time.perf_counter()
                if what == "exact":
                    for x in tokens:
                        exact.route(x, (1,))
                else:
                    for x in tokens:
                        router.route(x, (1,), (recent,))
                timed[what].append(1e6 * (time.perf_counter() - started) / DECISIONS)
    above = [two - one for one, two in zip(timed["exact"], timed["preferring"], strict=True)]
    return [
        row_of_runs(f"{name}: decision of a layer ({at.stack} {at.layer}), exact", timed["exact"], "µs"),
        row_of_runs(f"{name}: decision of a layer above exact", above, "µs").at_most(DECISION_AIM),
    ]


def word_rows(pack: Path) -> list[Row]:
    """Words of g2p that come out exactly right."""
    lines = Path("build/data/g2p/heldout.jsonl").read_text(encoding="utf-8").splitlines()[:WORDS]
    samples, settings, found = [json.loads(line) for line in lines], GenerationSettings(40), []
    for routing in ROUTINGS:
        with Engine.open(pack, routing=routing) as engine:
            answers = [engine.generate(sample["input"], settings).text for sample in samples]
        right = sum(text == sample["target"] for text, sample in zip(answers, samples, strict=True))
        found.append(Row(f"g2p, {routing}: words right", 100 * right / len(samples), "%", n=len(samples)))
    return found


def text_rows(name: str, pack: Path) -> list[Row]:
    """Of a thousand tokens written freely: how likely the unquantized model finds them, and how many four in a
    row were there before in the same text."""
    from moeconv.measure.trial import LoadedModel
    from moeconv.source.checkpoint import Checkpoint

    model, found = LoadedModel(Checkpoint.open(f"recipes/models/{name}")).model, []
    for routing in ROUTINGS:
        nats, again = [], []
        with Engine.open(pack, routing=routing) as engine:
            for seed, prompt in enumerate(function_texts(name, TEXTS)):
                settings = GenerationSettings(TEXT_TOKENS, temperature=1.0, seed=seed, ignore_eos=True)
                before, written = engine.encode(prompt), engine.generate(prompt, settings).result.tokens
                nats += nats_of(model, before, written)
                again.append(repeated(written))
        found += [
            Row(f"{name}, {routing}: perplexity of what it writes, unquantized", math.exp(statistics.mean(nats)), ""),
            Row(f"{name}, {routing}: repeated", 100 * statistics.mean(again), "% of four in a row"),
        ]
    return found


def nats_of(model: object, before: Sequence[int], written: Sequence[int]) -> list[float]:
    """Of each token written behind others."""
    import torch

    ids = torch.tensor([[*before, *written]])
    with torch.inference_mode():
        logs = model(ids).logits[0].log_softmax(-1)
    places = torch.arange(len(before) - 1, len(before) + len(written) - 1)
    return [-float(each) for each in logs[places, torch.tensor(written)]]


def repeated(tokens: Sequence[int]) -> float:
    """Share of four tokens in a row that came before in the same text."""
    grams = list(zip(*(itertools.islice(tokens, start, None) for start in range(4)), strict=False))
    return 1 - len(set(grams)) / len(grams)


# Preferring routers with experts of OLMoE's size: wiki's routing replayed, and random routers beside llama.cpp.

NAME = "olmoe-shaped"
SHAPED_SECONDS, SHAPED_ROUNDS = sized((2.0, 3), (0.05, 1))
BESIDE_LLAMA, LLAMA_AIM = 0.5, 15.0
TOKENS, HALVINGS = sized((64, 10), (4, 2))  # that a bonus is tried on, and how often


def shaped_rows(
    packs: Mapping[float, Path], levels: Sequence[Level], devices: Sequence[str], failed: list[str]
) -> list[Row]:  # fmt: skip
    """`packs` and `levels` are wiki's, of what routing may lose beyond the widths."""
    found, like_olmoe = list[Row](), shaped()
    for each in devices:
        device, where = DEVICES[each], f"{NAME}, {each}"
        disk = disk_bytes_per_s(like_olmoe.mixed)
        outcomes = alive(where, race(device, _entries(like_olmoe, packs), SHAPED_SECONDS, SHAPED_ROUNDS), failed)
        found += speed_rows(where, outcomes, min(disk, device.read_bps or disk), device.read_bps is not None)
    try:
        subprocess.run([str(LLAMA), "-m", "recipes.bench.llama", "make"], check=True, capture_output=True)
        found += _beside_llama(like_olmoe, levels, failed)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        tell("llama.cpp", error, failed)
    return found


def _entries(packs: Packs, preferring: Mapping[float, Path]) -> list[Entry]:
    """Routed as wiki is: exactly, and with each level; no router is asked for what it prefers, so eviction is named."""

    def entry(what: str, share: float, routed: Path, eviction: str) -> Entry:
        setting = Setting(
            str(packs.mixed), int(share * expert_bytes(packs.mixed)), eviction=eviction, routing=str(routed)
        )
        return of_setting(f"{what} {share:.0%}", setting, MOERT.warm_tokens, memory_bytes(packs, share))

    assert packs.routing is not None
    entries = [
        of_setting(
            RESIDENT.name, Setting(str(packs.mixed), None, predict="none", routing=str(packs.routing)),
            RESIDENT.warm_tokens, None,
        )
    ]  # fmt: skip
    for share in SHARES:
        entries.append(entry("exact", share, packs.routing, "auto"))
        for beyond, pack in preferring.items():
            entries.append(entry(f"{100 * beyond:g}%", share, _recorded(pack, share), "layer-lru"))
    return entries


def _recorded(pack: Path, share: float) -> Path:
    """How a pack of wiki routes held-out text with its preference for a share."""
    out = FOLDER / f"{pack.stem}-{share:.0%}.npz"
    if not out.exists():
        heldout, guesses = recorded.joined(pack, "heldout", HELDOUT_WINDOWS, f"{share:.0%}")
        with atomic_write(out) as fresh, fresh.open("wb") as stream:
            np.savez(stream, heldout=heldout, guesses=guesses)
    return out


# Beside llama.cpp -----------------------------------------------------------------------------------------------------


def _beside_llama(packs: Packs, levels: Sequence[Level], failed: list[str]) -> list[Row]:
    """Both go where random routers say, which llama.cpp can't be kept from. No loss can be measured of random weights:
    their bonus is such that as large a part of what exact routing asks for is asked for as on wiki."""
    level = max((each for each in levels if each.share == BESIDE_LLAMA), key=lambda each: each.beyond)
    preference = _as_little(packs.mixed, BESIDE_LLAMA, level.read / level.exact_read)
    preferring = with_preferences(packs.mixed, [preference], FOLDER / "olmoe-shaped.pack")
    limit, share = memory_bytes(packs, BESIDE_LLAMA), f"{BESIDE_LLAMA:.0%}"
    written = str(texts(OLMOE))
    settings = {
        f"exact {share}": Setting(str(packs.mixed), None, memory_bytes=limit, texts=written),
        f"preferring {share}": Setting(str(preferring), None, prefers=share, memory_bytes=limit, texts=written),
    }
    llama = f"llama.cpp {SAME_AS_Q2_K}"
    entries = [of_setting(name, setting, MOERT.warm_tokens, limit) for name, setting in settings.items()]
    entries.append(of_llama(llama, LLAMA, file_of(SAME_AS_Q2_K), limit, Path(written)))
    where = f"{NAME} (own routers), ssd, {limit / 1e6:.0f} MB"
    outcomes = alive(where, race(DEVICES["ssd"], entries, SHAPED_SECONDS, SHAPED_ROUNDS), failed)
    found = [row_of_runs(f"{where}: {name}: decode", each.speeds, "tokens/s") for name, each in outcomes.items()]
    preferred = outcomes.get(f"preferring {share}")
    if llama in outcomes and preferred is not None:  # exact routing beside llama.cpp is what bench-stream measures
        ratio = row_of_runs(
            f"{where}: preferring {share} to llama.cpp", ratios(preferred, outcomes[llama]), "× its speed"
        )
        found.append(ratio.at_least(LLAMA_AIM))
    return found


def _as_little(pack: Path, share: float, part: float) -> Preference:
    """The bonus, the same in all layers, with which `part` of what exact routing asks for is asked for."""
    moe = Pack.open(pack).manifest.model.moe
    count = int(share * moe.n)
    layers = len(Pack.open(pack).manifest.model.moe_layers())
    low, high = 0.0, 1.0

    def preference(bonus: float) -> Preference:
        return Preference(share, count, 1, (float(np.float32(bonus)),) * layers)

    exact = _asked(pack, preference(0.0))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        asked = _asked(pack, preference(middle))
        say(f"random routers, bonus {middle:.4f}: {asked / exact:.2f} of what exact routing asks for")
        low, high = (low, middle) if asked < part * exact else (middle, high)
    return preference(high)


def _asked(pack: Path, preference: Preference) -> int:
    """How often an expert was asked for that was not among those used last, in TOKENS tokens."""
    from moert.engine.engine import Engine
    from moert.models.ffn import PreferringRouter

    counts: list[int] = []

    def counted(router: PreferringRouter, x: object, lengths: object, recent: object = ()) -> object:
        before = [kept.experts.copy() for kept in recent]
        routed = PreferringRouter.route(router, x, lengths, recent)
        counts.extend(int((~np.isin(routed.experts[at], each)).sum()) for at, each in enumerate(before))
        return routed

    with Engine.open(pack, routing="exact", predict="none") as engine:
        engine.reserve(1, TOKENS)
        engine.model.prefer(preference)
        for at, router in engine.model.routers.items():
            if isinstance(router, PreferringRouter):
                engine.model.routers[at].route = partial(counted, router)
        first, *others = islice(beginnings(engine.spec.vocab_size), TOKENS)
        (state, unread), *_ = engine.model.begin([[first]])
        engine.model.read([state], [unread])
        for token in others:
            engine.model.step(state, token)
    return sum(counts)


ASKED = tuple(name for name in ("wiki", "wikids") if name in PLAIN)
RACED = sized(("ssd", "nvme"), ("nvme",))
SECONDS, ROUNDS, NEW_TOKENS = sized((3.0, 5, 192), (0.05, 1, 8))


def entries_of(name: str, packs: Mapping[float, Path], resident: Path) -> list[Entry]:
    """The plain pack routed exactly and with each level, and that of --resident; each has room for that share of its
    experts."""
    plain, asked = PLAIN[name], str(prompts(PLAIN[name], text_of(name)))

    def entry(what: str, pack: Path, share: float, prefers: str) -> Entry:
        setting = Setting(
            str(pack), int(share * expert_bytes(pack)), prompts=asked, new_tokens=NEW_TOKENS, prefers=prefers
        )
        return of_setting(f"{what} {share:.0%}", setting, MOERT.warm_tokens, memory_bytes(alike(name, pack), share))

    entries = [
        of_setting(
            RESIDENT.name, Setting(str(plain), None, predict="none", prompts=asked, new_tokens=NEW_TOKENS),
            RESIDENT.warm_tokens, None,
        )
    ]  # fmt: skip
    for share in SHARES:
        entries.append(entry("exact", plain, share, "exact"))
        entries += [entry(f"{100 * beyond:g}%", pack, share, f"{share:.0%}") for beyond, pack in packs.items()]
        entries.append(entry("--resident", resident, share, f"{share:.0%}"))
    return entries


def alike(name: str, pack: Path) -> Packs:
    """For what asks how much memory a pack gets."""
    return Packs(name, pack, pack, pack, None, None, NEW_TOKENS)


def raced_rows(
    name: str, found: Sequence[Level], resident: Path, devices: Sequence[str], failed: list[str]
) -> list[Row]:
    packs, room = level_packs(name, found), alike(name, PLAIN[name])
    larger = expert_bytes(resident) / expert_bytes(PLAIN[name])
    rows = [Row(f"{name}: experts of --resident to those of --loss alone", larger, "of their bytes")]
    for each in devices:
        device, where = DEVICES[each], f"{name}, {each}"
        disk = disk_bytes_per_s(room.mixed)
        outcomes = alive(where, race(device, entries_of(name, packs, resident), SECONDS, ROUNDS), failed)
        rows += speed_rows(where, outcomes, min(disk, device.read_bps or disk), limited(device))
    return rows


def limited(device: Device) -> bool:
    """Whether a drive is slow enough to be what a token waits for."""
    return device.read_bps is not None


def told(rows: Sequence[Row]) -> Sequence[Row]:
    print(table(rows), end="\n\n", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Routing that prefers what was used lately, beside exact routing.")
    parser.add_argument("--devices", nargs="+", choices=list(DEVICES), default=list(RACED))
    arguments = parser.parse_args()
    if lacking := missing(reads=Path(__file__)):
        raise SystemExit(f"bench-less imitates drives with control groups, but {lacking}")
    need(PLAIN.values(), "demo report")
    started, failed, rows = time.perf_counter(), list[str](), list[Row]()
    made: dict[str, tuple[Path, ConversionReport]] = {name: converted(name) for name in PLAIN}
    found = {name: levels(name) for name in ASKED}
    for name in ASKED:
        rows += told(asked_rows(name, found[name]))
    for name, (_, report) in made.items():
        rows += told(against_alone(name, report))
    with read_ahead(next(iter(PLAIN.values()))) as ahead_kb:
        for name in ASKED:
            rows += told(raced_rows(name, found[name], made[name][0], arguments.devices, failed))
        rows += told(shaped_rows(level_packs("wiki", found["wiki"]), found["wiki"], arguments.devices, failed))
    rows += told(function_rows({name: pack for name, (pack, _) in made.items()}))
    print(table(rows))
    settings = {
        "shares": SHARES, "beyond": BEYOND, "seconds": SECONDS, "rounds": ROUNDS, "threads": THREADS, "failed": failed,
        "devices": arguments.devices, "read_ahead_kb": ahead_kb, "took_s": round(time.perf_counter() - started),
    }  # fmt: skip
    print(f"written to {write('less', context(settings), rows)}")
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    as_program(main)
