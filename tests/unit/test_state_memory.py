"""States of fixed size are there once for each sequence: beams and conversations keep none that has ended."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from weakref import WeakSet

import numpy as np
import pytest
from tiny_packs import DECODER_SHAPE, MIXERS, streaming, write_pack

from moert.engine.engine import Engine
from moert.models.kv import Fixed
from moert.pack.mixers import FixedState, GatedDelta, Indexer, Mamba, Mamba2, Pooled, Pools, ShortConv
from moert.pack.model_spec import ModelSpec
from moert.pack.parts import Norm, Rope
from tests.cgroups import Group, missing
from tests.pairs import each, thinned

ROOT = Path(__file__).resolve().parents[2]
BEAMS = 4
_NORM = Norm(1e-5)
MIXED: dict[str, FixedState] = {
    "conv": ShortConv(65535), "delta": GatedDelta(24, 12, 256, 256, 4, _NORM),
    "kda": GatedDelta(24, 24, 256, 256, 4, _NORM, by_feature=True, rank=256, gate="sigmoid"),
    "mamba": Mamba(1 << 14, 96, 6, 3, _NORM), "mamba2": Mamba2(48, 64, 2, 512, 4, _NORM),
}  # fmt: skip
"""Of some 6 MB of state a layer."""


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The pack of a mixer, written once."""

    @cache
    def written(name: str) -> Path:
        mixers = tuple((layer, MIXED[name]) for layer in range(4))
        shape = DECODER_SHAPE.but(decoder=(True,) * 5, mixers=mixers, eos=(), family="mixers")
        return write_pack(tmp_path_factory.mktemp("mixers") / name, shape.spec, paths=False)

    return written


def in_group(command: str, pack: Path, limit_bytes: int, *more: object) -> tuple[subprocess.CompletedProcess[str], int]:
    """What moert says in a group of so much memory, and how many processes the system ended."""
    asked = [command, pack, "--memory", limit_bytes, "--json", *more]
    with Group(memory_bytes=max(limit_bytes, 60_000_000)) as group:
        done = subprocess.run(
            [sys.executable, "-m", "moert", *map(str, asked)], capture_output=True, text=True, check=False, cwd=ROOT,
            preexec_fn=lambda: group.add(0),
        )  # fmt: skip
        return done, group.oom_kills


def in_the_smallest(command: str, pack: Path, *more: object) -> tuple[str, int]:
    """Returns what moert prints in a group of the smallest memory that it names, and that memory."""
    limit = 1_000_000
    for _ in range(3):
        done, killed = in_group(command, pack, limit, *more)
        assert killed == 0, limit
        if done.returncode == 0:
            break
        assert "too small" in done.stderr
        limit = int(done.stderr.split("--memory ")[1].split()[0])
    assert done.returncode == 0, done.stderr
    return done.stdout, limit


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("name", MIXED)
def test_beams_of_every_mixer_run_in_the_smallest_memory_that_is_named(write: Callable[[str], Path], name: str) -> None:
    pack = write(name)
    said, limit = in_the_smallest("run", pack, "one small step", "--max-new-tokens", 24, "--tune", f"beams={BEAMS}")
    assert json.loads(said)["stats"]["peak_rss_bytes"] <= limit


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@thinned("name, more", MIXED, [[], ["--context", 64]], facts=each)
def test_texts_are_scored_in_the_smallest_memory_that_is_named(
    write: Callable[[str], Path], name: str, more: list[object]
) -> None:
    pack, text = write(name), "one small step " * 25
    said, _ = in_the_smallest("score", pack, text, *more)
    assert json.loads(said)["scored_tokens"] > 200


def pooling(spec: ModelSpec) -> ModelSpec:
    """Attention to pools, with states of some MB a layer."""
    pools = Pools(4, True, Indexer(8, 64, 16))
    part = Pooled(16, 512, 64, 128, 2000, 0.044, _NORM, 0, 4, 128, pools)
    kinds = tuple(replace(kind, mixer=part) for kind in spec.decoder.kinds)
    return replace(spec, ropes=(Rope(64),), decoder=replace(spec.decoder, kinds=kinds))


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("made", [streaming, pooling])
def test_streams_and_pools_run_in_the_smallest_memory_that_is_named(
    made: Callable[[ModelSpec], ModelSpec], tmp_path: Path
) -> None:
    shape = DECODER_SHAPE.but(d_model=512, n_heads=8, n_kv_heads=4, head_dim=64, eos=())
    pack, text = write_pack(tmp_path / "some.pack", made(shape.spec), paths=False), "one small step " * 25
    said, limit = in_the_smallest("run", pack, text, "--max-new-tokens", 8)
    assert json.loads(said)["stats"]["peak_rss_bytes"] <= limit


def test_no_more_states_are_there_than_beams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: WeakSet[Fixed] = WeakSet()
    most = 0
    made = Fixed.__init__

    def count(self: Fixed, *arguments: object) -> None:
        nonlocal most
        made(self, *arguments)  # type: ignore[arg-type]
        there.add(self)
        most = max(most, len(there))

    pack = write_pack(tmp_path / "p", replace(MIXERS, tokens=replace(MIXERS.tokens, eos=())), paths=False)
    layers = sum(
        isinstance(MIXERS.decoder[at].mixer, FixedState) or MIXERS.decoder[at].mixer is None for at in range(6)
    )
    monkeypatch.setattr(Fixed, "__init__", count)
    with Engine.open(pack) as engine:
        engine.generate([3, 4, 5, 6], max_new_tokens=12, beams=BEAMS)
    assert most == BEAMS * layers


def test_marking_again_and_going_back_take_no_third_copy() -> None:
    fixed = Fixed(Mamba2(4, 6, 2, 5, 4, _NORM), 24)
    arrays = list(fixed.arrays)
    fixed.extend(1)
    fixed.arrays[0][:] = 1
    fixed.mark()
    assert fixed._marked is not None
    kept = list(fixed._marked[1])
    fixed.extend(1)
    fixed.arrays[0][:] = 2
    fixed.mark()
    assert all(one is other for one, other in zip(fixed._marked[1], kept, strict=True))
    fixed.extend(1)
    fixed.arrays[0][:] = 3
    assert fixed.cut(2, 0)
    assert all(one is other for one, other in zip(fixed.arrays, arrays, strict=True))
    assert np.all(fixed.arrays[0] == 2)
    assert np.all(kept[0] == 2)
