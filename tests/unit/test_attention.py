"""Long sequences are read in pieces, and attended to without storing all scores; what that changes is nothing, or
rounding where the reference computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_keys import WideKeys
from tiny_packs import DECODER_SHAPE, SPECS, write_pack
from transformers.models.t5.modeling_t5 import T5Attention

from moert.engine.engine import Engine
from moert.experts import streaming
from moert.kernels import backend as backends
from moert.kernels.backend import Backend, opaque
from moert.kernels.pages import PageLayout, pages_of
from moert.models import mixers, model
from moert.models.mixers import DistanceBias, Rotary
from moert.pack.codec import F32
from moert.pack.parts import Buckets, Rope
from tests.kernels import KERNELS, needs_native
from tests.pairs import thinned
from tests.shapes import frequencies

# Positions


def bias_of(bidirectional: bool, n: int = 8, most: int = 16) -> tuple[DistanceBias, F32]:
    table = np.random.default_rng(1).normal(size=(n, 3)).astype(np.float32)
    return DistanceBias(Buckets(n, most), table, bidirectional), table


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("n", "most"), [(8, 16), (32, 128), (32, 17), (4, 1000)])
def test_a_bias_is_that_of_each_distance(bidirectional: bool, n: int, most: int) -> None:
    bias, table = bias_of(bidirectional, n, most)
    offsets = torch.arange(-1200, 1201)
    buckets = T5Attention._relative_position_bucket(offsets, bidirectional, num_buckets=n, max_distance=most).numpy()
    found, zero = bias.by_distance(1200)
    assert found.flags.c_contiguous
    assert found.dtype == np.float32
    assert np.array_equal(found[:, zero - 1200 : zero + 1201], table[buckets].T)


@given(reaches=st.lists(st.integers(0, 700), min_size=1, max_size=5), bidirectional=st.booleans())
def test_a_bias_that_grows_keeps_what_it_said(reaches: list[int], bidirectional: bool) -> None:
    bias, _ = bias_of(bidirectional)
    whole, middle = bias_of(bidirectional)[0].by_distance(700)
    for reach in reaches:
        found, zero = bias.by_distance(reach)
        assert zero >= reach
        assert found.shape[1] >= zero + reach + 1
        offsets = np.arange(-reach, reach + 1)
        assert np.array_equal(found[:, zero + offsets], whole[:, middle + offsets])


@settings(max_examples=50)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 500), st.integers(1, 200)), min_size=1, max_size=4),
    factor=st.sampled_from([1.0, 0.5]),
)
def test_turns_are_those_of_each_position(pieces: list[tuple[int, int]], factor: float) -> None:
    rotary = Rotary(Rope(12, factor), frequencies(12))
    for start, tokens in pieces:
        found = rotary.turns(start, tokens)
        assert found.shape == (tokens, 2, 6)
        assert found.flags.c_contiguous
        angles = np.arange(start, start + tokens)[:, None] * frequencies(12).astype(np.float64)
        expected = factor * np.stack((np.cos(angles), np.sin(angles)), 1)
        np.testing.assert_allclose(found, expected, atol=5e-5)  # float32 angles of up to 700


def test_positions_of_a_long_prompt_are_of_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of a prompt keeps its part of the table, and with it all of the table, until all layers have run."""
    made, plain = list[int](), Rotary.reach

    def reach(self: Rotary, tokens: int) -> None:
        before = len(self._turns)
        plain(self, tokens)
        made.extend([len(self._turns)] * (len(self._turns) > before))

    monkeypatch.setattr(Rotary, "reach", reach)
    pack = write_pack(tmp_path / "a.pack", DECODER_SHAPE.but(max_positions=1000).spec, paths=False)
    with Engine.open(pack, predict="none", threads=1) as engine:
        engine.reserve(900, 1)
        engine.model.prefill([3 + at % 11 for at in range(900)])
    assert made == [1024]


# Pieces


@thinned("kernels, rows, name", KERNELS, [1, 7, 20], SPECS)
def test_pieces_change_nothing_but_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rows: int, kernels: str
) -> None:
    """And not even that with native kernels."""
    ids, targets = list(range(3, 60)), list(range(40)) if SPECS[name].encoder else None
    path = write_pack(tmp_path / "some.pack", SPECS[name], paths=False)
    if kernels == "reference":  # rounded to 16 bits, keys might fall either way
        monkeypatch.setattr("moert.engine.engine.open_backend", lambda name, threads: opaque(WideKeys()))
    with Engine.open(path, kernels=kernels, predict="none") as engine:
        engine.reserve(57, 40)
        whole = engine.model.forward_all(ids, targets)
        state, logits = engine.model.prefill(ids)
        for module in (backends, model, mixers, streaming):
            monkeypatch.setattr(module, "ROWS", rows)
        sizes = sizes_of_pieces(engine.backend, monkeypatch)
        found = engine.model.forward_all(ids, targets)
        blocked, again = engine.model.prefill(ids)
        tolerance = 1e-3 if kernels == "reference" else 0
        np.testing.assert_allclose(found, whole, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(again, logits, rtol=tolerance, atol=tolerance)
        assert (blocked.length, blocked.nbytes) == (state.length, state.nbytes)
        assert max(sizes["mixture"]) <= max(rows, engine.spec.moe.router.top_k)
        assert max(sizes["causal"], default=rows) == rows  # attention to pools has a file of its own
        if name == "switch":
            assert sizes["whole"] == [57] * 2 * len(SPECS[name].encoder or ())
            assert max(sizes["cross"]) == max(sizes["keep"]) == rows


def sizes_of_pieces(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """How many tokens each call gets from now on."""
    sizes: dict[str, list[int]] = {"causal": [], "whole": [], "cross": [], "keep": [], "mixture": []}
    attend, keep, mixture = backend.attend, backend.keep, backend.mixture

    def attends(weights: Any, x: F32, *rest: Any) -> None:
        sizes["causal" if weights.causal else "whole" if weights.own else "cross"].append(len(x))
        attend(weights, x, *rest)

    def keeps(weights: Any, encoded: F32, *rest: Any) -> None:
        sizes["keep"].append(len(encoded))
        keep(weights, encoded, *rest)

    def mixes(experts: Any, counts: Any, *rest: Any) -> None:
        sizes["mixture"].append(sum(counts))
        mixture(experts, counts, *rest)

    for name, replaced in (("attend", attends), ("keep", keeps), ("mixture", mixes)):
        monkeypatch.setattr(backend, name, replaced)
    return sizes


@pytest.mark.parametrize("name", SPECS)
def test_the_first_piece_makes_room_for_all_of_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(model, "ROWS", 50)
    grown: list[int] = []
    made = PageLayout.pages
    monkeypatch.setattr(PageLayout, "pages", lambda layout, count: (grown.append(count), made(layout, count))[1])
    spec = SPECS[name]
    path = write_pack(tmp_path / "some.pack", spec, paths=False)
    with Engine.open(path, kernels="reference", predict="none") as engine:
        engine.reserve(300, 1)
        engine.model.prefill([3] * 300)
    layers = sum(spec.decoder[at].attention is not None for at in range(len(spec.decoder)))
    expected = pages_of(300)
    if spec.encoder is None:
        assert grown == [expected] * layers
    else:  # the encoder's own, what the decoder reads of it, and the decoder's first token
        assert sorted(grown) == [1] * layers + [expected] * (len(spec.encoder or ()) + layers)


# Memory

MEASURE = """
import resource, sys
from pathlib import Path
import numpy as np
from moert.kernels import open_backend
from moert.kernels.backend import ROWS, AttentionWeights, Floats, NormWeights, Positions
from moert.models.kv import Kept
from moert.models.mixers import DistanceBias
from moert.pack.parts import Attention, Buckets
def peak():
    if sys.platform == "linux":  # where the other starts with what the parent process had
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
backend, causal, n = open_backend(sys.argv[1]), sys.argv[2] == "causal", 6000
part = Attention(4, 4, 6, 1.0, None, None, None, Buckets(8, 16))
matrices = {name: backend.matrix(Floats("F32", np.full((24, 24), 0.04, np.float32))) for name in "qkvo"}
norms = {"before": NormWeights(np.ones(24, np.float32), None, 1e-5)}
weights = AttentionWeights(part, True, causal, 0, norms, matrices)
bias, zero = DistanceBias(part.buckets, np.ones((8, 4), np.float32), not causal).by_distance(n)
x, kept, piece = np.ones((n, 24), np.float32), Kept(part, n), ROWS if causal else n
before = peak()
for rows in np.split(x, range(piece, n, piece)):
    backend.attend(weights, rows, kept, kept.extend(len(rows)), Positions(None, bias, zero))
print(peak() - before)
"""


@pytest.mark.parametrize(
    ("kernels", "kind"),
    [pytest.param("auto", "causal", marks=needs_native), pytest.param("auto", "whole", marks=needs_native),
     ("reference", "causal")],
)  # fmt: skip
def test_a_long_sequence_takes_little_memory(kernels: str, kind: str) -> None:
    """The reference reads that of an encoder at once, and says so (moert.models.footprint)."""
    command = [sys.executable, "-c", MEASURE, kernels, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 * 4 * 6000 * 6000 / 10  # a tenth of the scores
