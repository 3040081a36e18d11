"""A checkpoint on disk, converted, profiled and run from the command line: no policy changes what is written."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from random_hash import add_hash
from tiny import tiny_olmoe, tiny_switch
from tiny_packs import record_routes

from moeconv.packing.emit import Label, emit
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder
from moeconv.routes import build
from moeconv.source.checkpoint import Checkpoint
from moeconv.writer import add_to_pack
from moert.command import cli
from moert.engine import engine as engine_module
from moert.engine.budget import Budget
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.engine.registry import PREDICTS
from moert.experts import cache as cache_module
from moert.experts import store as store_module
from moert.experts import streaming
from moert.experts.drive import is_direct, open_expert, read_into
from moert.experts.names import EVICTIONS
from moert.experts.store import IoSettings
from moert.experts.streaming import CachedExperts
from moert.pack.paths import PATHS
from moert.pack.reader import Pack
from tests.pairs import thinned

PROMPTS = ("small", "of experts", "the router decides")
NEW = 12
WIDTHS = (2, 4, 8, 16)
CHECKPOINTS = {"switch": tiny_switch, "olmoe": tiny_olmoe}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    checkpoint = Checkpoint.open(CHECKPOINTS[request.param](root / "checkpoint"))
    spec = checkpoint.spec
    widths = {key: (WIDTHS[index % 4],) * len(spec.moe.ffn.projections) for index, key in enumerate(spec.expert_keys())}
    out = root / "model.pack"
    coder = ExpertCoder(checkpoint, QUANTIZERS["channel"](None), None)
    manifest = emit(coder, widths, out, seed=0, label=Label("tests"))
    add_to_pack(out, manifest, PATHS, build(spec.moe.n, record_routes(out, PROMPTS)).to_bytes())
    return add_hash(out)


def run(capsys: pytest.CaptureFixture[str], pack: Path, source: Path, *flags: str) -> tuple[list, dict]:
    """(answers, figures) of `moert run --input`."""
    capsys.readouterr()
    arguments = ["run", str(pack), "--input", str(source), "--json", "--stats", "--max-new-tokens", str(NEW), *flags]
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert end.value.code == 0, err
    answers = [json.loads(line) for line in out.splitlines()]
    return [(answer["tokens"], answer["output"]) for answer in answers], json.loads(err.splitlines()[-1])


class Paths:
    """Which ways a run took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.direct: list[bool] = []
        self.readers: set[str] = set()
        self.overlaps = 0
        self.pauses_s = 0.0
        monkeypatch.setattr(store_module, "open_expert", self._open)
        monkeypatch.setattr(store_module, "read_into", self._read)
        monkeypatch.setattr(store_module, "TOGETHER_BYTES", 0)  # one by one

    def count_as_large(self) -> None:
        """Experts are read by other threads and computed with as they come; the disk is slow enough to see it."""
        self.pauses_s = 0.001
        for module in (cache_module, streaming):
            self._monkeypatch.setattr(module, "HANDED_OVER_BYTES", 0)
        inner = CachedExperts._run_as_they_come

        def counted(runner: CachedExperts, *arguments: object) -> None:
            self.overlaps += 1
            inner(runner, *arguments)  # type: ignore[arg-type]

        self._monkeypatch.setattr(CachedExperts, "_run_as_they_come", counted)

    def predict_at_any_price(self) -> None:
        """So small experts are never worth a prediction. Reads take so long that other threads get a turn."""
        self.pauses_s = 0.001
        self._monkeypatch.setattr(engine_module, "Worth", lambda: None)

    def _open(self, path: str, direct: bool) -> int:
        handle = open_expert(path, direct)
        self.direct.append(is_direct(handle))
        return handle

    def _read(self, handle: int, into: Any, offset: int) -> int:
        self.readers.add(threading.current_thread().name)
        time.sleep(self.pauses_s)
        return read_into(handle, into, offset)


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Paths:
    return Paths(monkeypatch)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS * 2))
    return path


@pytest.fixture(scope="module")
def expected(pack: Path) -> list[tuple[list[int], str]]:
    """With room for all experts, on one thread, in the process of the tests."""
    settings = GenerationSettings(max_new_tokens=NEW)
    with Engine.open(pack, eviction="lru", predict="none", threads=1, io=IoSettings(False, 1)) as engine:
        answers = [engine.generate(prompt, settings) for prompt in PROMPTS * 2]
    assert len({tuple(answer.result.tokens) for answer in answers}) == len(PROMPTS)
    return [(answer.result.tokens, answer.text) for answer in answers]


def test_all_in_memory_each_expert_is_read_once(pack, source, expected, paths, capsys) -> None:
    answers, figures = run(
        capsys, pack, source, "--tune", "predict=none", "--tune", "cache=100%", "--tune", "io=direct,1"
    )
    assert answers == expected
    assert figures["evictions"] == figures["prefetch_issued_bytes"] == 0
    assert figures["reads"] == figures["expert_requests"] - figures["expert_hits"]
    assert 0 < figures["reads"] <= len(Pack.open(pack).manifest.experts)
    assert figures["bytes_read"] <= figures["expert_bytes"]
    assert figures["stall_s"] > 0


def test_a_limit_for_the_process_leaves_the_answers_alone(pack, source, expected, capsys) -> None:
    answers, figures = run(capsys, pack, source, "--memory", "auto", "--tune", "io=direct,2")
    assert answers == expected
    assert figures["memory_bytes"] > figures["cache_bytes"] > 0


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_every_eviction_writes_the_same(pack, source, expected, capsys, eviction: str) -> None:
    flags = ("--tune", f"eviction={eviction}", "--tune", "predict=none", "--tune", "cache=40%", "--tune", "io=direct,1")
    answers, figures = run(capsys, pack, source, *flags)
    assert answers == expected
    assert figures["evictions"] > 0
    assert figures["reads"] == figures["expert_requests"] - figures["expert_hits"] > figures["evictions"]
    assert 0 < figures["hit_rate"] < 1


@pytest.mark.parametrize("weighed", [False, True], ids=["at any price", "weighed"])
@pytest.mark.parametrize("predict", PREDICTS)
def test_every_prediction_writes_the_same(pack, source, expected, paths, capsys, predict: str, weighed: bool) -> None:
    if not weighed:
        paths.predict_at_any_price()
    flags = ("--tune", "eviction=lru", "--tune", f"predict={predict}", "--tune", "cache=40%", "--tune", "io=direct,2")
    answers, figures = run(capsys, pack, source, *flags)
    assert answers == expected
    assert figures["evictions"] > 0
    assert figures["prefetch_used_bytes"] <= figures["prefetch_issued_bytes"] <= figures["bytes_read"]
    if predict in ("none", "auto"):  # experts are small
        assert figures["prefetch_issued_bytes"] == 0
        assert paths.readers == {"MainThread"}
    elif not weighed:
        assert figures["prefetch_used_bytes"] > 0
        assert len(paths.readers) > 1


@thinned("predict, loaders, mode", ["none", "gate"], [1, 4], ["direct", "buffered"])
def test_experts_that_come_while_others_are_computed_with(
    pack, source, expected, paths, capsys, mode: str, loaders: int, predict: str
) -> None:
    paths.count_as_large()
    paths.predict_at_any_price()
    flags = (
        "--tune",
        "eviction=paper",
        "--tune",
        f"predict={predict}",
        "--tune",
        "cache=40%",
        "--tune",
        f"io={mode},{loaders}",
    )
    answers, figures = run(capsys, pack, source, *flags)
    assert answers == expected
    assert figures["evictions"] > 0
    assert figures["stall_s"] > 0
    assert paths.overlaps > 0
    assert (figures["prefetch_used_bytes"] > 0) == (predict != "none")
    loading = {name for name in paths.readers if name.startswith("moert-load")}
    assert 1 <= len(loading) <= loaders
    assert loaders == 1 or len(loading) > 1
    if mode == "buffered" or direct_reads_work(pack):
        assert set(paths.direct) == {mode == "direct"}


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("predict", ["none", "gate"])
def test_room_for_one_layer_of_one_token(pack, source, expected, paths, capsys, predict: str, large: bool) -> None:
    """Less than a prompt needs of a layer: its experts come and go within the layer."""
    if large:
        paths.count_as_large()
    paths.predict_at_any_price()
    least = Budget.of(Pack.open(pack).manifest).layer_bytes
    flags = (
        "--tune",
        "eviction=lru",
        "--tune",
        f"predict={predict}",
        "--tune",
        f"cache={least}",
        "--tune",
        "io=direct,2",
    )
    answers, figures = run(capsys, pack, source, *flags)
    assert answers == expected
    assert figures["cache_bytes"] == least
    assert figures["evictions"] > 0
    assert figures["hit_rate"] < 0.5 or predict != "none"


def direct_reads_work(pack: Path) -> bool:
    handle = open_expert(pack / "manifest.json", True)
    try:
        return is_direct(handle)
    finally:
        os.close(handle)
