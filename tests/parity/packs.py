"""Packs for parity tests, and the plainest way to run them: every expert in memory, no cache."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from moeconv.artifacts import uniform
from moeconv.checkpoint import Checkpoint
from moeconv.coder import ExpertCoder
from moeconv.emit import emit
from moeconv.quantizers import QUANTIZERS
from moert.backbone import load_backbone
from moert.kernels import REFERENCE, open_backend
from moert.kernels.backend import Backend
from moert.models.model import Model, build_model
from moert.pack.model_spec import ExpertKey, Stack
from moert.pack.reader import Pack


class MemoryRunner:
    """All experts of a pack, held in memory, each run for its own tokens.

    `dropped` counts the tokens that were dropped for want of capacity. What the routers decide is written to `decided`;
    where `given` has decisions of another runner, those are followed instead.
    """

    def __init__(self, pack: Pack, backend: Backend) -> None:
        self.decided: list[tuple[Tensor, Tensor]] = []
        self.given: list[tuple[Tensor, Tensor]] = []
        self.moe, self.backend = pack.manifest.model.moe, backend
        self.experts = {
            entry.key: backend.expert(pack, entry.key, pack.read_expert(entry.key)) for entry in pack.manifest.experts
        }
        self.dropped = 0

    def run(self, stack: Stack, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor, out: Tensor) -> None:
        if self.given:
            experts, weights = self.given.pop(0)
        self.decided.append((experts, weights))
        self.dropped += int((experts < 0).sum())
        for key, expert in self.experts.items():
            if key[:2] == (stack, layer) and (tokens := (experts == key.expert).any(1).nonzero()[:, 0]).numel():
                share = weights[experts == key.expert]
                self.backend.run_all([expert], [len(tokens)], tokens, share, hidden, out, self.moe)

    def run_one(
        self, stack: Stack, layer: int, hidden: Tensor, experts: list[int], weights: Tensor, out: Tensor
    ) -> None:
        held = [self.experts[ExpertKey(stack, layer, expert)] for expert in experts]
        self.backend.mix(held, weights, hidden, out, self.moe)


def pack_of(source: Path, out: Path, bits: int = 16) -> Pack:
    """All experts in one width; the quantizer has nothing to do where it is 16."""
    checkpoint = Checkpoint.open(source)
    coder = ExpertCoder(checkpoint, QUANTIZERS["channel"](None), None)
    emit(coder, uniform(checkpoint.spec, bits), out, seed=0, creator="tests")
    return Pack.open(out)


def open_model(pack: Pack, backend: Backend | None = None) -> tuple[Model, MemoryRunner]:
    """On the reference, unless another backend is given."""
    chosen = open_backend(REFERENCE) if backend is None else backend
    runner = MemoryRunner(pack, chosen)
    return build_model(pack.manifest.model, load_backbone(pack), runner, chosen), runner


def greedy(model: Model, ids: list[int], max_new_tokens: int) -> list[int]:
    """New tokens, the end token included."""
    state, logits = model.prefill(ids)
    tokens: list[int] = []
    while True:
        tokens.append(int(logits.argmax()))
        if tokens[-1] in model.spec.eos_token_ids or len(tokens) == max_new_tokens:
            return tokens
        logits = model.step(state, tokens[-1])


def reference_greedy(model: torch.nn.Module, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """What transformers generates after each prompt, end tokens included, prompts and start tokens left out.

    Prompts of one length run as one batch, so that nothing is padded.
    """
    by_length: dict[int, list[int]] = {}
    for index, ids in enumerate(prompts):
        by_length.setdefault(len(ids), []).append(index)
    config = model.config
    written: list[list[int]] = [[] for _ in prompts]
    for length, indices in by_length.items():
        batch = torch.tensor([prompts[index] for index in indices])
        with torch.inference_mode():
            rows = model.generate(  # type: ignore[operator]
                batch, attention_mask=torch.ones_like(batch), do_sample=False, num_beams=1,
                max_new_tokens=max_new_tokens,
            )  # fmt: skip
        for index, row in zip(indices, rows[:, 1 if config.is_encoder_decoder else length :].tolist(), strict=True):
            end = row.index(config.eos_token_id) + 1 if config.eos_token_id in row else len(row)
            written[index] = row[:end]
    return written
