"""Packs for parity tests, and the plainest way to run them: every expert in memory, no cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from moeconv.artifacts import uniform
from moeconv.checkpoint import Checkpoint
from moeconv.coder import ExpertCoder
from moeconv.emit import emit
from moeconv.quantizers import QUANTIZERS
from moert.kernels.reference import grouped_ffn
from moert.models.model import Model, build_model
from moert.pack.model_spec import ExpertKey, Stack
from moert.pack.reader import Pack, Projection


class MemoryRunner:
    """All experts of a pack, held in memory; `seen` counts the tokens that were dropped for want of capacity."""

    def __init__(self, pack: Pack) -> None:
        self.activation = pack.manifest.model.moe.activation
        self.experts = {
            entry.key: pack.projections(entry.key, pack.read_expert(entry.key)) for entry in pack.manifest.experts
        }
        self.dropped = 0

    def run(self, stack: Stack, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        self.dropped += int((experts < 0).sum())

        @contextmanager
        def lease(expert: int) -> Iterator[Mapping[str, Projection]]:
            yield self.experts[ExpertKey(stack, layer, expert)]

        return grouped_ffn(hidden, experts, weights, self.activation, lease)


def pack_of_16_bits(source: Path, out: Path) -> Pack:
    checkpoint = Checkpoint.open(source)
    coder = ExpertCoder(checkpoint, QUANTIZERS["channel"](None), None)  # the quantizer has nothing to do
    emit(coder, uniform(checkpoint.spec, 16), out, seed=0, creator="tests")
    return Pack.open(out)


def open_model(pack: Pack) -> tuple[Model, MemoryRunner]:
    runner = MemoryRunner(pack)
    backbone = {name: tensor.float() for name, tensor in load_file(pack.file("backbone.safetensors")).items()}
    return build_model(pack.manifest.model, backbone, runner), runner


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
