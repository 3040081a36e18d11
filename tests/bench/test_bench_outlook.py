"""What `moeconv plan MODEL` is told of other models and of the stated machine, and how far off it was."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moeconv.plan.likeness import references
from moeconv.plan.machine import SOURCE, stated
from moeconv.plan.pace import Drive, token_s
from moert.pack.model_spec import ModelSpec
from moert.pack.trace import Trace, record
from recipes.bench import hit_rates, outlook
from recipes.bench.outlook_machine import KERNELS, OUT, RESULTS, machine
from recipes.bench.result import Result, Row, read
from tests.shapes import Shape, every

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
    made = machine(read(RESULTS / KERNELS), read(RESULTS / "less.json"), stated().host)
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
