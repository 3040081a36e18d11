"""Which arithmetic is chosen, and what the expert executor asks of it, of the reference and of the native one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_packs import DECODER, write_pack

from moert.experts import cache as cache_module
from moert.experts import executor as executor_module
from moert.experts.cache import ExpertCache, Slot
from moert.experts.drive import IoSettings
from moert.experts.eviction import EVICTION
from moert.experts.executor import CachedExperts
from moert.experts.store import ExpertStore
from moert.kernels import library, open_backend
from moert.kernels.arena import Arena
from moert.kernels.backend import ROWS, Backend
from moert.kernels.library import InstructionSetInvalid
from moert.kernels.native import NativeBackend
from moert.kernels.reference import ReferenceBackend, ffn, weights
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from moert.stats import ExpertCounters

needs_library = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.missing()}")
BACKENDS = ["reference", pytest.param("auto", marks=needs_library)]


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PATH", tmp_path / "_native.so")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return Pack.open(write_pack(tmp_path_factory.mktemp("backends") / "decoder.pack", DECODER, paths=False))


@needs_library
def test_auto_takes_the_best_instruction_set_and_a_name_that_one() -> None:
    found = library.load()
    assert found is not None
    running = [each.name for each in found.instruction_sets if each.runs]
    assert running[-1] == "scalar"
    for name, expected in (("auto", running[0]), *((name, name) for name in running)):
        backend = open_backend(name, threads=2)
        assert isinstance(backend, NativeBackend)
        assert backend.name == expected
        assert backend.steps is not None
        backend.close()
        backend.close()
    with pytest.raises(
        InstructionSetInvalid, match=r"'mmx' does not run here: use auto or reference, or one of .*scalar$"
    ):
        open_backend("mmx")


def test_the_reference_is_there_by_name() -> None:
    backend = open_backend("reference", threads=2)
    assert isinstance(backend, ReferenceBackend)
    assert (backend.name, backend.steps) == ("reference", None)


def test_without_the_library_auto_is_the_reference_and_a_name_an_error(no_library: None) -> None:
    assert isinstance(open_backend("auto"), ReferenceBackend)
    assert isinstance(open_backend("reference"), ReferenceBackend)
    with pytest.raises(InstructionSetInvalid) as caught:
        open_backend("avx2")
    assert str(caught.value) == (
        "--kernels 'avx2' does not run here: there are no native kernels (_native.so was not built): use auto or "
        "reference, or install a C compiler, then moert again"
    )


class CountingCache(ExpertCache):
    """Writes down what is lent together."""

    lent: list[list[int]]

    def take(self, keys: Sequence[ExpertKey], following: Sequence[ExpertKey]) -> list[Slot]:
        self.lent.append([key.expert for key in keys])
        return super().take(keys, following)


def executor(pack: Pack, backend: Backend) -> tuple[CachedExperts, CountingCache]:
    counters = ExpertCounters()
    store = ExpertStore(pack, backend, counters, IoSettings(True, 2))
    cache = CountingCache(store, EVICTION["lru"](DECODER.moe_layers()), 1 << 20, counters, loaders=2)
    cache.lent = []
    return CachedExperts(pack, cache, backend, None), cache


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "chosen",
    [
        [[2, 5]], [[-1, 5]], [[0, -1]], [[-1, -1]],
        [[2, 5], [0, 2], [-1, 7], [2, -1], [-1, -1], [0, 7], [5, 7]],
    ],
    ids=str,
)  # fmt: skip
def test_a_layer_is_the_weighted_sum_of_its_experts_each_lent_once(
    pack: Pack, monkeypatch: pytest.MonkeyPatch, name: str, overlap: bool, chosen: list[list[int]]
) -> None:
    """`overlap`: experts count as large, so that they are computed with as they come."""
    for module in (cache_module, executor_module):
        monkeypatch.setattr(module, "HANDED_OVER_BYTES", 0 if overlap else 1 << 20)
    backend = open_backend(name)
    runner, cache = executor(pack, backend)
    experts, n = torch.tensor(chosen), len(chosen)
    chance = torch.Generator().manual_seed(0)
    hidden, before = torch.randn(2, n, DECODER.d_model, generator=chance).unbind()
    share = torch.rand(n, 2, generator=chance)
    found, expected = before.clone(), before.clone()
    runner.run("decoder", 1, hidden, experts, share, found)
    for row, places in enumerate(chosen):
        for expert, weight in zip(places, share[row], strict=True):
            if expert >= 0:
                key = ExpertKey("decoder", 1, expert)
                parts = pack.projections(key, pack.read_expert(key))
                matrices = {part: weights(projection) for part, projection in parts.items()}
                expected[row] += weight * ffn(matrices, hidden[row : row + 1], DECODER.moe)[0]
    # rounded to 8 bits, an input is off by up to 1/254 of the largest of its 32
    tolerance = 1e-5 if name == "reference" else 0.05
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    asked = sorted({expert for places in chosen for expert in places} - {-1})
    assert [expert for lent in cache.lent for expert in lent] == asked
    again = before.clone()
    runner.run("decoder", 1, hidden, experts, share, again)  # now everything is there
    assert torch.equal(again, found)
    cache.close()
    backend.close()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("tokens", [ROWS, 2 * ROWS + 1])
def test_each_row_of_a_long_prompt_is_as_if_it_came_alone(pack: Pack, name: str, tokens: int) -> None:
    backend = open_backend(name)
    runner, cache = executor(pack, backend)
    chance = torch.Generator().manual_seed(1)
    hidden, share = torch.randn(tokens, DECODER.d_model, generator=chance), torch.rand(tokens, 2, generator=chance)
    experts = torch.tensor([[0, 3 if token % 5 else 6] for token in range(tokens)])
    found, alone = torch.zeros(2, tokens, DECODER.d_model).unbind()
    runner.run("decoder", 1, hidden, experts, share, found)
    for row in range(tokens):
        runner.run("decoder", 1, *(part[row : row + 1] for part in (hidden, experts, share, alone)))
    torch.testing.assert_close(found, alone, **({"atol": 0, "rtol": 0} if name != "reference" else {}))
    cache.close()
    backend.close()


@needs_library
@pytest.mark.parametrize("where", ["in an arena", "in a buffer of its own"])
def test_an_expert_keeps_its_bytes_alive(pack: Pack, where: str) -> None:
    backend, hidden = open_backend(), torch.ones(1, DECODER.d_model)
    key, answers = ExpertKey("decoder", 0, 3), []
    for _ in range(2):
        arena = Arena()
        room = arena.allocate(pack.entry(key).file_bytes) if where == "in an arena" else None
        expert = backend.expert(pack, key, pack.read_expert(key, room))
        del arena, room
        rubbish = [bytearray(b"\xff" * 5000) for _ in range(200)]
        out = torch.zeros(1, DECODER.d_model)
        backend.mix([expert], torch.ones(1), hidden, out, DECODER.moe)
        answers.append(out)
        del rubbish
    assert torch.equal(*answers)
    assert answers[0].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_dense_matrix_is_the_backends_own(name: str, dtype: torch.dtype) -> None:
    backend = open_backend(name)
    stored = torch.arange(12.0).reshape(3, 4).to(dtype)
    matrix = backend.matrix(stored)
    stored.zero_()
    assert backend.rows(matrix, [2, 0]).tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
