"""A model run layer by layer gives what it gives in memory, and goes on where it was."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY, VARIANTS, kinds, variant_id
from trials import running

from moeconv.artifacts import uniform
from moeconv.dense import dense_of, weighed
from moeconv.errors import ConversionError
from moeconv.measure.codes import collect_beside
from moeconv.measure.metrics import find_metric
from moeconv.measure.passes import LayeredModel, Passage, Room
from moeconv.measure.scoring import Extent, build_scorer, load_tokenizer
from moeconv.measure.trial import LoadedModel, Trial
from moeconv.progress import unseen
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import DenseCoder, ExpertCoder
from moeconv.quantizers.moments import BESIDE, Moments, collect
from moeconv.source.archs.weights import linears_of
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import CheckpointError
from moert.pack.tensors import TOKENIZER
from tests.pairs import thinned
from tests.refusing import one_line

TinyModel = Callable[[str, str], Path]
WHOLE = {"switch_transformers", "nllb-moe", "gptsan-japanese"}
"""What must fit memory whole."""
DECODERS = [(family, name) for family, name in VARIANTS if family not in WHOLE]


def layered_of(path: Path, folder: Path, dense_bits: int | None = None) -> LayeredModel:
    checkpoint = Checkpoint.open(path)
    coder = ExpertCoder(checkpoint, QUANTIZERS["group"](None), None)
    room = Room(folder, 1, 200_000)
    return LayeredModel(coder, DenseCoder(checkpoint, dense_of(checkpoint.spec, dense_bits)), room, unseen)


def trial_of(path: Path, dense_bits: int | None = None) -> Trial:
    checkpoint = Checkpoint.open(path)
    dense = DenseCoder(checkpoint, dense_of(checkpoint.spec, dense_bits))
    return Trial(LoadedModel(checkpoint, dense), ExpertCoder(checkpoint, QUANTIZERS["group"](None), None))


def scorer_of(subject: Any) -> Any:
    checkpoint = subject.checkpoint
    tokenizer = load_tokenizer(checkpoint.path / TOKENIZER, checkpoint.spelled)
    text = running(20)
    return build_scorer(subject, tokenizer, text, find_metric("token_perplexity"), Extent(5, 32, None))


@thinned("family, variant", DECODERS, facts=kinds, ids=variant_id)
def test_the_same_nats_as_in_memory(family: str, variant: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tiny_model(family, variant)
    found = []
    for subject in (trial_of(path), layered_of(path, tmp_path)):
        scorer = scorer_of(subject)
        subject.restore()
        before = scorer.score(as_reference=True)
        subject.assign(uniform(subject.spec, 3))
        after = scorer.score()
        found.append([before.nats, after.nats, after.kls])
    tokens = before.tokens
    for mine, theirs in zip(*found, strict=True):
        assert abs(mine - theirs).max() / tokens.max() < 1e-5


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "qwen2_moe", "jamba", "longcat_flash"])
def test_inputs_outside_the_experts_are_those_in_memory(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Whole layers without experts and shared experts among them."""
    path = tiny_model(family, next(iter(TINY[family][1])))
    layered, loaded = layered_of(path, tmp_path / "room"), LoadedModel(Checkpoint.open(path))
    names = [name for name in weighed(layered.spec) if name != "head.weight"]
    collect_beside(layered, scorer_of(layered).texts, weighed(layered.spec), tmp_path / "beside.safetensors")
    found = Moments.load(tmp_path / "beside.safetensors")
    linears = linears_of(loaded.model, loaded.checkpoint.description, names)
    expected = collect(loaded.calls, scorer_of(loaded).score, "products", linears)
    assert {name.removeprefix(BESIDE).removesuffix(".rows") for name in found.tensors} == {*linears}
    seen = {name for name in linears if expected.beside(name) is not None}
    assert seen == {name for name in linears if found.beside(name) is not None}
    assert len(seen) > len(linears) / 2
    for name in seen:
        mine, theirs = found.beside(name), expected.beside(name)
        assert mine is not None
        assert theirs is not None
        assert mine.rows.tolist() == theirs.rows.tolist()
        assert abs(mine.moment - theirs.moment).max() < 1e-4 * abs(theirs.moment).max(), name


@pytest.mark.parametrize("family", sorted(WHOLE))
def test_what_can_not_be_run_by_its_layers_says_so(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="can't be run layer by layer: it must fit"):
        layered_of(tiny_model(family, next(iter(TINY[family][1]))), tmp_path)


@pytest.fixture
def stopped(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, list[int]]:
    """A model, the folder of its pass that was killed at layer 1, and the layers that were at work since."""
    path, folder, at_work = tiny_model("olmoe", "plain"), tmp_path / "stopped", list[int]()
    scorer = scorer_of(layered_of(path, folder))

    class Killed(Exception):
        pass

    ready = LayeredModel.ready

    def watched(self: LayeredModel, at: int) -> Any:
        at_work.append(at)
        if at == 1 and at_work.count(1) == 1:
            raise Killed
        return ready(self, at)

    monkeypatch.setattr(LayeredModel, "ready", watched)
    with pytest.raises(Killed):
        scorer.score(as_reference=True)
    return path, folder, at_work


def test_a_killed_pass_goes_on_at_its_layer(stopped: tuple[Path, Path, list[int]], tmp_path: Path) -> None:
    path, folder, at_work = stopped
    assert at_work == [0, 1]
    again = scorer_of(layered_of(path, folder)).score(as_reference=True).nats
    assert at_work[2] == 1, "layer 0 is not run again"
    expected = scorer_of(layered_of(path, tmp_path / "whole")).score(as_reference=True).nats
    assert (again == expected).all()


@pytest.mark.parametrize("place", ["first", "middle", "sum"])
def test_states_that_were_changed_are_refused_and_made_again(
    stopped: tuple[Path, Path, list[int]], tmp_path: Path, place: str
) -> None:
    path, folder, _ = stopped
    (states,) = folder.rglob("*.states")
    body = bytearray(states.read_bytes())
    body[{"first": 0, "middle": len(body) // 2, "sum": -1}[place]] ^= 1
    states.write_bytes(body)
    with one_line(ConversionError, rf"{states.name} was changed since it was made: delete it"):
        scorer_of(layered_of(path, folder)).score(as_reference=True)
    states.unlink()
    again = scorer_of(layered_of(path, folder)).score(as_reference=True).nats
    assert (again == scorer_of(layered_of(path, tmp_path / "whole")).score(as_reference=True).nats).all()


def test_a_file_of_states_counts_at_its_own_place_alone(tmp_path: Path) -> None:
    passage, values = Passage(tmp_path / "a", (3, 2, 4), keeps=True), torch.randn(3, 2, 4)
    for layer in (1, 2, 3):
        with passage.leaving(layer) as left:
            left[torch.tensor([2, 0])] = values[[2, 0]]  # the other row stays zero
    for layer in (1, 2, 3):
        found = Passage(tmp_path / "a", (3, 2, 4), keeps=True).entering(layer)
        assert (found == values * torch.tensor([1, 0, 1])[:, None, None]).all()
    (tmp_path / "b").mkdir()
    for source, target in (("a/003", "a/002"), ("a/001", "b/001")):
        shutil.copy(tmp_path / f"{source}.states", tmp_path / f"{target}.states")
        with pytest.raises(ConversionError, match="was changed since"):
            Passage((tmp_path / target).parent, (3, 2, 4)).entering(int(target[-1]))
    assert Passage(tmp_path / "a", (3, 2, 4), keeps=True).reached == 3
    (tmp_path / "a/002.states").unlink()
    assert Passage(tmp_path / "a", (3, 2, 4), keeps=True).reached == 1, "all before it have to be there"
    assert Passage(tmp_path / "a", (3, 2, 4)).reached == 3
    with (tmp_path / "a/003.states").open("rb+") as file:
        file.truncate(3 * 2 * 4 * 4)
    assert Passage(tmp_path / "a", (3, 2, 4)).reached == 1, "states without checksums are none"


def test_a_full_disk_is_one_line(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    scorer = scorer_of(layered_of(tiny_model("olmoe", "plain"), tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConversionError, match="No space left on device; free some space"):
        scorer.score(as_reference=True)


def test_matrices_outside_the_experts_have_their_widths(tiny_model: TinyModel, tmp_path: Path) -> None:
    path, found = tiny_model("olmoe", "plain"), []
    for subject in (trial_of(path, 4), layered_of(path, tmp_path, 4)):
        scorer = scorer_of(subject)
        scorer.score(as_reference=True)
        subject.assign(uniform(subject.spec, 4))
        found.append(scorer.score())
    assert abs(found[0].kls - found[1].kls).max() < 1e-4
    assert found[0].kl > 0
