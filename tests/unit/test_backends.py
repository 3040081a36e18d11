"""Which arithmetic is chosen, and what the expert executor asks of it, of the reference and of the native one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from native_problems import F64, FLOATS, Dtype, Projections, floats, normal, plain_expert
from tiny_packs import DECODER, write_pack

from moeconv.matrices import Projection, matrices_of, projection_weights, read_expert
from moert.experts import cache as cache_module
from moert.experts import streaming
from moert.experts.cache import ExpertCache, Lease
from moert.experts.policy import EVICTION
from moert.experts.store import ExpertStore, IoSettings
from moert.experts.streaming import CachedExperts
from moert.kernels import library, open_backend
from moert.kernels.backend import ROWS, Backend
from moert.kernels.library import InstructionSetInvalid
from moert.kernels.memory import Arena
from moert.kernels.native import NativeBackend
from moert.kernels.reference import Plain, ReferenceBackend, ffn
from moert.pack.codec import F32, QuantizedMatrix
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.pack.reader import Pack
from moert.stats import ExpertCounters
from tests.kernels import KERNELS, needs_native
from tests.pairs import thinned


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PATH", tmp_path / "_native.so")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return Pack.open(write_pack(tmp_path_factory.mktemp("backends") / "decoder.pack", DECODER, paths=False))


@needs_native
def test_auto_takes_the_best_instruction_set_and_a_name_that_one() -> None:
    found = library.load()
    running = [each.name for each in found.instruction_sets if each.runs]
    assert running[-1] == "scalar"
    for name, expected in (("auto", running[0]), *((name, name) for name in running)):
        backend = open_backend(name, threads=2)
        assert isinstance(backend, NativeBackend)
        assert backend.name == expected
        assert (backend.threads, backend.widens) == (2, False)
        backend.close()
        backend.close()
    with pytest.raises(
        InstructionSetInvalid, match=r"'mmx' does not run here: use auto or reference, or one of .*scalar$"
    ):
        open_backend("mmx")


def test_without_the_library_auto_is_the_reference_and_a_name_an_error(no_library: None) -> None:
    for name in ("auto", "reference"):
        backend = open_backend(name, threads=2)
        assert isinstance(backend, ReferenceBackend)
        assert (backend.name, backend.threads, backend.widens) == ("reference", 1, True)
    with pytest.raises(InstructionSetInvalid) as caught:
        open_backend("avx2")
    assert str(caught.value) == (
        "kernels='avx2' does not run here: there are no native kernels (_native.so was not built): use auto or "
        "reference, or install a C compiler, then moert again"
    )


class CountingCache(ExpertCache):
    """Writes down what is lent together."""

    lent: list[list[int]]

    def lease(self, keys: Sequence[ExpertKey], following: Sequence[ExpertKey] = ()) -> Lease:
        self.lent.append([key.expert for key in keys])
        return super().lease(keys, following)


def executor(pack: Pack, backend: Backend) -> tuple[CachedExperts, CountingCache]:
    counters = ExpertCounters()
    store = ExpertStore(pack, backend, counters, IoSettings(True, 2))
    cache = CountingCache(store, EVICTION["lru"](DECODER.moe_layers()), 1 << 20, counters, loaders=2)
    cache.lent = []
    return CachedExperts(pack, cache, backend, None), cache


@thinned(
    "name, overlap, chosen", KERNELS, [False, True],
    [[[2, 5]], [[-1, 5]], [[0, -1]], [[-1, -1]], [[2, 5], [0, 2], [-1, 7], [2, -1], [-1, -1], [0, 7], [5, 7]]],
)  # fmt: skip
def test_a_layer_is_the_weighted_sum_of_its_experts_each_lent_once(
    pack: Pack, monkeypatch: pytest.MonkeyPatch, name: str, overlap: bool, chosen: list[list[int]]
) -> None:
    """`overlap`: experts count as large, so that they are computed with as they come."""
    for module in (cache_module, streaming):
        monkeypatch.setattr(module, "HANDED_OVER_BYTES", 0 if overlap else 1 << 20)
    backend = open_backend(name)
    runner, cache = executor(pack, backend)
    experts, n, rng = np.array(chosen), len(chosen), np.random.default_rng(0)
    hidden, before = normal(rng, n, DECODER.d_model), normal(rng, n, DECODER.d_model)
    share = rng.uniform(size=(n, 2)).astype(np.float32)
    found, expected, bound = before.copy(), before.astype(np.float64), np.full(before.shape, 1e-5)
    runner.run(LayerKey("decoder", 1), hidden, experts, share, found, found)
    for row, places in enumerate(chosen):
        for expert, weight in zip(places, share[row], strict=True):
            if expert >= 0:
                key = ExpertKey("decoder", 1, expert)
                parts = matrices_of(pack, key, read_expert(pack, key))
                value, error = layer_of(name, parts, hidden[row : row + 1])
                expected[row] += weight * value[0]
                bound[row] += weight * error[0]
    assert (np.abs(found - expected) <= bound).all()
    asked = sorted({expert for places in chosen for expert in places} - {-1})
    assert [expert for lent in cache.lent for expert in lent] == asked
    again = before.copy()
    runner.run(LayerKey("decoder", 1), hidden, experts, share, again, again)  # now everything is there
    assert np.array_equal(again, found)
    cache.close()
    backend.close()


def layer_of(name: str, parts: Mapping[str, Projection], x: F32) -> tuple[F64, F64]:
    """expert(x), and how far from it the backend may be."""
    if name == "reference":
        value = ffn({part: Plain(projection_weights(each)) for part, each in parts.items()}, x, DECODER.moe.ffn)
        return value.astype(np.float64), np.abs(1e-5 * value)
    stored: Projections = {
        part: each if isinstance(each, QuantizedMatrix) else floats("F32", each) for part, each in parts.items()
    }
    return plain_expert(stored, x, DECODER.moe.ffn)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("tokens", [ROWS, 2 * ROWS + 1])
def test_each_row_of_a_long_prompt_is_as_if_it_came_alone(pack: Pack, name: str, tokens: int) -> None:
    backend = open_backend(name)
    runner, cache = executor(pack, backend)
    rng = np.random.default_rng(1)
    hidden, share = normal(rng, tokens, DECODER.d_model), rng.uniform(size=(tokens, 2)).astype(np.float32)
    experts = np.array([[0, 3 if token % 5 else 6] for token in range(tokens)])
    found, alone = np.zeros((2, tokens, DECODER.d_model), np.float32)
    runner.run(LayerKey("decoder", 1), hidden, experts, share, found, found)
    for row in range(tokens):
        runner.run(LayerKey("decoder", 1), *(part[row : row + 1] for part in (hidden, experts, share, alone, alone)))
    if name == "reference":
        np.testing.assert_allclose(found, alone, atol=1e-5, rtol=1.3e-6)
    else:
        assert np.array_equal(found, alone)
    cache.close()
    backend.close()


@needs_native
@pytest.mark.parametrize("where", ["in an arena", "in a buffer of its own"])
def test_an_expert_keeps_its_bytes_alive(pack: Pack, where: str) -> None:
    backend, hidden = open_backend(), np.ones((1, DECODER.d_model), np.float32)
    key, answers = ExpertKey("decoder", 0, 3), []
    views = ExpertStore(pack, backend, ExpertCounters(), IoSettings(True, 2))
    for _ in range(2):
        arena, body = Arena(), read_expert(pack, key)
        room = arena.allocate(len(body)) if where == "in an arena" else np.empty(len(body), np.uint8)
        room[:] = np.frombuffer(body, np.uint8)
        expert = views.expert(key, room)
        del arena, room, body
        rubbish = [bytearray(b"\xff" * 5000) for _ in range(200)]
        out = np.zeros((1, DECODER.d_model), np.float32)
        backend.mixture([expert], [1], np.zeros(1, np.int32), np.ones(1, np.float32), hidden, out, DECODER.moe.ffn)
        answers.append(out)
        del rubbish
    assert np.array_equal(*answers)
    assert np.abs(answers[0]).sum() > 0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", KERNELS)
def test_a_dense_matrix_is_the_backends_own(name: str, dtype: Dtype) -> None:
    backend = open_backend(name)
    stored = floats(dtype, np.arange(12.0).reshape(3, 4))
    matrix = backend.matrix(stored)
    stored.data[:] = 0
    assert backend.rows(matrix, [2, 0]).tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]


@pytest.mark.parametrize("name", KERNELS)
def test_a_dense_matrix_of_codes_is_the_backends_own(name: str) -> None:
    backend = open_backend(name)
    codes = np.arange(12, dtype=np.uint8).reshape(3, 4)
    scale, minimum = np.full((3, 1), 2, np.float16), np.ones((3, 1), np.float16)
    stored = QuantizedMatrix(8, 4, 4, codes, scale, minimum)
    matrix = backend.matrix(stored)
    for part in (codes, scale, minimum):
        part[:] = 0
    assert backend.rows(matrix, [2, 0]).tolist() == [[17, 19, 21, 23], [1, 3, 5, 7]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", KERNELS)
def test_a_bias_is_added_to_what_a_matrix_gives_and_not_to_its_rows(name: str, dtype: Dtype) -> None:
    backend = open_backend(name)
    matrix = backend.matrix(floats(dtype, np.arange(12.0).reshape(3, 4)), np.array([1, 2, 3], np.float32))
    ones = np.ones((2, 4), np.float32)
    assert backend.linear(ones, matrix).tolist() == [[7, 24, 41]] * 2
    assert backend.rows(matrix, [1]).tolist() == [[4, 5, 6, 7]]
