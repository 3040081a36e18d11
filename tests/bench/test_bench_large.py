"""The bench of whole models: experts that are alike, where time goes, rows. Nothing here is timed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moert.engine import Engine
from moert.pack.reader import Pack, projection_weights
from recipes.bench.large_rows import prompt_rows, spent_rows
from recipes.bench.race import Outcome
from recipes.bench.shaped import DENSE, OLMOE_SHAPE, write_pack
from recipes.bench.streamed import Segment, Setting, Streamed
from recipes.bench.timed import Meter, Spent
from tests import tiny_packs
from tests.shapes import every

SMALL = OLMOE_SHAPE.but(
    vocab_size=96, d_model=64, n_heads=2, n_kv_heads=2, head_dim=32, scale=32**-0.5, decoder=every(3), num_experts=4,
    top_k=2, d_ff=128,
).spec  # fmt: skip


def test_experts_alike_have_the_first_layers_numbers(tmp_path: Path) -> None:
    widths = {key: 3 if key.expert == 0 else 2 for key in SMALL.expert_keys()}
    write_pack(tmp_path / "alike.pack", widths, DENSE, SMALL, alike=True)
    write_pack(tmp_path / "own.pack", widths, DENSE, SMALL)
    alike, own = (Pack.open(tmp_path / name) for name in ("alike.pack", "own.pack"))
    for key in SMALL.expert_keys():
        first = SMALL.moe_layers()[0].expert(key.expert)
        copied, original = (pack.projections(at, pack.read_expert(at)) for pack, at in ((alike, key), (own, first)))
        for name, matrix in copied.items():
            assert (projection_weights(matrix) == projection_weights(original[name])).all()


def test_a_prompt_is_compared_with_the_longer_of_reading_and_computing() -> None:
    mine, resident = Outcome(prompt=Segment(8, 6.0, 0, 0, 0)), Outcome(prompt=Segment(8, 2.0, 0, 0, 0))
    rows = prompt_rows("here", mine, resident, reading_s=5.0)
    assert [row.value for row in rows] == [5.0, 2.0, 1.2]
    assert rows[-1].met
    assert not prompt_rows("here", Outcome(), resident, 5.0)


def test_shares_of_a_token() -> None:
    rows = spent_rows("here", Outcome(spent=Spent(whole=10.0, kernels=6.0, waiting=3.5, deciding=0.2)))
    assert [(row.value, row.met) for row in rows] == [(60.0, None), (35.0, None), (5.0, True), (2.0, True)]


def test_a_meter_divides_the_time_and_changes_no_token(tmp_path: Path) -> None:
    pack = tiny_packs.write_pack(tmp_path / "tiny.pack", tiny_packs.DECODER)
    with Engine.open(pack, threads=1, cache="40%") as engine:
        if engine.backend.name == "reference":
            pytest.skip("no compiler: the meter counts calls of the native kernels")
        plain = tiny_packs.run_greedy(engine, [5, 6], 4)
    with Engine.open(pack, threads=1, cache="40%") as engine:
        meter, found = Meter(engine), []
        spent = meter.during(lambda: found.append(tiny_packs.run_greedy(engine, [5, 6], 4)))
    assert all(np.array_equal(one, other) for one, other in zip(found[0], plain, strict=True))
    assert min(spent.kernels, spent.deciding) > 0
    assert spent.python >= spent.deciding
    assert spent.whole >= spent.kernels + spent.waiting


def test_a_session_tells_where_its_time_went(tmp_path: Path) -> None:
    pack = tiny_packs.write_pack(tmp_path / "tiny.pack", tiny_packs.DECODER)
    session = Streamed(Setting(str(pack), None, memory_bytes=1 << 40))
    if session._engine.backend.name == "reference":
        pytest.skip("no compiler: the meter counts calls of the native kernels")
    assert Spent(**session.spent(2)).whole > 0
