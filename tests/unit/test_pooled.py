"""Attention to pools: the formulas of SPEC.md one number after the other, pieces of a text, copies that part; and
routers with a table of tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_packs import POOLING, QUANTIZATION
from tiny_packs import POOLS, backbone, write_pack

from moert.engine.engine import Engine
from moert.kernels import library, open_backend
from moert.kernels.backend import ROWS, Backend, Floats, Stored
from moert.kernels.reference import ReferenceBackend
from moert.models.backbone import load_backbone
from moert.models.kv import POOL_ROWS, Fixed, Rows
from moert.models.mixers import Rotary
from moert.models.model import Builder
from moert.models.pooled import PooledMixer
from moert.pack.codec import F32
from moert.pack.errors import HeaderInvalid
from moert.pack.mixers import Indexer, Pooled, Pools
from moert.pack.parts import Norm, Rope
from moert.pack.reader import Pack
from tests.dense_packs import write_dense_pack

D_MODEL, EPS, TURNS = 10, 1e-5, np.array([0.9, 0.2], np.float32)
NEAR = Pooled(4, 6, 4, 7, 5, 0.408, Norm(EPS), 0, 2, 4, None)
PARTS = {
    "no pools": NEAR,
    "one key": replace(NEAR, window=1, groups=4),
    "all pools": replace(NEAR, pools=Pools(4, False, None)),
    "overlap": replace(NEAR, pools=Pools(3, True, None)),
    "indexer": replace(NEAR, pools=Pools(3, True, Indexer(5, 6, 2))),
    "indexer alone": replace(NEAR, window=2, pools=Pools(2, False, Indexer(3, 4, 1))),
    "pools of one": replace(NEAR, window=2, pools=Pools(1, True, Indexer(3, 4, 3))),
}
BACKENDS = [ReferenceBackend] if library.load() is None else [ReferenceBackend, open_backend]


class Case:
    """A mixer, and the tensors that it is made of."""

    def __init__(self, part: Pooled, seed: int, make: Any) -> None:
        rng, self.part = np.random.default_rng(seed), part
        self.tensors = {
            name: (1 if name.endswith("norm.weight") else 0)
            + rng.normal(size=shape).astype(np.float32) * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)
            for name, shape, _ in part.tensors("m", D_MODEL)
        }
        self.backend: Backend = make()
        stored: dict[str, Stored] = {name: Floats("F32", each) for name, each in self.tensors.items()}
        stored["n.weight"] = Floats("F32", np.ones(D_MODEL, np.float32))
        builder, rope = Builder(stored, [Rope(4)], self.backend), Rotary(Rope(4), TURNS)
        norm = builder.norm(Norm(EPS), "n")
        self.mixer = PooledMixer(part, "m", builder, norm, rope)

    def read(self, x: F32, pieces: list[int], kept: Fixed | None = None) -> F32:
        kept, found, start = kept or Fixed(self.part, D_MODEL), x.copy(), 0
        for piece in pieces:
            self.mixer.read(found[start : start + piece], kept)
            start += piece
        return found

    def by_the_text(self, x: F32) -> np.ndarray:
        """The output behind each token, in float64."""
        part, w = self.part, {name[2:]: each.astype(np.float64) for name, each in self.tensors.items()}
        xs = [_normed(each) for each in x.astype(np.float64)]
        keys = [_turned(_normed(w["kv.weight"] @ each, w["kv_norm.weight"]), p) for p, each in enumerate(xs)]
        made = []
        for p, each in enumerate(xs):
            y = _normed(w["q_a.weight"] @ each, w["q_norm.weight"])
            seen = keys[max(0, p - part.window + 1) : p + 1] + self._pools(w, xs[: p + 1], y)
            heads = []
            for h in range(part.n):
                q = _turned(_normed((w["q.weight"] @ y)[h * part.dim : (h + 1) * part.dim]), p)
                powers = [math.exp(part.scale * float(q @ key)) for key in seen]
                total = sum(powers) + math.exp(w["sinks"][h])
                mean = sum(power / total * key for power, key in zip(powers, seen, strict=True))
                heads.append(_turned(mean, -p))
            size = part.n // part.groups
            joined = [np.concatenate(heads[at * size : (at + 1) * size]) for at in range(part.groups)]
            narrow = [w[f"narrow.{at}.weight"] @ each for at, each in enumerate(joined)]
            made.append(x[p] + w["out.weight"] @ np.concatenate(narrow))
        return np.array(made)

    def _pools(self, w: dict[str, Any], xs: list[Any], y: Any) -> list[Any]:
        pools = self.part.pools
        if pools is None:
            return []
        made = {name: self._made(w, name, dim, xs) for name, dim in self.part.kept.items()}
        if pools.indexer is None:
            return made["pool"]
        n, dim = pools.indexer.n, pools.indexer.dim
        z = [_turned(each, len(xs) - 1) for each in (w["index.q.weight"] @ y).reshape(n, dim)]
        weights = w["index.weights.weight"] @ xs[-1]
        worth = [sum(weights[m] * max(0.0, z[m] @ s) for m in range(n)) for s in made["index"]]
        best = sorted(range(len(worth)), key=lambda i: -worth[i])[: pools.indexer.top]
        return [made["pool"][i] for i in best]

    def _made(self, w: dict[str, Any], name: str, dim: int, xs: list[Any]) -> list[Any]:
        pools = self.part.pools
        assert pools is not None
        v = [w[f"{name}.values.weight"] @ x for x in xs]
        g = [w[f"{name}.gates.weight"] @ x + w[f"{name}.places"][j % pools.every] for j, x in enumerate(xs)]
        found = []
        for i in range(len(xs) // pools.every):
            own = range(i * pools.every, (i + 1) * pools.every)
            before = range((i - 1) * pools.every, i * pools.every) if i and pools.overlap else range(0)
            parts = [(g[j][-dim:], v[j][-dim:]) for j in own] + [(g[j][:dim], v[j][:dim]) for j in before]
            powers = [np.exp(gate) for gate, _ in parts]
            mean = sum(power * value for power, (_, value) in zip(powers, parts, strict=True)) / sum(powers)
            found.append(_turned(_normed(mean, w[f"{name}.norm.weight"]), i * pools.every))
        return found


def _normed(x: Any, weight: Any = 1.0) -> Any:
    return x / np.sqrt((x * x).mean() + EPS) * weight


def _turned(x: Any, p: int) -> Any:
    x, first = x.copy(), len(x) - 4
    for i, turn in enumerate(TURNS.astype(np.float64)):
        a, at = p * turn, first + 2 * i
        x[at], x[at + 1] = x[at] * math.cos(a) - x[at + 1] * math.sin(a), x[at + 1] * math.cos(a) + x[at] * math.sin(a)
    return x


def words(n: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).normal(size=(n, D_MODEL)).astype(np.float32)


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("name", PARTS)
def test_an_output_is_that_of_the_text(name: str, make: Any) -> None:
    case, x = Case(PARTS[name], 1, make), words(23)
    np.testing.assert_allclose(case.read(x, [23]), case.by_the_text(x), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(library.load() is None, reason="no native kernels: numpy's products differ with their rows")
@pytest.mark.parametrize("name", PARTS)
def test_a_token_alone_has_the_bits_that_it_has_among_others(name: str) -> None:
    """A window and a pool that end in the middle of a piece, and pieces of which one is longer than ROWS."""
    case, n = Case(PARTS[name], 2, open_backend), ROWS + 50
    x = words(n)
    whole = case.read(x, [n])
    for pieces in ([1] * n, [2, 5, 3, 1, n - 11], [n - 1, 1]):
        assert case.read(x, pieces).tobytes() == whole.tobytes()


@pytest.mark.parametrize("name", PARTS)
def test_copies_part_and_marks_are_gone_back_to(name: str) -> None:
    case, first, kept = Case(PARTS[name], 3, ReferenceBackend), words(3 * POOL_ROWS + 5), Fixed(PARTS[name], D_MODEL)
    case.read(first, [len(first)], kept)
    kept.mark()
    twin, more, other = kept.copy(), words(40, 1), words(40, 2)
    expected = case.read(more, [40], kept)
    assert case.read(other, [40], twin).tobytes() != expected.tobytes()
    assert kept.cut(len(first), 0)
    again = kept.copy()
    case.read(other, [40], kept)
    assert case.read(more, [40], again).tobytes() == expected.tobytes()
    assert kept.cut(len(first), 0)
    assert case.read(more, [40], kept).tobytes() == expected.tobytes()


def test_rows_of_a_copy_stay_when_the_original_is_cut_and_goes_on() -> None:
    rows = Rows(2, every=3)
    for at in range(POOL_ROWS + 4):
        rows.add(np.full(2, at, np.float32))
    twin = rows.copy()
    rows.cut(3 * 2 + 1)
    assert rows.length == 2
    for _ in range(POOL_ROWS):
        rows.add(np.full(2, -1, np.float32))
    assert np.concatenate(twin.pieces(twin.length))[:, 0].tolist() == list(range(POOL_ROWS + 4))
    assert np.concatenate(rows.pieces(rows.length))[:, 0].tolist() == [0, 1] + [-1] * POOL_ROWS
    assert np.concatenate(rows.pieces(3))[:, 0].tolist() == [0, 1, -1]


# Routers whose experts a table names


def test_experts_follow_from_the_tokens_numbers_alone(tmp_path: Path) -> None:
    table, asked = backbone(POOLS)["decoder.0.router.table"], [3, 9, 4, 9]
    with Engine.open(write_pack(tmp_path / "p", POOLS, paths=False)) as engine:
        at, chosen = POOLS.moe_layers()[0], []
        run = engine.runner.run

        def heard(place: Any, hidden: F32, experts: Any, *others: Any) -> None:
            if place == at:
                chosen.extend(experts.tolist())
            run(place, hidden, experts, *others)

        engine.runner.run = heard  # type: ignore[method-assign]
        engine.reserve(4, 1)
        engine.model.prefill_many([asked[:3], asked[3:]])
        assert chosen == table[asked].sort(dim=1).values.tolist()
        counts = np.bincount(np.ravel(chosen), minlength=8)
        assert np.array_equal(engine.model.routers[at].guess(np.zeros((4, 24), np.float32)), counts / np.float32(4))


@pytest.mark.parametrize("row", [[0.5, 1], [1, 1], [3, 0], [-1, 0]], ids=str)
def test_a_table_that_names_no_two_experts_is_refused(tmp_path: Path, row: list[float]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["decoder.0.router.table"][7] = torch.tensor(row)

    write_dense_pack(tmp_path / "p", POOLING, QUANTIZATION, change)
    weights = load_backbone(Pack.open(tmp_path / "p"))
    with pytest.raises(HeaderInvalid, match=r"decoder\.0\.router\.table should name different experts of 3"):
        weights.pop("decoder.0.router.table")
