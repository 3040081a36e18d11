"""Everything but the experts on a device of torch, beside the reference: torch's CPU stands for the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from attention_answers import found_keys
from attention_problems import Problem, keep, latent_problems, make, nothing_behind, problems, raw, read
from hypothesis import given, settings
from hypothesis import strategies as st
from native_problems import ACTIVATION, CODED, KINDS, Kind, activations, normal, random_stored

from moert.beside.gpu import torch_backend
from moert.beside.gpu.device import DeviceFull
from moert.beside.gpu.torch_backend import PlacedMatrix, PlacedNetwork, TorchBackend
from moert.beside.gpu.torch_matrices import TorchMemory, array_of
from moert.kernels.backend import Backend, NormWeights, Positions, RouterWeights, opaque
from moert.kernels.pages import KvBits
from moert.kernels.reference import ReferenceBackend, kept_as
from moert.models.kv import Kept
from moert.pack.codec import F32
from moert.pack.parts import Act, Attention, Ffn, Router

REFERENCE = ReferenceBackend()
CPU = torch.device("cpu")
some_tokens = st.lists(st.sampled_from([1, 1, 2, 5, 60, 70]), min_size=1, max_size=3)
kinds, seeds = st.sampled_from((*KINDS, *CODED)), st.integers(0, 1 << 20)


def backend_of(capacity_bytes: int = 1 << 30) -> TorchBackend:
    return TorchBackend("torch:cpu", opaque(ReferenceBackend()), TorchMemory(CPU, capacity_bytes))


def close(found: F32, expected: F32) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * max(1.0, float(np.abs(expected).max())))


def close_kept(found: Kept, expected: Kept) -> None:
    """Where float32 sums differ in the last bits, a number may be rounded the other way."""
    step = 2.0**-10 if found.layout.bits == 16 else 0.03
    for mine, theirs in zip(found_keys(found), found_keys(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=step, atol=step * max(1.0, float(np.abs(theirs).max())) / 4)
    assert nothing_behind(found)


# Attention


def check_read(problem: Problem, pieces: list[int], backend: TorchBackend | None = None) -> None:
    backend, x = backend or backend_of(), problem.tokens(sum(pieces))
    found, kept = read(backend, problem, problem.on(backend), x, pieces)
    expected, others = read(REFERENCE, problem, problem.on(REFERENCE), x, pieces)
    close_kept(kept, others)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.02 * max(1.0, float(np.abs(expected).max())))


@settings(max_examples=100)
@given(problem=problems(), pieces=some_tokens, window=st.sampled_from([None, None, 1, 5, 70]))
def test_tokens_attend_to_those_before_them(problem: Problem, pieces: list[int], window: int | None) -> None:
    assert isinstance(problem.part, Attention)
    check_read(replace(problem, part=replace(problem.part, window=window)), pieces)


@settings(max_examples=60)
@given(problem=latent_problems(), pieces=some_tokens)
def test_tokens_attend_to_latent_features(problem: Problem, pieces: list[int]) -> None:
    check_read(problem, pieces)


@settings(max_examples=30)
@given(problem=problems(causal=False), tokens=st.integers(1, 150))
def test_an_encoders_tokens_attend_to_all(problem: Problem, tokens: int) -> None:
    check_read(problem, [tokens])


@settings(max_examples=30)
@given(problem=problems(own=False, causal=False), pieces=some_tokens, length=st.sampled_from([1, 61, 130]))
def test_attention_to_the_encoded_input(problem: Problem, pieces: list[int], length: int) -> None:
    encoded, x, outs, kepts = problem.tokens(length), problem.tokens(sum(pieces)), [], []
    for backend in (backend_of(), REFERENCE):
        weights, out = problem.on(backend), x.copy()
        kepts.append(keep(backend, weights, encoded, [length], problem.bits))
        stays, start = raw(kepts[-1]), 0
        for tokens in pieces:
            backend.attend(weights, out[start : start + tokens], kepts[-1], 0, Positions())
            start += tokens
        assert all(map(np.array_equal, raw(kepts[-1]), stays))
        outs.append(out)
    close_kept(*kepts)
    np.testing.assert_allclose(outs[0], outs[1], rtol=0, atol=0.02 * max(1.0, float(np.abs(outs[1]).max())))


def test_few_heads_at_a_time_read_what_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make(kv=4, shared=3, sinks=True, biased=True, softcap=3.0)
    x, backend = problem.tokens(90), backend_of()
    whole, _ = read(backend, problem, problem.on(backend), x, [40, 50])
    monkeypatch.setattr("moert.beside.gpu.torch_backend._SCORES", 1)
    found, _ = read(backend, problem, problem.on(backend), x, [40, 50])
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-6 * float(np.abs(whole).max()))


@pytest.mark.parametrize("bits", get_args(KvBits))
def test_forks_and_cuts_go_on_by_themselves(bits: KvBits) -> None:
    """What is on the device is told from what only memory has, or has otherwise by now."""
    problem = make(turning=1, bits=bits)
    x, answers = problem.tokens(300), []
    for backend in (backend_of(), REFERENCE):
        weights = problem.on(backend)

        def step(kept: Kept, rows: F32, backend: Any = backend, weights: Any = weights) -> F32:
            out, start = rows.copy(), kept.extend(len(rows))
            backend.attend(weights, out, kept, start, problem.positions(start, len(rows)))
            return out

        first = Kept(problem.part, bits=bits, make=backend.pages)
        outs = [step(first, x[:100])]
        fork = first.copy()
        outs += [step(first, x[100:130]), step(fork, x[130:150]), step(first, x[150:151]), step(fork, x[151:220])]
        assert first.cut(70, 0)
        outs += [step(first, x[220:225]), step(fork, x[225:226])]
        answers.append(np.concatenate(outs))
    np.testing.assert_allclose(*answers, rtol=0, atol=0.01 * float(np.abs(answers[1]).max()))


# Matrices and networks


@settings(max_examples=60)
@given(seed=seeds, kind=kinds, group=st.sampled_from([None, 16, 10]), rows=st.integers(1, 60), cols=st.integers(1, 90))
def test_matrices(seed: int, kind: Kind, group: int | None, rows: int, cols: int) -> None:
    rng = np.random.default_rng(seed)
    stored, bias, x, backend = random_stored(rng, kind, rows, cols, group), normal(rng, rows), None, backend_of()
    x, ids = activations(rng, 5, cols), rng.integers(0, rows, 4).tolist()
    mine, theirs = backend.matrix(stored), REFERENCE.matrix(stored)
    close(backend.linear(x, mine), REFERENCE.linear(x, theirs))
    close(backend.linear(x, backend.biased(mine, bias)), REFERENCE.linear(x, REFERENCE.biased(theirs, bias)))
    for found, expected in zip(backend.linears(x, [mine, mine]), REFERENCE.linears(x, [theirs] * 2), strict=True):
        close(found, expected)
    assert np.array_equal(backend.rows(mine, ids), REFERENCE.rows(theirs, ids))
    norm = NormWeights(1 + normal(rng, cols) / 8, None, 1e-5)
    close(backend.head(x, norm, 0.5, 3.0, mine), REFERENCE.head(x, norm, 0.5, 3.0, theirs))
    close(backend.head(x, norm, 0.5, None, mine), REFERENCE.head(x, norm, 0.5, None, theirs))
    one = random_stored(rng, kind, 1, cols, group)
    close(backend.gate(x, backend.matrix(one), 2.5), REFERENCE.gate(x, REFERENCE.matrix(one), 2.5))


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sigmoid_of_chosen", "sparsemixer"])
@pytest.mark.parametrize("own", [False, True])
def test_routers(score: Any, own: bool) -> None:
    rng, backend = np.random.default_rng(4), backend_of()
    stored, x, ones = random_stored(rng, "F32", 9, 30, None, 1.0), normal(rng, 6, 30), np.ones(30, np.float32)
    norm, other = NormWeights(ones, None, 1e-5), NormWeights(2 * ones, None, 1e-5)
    part = Router(3, score != "sigmoid_of_chosen", None, score, own_norm=own, jitter=0.01)
    mine, theirs = (
        RouterWeights(part, 1.5, norm, other if own else None, each.matrix(stored), None, None)
        for each in (backend, REFERENCE)
    )
    hidden, scores = backend.scores(x, mine)
    same, expected = REFERENCE.scores(x, theirs)
    close(hidden, same)
    close(scores, expected)
    for found, given_ in zip(backend.choose(expected, mine), REFERENCE.choose(expected, theirs), strict=True):
        np.testing.assert_allclose(found, given_, rtol=1e-6)
    recent, again = np.array([8, 2, -1], np.int32), np.array([8, 2, -1], np.int32)
    found = backend.prefer(expected[:1], mine, 0.5, 1, recent)
    given_ = REFERENCE.prefer(expected[:1], theirs, 0.5, 1, again)
    assert np.array_equal(found[0], given_[0])
    assert np.array_equal(recent, again)


@pytest.mark.parametrize("activation", list(ACTIVATION))
@pytest.mark.parametrize("gated", [False, True])
def test_networks_that_every_token_passes(activation: Any, gated: bool) -> None:
    rng, spec = np.random.default_rng(5), Ffn(50, Act(activation), gated)
    widths: dict[str, Kind] = {"gate": 4, "up": 8, "down": "BF16"}
    stored = [random_stored(rng, kind, *spec.shape(name, 33), 16) for name, kind in widths.items()]
    x, before, share = normal(rng, 7, 33), normal(rng, 7, 33), rng.uniform(0, 1, 5).astype(np.float32)
    tokens, outs, parts = np.array([0, 2, 3, 5, 6], np.int32), [], []
    for backend in (backend_of(), REFERENCE):
        matrices: list[Any] = [backend.matrix(each) for each in stored]
        network: Any = backend.dense(matrices[0] if gated else None, *matrices[1:])
        out, part = before.copy(), np.empty((1, 33), np.float32)
        backend.mixture([network], [5], tokens, share, x, out, spec)
        backend.parts([network], x[:1], part, spec)
        outs.append(out)
        parts.append(part)
    close(*outs)
    close(*parts)


# Little room


@pytest.fixture
def full() -> TorchBackend:
    """Its device has no room for any matrix."""
    return backend_of(1)


def test_without_room_all_is_done_in_memory_by_the_host_bit_for_bit(full: TorchBackend) -> None:
    problem = make(kind="BF16", gate=True, qk_norm="head", turning=1)
    x = problem.tokens(130)
    found, kept = read(full, problem, problem.on(full), x, [70, 1, 59])
    expected, others = read(REFERENCE, problem, problem.on(REFERENCE), x, [70, 1, 59])
    assert np.array_equal(found, expected)
    assert all(map(np.array_equal, raw(kept), raw(others)))


def test_what_has_no_room_for_its_keys_goes_back_to_memory() -> None:
    """In the middle of a sequence, whose keys are there; and the device gets its room back."""
    problem = make(kind="F16", turning=1, dim=128)
    memory = TorchMemory(CPU, 1 << 20)
    backend = TorchBackend("torch:cpu", opaque(ReferenceBackend()), memory)
    weights, x, out = problem.on(backend), problem.tokens(130), problem.tokens(130)
    kept, asked, used = Kept(problem.part, make=backend.pages), [], memory.used_bytes
    assert all(matrix.there is not None for matrix in weights.matrices.values())
    memory.give_back = lambda: bool(asked.append(memory.used_bytes))
    for first, stop in ((0, 60), (60, 64), (64, 130)):
        if first == 64:
            memory.capacity_bytes = memory.used_bytes + 100  # and another page does not fit
        start = kept.extend(stop - first)
        backend.attend(weights, out[first:stop], kept, start, problem.positions(start, stop - first))
    assert len(asked) == 1
    assert asked[0] > used
    assert memory.used_bytes == 0
    assert all(matrix.there is None for matrix in weights.matrices.values())
    expected, _ = read(REFERENCE, problem, problem.on(REFERENCE), x, [60, 4, 66])
    np.testing.assert_allclose(out, expected, rtol=0, atol=0.01 * float(np.abs(expected).max()))


def test_who_gives_something_back_is_asked_before_that() -> None:
    problem = make(kind="F16", turning=1, dim=128)
    memory = TorchMemory(CPU, 1 << 20)
    backend = TorchBackend("torch:cpu", opaque(ReferenceBackend()), memory)
    weights = problem.on(backend)
    memory.capacity_bytes = memory.used_bytes

    def give_back() -> bool:
        memory.capacity_bytes += 1 << 20
        return True

    memory.give_back = give_back
    read(backend, problem, weights, problem.tokens(70), [70])
    assert all(matrix.there is not None for matrix in weights.matrices.values())


def test_memory_is_counted_and_given_back() -> None:
    memory = TorchMemory(CPU, 1000)
    room = memory.empty((10, 20), torch.float16)
    assert (memory.used_bytes, memory.fits(600), memory.fits(601)) == (400, True, False)
    with pytest.raises(DeviceFull, match=r"600 bytes of 1\.00 kB left, 601 bytes are asked for"):
        memory.empty((601,), torch.uint8)
    del room
    assert memory.used_bytes == 0


def test_networks_and_matrices_move_once(full: TorchBackend) -> None:
    """What moved to memory is no longer on the device, and is the same."""
    rng, backend, host = np.random.default_rng(1), backend_of(), opaque(ReferenceBackend())
    stored, x = random_stored(rng, 3, 20, 30, 16), normal(rng, 2, 30)
    matrix = backend.matrix(stored, normal(rng, 20))
    before = backend.linear(x, matrix)
    here: Any = matrix.here(host)
    assert matrix.there is None
    assert matrix.here(host) is here
    close(host.linear(x, here), before)
    close(backend.linear(x, matrix), before)
    assert isinstance(full.dense(None, full.matrix(stored), full.matrix(stored)), PlacedNetwork)
    assert isinstance(full.matrix(stored), PlacedMatrix)


def test_what_has_no_matrix_is_the_hosts() -> None:
    host: Backend = opaque(ReferenceBackend())
    backend = TorchBackend("torch:cpu", host, TorchMemory(CPU, 1 << 20))
    assert (backend.name, backend.threads, backend.widens) == ("reference and torch:cpu", 1, True)
    for name in ("norm", "conv", "delta", "scan", "lstm", "attend_sparsely", "fire", "project", "expert", "gated"):
        assert getattr(backend, name) == getattr(host, name)


@pytest.mark.parametrize("bits", get_args(KvBits))
def test_keys_of_any_size_are_rounded_as_in_memory(bits: KvBits) -> None:
    rows = np.random.default_rng(2).normal(size=(280, 2, 9)).astype(np.float32)
    rows = np.ldexp(rows, np.arange(-150, 130).reshape(-1, 1, 1))
    rows[5, 0], rows[6, 1, 3], rows[7, 1, 4] = 0, np.inf, np.nan
    with np.errstate(all="ignore"):
        expected = kept_as(np.int8 if bits == 8 else np.float16, rows)
    found = torch_backend._rounded(bits, torch.from_numpy(rows), torch.from_numpy(rows))
    for mine, exactly in zip((found[0], found[2]), expected, strict=True):
        np.testing.assert_array_equal(array_of(mine), exactly)
