"""Claims of docs/papers.md: flags, commands, files and rows that they name are there; figures are of kept results."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moeconv.artifacts import Probe
from moeconv.tuned import TUNED
from moert.command.settings import SETTINGS
from moert.described import Misasked
from moert.pack.model_spec import LayerKey
from recipes.bench import edgemoe, kept
from recipes.bench.blocks import PAPERS, RESULTS, ROOT, RowMissing, names, paper_table
from recipes.bench.blocks import kept as kept_results
from recipes.bench.race import Device, Entry, Outcome
from recipes.bench.result import Result, read, write
from recipes.bench.stream_packs import Packs, expert_bytes
from recipes.bench.streamed import Segment
from recipes.bench.tables.papers import NOT_MEASURED, Claim
from tests import tiny_packs

CLAIMS = [claim for claims in PAPERS.values() for claim in claims]
HELP = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
SETTINGS_OF = {each.called: each for each in (*SETTINGS, *TUNED) if not each.usual}


@pytest.fixture(scope="module")
def results() -> Mapping[str, Result]:
    return kept_results()


def is_there(said: str) -> bool:
    """Returns whether a flag, command, module, target of make or file exists, with the options behind it."""
    if tuned := re.fullmatch(r"--tune ([a-z-]+)=(\S+)", said):
        SETTINGS_OF[tuned[1]].parsed(tuned[2])
        return True
    first, *rest = said.split()
    if said.startswith("python -m"):
        module = importlib.util.find_spec(rest[1])
        return module is not None and {*rest[2:]} <= {*re.findall(r"--[a-z-]+", HELP)}
    if first in ("moert", "moeconv"):
        help_of = re.search(rf"<!-- help: {first} {rest[0]} -->(.*?)<!-- end -->", HELP, re.DOTALL)
        return help_of is not None and {*rest[1:]} <= {*re.findall(r"--[a-z-]+", help_of[1])}
    if first == "make":
        return re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE) is not None
    return first in re.findall(r"--[a-z-]+", HELP) if first.startswith("--") else (ROOT / said).exists()


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.mechanism)
def test_what_a_claim_names_is_there(claim: Claim, results: Mapping[str, Result]) -> None:
    for said in re.findall(r"`([^`]*)`", f"{claim.ours} {claim.differs}"):
        assert is_there(said), said
    rows = {name for cell in claim.line for name in names(cell)}
    assert bool(rows) is bool(claim.result), "a claim names rows and their result, or neither"
    assert claim.out != NOT_MEASURED or not claim.result
    assert claim.result or not re.search(r"\d", claim.out), "a figure that is no row"
    if claim.result and claim.result not in results:
        pytest.skip(f"{claim.result} is not kept yet: WAITING of tests/rules/test_tables.py")
    assert rows <= set(results[claim.result].by_name if claim.result else ())


def test_other_names_are_missed() -> None:
    there = [
        is_there(each) for each in ("--layot", "make bench-hsh", "moeconv train-hush", "python -m recipes.bench.x")
    ]
    assert there == [False] * 4
    with pytest.raises(Misasked, match="is not one of"):
        is_there("--tune eviction=fifo")


@pytest.mark.parametrize("name", PAPERS)
def test_a_changed_result_changes_its_cells(name: str, results: Mapping[str, Result]) -> None:
    if lacking := {claim.result for claim in PAPERS[name]} - {"", *results}:
        pytest.skip(f"not kept yet: {', '.join(lacking)}")
    claim = next(claim for claim in PAPERS[name] if claim.result)
    changed = next(names(claim.out))
    rows = [replace(row, value=row.value + 20, spread=None) if row.name == changed else row
            for row in results[claim.result].rows]  # fmt: skip
    before = paper_table(PAPERS[name], results)
    assert before
    after = paper_table(PAPERS[name], {**results, claim.result: Result(results[claim.result].context, rows)})
    assert after
    lines = zip(before.splitlines(), after.splitlines(), strict=True)
    assert claim.mechanism in {old.split(" | ")[0].removeprefix("| ") for old, new in lines if old != new}
    assert f"{claim.result} of commit {results[claim.result].context['commit'][:7]}" in " ".join(after.split())
    assert paper_table(PAPERS[name], {key: each for key, each in results.items() if key != claim.result}) is None


def test_a_result_without_a_row_of_a_claim_is_not_kept(tmp_path) -> None:
    found = read(RESULTS / "beforehand.json")
    rows = [row for row in found.rows if not (row.name.startswith("wiki") and row.name.endswith("with hash"))]
    with pytest.raises(RowMissing, match="with hash"):
        kept.keep(write("beforehand", found.context, rows, tmp_path / "build"), tmp_path / "docs")
    assert not (tmp_path / "docs").exists()


# `make bench-edgemoe` in imitated races: every row that the claims quote is there, and every pack has equal room.


def raced(device: Device, entries: list[Entry], seconds: float, rounds: int) -> dict[str, Outcome]:
    return {entry.name: Outcome([Segment(10, 1.0, 50, 20, 5, 2)] * rounds) for entry in entries}


@pytest.fixture
def rivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> edgemoe.Rivals:
    pack = tiny_packs.write_pack(tmp_path / "tiny.pack", tiny_packs.DECODER)
    packs = Packs("olmoe-shaped", pack, pack, pack, None, None, 7)
    named = ("paper's", "STI-like", "INT2, LRU", *map(edgemoe.TARGET.format, edgemoe.TARGETS))
    monkeypatch.setattr(edgemoe, "race", raced)
    monkeypatch.setattr(edgemoe, "texts", lambda spec: tmp_path / "texts")
    monkeypatch.setattr(edgemoe, "shaped", lambda baselines: packs)
    return edgemoe.Rivals(packs, dict.fromkeys(named, pack))


def test_the_claims_quote_rows_of_the_bench(rivals: edgemoe.Rivals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        edgemoe, "rivals", lambda name: (replace(rivals, packs=replace(rivals.packs, name=name)), [])
    )  # fmt: skip
    monkeypatch.setattr(edgemoe, "targets", lambda found: (found, []))
    rows = [row.name for part in edgemoe.result_rows([]) for row in part]
    assert len(set(rows)) == len(rows)
    quoted = {name for template in kept.claimed("edgemoe") for name in names(template)}
    plans = [(name, plan) for name in edgemoe.MODELS for plan in ("ours", "paper's", "INT4", "STI-like", "INT2")]
    plans += [("wiki", edgemoe.TARGET.format(loss)) for loss in edgemoe.TARGETS]
    of_packs = {f"{name}, {plan}: {what}" for name, plan in plans for what in ("loss", "experts")}
    assert quoted - {*rows} == of_packs | {f"{name}: target" for name in edgemoe.MODELS}


def test_every_pack_has_the_room_of_ours_and_every_decoder_the_same_text(rivals: edgemoe.Rivals) -> None:
    found = list[dict[str, Any]]()

    def watched(device: Device, entries: list[Entry], seconds: float, rounds: int) -> dict[str, Outcome]:
        found.extend(json.loads(entry.command[-1]) for entry in entries)
        return raced(device, entries, seconds, rounds)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(edgemoe, "race", watched)
        edgemoe.width_rows(rivals, [])
    assert len(found) == 8
    assert {each["cache_bytes"] for each in found} == {expert_bytes(rivals.packs.mixed) // 2}
    assert len({each["texts"] for each in found}) == 1
    assert found[0]["texts"]
    assert [each["eviction"] for each in found[1:5]] == ["lru", "paper", "lifo", "lru"]


def test_sti_widens_the_experts_that_gain_most_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Imitated:
        """Each expert gains more than those of its layer with smaller numbers."""

        spec = tiny_packs.DECODER
        metric = SimpleNamespace(value=np.mean, loss=lambda before, after: before - after)
        reference = SimpleNamespace(scores=np.ones(2))
        trial = SimpleNamespace(assign=lambda widths: None)

        def __init__(self, name: str, samples: int) -> None:
            base = SimpleNamespace(scores=np.zeros(2), nats=[0.0, 0.0])
            self.prober = SimpleNamespace(prepare=lambda: base, probe=self._probe)

        def probes(self, at: LayerKey, bits: int) -> list[Probe]:
            return [Probe(at.expert(number), (bits,)) for number in range(self.spec.moe.n)]

        def _probe(self, probes: list[Probe]) -> list[SimpleNamespace]:
            return [
                SimpleNamespace(probe=one, scores=SimpleNamespace(scores=np.full(2, one.key.expert))) for one in probes
            ]

    monkeypatch.setattr(edgemoe, "Subject", Imitated)
    widths, half = edgemoe.sti_widths("any", 2), Imitated.spec.moe.n // 2
    assert {key: set(bits) for key, bits in widths.items()} == {
        key: {4} if key.expert >= half else {2} for key in Imitated.spec.expert_keys()
    }
