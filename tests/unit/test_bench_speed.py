"""The bench beside llama.cpp and transformers: the model it makes, how its processes talk, what its rows say."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moert.engine import Engine
from moert.generation.settings import GenerationSettings
from moert.pack.codec import dequantize
from moert.pack.model_spec import ExpertKey, StackSpec
from tests.bench import bandwidth, llama, speed
from tests.bench.ours import Ours
from tests.bench.runner import Runner
from tests.bench.shaped import OLMOE, projection, quantize, weight, write_pack

TINY = replace(
    OLMOE,
    vocab_size=96,
    d_model=64,
    n_heads=2,
    n_kv_heads=2,
    head_dim=32,
    attention_scale=32**-0.5,
    decoder=StackSpec(2, (0, 1)),
    moe=replace(OLMOE.moe, num_experts=4, top_k=2, d_ff=128),
)
HALF = {"attention": 16, "router": 16, "head": 16, "embed": 16}
ECHO = """
import os, sys
from tests.bench.runner import serve
class Echo:
    def __init__(self):
        print("loading")
    def generate(self, ids, new_tokens):
        print("noise")
        return [ids[0]] * new_tokens, 0.5, 0.5 + (new_tokens - 1) / 8
    def variables(self):
        return sorted(name for name in os.environ if "OMP" in name)
    def fail(self):
        sys.exit(3)
serve(Echo)
"""


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_are_within_half_a_step(bits: int) -> None:
    weights = weight("some.weight", (16, 128))
    coded = quantize(weights, bits)
    step = np.repeat(coded.scale.astype(np.float32), coded.group_size, axis=1)
    assert np.all(np.abs(dequantize(coded) - weights) <= 0.51 * step + 2e-3)
    same = np.full((2, 128), 0.25, np.float32)
    assert np.array_equal(dequantize(quantize(same, bits)), same)


def test_weights_follow_from_seed_and_name() -> None:
    first = weight("decoder.0.attn.q.weight", (8, 64))
    assert np.array_equal(first, weight("decoder.0.attn.q.weight", (8, 64)))
    assert not np.array_equal(first, weight("decoder.1.attn.q.weight", (8, 64)))
    assert 0.8 < float(first.std()) * 64**0.5 < 1.2


def test_the_pack_is_the_model(tmp_path: Path) -> None:
    """At 8 bits the logits of the pack are nearly those of another set of the same weights, and not of others."""
    for bits in (4, 8):
        write_pack(tmp_path / f"{bits}.pack", bits, HALF, TINY)
    fine, coarse = (Ours(tmp_path / f"{bits}.pack") for bits in (8, 4))
    ids = [5, 17, 80, 3]
    assert np.corrcoef(fine.logits(ids), coarse.logits(ids))[0, 1] > 0.9
    assert np.corrcoef(fine.logits(ids), fine.logits(ids[::-1]))[0, 1] < 0.9
    assert coarse.bytes_per_token() < fine.bytes_per_token()
    tokens, first_s, total_s = fine.generate(ids, 5)
    with Engine.open(tmp_path / "8.pack", predictor="none") as engine:
        assert tokens == engine.generate_ids(ids, GenerationSettings(max_new_tokens=5)).result.tokens
    assert 0 < first_s < total_s


def test_a_pack_is_made_once(tmp_path: Path) -> None:
    out = tmp_path / "a.pack"
    write_pack(out, 4, HALF, TINY)
    before = (out / "manifest.json").stat().st_mtime_ns
    write_pack(out, 4, HALF, TINY)
    assert (out / "manifest.json").stat().st_mtime_ns == before
    write_pack(out, 2, HALF, TINY)
    assert (out / "manifest.json").stat().st_mtime_ns > before


def test_the_peers_file_has_every_tensor_in_order() -> None:
    shapes = list(llama._shapes(TINY))
    assert [shape for _, shape in shapes] == [values.shape for values in llama._tensors(TINY)]
    names = [name for name, _ in shapes]
    assert len(set(names)) == len(names)
    assert {"token_embd.weight", "output.weight", "blk.1.attn_q_norm.weight", "blk.1.ffn_down_exps.weight"} < {*names}
    experts = dict(zip(names, llama._tensors(TINY), strict=True))["blk.1.ffn_down_exps.weight"]
    expected = projection(TINY, ExpertKey("decoder", 1, 3), "down")
    assert np.array_equal(experts[3], expected.astype(np.float16))


def test_a_runner_answers_through_the_noise_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with Runner([sys.executable, "-c", ECHO]) as runner:
        assert runner.ask("generate", [7, 8], 3) == [[7, 7, 7], 0.5, 0.75]
        assert speed.decode_speed([7], 9)(runner) == 8
        assert speed.prefill_speed([7] * 10)(runner) == 20
        assert speed.whole_speed([[7], [8]], 5)(runner) == 5
        assert runner.ask("variables") == []
        with pytest.raises(RuntimeError, match="status 3"):
            runner.ask("fail")


def test_runs_alternate_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def run(side: str) -> float:
        order.append(side)
        return float(len(order))

    pairs = speed.alternate(2, lambda: run("ours"), lambda: run("theirs"))
    assert order == ["ours", "theirs", "ours", "theirs", "theirs", "ours"]
    assert pairs == [(3.0, 4.0), (6.0, 5.0)]


def test_the_ratio_is_the_median_of_ratios() -> None:
    rows = speed.compared("decode", "peer", [(2.0, 1.0), (9.0, 3.0), (8.0, 8.0)])
    assert [row.value for row in rows] == [8.0, 3.0, 2.0]


def test_shares_are_of_the_quiet_run_before() -> None:
    rows = speed.busy_rows(speed.LEVELS["4bits"], [((10.0, 6.0), (20.0, 2.0)), ((20.0, 8.0), (20.0, 2.0))])
    assert [row.value for row in rows] == [7.0, 2.0, 3.5, 0.5, 0.1]
    assert [row.met for row in rows] == [None, None, None, True, None]


def test_the_busy_process_ends() -> None:
    with speed.busy_process() as process:
        assert process.poll() is None
    assert process.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_bandwidth_is_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "NBYTES", 1 << 20)
    assert bandwidth.read_bandwidth(2, runs=2) > 1e6
