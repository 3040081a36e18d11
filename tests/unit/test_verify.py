"""verify: every pack that was made from a checkpoint is accepted, one of other experts' weights is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import VOCAB, tiny_olmoe

from moeconv.errors import VerifyFailed
from moeconv.packing.emit import Label, emit
from moeconv.packing.packed import verify
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder
from moeconv.quantizers.moments import Moments, collect
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.experts import ExpertCalls
from moert.pack.codec import F32, INT_WIDTHS
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from tests.pairs import thinned


class Swapped(Checkpoint):
    """A checkpoint in which each expert has the weights of another of its layer."""

    def expert(self, key: ExpertKey) -> dict[str, F32]:
        return super().expert(ExpertKey(key.stack, key.layer, (key.expert + 1) % self.spec.moe.n))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(tiny_olmoe(tmp_path_factory.mktemp("olmoe")))


@pytest.fixture(scope="module")
def moments(source: Checkpoint) -> dict[tuple[str, int], Moments]:
    """(what is wanted, tokens) → moments; of few tokens, some experts saw none."""
    model = source.model(torch.float32)
    calls = ExpertCalls(model, source.family, source.spec)
    found = {}
    for tokens in (5, 400):
        ids = torch.randint(4, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(tokens))
        for quantizer in QUANTIZERS.values():
            wants = quantizer(None).wants
            if wants != "nothing":
                found[wants, tokens] = collect(calls, lambda ids=ids: model(input_ids=ids), wants)
    return found


@thinned("name, group, tokens", QUANTIZERS, [None, 32], [0, 5, 400])
def test_its_own_weights_are_accepted_and_others_are_not(
    name: str, group: int | None, tokens: int, source: Checkpoint,
    moments: dict[tuple[str, int], Moments], tmp_path: Path,
) -> None:  # fmt: skip
    quantizer = QUANTIZERS[name](group)
    if name == "channel" and (group or tokens):
        return  # it takes neither
    coder = ExpertCoder(source, quantizer, moments.get((quantizer.wants, tokens)))
    widths = {key: (INT_WIDTHS[place % 4],) * 3 for place, key in enumerate(source.spec.expert_keys())}
    emit(coder, widths, tmp_path / "pack", seed=0, label=Label("tests"))
    pack = Pack.open(tmp_path / "pack")
    found = verify(pack, source)
    assert found.worst is not None
    assert found.worst < (1 if name == "channel" else 0.85), "next to no margin"
    with pytest.raises(VerifyFailed, match="times what its width allows"):
        verify(pack, Swapped.open(source.path))
