"""`moert bench`: what it counts, its bounds, the JSON line and the tables. Nothing here is timed."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from command_line import Moert
from hypothesis import given, settings
from hypothesis import strategies as st

from moeconv.eviction import replay
from moert.bench import command
from moert.bench import drive as module
from moert.bench.command import asked, bench, percentile, summarize, summary_lines, summary_of, texts_of, tokens_sha256
from moert.bench.curve import CHUNKS, IN_FLIGHT, Curve, best_piece
from moert.bench.drive import FIRING
from moert.bench.measure import TEXTS, BenchRun, FurthestFirst, Sample, bound_s, furthest_first, least_bytes, measure
from moert.command.prompts import Longest
from moert.engine.budget import CacheLimit, MemoryLimit, parse_cache, parse_memory
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.engine.session import Request, Session
from moert.errors import InputInvalid, PathsMissing
from moert.experts.policy import EVICTION, Demand
from moert.experts.probe import Drive
from moert.experts.store import IoSettings
from moert.machine import usable_cores
from moert.pack.errors import ManifestMissing, PackError
from moert.pack.model_spec import ExpertKey, LayerKey
from tests import tiny_packs
from tests.alone import alone
from tests.tiny_bench import SETTINGS, but

LONGEST = Longest(1000, "memory")


# The bound ------------------------------------------------------------------------------------------------------------


def test_what_was_in_memory_before_need_not_be_read_but_takes_its_room() -> None:
    trace = [Demand(LayerKey("decoder", 0), (expert,)) for expert in (0, 1, 0, 2)]
    keys = [ExpertKey("decoder", 0, expert) for expert in range(4)]
    nbytes = dict.fromkeys(keys, 10)
    assert furthest_first(trace, nbytes, 20) == FurthestFirst(4, 3, 30)
    assert furthest_first(trace, nbytes, 20, [keys[0], keys[3]]) == FurthestFirst(4, 2, 20)
    assert furthest_first(trace, nbytes, 40, keys) == FurthestFirst(4, 0, 0)
    assert furthest_first(trace, nbytes, 20).hit_rate == 0.25


def test_the_bound_is_the_slower_of_both() -> None:
    assert bound_s(2.0, 100, 10.0) == 10.0
    assert bound_s(20.0, 100, 10.0) == 20.0
    assert bound_s(2.0, 100, None) == 2.0


# Measuring ------------------------------------------------------------------------------------------------------------


def test_every_sample_has_the_length_that_was_asked_for(measured: BenchRun) -> None:
    assert [sample.prompt_tokens for sample in measured.samples] == [14, 5]
    assert [(len(sample.tokens), len(sample.later_s)) for sample in measured.samples] == [(3, 2), (3, 2)]
    assert all(sample.first_s > 0 for sample in measured.samples)


def test_only_the_samples_count_not_the_warm_up(measured: BenchRun) -> None:
    assert measured.demands == sum(len(step.experts) for step in measured.trace) == measured.furthest_first.demands
    assert len(measured.trace) == 2 * 3 * 3  # samples, passes, layers
    assert measured.ahead_bytes == measured.ahead_used_bytes == 0
    assert measured.cache_bytes == measured.expert_bytes // 2
    assert 0 < measured.least_bytes <= min(measured.bytes_read, measured.furthest_first.bytes_read)
    assert measured.hits_in_flight == 0, "nothing is read ahead"
    assert measured.resident_s is not None
    assert measured.resident_s > 0


def in_800_megabytes(pack: Path) -> tuple[dict[str, int], dict[str, Any]]:
    """What was counted, and the settings of the summary."""
    limit = MemoryLimit(nbytes=8 * 10**8)
    asked = but(cache=None, memory=limit, io=None, eviction="auto", threads=None)
    whole = measure(pack, asked, ["one small step", "hello", "zigzag"], disk_bytes_per_s=1e6)
    counts = {"read": whole.bytes_read, "lacked": whole.demands - whole.hits, "unavoidable": whole.least_bytes}
    return counts, summary_of(whole)["settings"]


def test_with_all_experts_in_memory_nothing_is_read_and_nothing_has_to_leave(pack: Path) -> None:
    counts, settings = alone(in_800_megabytes, pack)
    assert counts == {"read": 0, "lacked": 0, "unavoidable": 0}
    assert settings["eviction"] is None
    assert settings["memory"] == {"asked": "800MB", "bytes": 8 * 10**8}
    assert settings["threads"] == usable_cores()
    assert settings["kernels"] != "auto"


def test_no_prompt_runs_before_it_is_measured(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[list[int]] = []
    add = Session.add

    def noted(self: Session, ids: list[int], *rest: Any, **named: Any) -> Request:
        runs.append(ids)
        return add(self, ids, *rest, **named)

    monkeypatch.setattr(Session, "add", noted)
    measure(pack, SETTINGS, ["one small step", "hello"], disk_bytes_per_s=1e9)
    assert [len(ids) for ids in runs] == [24, 14, 5]
    del runs[:]
    measure(pack, but(cache=None), None, disk_bytes_per_s=1e9)
    assert len(runs) == len(TEXTS) + 1
    assert runs[0] not in runs[1:]


def test_the_first_request_has_the_look_at_the_drive_in_its_time(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def looks(files: Sequence[Path]) -> Drive:
        clock[0] += 100.0
        return Drive(IoSettings(False, 1), {})

    monkeypatch.setattr("moert.experts.streaming.drive_of", looks)
    found = measure(pack, but(io=None), ["hello"], disk_bytes_per_s=1e9)
    assert found.first_request_s == 100.0
    assert [sample.first_s for sample in found.samples] == [0.0]
    with Engine.open(pack, cache=CacheLimit(share=0.5), threads=1) as engine:
        engine.generate([1, 2], GenerationSettings(max_new_tokens=1))
        assert engine.stats().time_to_first_token_s == 100.0


def test_what_is_read_ahead_is_counted_but_not_what_the_warm_up_read(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, amounts = Engine.session, iter([(7, 5), (100, 40), (200, 20)])  # bytes of each request: read, used

    def reading_ahead(self: Engine) -> Session:
        read, used = next(amounts)
        self.counters.prefetch_issued_bytes += read
        self.counters.prefetch_used_bytes += used
        return session(self)

    monkeypatch.setattr(Engine, "session", reading_ahead)
    ahead = measure(pack, SETTINGS, ["hello", "zigzag"], disk_bytes_per_s=1e9)
    assert (ahead.ahead_bytes, ahead.ahead_used_bytes) == (300, 60)
    nbytes = summary_of(ahead)["bytes"]
    assert (nbytes["read_ahead"], nbytes["read_ahead_used"]) == (300, 60)


def test_without_prompts_there_are_built_in_ones(pack: Path, tmp_path: Path) -> None:
    built_in = measure(pack, SETTINGS, None, disk_bytes_per_s=1e9)
    assert [sample.prompt_tokens for sample in built_in.samples] == [24] * 4
    assert built_in.resident_s is None
    silent = tiny_packs.write_pack(tmp_path / "silent.pack", tiny_packs.DECODER, paths=False, tokenizer=False)
    assert len(measure(silent, SETTINGS, None, 1e9).samples) == 4


# The summary ----------------------------------------------------------------------------------------------------------


def test_the_json_line_has_every_figure(measured: BenchRun) -> None:
    found = summary_of(measured)
    assert set(found) == {
        "hardware", "pack", "settings", "device", "samples", "prompt_tokens", "new_tokens", "prompt_tokens_per_s",
        "tokens_per_s", "time_to_first_token_s", "first_request", "token_latency_s", "sample_latency_s", "bytes",
        "hit_rate", "hit_rate_in_memory", "hit_rate_in_flight", "stall_s", "bound", "tokens_sha256",
    }  # fmt: skip
    assert len(found["pack"]["sha256"]) == len(found["tokens_sha256"]) == 64
    assert found["settings"]["cache"] == {"asked": "50%", "bytes": measured.expert_bytes // 2}
    assert (found["settings"]["memory"], found["settings"]["threads"]) == (None, 1)
    assert set(found["bytes"]) == {
        "disk_read", "read_ahead", "read_ahead_used", "cache", "experts", "backbone", "peak_process",
    }  # fmt: skip
    assert set(found["token_latency_s"]) == {"p50", "p90", "p99"}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_speeds_and_the_bound_follow_from_the_times(measured: BenchRun) -> None:
    samples = (Sample(10, (1, 2, 3), 2.0, (0.5, 0.5)), Sample(30, (4,), 2.0, ()))
    known = replace(measured, samples=samples, stall_s=1.0, least_bytes=300, disk_bytes_per_s=100.0)
    found = summarize(replace(known, resident_s=2.5), {}, "")
    assert (found["prompt_tokens_per_s"], found["tokens_per_s"], found["time_to_first_token_s"]) == (10.0, 2.0, 2.0)
    assert found["sample_latency_s"] == [3.0, 2.0]
    assert found["bound"]["least_s"] == 3.0
    assert found["bound"]["share"] == pytest.approx(0.6)
    unknown = summarize(replace(known, resident_s=None), {}, "")["bound"]
    assert (unknown["compute_s"], unknown["compute"], unknown["least_s"]) == (4.0, "not waiting", 4.0)


def test_a_run_is_never_faster_than_its_bound(measured: BenchRun) -> None:
    for resident_s, disk in ((1e6, 1e9), (1e-9, 1e-3)):
        bound = summarize(replace(measured, resident_s=resident_s, disk_bytes_per_s=disk), {}, "")["bound"]
        assert bound["least_s"] <= measured.total_s
        assert bound["compute_s"] == min(resident_s, measured.total_s - measured.stall_s)
    assert (bound["share"], bound["least_s"]) == (1.0, measured.total_s)


@pytest.mark.parametrize("text", ["auto", "50%", "33.3%", "1.5GB", "800MB", "1.234MB", "16GB", "512MiB", "600kB"])
def test_limits_are_said_as_they_were_asked_for(text: str) -> None:
    said = asked(parse_memory(text))
    assert said == {"512MiB": "536870912", "600kB": "600000"}.get(text, text)
    assert parse_memory(said) == parse_memory(text)
    if text != "auto":
        assert asked(parse_cache(text)) == said


def test_the_lines_say_that_eviction_was_not_needed(measured: BenchRun) -> None:
    hardware = {"processor": "x", "cores": 1}
    lines = summary_lines(summarize(replace(measured, eviction=None), hardware, ""))
    assert any(line.startswith("settings") and "eviction not needed" in line and "threads 1," in line for line in lines)


def test_one_token_each_has_no_latency_of_later_ones(measured: BenchRun) -> None:
    found = summarize(replace(measured, samples=(Sample(3, (1,), 1.0, ()),)), {"processor": "x", "cores": 1}, "")
    assert found["token_latency_s"] is None
    assert not any(line.startswith("token latency") for line in summary_lines(found))


def test_the_hash_of_the_tokens_tells_samples_apart() -> None:
    assert tokens_sha256([(1, 2), (3,)]) == tokens_sha256([[1, 2], [3]])
    assert tokens_sha256([(1, 2), (3,)]) != tokens_sha256([(1,), (2, 3)])


def test_percentiles_are_values_that_were_there() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, q) for q in (1, 20, 50, 90, 100)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_ends_with_one_json_line(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench([pack], SETTINGS, ["hello"], as_json=True)
    alone = capsys.readouterr().out.splitlines()
    bench([pack], SETTINGS, ["hello"])
    with_table = capsys.readouterr().out.splitlines()
    assert len(alone) == 1
    assert len(with_table) > 5
    assert json.loads(alone[0])["tokens_sha256"] == json.loads(with_table[-1])["tokens_sha256"]


def test_prompts_come_from_one_place(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "a"}\n{"input": "b"}\n')
    assert texts_of(None, None, LONGEST) is None
    assert texts_of("a", None, LONGEST) == ["a"]
    assert texts_of(None, lines, LONGEST) == ["a", "b"]
    with pytest.raises(InputInvalid, match="exclude each other"):
        texts_of("a", lines, LONGEST)
    lines.write_text("\n")
    with pytest.raises(InputInvalid, match="no prompts"):
        texts_of(None, lines, LONGEST)


def test_an_empty_stdin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    with pytest.raises(InputInvalid, match="stdin has no prompts"):
        texts_of(None, Path("-"), LONGEST)


def test_all_packs_are_looked_at_before_the_first_is_measured(
    pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "measure", lambda *rest: pytest.fail("measured"))
    with pytest.raises(ManifestMissing):
        bench([pack, tmp_path / "nothing"], SETTINGS)
    without = tiny_packs.write_pack(tmp_path / "without.pack", tiny_packs.DECODER, paths=False)
    with pytest.raises(PathsMissing):
        bench([pack, without], but(predict="transitions"))


def test_what_was_measured_is_printed_before_anything_else_can_fail(
    pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = shutil.copytree(pack, tmp_path / "damaged.pack")
    backbone = damaged / "backbone.safetensors"
    backbone.write_bytes(bytes(backbone.stat().st_size))
    with pytest.raises(PackError):
        bench([pack, damaged], SETTINGS, ["hello"], as_json=True)
    assert json.loads(capsys.readouterr().out)["pack"]["path"] == str(pack)


# `moert bench --drive`: what it prints and draws of a curve. Nothing here is timed.

SPEEDS = {(chunk, count): float(chunk * count * 1000) for chunk in CHUNKS for count in IN_FLIGHT}


@pytest.fixture
def moert(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Moert:
    monkeypatch.setattr(module, "curve_of", lambda files: Curve(SPEEDS, sum(file.stat().st_size for file in files)))
    return Moert(capsys, monkeypatch)


@pytest.fixture
def relu(tmp_path: Path) -> Path:
    return tiny_packs.write_pack(tmp_path / "relu.pack", tiny_packs.SWITCH)


def test_a_table_and_a_line(moert: Moert, pack: Path) -> None:
    assert moert("bench", pack, "--drive") == 0
    lines = moert.out.splitlines()
    assert lines[0] == "Reading from the drive of tiny.pack (MB/s)"
    assert lines[1].split("  ")[0] == "bytes of a read"
    assert [line.split()[0] for line in lines[2 : 2 + len(CHUNKS)]] == list(map(str, CHUNKS))
    found = json.loads(lines[-1])
    assert {(row["chunk_bytes"], row["in_flight"]): row["bytes_per_s"] for row in found["speeds"]} == SPEEDS
    assert found["pieces"] == [], "its activation has no exact zeros"


def test_pieces_are_advised_where_neurons_may_be_zero(moert: Moert, relu: Path) -> None:
    assert moert("bench", relu, "--drive", "--json") == 0
    (line,) = moert.out.splitlines()
    found = json.loads(line)
    files = [*(relu / "experts").rglob("*.safetensors"), relu / "backbone.safetensors"]
    assert found["spread_bytes"] == sum(file.stat().st_size for file in files)
    assert [one["firing"] for one in found["pieces"]] == list(FIRING)
    for one in found["pieces"]:
        assert one["best_bytes"] == best_piece({int(at): s for at, s in one["seconds"].items()})
    assert moert("bench", relu, "--drive") == 0
    assert moert.out.count("--tune piece-bytes") == 1


def test_options_of_a_run_have_no_effect(moert: Moert, pack: Path) -> None:
    for options in (("--memory", "1GB"), ("--tune", "threads=1"), ("--prompt", "hello")):
        assert moert("bench", pack, "--drive", *options) == 2
        assert moert.err == f"moert: {options[0]} has no effect with --drive: it runs no model: leave it out\n"


# PFOO-L: never above what the best of all possible choices reads, nor above any policy or Belady's rule.

EXPERTS = 5
KEYS = [ExpertKey("decoder", 0, expert) for expert in range(EXPERTS)]
WALKS = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=9)
SIZES = st.lists(st.integers(1, 7), min_size=EXPERTS, max_size=EXPERTS)
LONG = st.lists(st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=3), min_size=1, max_size=60)


def steps(walk: Sequence[int]) -> list[Demand]:
    return [Demand(LayerKey("decoder", 0), (expert,)) for expert in walk]


def optimum(walk: Sequence[int], sizes: Sequence[int], capacity: int, held: frozenset[int]) -> int:
    """The least bytes of all ways to choose who leaves."""

    @cache
    def least(at: int, held: frozenset[int]) -> int:
        if at == len(walk):
            return 0
        wanted = walk[at]
        if wanted in held:
            return least(at + 1, held)
        kept = [frozenset(some) for count in range(len(held) + 1) for some in combinations(sorted(held), count)]
        fits = [some for some in kept if sum(sizes[expert] for expert in some) + sizes[wanted] <= capacity]
        return sizes[wanted] + min(least(at + 1, some | {wanted}) for some in fits)

    return least(0, held)


@settings(max_examples=300, deadline=None)
@given(WALKS, SIZES, st.integers(7, 20), st.sets(st.integers(0, EXPERTS - 1)))
def test_the_bound_is_never_above_the_best_of_all_choices(walk, sizes, capacity, wanted) -> None:
    held: set[int] = set()
    for expert in sorted(wanted):
        if sum(sizes[each] for each in held) + sizes[expert] <= capacity:
            held.add(expert)
    nbytes = dict(zip(KEYS, sizes, strict=True))
    found = least_bytes(steps(walk), nbytes, capacity, [KEYS[expert] for expert in held])
    assert found <= optimum(walk, sizes, capacity, frozenset(held))
    assert found >= sum(sizes[expert] for expert in {*walk} - held), "what was never there is read at least once"


@settings(max_examples=100, deadline=None)
@given(LONG, st.integers(3, 5))
def test_with_equal_sizes_it_is_beladys_rule_or_less(layers, slots) -> None:
    trace = [Demand(LayerKey("decoder", 0), tuple(sorted(experts))) for experts in layers]
    nbytes = dict.fromkeys(KEYS, 7)
    assert least_bytes(trace, nbytes, 7 * slots) <= furthest_first(trace, nbytes, 7 * slots).bytes_read


@settings(max_examples=150, deadline=None)
@given(LONG, SIZES, st.integers(21, 40), st.sampled_from(sorted(EVICTION)))
def test_no_policy_reads_less(layers, sizes, capacity, name) -> None:
    trace = [Demand(LayerKey("decoder", 0), tuple(sorted(experts))) for experts in layers]
    nbytes = dict(zip(KEYS, sizes, strict=True))
    least = least_bytes(trace, nbytes, capacity)
    assert least <= replay(trace, nbytes, capacity, EVICTION[name]([LayerKey("decoder", 0)], None)).bytes_read
    assert least <= furthest_first(trace, nbytes, capacity).bytes_read


def test_it_is_below_beladys_rule_where_sizes_make_that_rule_wrong() -> None:
    """Expert 2 is needed again first, but the next one that is missing pushes it out or the larger 0."""
    sizes, walk = [4, 1, 3, 2, 3], (0, 1, 2, 2, 0, 1)
    nbytes = dict(zip(KEYS, sizes, strict=True))
    best = optimum(walk, sizes, 5, frozenset())
    assert least_bytes(steps(walk), nbytes, 5) <= best < furthest_first(steps(walk), nbytes, 5).bytes_read


def test_with_room_for_all_only_first_demands_are_read_and_only_of_what_was_not_held() -> None:
    nbytes = dict(zip(KEYS, (5, 4, 3, 2, 1), strict=True))
    walk = (0, 1, 0, 2, 1, 0)
    assert least_bytes(steps(walk), nbytes, 12) == 12
    assert least_bytes(steps(walk), nbytes, 12, KEYS[:2]) == 3
    assert least_bytes([], nbytes, 12) == 0


def test_the_last_hit_is_counted_in_part() -> None:
    """Two experts of 10 in turn, with room for one and a half: of each expert a half could stay."""
    nbytes = dict.fromkeys(KEYS, 10)
    assert least_bytes(steps((0, 1, 0, 1)), nbytes, 15) == 20
    assert least_bytes(steps((0, 1, 0, 1)), nbytes, 10) == 40
    assert least_bytes(steps((0, 1, 2, 0, 1, 2)), nbytes, 15) == 60 - 60 // 4


def test_an_expert_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="more than the budget of 9"):
        least_bytes(steps((0,)), dict.fromkeys(KEYS, 10), 9)
