"""Long sequences are attended to in blocks, and that changes nothing but rounding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_packs import SPECS, SWITCH, write_pack
from torch import Tensor

from moert.engine import Engine
from moert.models import attention, moe
from moert.models.kv import KvCache
from moert.models.layers import RelativeBias


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """On the reference: rounding activations to 8 bits would turn a difference in the last bit into a larger one."""
    path = write_pack(tmp_path_factory.mktemp("attention") / "switch.pack", SWITCH, paths=False)
    return Engine.open(path, kernels="reference")


@pytest.mark.parametrize("limit_bytes", [1, 4 * SWITCH.n_heads * 50 * 7])
def test_blocks_of_queries_bound_the_scores(engine, monkeypatch, limit_bytes) -> None:
    ids, targets = list(range(3, 53)), list(range(40))
    engine.reserve(50, 40)
    whole = engine.model.forward_all(ids, targets)
    sizes: list[int] = []
    real = attention._attend

    def measured(query: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None) -> Tensor:
        sizes.append(4 * query.shape[0] * query.shape[1] * keys.shape[1])
        assert bias is None or 4 * bias.numel() == sizes[-1]
        return real(query, keys, values, scale, bias)

    monkeypatch.setattr(attention, "_attend", measured)
    monkeypatch.setattr(attention, "SCORE_BYTES", limit_bytes)
    blocked = engine.model.forward_all(ids, targets)
    assert len(sizes) > 8 * 5  # eight attentions, each in several blocks
    assert max(sizes) <= max(limit_bytes, 4 * SWITCH.n_heads * 50)  # one query at least
    torch.testing.assert_close(blocked, whole, rtol=1e-4, atol=1e-4)
    assert torch.equal(engine.model.forward_all(ids, targets), blocked)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_a_bias_by_blocks_is_that_of_each_distance(bidirectional: bool) -> None:
    weight = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    bias = RelativeBias(weight, 16, bidirectional)
    n = 40
    for rows in (bias.both_ways(n), bias.causal(n)):
        for start, stop in ((0, n), (5, 12), (39, 40)):
            block = rows.rows(start, stop)
            assert block.shape == (3, stop - start, n)
            for query in range(start, stop):
                seen = slice(0, query + 1)
                assert torch.equal(block[:, query - start, seen], bias.latest(query + 1).rows(0, 1)[:, 0])
    assert torch.isneginf(bias.causal(n).rows(0, n)).equal(torch.ones(3, n, n).triu(1).bool())
    offset = bias.both_ways(n).rows(0, n)
    assert torch.equal(offset[:, 3, 20], offset[:, 10, 27])


def test_a_decoder_reads_a_long_prompt_without_storing_all_scores(tmp_path: Path, monkeypatch) -> None:
    """torch's own causal attention does: no score passes through ours."""
    monkeypatch.setattr(attention, "_attend", None)
    with Engine.open(write_pack(tmp_path / "decoder.pack", SPECS["decoder"], paths=False)) as engine:
        engine.reserve(57, 1)
        assert torch.isfinite(engine.model.prefill(list(range(3, 60)))[1]).all()


@pytest.mark.parametrize("rows", [1, 7, 20])
@pytest.mark.parametrize("name", SPECS)
def test_blocks_of_rows_change_nothing_but_rounding(tmp_path: Path, monkeypatch, name, rows) -> None:
    ids, targets = list(range(3, 60)), None if name == "decoder" else list(range(40))
    path = write_pack(tmp_path / "some.pack", SPECS[name], paths=False)
    with Engine.open(path, kernels="reference", predictor="none") as engine:
        engine.reserve(57, 40)
        whole = engine.model.forward_all(ids, targets)
        state, logits = engine.model.prefill(ids)
        monkeypatch.setattr(attention, "ROWS", rows)
        monkeypatch.setattr(moe, "ROWS", rows)
        torch.testing.assert_close(engine.model.forward_all(ids, targets), whole, rtol=1e-3, atol=1e-3)
        blocked, again = engine.model.prefill(ids)
        torch.testing.assert_close(again, logits, rtol=1e-3, atol=1e-3)
        assert (blocked.length, blocked.nbytes) == (state.length, state.nbytes)


def test_the_first_block_makes_room_for_all_of_the_prompt(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(attention, "ROWS", 50)
    grown: list[int] = []
    grow = KvCache._grow
    monkeypatch.setattr(KvCache, "_grow", lambda cache, tokens: (grown.append(tokens), grow(cache, tokens)))
    path = write_pack(tmp_path / "decoder.pack", SPECS["decoder"], paths=False)
    with Engine.open(path, kernels="reference", predictor="none") as engine:
        engine.reserve(300, 1)
        engine.model.prefill([3] * 300)
    assert grown == [300] * SPECS["decoder"].decoder.n_layers


def test_a_long_sequence_takes_little_memory() -> None:
    code = (
        "import resource, sys, torch\n"
        "from moert.models.attention import _attend, query_rows\n"
        "from moert.models.layers import RelativeBias\n"
        "unit = 1 if sys.platform == 'darwin' else 1024\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit\n"
        "torch.set_num_threads(1)\n"
        "x, before = torch.ones(4, 6000, 6), peak()\n"
        "bias, rows = RelativeBias(torch.ones(8, 4), 16, True).both_ways(6000), query_rows(4, 6000)\n"
        "for at in range(0, 6000, rows):\n"
        "    _attend(x[:, at : at + rows], x, x, 1.0, bias.rows(at, min(at + rows, 6000)))\n"
        "print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 * 4 * 6000 * 6000 / 10  # a tenth of the scores
