"""Benches of conversions and forecasts: what is compared, and the rows and aims that come of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from moeconv.artifacts import Probe, SensitivityTable, Summary, SweepCost
from moeconv.conversion.settings import Settings
from moeconv.dense import SOURCE as UNCHANGED
from moeconv.plan.forecast import SOURCE, Drive, references, stated, token_s
from moeconv.routes import record
from moert.pack.manifest import LossEstimate
from moert.pack.model_spec import ExpertKey, ModelSpec
from moert.pack.paths import Trace
from moert.pack.reader import Pack
from recipes.bench import hit_rates, mixed, outlook
from recipes.bench.blocks import rendered
from recipes.bench.conversions import opened
from recipes.bench.gradients import effort_rows, plan_rows, rank_rows
from recipes.bench.mixed import EXPERTS, MODELS, SETTINGS, Measured, Outside
from recipes.bench.mixed import rows_of as rows_of_mixed
from recipes.bench.outlook_machine import KERNELS, OUT, RESULTS, TRELLIS_KERNELS, machine
from recipes.bench.plans import (
    MC_WIDTHS,
    SEEDS,
    SIGNAL,
    Significance,
    rankings,
    reordered,
    significances,
    solved,
    with_widths,
)
from recipes.bench.promise import CASES, Split, halves, summary
from recipes.bench.result import Result, Row, read
from recipes.bench.shape_numbers import config_of
from recipes.bench.size import Aim, Ran, conversion, growth_rows, line, rows_of, run
from recipes.bench.tables import quality as tables
from recipes.bench.virtual import VirtualTensors, mark, tensors_of
from recipes.bench.workers import rows_of as rows_of_workers
from tests.cgroups import missing
from tests.shapes import Shape, every
from tests.tiny import tiny_olmoe

# bench-size: what it makes of conversions, and that one of a checkpoint without weights on the disk goes through.

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 128, "eos_token_id": 1,
}  # fmt: skip
RAN = Ran(300, 500, 28 * 10**9, 19 * 10**8, 4 * 10**9, {"references": 40.0, "fisher": 120.0})


@pytest.fixture
def virtual(tmp_path: Path) -> Path:
    """A small checkpoint whose weights are made when they are read."""
    folder = tmp_path / "virtual"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of("olmoe", 2) | SMALL))
    mark(folder, 2, 5)
    return folder


def test_a_conversion_reads_what_is_made(virtual: Path, tmp_path: Path) -> None:
    out = tmp_path / "made.pack"
    command = conversion(["quantize", str(virtual), "--bits", "16", "--out", str(out)], virtual=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    made = tensors_of(virtual)
    assert isinstance(made, VirtualTensors)
    pack = Pack.open(out)
    assert len(pack.manifest.experts) == 16
    assert pack.manifest.quality is None


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_what_a_process_held_is_seen_also_where_it_fails(tmp_path: Path) -> None:
    """Both write 200 MB; one then ends with 3."""
    program = "import sys; held = b'x' * 200_000_000; import time; time.sleep(0.5); print('so much'); sys.exit({})"
    well = run([sys.executable, "-c", program.format(0)], tmp_path / "a.pack", 1 << 30)
    assert well.failed is None
    assert 200e6 < well.resident_peak_bytes < 400e6
    assert 200e6 < well.group_peak_bytes <= 1 << 30
    assert well.steps == {}
    ill = run([sys.executable, "-c", program.format(3)], tmp_path / "b.pack", 1 << 30)
    assert ill.failed == "exit code 3: so much"
    killed = run([sys.executable, "-c", program.format(0)], tmp_path / "c.pack", 100 << 20)
    assert killed.failed is not None
    assert "out of memory" in killed.failed


def test_an_aim_in_seconds_is_met_by_what_the_machine_allows_too() -> None:
    met = {bound: rows_of("x", RAN, Aim(240, None), bound)[0].met for bound in (None, 100, 269, 270)}
    assert met == {None: False, 100: False, 269: False, 270: True}
    assert rows_of("x", RAN, Aim(300, None))[0].met
    by_name = {row.name: row for row in rows_of("x", RAN, Aim(None, 4 * 10**9), 150)}
    assert by_name["x: time"].met is None
    assert by_name["x: most memory of the group, page cache included"].met
    assert by_name["x: share of the bound"].value == 0.5


def test_time_by_layers_is_a_line_or_is_said_to_be_none() -> None:
    assert line({1: 15, 2: 20, 4: 30}) == pytest.approx((10, 5))
    straight = {row.name: row for row in growth_rows("x", {1: 15.0, 2: 20.0, 4: 30.0}, 16)}
    assert straight["x: furthest from a line"].met
    assert straight["x: all 16 layers, extrapolated from 1, 2, 4"].value == pytest.approx(90)
    squares = {row.name: row for row in growth_rows("x", {n: float(n * n) for n in (1, 2, 4, 8)}, 8)}
    assert squares["x: furthest from a line"].met is False
    assert squares["x: time of 8 layers, of as many times 1"].met is False
    assert not any("extrapolated" in name for name in squares)
    with pytest.raises(ValueError, match="two points"):
        line({4: 1.0})


# Two workers beside one: what they are told, and the rows that come of it.


def ran(wall_s: float) -> Ran:
    return Ran(wall_s, wall_s, 0, 0, 0, {"sweep": wall_s / 2})


def test_the_ratio_is_of_runs_that_followed_each_other() -> None:
    rows = rows_of_workers("m", {1: [ran(10.0), ran(30.0)], 2: [ran(5.0), ran(20.0)]})
    found = {row.name: row for row in rows}
    assert found["m, 1 worker(s): time"].value == 20.0
    assert found["m, 2 worker(s): sweep"].value == 10.0
    ratio = found["m: one worker's time, of that of two"]
    assert (ratio.value, ratio.runs, ratio.met) == (1.75, 2, False)


# The bench of rankings: whose costs an expert gets, and its table.

KEYS = [ExpertKey("decoder", 0, expert) for expert in range(4)]
COSTS = (3.0, 1.0, 4.0, 2.0)  # of each expert at 2 bits
TOKENS_OF_EACH = (10, 40, 20, 30)


def probe_of(key: ExpertKey, bits: int) -> Probe:
    return Probe(key, (bits,) * 3)


def swept() -> SensitivityTable:
    costs = {probe_of(key, 2): (0.0, 0.0, cost) for key, cost in zip(KEYS, COSTS, strict=True)}
    costs |= {probe_of(key, 3): (0.0, 0.0, cost / 10) for key, cost in zip(KEYS, COSTS, strict=True)}
    return SensitivityTable(4, Summary(1.0, 0.0, 0.0, 0.0), costs, dict(zip(KEYS, TOKENS_OF_EACH, strict=True)))


def costs_of(table: SensitivityTable, bits: int) -> list[float]:
    return [table.cost(probe_of(key, bits), SIGNAL) for key in KEYS]


def test_the_first_of_an_order_gets_the_largest_costs_at_all_widths() -> None:
    found = reordered(swept(), [KEYS[3], KEYS[0], KEYS[1], KEYS[2]])
    assert costs_of(found, 2) == [3.0, 2.0, 1.0, 4.0]
    assert costs_of(found, 3) == [0.3, 0.2, 0.1, 0.4]


def test_rankings_deal_out_the_same_costs_by_usage_and_at_random() -> None:
    table = swept()
    found = rankings(table)
    assert found["sweep"] == [table]
    assert costs_of(found["usage"][0], 2) == [1.0, 4.0, 2.0, 3.0]
    assert len(found["random"]) == SEEDS
    assert all(sorted(costs_of(one, 2)) == sorted(COSTS) for one in found["random"])
    assert len({tuple(costs_of(one, 2)) for one in found["random"]}) > 1


def test_the_table_has_a_line_for_each_size() -> None:
    where = {"commit": "0123456789ab", "date": "2026-01-02", "settings": {},
             "hardware": {"processor": "Some CPU", "cores": 2, "memory_gib": 24, "isa": "avx2"}}  # fmt: skip
    rows = [Row("wiki, all at 2 bits: loss", 3.8, "%").within(3.4, 4.2), Row("wiki, all at 2 bits: experts", 3.9, "MB")]
    for ranking, loss in (("sweep", 2.3), ("usage", 2.7), ("random", 3.2)):
        rows.append(Row(f"wiki, 2.4 bits, {ranking}: loss", loss, "%"))
        rows.append(Row(f"wiki, 2.4 bits, {ranking}: experts", 4.2, "MB"))
    rows += [Row("wiki, 2.4 bits, random: least loss", 3.1, "%"), Row("wiki, 2.4 bits, random: largest loss", 3.4, "%")]
    lines = rendered(tables.plans_parts(Result(where, rows)), Result(where, rows)).splitlines()
    assert lines[2] == "| wiki | 2 and scales | 3.90 MB | | | | 3.80% (3.40% to 4.20%) |"
    assert lines[3] == "| wiki | 2.4 | 4.20 MB | 2.30% | 2.70% | 3.10% to 3.40% | |"
    for ranking, loss in (("sweep of 1 to 3", 5.1), ("MC-MoE", 6.2)):
        rows += [
            Row(f"wiki, 1.7 bits, {ranking}: loss", loss, "%"), Row(f"wiki, 1.7 bits, {ranking}: experts", 3.0, "MB"),
            Row(f"wiki, 1.7 bits, {ranking}: divergence", loss / 100, "nats a token"),
        ]  # fmt: skip
    lines = rendered(tables.plans_parts(Result(where, rows)), Result(where, rows)).splitlines()
    assert "| wiki | 1.7 | 5.10%, 0.0510 nats | 6.20%, 0.0620 nats | 3.00 and 3.00 MB |" in lines


# MC-MoE's widths: its integer program beside all choices there are, and its figures beside a layer run whole.


def test_other_widths_leave_the_costs_that_stay() -> None:
    found = with_widths(swept(), (3, 4))
    assert {probe.bits for probe in found.costs} == {(3,) * 3}
    assert costs_of(found, 3) == costs_of(swept(), 3)


@pytest.mark.parametrize("seed", range(5))
def test_the_program_finds_the_least_sum_that_fits_and_keeps_its_constraints(seed: int) -> None:
    generator = np.random.default_rng(seed)
    costs = np.sort(generator.exponential(size=(5, 3)) * 10.0 ** generator.integers(-6, 6), axis=1)[:, ::-1]
    nbytes, budget = (10, 20, 30), int(generator.integers(80, 140))

    def fits(places: tuple[int, ...]) -> bool:
        return sum(nbytes[place] for place in places) <= budget and {1, 2} <= set(places)

    least = min(costs[range(5), places].sum() for places in itertools.product(range(3), repeat=5) if fits(places))
    found = solved(costs, nbytes, budget)
    assert fits(tuple(found))
    assert costs[range(5), found].sum() == pytest.approx(least)
    with pytest.raises(ValueError, match="no widths of 5 experts take 79 bytes or less"):
        solved(costs, nbytes, 79)


def test_costs_are_frequency_by_router_weight_by_error() -> None:
    found = Significance(np.array([2.0, 3.0]), np.array([4.0, 9.0]), np.array([[3.0, 2.0, 1.0], [1.0, 0.5, 0.0]]))
    assert found.costs().tolist() == [[144.0, 64.0, 16.0], [81.0, 20.25, 0.0]]


def test_an_experts_error_is_the_change_of_its_layers_output(tmp_path: Path) -> None:
    model, text = tiny_olmoe(tmp_path / "model"), tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"some words and number {n} of many"}) + "\n" for n in range(40)))
    settings = Settings(
        str(model), tmp_path / "out", tmp_path, calib=str(text), samples=4, context=16, bits=(1, 2, 3, 4),
        dense_bits=UNCHANGED,
    )  # fmt: skip
    with opened(settings) as bench:
        bench.collect_moments(bench.moments)
        found = significances(bench)
        place = bench.spec.moe_layers()[-1]
        calls, outputs = bench.trial.calls, []
        scorer = bench.material.scorer(bench.trial, bench.material.ranking, bench.moment_samples)
        key = place.expert(int(found[place].tokens.argmax()))
        seen = []
        with calls.during(watch=lambda at, call: seen.append((at, call))):
            scorer.score()
        whole = [call for at, call in seen if at == place]
        for bits in (16, 2):
            bench.trial.assign({key: (bits,) * 3})
            outputs.append(torch.cat([calls.given(place, call) for call in whole]))
        change = float((outputs[1] - outputs[0]).norm())
    assert found[place].errors[key.expert, MC_WIDTHS.index(2)] == pytest.approx(change, rel=1e-4)
    assert found[place].tokens.sum() == sum(int((call.chosen >= 0).sum()) for call in whole)
    assert (np.diff(found[place].errors[found[place].tokens > 0], axis=1) < 0).mean() > 0.9


# The bench of the promise: how text is divided, and how refusals count.

CASE = dataclasses.replace(CASES[0], target=0.05)


def split(seed: int, loss: float | None, *, narrowest: bool = False) -> Split:
    nbytes = None if loss is None else 1_000_000
    return Split(seed, loss, loss and 0.05, nbytes, narrowest, 1.0, None if loss else "too much", "abc")


def values(splits: list[Split]) -> dict[str, tuple[float, bool | None]]:
    return {row.name.removeprefix(f"{CASE.name}: "): (row.value, row.met) for row in summary(CASE, splits)}


def test_halves_share_no_input_and_lose_no_row() -> None:
    rows = [{"input": f"word{number // 2}", "target": str(number)} for number in range(40)]
    first, second = halves(rows, 3)
    assert {row["input"] for row in first}.isdisjoint(row["input"] for row in second)
    assert len(first) == len(second) == 20
    assert sorted(int(row["target"]) for row in [*first, *second]) == list(range(40))


def test_halves_depend_on_the_seed_alone() -> None:
    rows = [{"text": f"article {number}"} for number in range(30)]
    assert halves(rows, 1) == halves(rows[::-1], 1)
    assert halves(rows, 1) != halves(rows, 2)


def test_one_of_twenty_may_lie_above_its_bound_two_may_not() -> None:
    met = "held-out loss stayed under its bound"
    good = [split(seed, 0.04) for seed in range(20)]
    assert values([*good[:19], split(19, 0.06)])[met] == (19, True)
    assert values([*good[:18], split(18, 0.06), split(19, 0.07)])[met] == (18, False)


def test_a_refusal_is_no_broken_promise_and_no_pack() -> None:
    found = values([*[split(seed, 0.04) for seed in range(19)], split(19, None)])
    assert found["packs"] == (19, None)
    assert found["held-out loss stayed under its bound"] == (19, True)
    assert values([split(0, None)])["held-out loss stayed under its bound"] == (0, False)


def test_timid_is_what_could_have_been_narrower() -> None:
    timid = "median held-out loss"
    assert values([split(seed, 0.01) for seed in range(4)])[timid] == (1.0, False)
    assert values([split(seed, 0.04) for seed in range(4)])[timid] == (4.0, True)
    assert values([split(seed, 0.01, narrowest=True) for seed in range(4)])[timid] == (1.0, None)


# The bench of mixed widths: its rows and its tables, from losses that are made up.

WHERE = {"commit": "0123456789ab", "date": "2026-01-02", "settings": {},
         "hardware": {"processor": "Some CPU", "cores": 2, "memory_gib": 24, "isa": "avx2"}}  # fmt: skip


def made_up(name: str, outside: Outside) -> dict[int, Measured]:
    def one(bits: int) -> Measured:
        loss = (16 - bits) / 100 + (16 - outside.bits) / 1000
        estimate = LossEstimate(200.0, 200 * (1 + loss), loss, loss - 0.01, loss + 0.01, 96)
        return Measured(bits * 1_000_000, outside.bits * 100_000, bits + 0.2, estimate)

    return {bits: one(bits) for bits in EXPERTS}


def test_every_cell_has_perplexity_loss_and_size(monkeypatch) -> None:
    monkeypatch.setattr(mixed, "measured", made_up)
    result = Result(WHERE, [row for name in MODELS for row in rows_of_mixed(name)])
    cell = result.by_name["wiki, attention at 4, experts at 2: loss"]
    assert (round(cell.value, 6), round(cell.low, 6), round(cell.high, 6), cell.n) == (15.2, 14.2, 16.2, 96)
    assert result.by_name["wiki, unquantized: perplexity"].value == 200
    assert len([name for name in result.by_name if name.endswith(": size")]) == 2 * 4 * (len(SETTINGS) + 1)
    wiki, wikids, origin = rendered(tables.mixed_parts(result), result).split("\n\n")
    lines = wiki.splitlines()
    assert lines[0].startswith("| wiki | experts 16 (16.20) | experts 4 (4.20) |")
    assert lines[2].startswith("| all 16 | 200.0 (+0.0%), 17.6 MB | 224.0 (+12.0%), 5.6 MB |")
    assert [line.split(" | ")[0][2:] for line in lines[2:]] == [str(each).replace(" at", "") for each in SETTINGS]
    assert len(wikids.splitlines()) == len(lines)
    assert origin.startswith("*Commit 0123456")


# The bench of the sweep by gradients: its rows, from costs that are known.


def probe(layer: int, expert: int, bits: int = 3) -> Probe:
    return Probe(ExpertKey("decoder", layer, expert), (bits,) * 3)


def test_ranks_are_compared_at_each_width_over_all_experts_and_inside_layers() -> None:
    exact = {probe(layer, expert): 10.0 * layer + expert for layer in (0, 1) for expert in range(3)}
    found = {one: -cost if one.key.layer == 0 else cost for one, cost in exact.items()}
    whole, within = rank_rows("wiki", exact, {**found, probe(0, 0, 2): 1.0})
    assert whole.name == "wiki, 3 bits: exact and gradients"
    assert within.value == pytest.approx(0.0)  # -1 and 1
    assert whole.value == pytest.approx(0.771, abs=1e-3)
    assert not whole.met
    assert rank_rows("wiki", exact, exact)[0].met


class Report:
    """What the rows take of a ConversionReport."""

    def __init__(self, cost: SweepCost, loss: float, nbytes: int) -> None:
        self.sweep_cost = cost
        self.calibration = self.heldout = LossEstimate(10.0, 10.5, loss, loss - 0.01, loss + 0.01, 8)
        self.expert_bytes = {"pack": nbytes}


def test_effort_and_plans_are_beside_the_exact_ones() -> None:
    exact = Report(SweepCost(10, 0, 1.0, 400, 1000, 20.0, 0), 0.04, 1_000_000)
    gradients = Report(SweepCost(10, 0, 1.0, 40, 900, 3.0, 0), 0.05, 1_000_000)
    flops, time, _ = effort_rows("wiki", exact, gradients)  # type: ignore[arg-type]
    assert (flops.value, flops.met, time.value, time.met) == (0.04, True, 0.15, False)
    rows = {row.name: row for row in plan_rows("wiki", exact, gradients)}  # type: ignore[arg-type]
    mine = rows["wiki, heldout: loss of the plan by gradients"]
    assert (mine.value, mine.aim, mine.met) == (5.0, "≤ 4", False)
    assert (mine.low, mine.high) == (pytest.approx(4.0), pytest.approx(6.0))


# What `moeconv plan MODEL` is told of other models and of the stated machine, and how far off it was.

TOKENS = 64


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return Shape(64, d_model=32, n_heads=2, n_kv_heads=2, head_dim=16, decoder=every(2), num_experts=8, top_k=2,
                 d_ff=32, scale=0.25, max_positions=256, family="olmoe").spec  # fmt: skip


def trace_of(experts: np.ndarray) -> Trace:
    """experts [tokens, layers, top_k], as windows of 16 tokens."""
    return record(8, [{"decoder": part} for part in np.split(experts, len(experts) // 16)])


def test_experts_that_fit_are_found_and_others_are_not(spec: ModelSpec) -> None:
    nbytes = dict.fromkeys(spec.expert_keys(), 4096)
    same = np.tile(np.array([[0, 1], [2, 3]]), (TOKENS, 1, 1))
    assert hit_rates.hit_rate(trace_of(same), spec, nbytes, 0.25) == 1.0  # four of sixteen, and four have room
    around = np.stack([(2 * np.arange(TOKENS)[:, None] + [0, 1]) % 8] * 2, axis=1)
    for share in (0.25, 0.5, 0.75):
        rate = hit_rates.hit_rate(trace_of(around), spec, nbytes, share)
        assert rate <= share, "no policy hits more of what goes round than has room"
    assert hit_rates.hit_rate(trace_of(around), spec, nbytes, 1.0) == 1.0


def test_the_file_is_what_the_command_writes() -> None:
    text = hit_rates.OUT.read_text(encoding="utf-8")
    assert hit_rates.document(json.loads(text)["models"]) == text
    assert [len(each.rates) for each in references()] == [len(hit_rates.SHARES)] * 4


def test_the_stated_machine_follows_from_the_results() -> None:
    """Its figures are out of docs/results, so that nobody can change them by hand; memory is what moert held."""
    made = machine(*(read(RESULTS / name) for name in (KERNELS, TRELLIS_KERNELS, "less.json")), stated().host)
    assert made.name == stated().name
    for name in ("layer_s", "miss_s"):
        assert getattr(made.processor, name) == pytest.approx(getattr(stated().processor, name), rel=1e-6)
    assert made.processor.kernel_bytes_per_s == pytest.approx(stated().processor.kernel_bytes_per_s)
    assert json.loads(OUT.read_text(encoding="utf-8"))["made_by"] == SOURCE


def test_a_slower_machine_takes_longer_for_all_that_is_computed() -> None:
    work, swift = outlook.work("wiki"), stated().processor
    slow = outlook.stretched(swift, work, 0.05)
    assert token_s(work, slow, Drive(1e12, 1e12), 1.0) == pytest.approx(0.05)
    assert slow.miss_s / swift.miss_s == pytest.approx(slow.layer_s / swift.layer_s)


def test_how_far_off_is_said_of_each_run() -> None:
    stream, less = read(RESULTS / "stream.json"), read(RESULTS / "less.json")
    found = list(outlook.cases(stream, less))
    rows = {row.name: row for row in outlook.rows()}
    for case in found:
        off = rows[f"{case.name}: off by"]
        said = rows[f"{case.name}: expected"].value
        assert off.value == pytest.approx(100 * (said / case.measured - 1))
        assert off.met == (abs(off.value) <= 25)
    assert rows["all: within the aim"].unit == f"of {len(found)} runs"
    assert rows["all: off by, median"].met, "the median is within the aim"


def test_a_drive_is_never_faster_than_its_limit() -> None:
    stream = read(RESULTS / "stream.json")
    quick = [Row(row.name, 1e6, row.unit) if "disk without" in row.name else row for row in stream.rows]
    cases = list(outlook.cases(Result(stream.context, quick), read(RESULTS / "less.json")))
    speeds = {case.name.split(", ")[2]: case.drive.bytes_per_s for case in cases}
    assert speeds == {"board": 100e6, "ssd": 500e6, "nvme": 1e12}
