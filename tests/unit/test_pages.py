"""Sequences that fork share pages of keys and values, and none sees what another one writes."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from attention_problems import make, make_latent
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_packs import DECODER_SHAPE, VOCAB, write_pack

from moert.engine.engine import Engine
from moert.kernels import library, open_backend, reference
from moert.kernels.pages import KEYS, KvBits, PageLayout, pages_of
from moert.models.kv import Kept, State, written_bytes
from moert.pack.codec import F32
from moert.pack.parts import Attention
from tests import pairs

PART = Attention(2, 2, 4, 1.0, None, None, None, None)
NATIVE = library.load() is not None


@dataclass
class Twin:
    """What was written into `kept`, remembered by itself: [tokens, 2, kv, dim]."""

    kept: Kept
    rows: F32 = field(default_factory=lambda: np.zeros((0, 2, 2, 4), np.float32))

    def write(self, rows: F32) -> None:
        reference.write(self.kept, self.kept.extend(len(rows)), rows[:, 0], rows[:, 1])
        self.rows = np.concatenate((self.rows, rows))

    def check(self, bits: KvBits) -> None:
        alone = Kept(PART, 0, bits)
        alone.extend(len(self.rows))
        if not len(self.rows):
            assert self.kept.pages == []
            return
        reference.write(alone, 0, self.rows[:, 0], self.rows[:, 1])
        assert len(self.kept.pages) == pages_of(self.kept.length)
        for found, expected in zip(reference.read(self.kept), reference.read(alone), strict=True):
            assert np.array_equal(found, expected)


STEPS = st.lists(st.tuples(st.sampled_from("wwwffcc"), st.integers(0, 300), st.integers(0, 9)), max_size=25)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, bits=st.sampled_from([8, 16]), expected=st.sampled_from([0, 100, 200]))
def test_forks_are_as_copies_that_share_nothing(steps: list[tuple[str, int, int]], bits: KvBits, expected: int) -> None:
    """Whatever is written, forked and cut, in any order."""
    rng, twins = np.random.default_rng(len(steps)), [Twin(Kept(PART, expected, bits))]
    for what, number, which in steps:
        twin = twins[which % len(twins)]
        if what == "w":
            twin.write(rng.normal(size=(number % 140, 2, 2, 4)).astype(np.float32))
        elif what == "f" and len(twins) < 8:
            twins.append(Twin(twin.kept.copy(), twin.rows))
        elif what == "c":
            length = number % (len(twin.rows) + 1)
            assert twin.kept.cut(length, number)
            twin.rows = twin.rows[:length]
        for each in twins:
            each.check(bits)


def filled(tokens: int) -> Kept:
    kept = Kept(PART, tokens)
    rows = np.random.default_rng(tokens).normal(size=(tokens, 2, 2, 4)).astype(np.float32)
    reference.write(kept, kept.extend(tokens), rows[:, 0], rows[:, 1])
    return kept


@pytest.mark.parametrize("length", [1, KEYS - 1, KEYS, KEYS + 1, 5 * KEYS + 7])
def test_only_the_last_page_is_copied_and_only_once(length: int) -> None:
    kept = filled(length)
    before, twins = list(kept.pages), [kept.copy() for _ in range(3)]
    assert all(twin.pages == before for twin in twins)
    kept.extend(1)
    assert kept.pages[: len(before)] == before, "who was there first writes on where it is"
    for twin in twins:
        twin.extend(1)
        whole = length // KEYS
        assert twin.pages[:whole] == before[:whole]
        assert len(twin.pages) == pages_of(length + 1)
        assert twin.pages[whole] not in before
        mine = list(twin.pages)
        twin.extend(1)
        assert twin.pages[: len(mine)] == mine
    assert len({id(twin.pages[-1]) for twin in (kept, *twins)}) == 4


def test_what_is_shared_counts_once() -> None:
    kept = filled(5 * KEYS + 7)
    states, page = [State([kept])], PageLayout.of(PART, 16).nbytes
    states += [states[0].copy() for _ in range(3)]
    assert written_bytes(states) == written_bytes(states[:1]) == 6 * page
    for state in states:
        state.own[0].extend(1)
    assert written_bytes(states) == 9 * page
    assert written_bytes(states[1:]) == 8 * page


def test_what_an_encoder_made_is_shared_whole() -> None:
    state = State([filled(3)], [filled(200)])
    twin = state.copy()
    assert twin.cross[0] is state.cross[0]
    assert written_bytes([state, twin]) == written_bytes([state])


def test_room_for_tokens_that_never_came_is_given_back() -> None:
    """A client that leaves early had asked for thousands of tokens: its first page may stay in memory, and no other."""
    tracemalloc.start()
    kept = Kept(PART, 5000)
    kept.extend(3)
    expected = tracemalloc.get_traced_memory()[0]
    assert kept.cut(3, 0)
    left = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept.nbytes == kept.layout.nbytes
    assert left < expected / 20


def test_pages_after_a_cut_are_used_again() -> None:
    kept = filled(5 * KEYS)
    before = list(kept.pages)
    assert kept.cut(2 * KEYS + 1, 5 * KEYS)
    kept.extend(3 * KEYS - 1)
    assert kept.pages == before
    twin = kept.copy()
    assert kept.cut(KEYS, 0)
    kept.extend(KEYS)
    assert kept.pages[1] not in before, "others read that one"
    assert twin.pages == before


@pytest.mark.skipif(not NATIVE, reason=f"no native kernels: {library.missing()}")
@pairs.thinned("bits, latent, forked", [8, 16], [False, True], [1, 63, 64, 100, 130])
def test_attention_after_a_fork_is_that_of_a_sequence_by_itself(latent: bool, bits: KvBits, forked: int) -> None:
    problem = make_latent(bits=bits) if latent else make(bits=bits, turning=1)
    x, others, backend = problem.tokens(200), problem.tokens(201)[1:], open_backend("auto", 1)
    weights = problem.on(backend)

    def read(kept: Kept, rows: F32, start: int) -> F32:
        out = rows[start:].copy()
        place = kept.extend(len(out))
        backend.attend(weights, out, kept, place, problem.positions(start, len(out)))
        return out

    first = Kept(problem.part, bits=bits)
    read(first, x[:forked], 0)
    second = first.copy()
    mixed = np.concatenate((x[:forked], others[forked:]))
    found = [read(first, x, forked), read(second, mixed, forked)]
    for rows, each in zip((x, mixed), found, strict=True):
        alone = Kept(problem.part, bits=bits)
        read(alone, rows[:forked], 0)
        assert read(alone, rows, forked).tobytes() == each.tobytes()
    backend.close()


@pytest.mark.skipif(not NATIVE, reason=f"the same bit for bit on the native kernels: {library.missing()}")
@pairs.thinned("bits, tokens", [8, 16], [512, 1500, pytest.param(4096, marks=pytest.mark.slow)], facts=pairs.each)
def test_a_long_prompt_forks_anywhere(tmp_path: Path, tokens: int, bits: KvBits) -> None:
    spec = DECODER_SHAPE.but(max_positions=4200).spec
    ids = np.random.default_rng(tokens).integers(3, VOCAB, tokens).tolist()
    with Engine.open(write_pack(tmp_path / "p", spec, paths=False), predict="none", threads=1, kv=bits) as engine:
        engine.reserve(tokens, 9)
        model = engine.model
        state, logits = model.prefill(ids)
        other, _ = model.prefill(ids[: tokens // 3])
        twin = other.copy()
        model.read([other], [ids[::-1][:100]])
        assert model.read([twin], [ids[tokens // 3 :]])[0].tobytes() == logits.tobytes()
        forks = [state.copy() for _ in range(3)]
        together = model.read([state, *forks], [[at] for at in (5, 6, 7, 8)])
        for token, row in zip((5, 6, 7, 8), together, strict=True):
            assert model.step(model.prefill(ids)[0], token).tobytes() == row.tobytes()
