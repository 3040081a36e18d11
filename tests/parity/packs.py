"""Packs for parity tests, and the plainest way to run them: every expert in memory, no cache."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moeconv.artifacts import uniform
from moeconv.packing.emit import Label, emit
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder
from moeconv.source.checkpoint import Checkpoint
from moert.experts.store import ExpertStore, IoSettings
from moert.kernels import REFERENCE, open_backend
from moert.kernels.backend import I64, Backend, Expert
from moert.kernels.pages import KvBits
from moert.models.backbone import load_backbone
from moert.models.model import Model
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.pack.reader import Pack
from moert.stats import ExpertCounters
from tests.once import made_once
from tests.tiny import TINY

MODELS = Path(__file__).resolve().parents[2] / "recipes" / "models"


class MemoryRunner:
    """All experts of a pack, held in memory, each run for its own tokens.

    `dropped` counts the tokens that were dropped for want of capacity. What the routers decide is written to `decided`;
    where `given` has decisions of another runner, those are followed instead.
    """

    def __init__(self, pack: Pack, backend: Backend) -> None:
        self.decided: list[tuple[I64, F32]] = []
        self.given: list[tuple[I64, F32]] = []
        self.parts, self.backend = pack.manifest.model.experts, backend
        self.experts = experts_of(pack, backend)
        self.dropped = 0

    def run(self, at: LayerKey, hidden: F32, experts: I64, weights: F32, out: F32, x: F32) -> None:
        if self.given:
            experts, weights = self.given.pop(0)
        self.decided.append((experts, weights))
        self.dropped += int((experts < 0).sum())
        for key, expert in self.experts.items():
            taken = experts == key.expert
            if key.at == at and taken.any():
                tokens = np.flatnonzero(taken.any(1)).astype(np.int32)
                self.backend.mixture([expert], [len(tokens)], tokens, weights[taken], hidden, out, self.parts[at].ffn)


def experts_of(pack: Pack, backend: Backend) -> dict[ExpertKey, Expert]:
    """Each read by itself."""
    store, experts = ExpertStore(pack, backend, ExpertCounters(), IoSettings(False, 1)), {}
    for entry in pack.manifest.experts:
        buffer = np.empty(entry.file_bytes, np.uint8)
        store.read(entry.key, buffer)
        experts[entry.key] = store.expert(entry.key, buffer)
    return experts


def pack_of(source: Path, out: Path, bits: int = 16) -> Pack:
    """All experts in one width; the quantizer has nothing to do where it is 16."""
    checkpoint = Checkpoint.open(source)
    coder = ExpertCoder(checkpoint, QUANTIZERS["channel"](None), None)
    emit(coder, uniform(checkpoint.spec, bits), out, seed=0, label=Label("tests"))
    return Pack.open(out)


class Tiny:
    """Checkpoints of families' variants, packs of them and of the trained reference models: each is written once, also
    where several processes run tests, and must not be changed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.source, self.pack, self.reference = cache(self._source), cache(self._pack), cache(self._reference)

    def _source(self, family: str, name: str) -> Path:
        make, variants = TINY[family]
        return made_once(self._root / family / name / "hf", partial(make, **variants[name]))

    def _pack(self, family: str, name: str, bits: int = 16) -> Pack:
        source = self.source(family, name)
        return Pack.open(made_once(self._root / family / name / f"{bits}.pack", partial(pack_of, source, bits=bits)))

    def _reference(self, name: str, bits: int = 16) -> Pack:
        return Pack.open(made_once(self._root / f"{name}-{bits}.pack", partial(pack_of, MODELS / name, bits=bits)))


def open_model(pack: Pack, backend: Backend | None = None, kv: KvBits = 16) -> tuple[Model, MemoryRunner]:
    """On the reference, unless another backend is given."""
    chosen = open_backend(REFERENCE) if backend is None else backend
    runner = MemoryRunner(pack, chosen)
    return Model(pack.manifest.model, load_backbone(pack), runner, chosen, kv), runner


def greedy(model: Model, ids: list[int], max_new_tokens: int) -> list[int]:
    """New tokens, the end token included."""
    state, logits = model.prefill(ids)
    tokens: list[int] = []
    first = model.spec.tokens.first
    while True:
        tokens.append(int(logits.argmax()) if tokens or first is None else first)
        if tokens[-1] in model.spec.tokens.eos or len(tokens) == max_new_tokens:
            return tokens
        logits = model.step(state, tokens[-1])


def reference_greedy(model: Any, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """What transformers generates after each prompt, end tokens included, prompts and start tokens left out.

    Prompts of one length run as one batch, so that nothing is padded.
    """
    by_length: dict[int, list[int]] = {}
    for index, ids in enumerate(prompts):
        by_length.setdefault(len(ids), []).append(index)
    config = model.config.get_text_config(decoder=True)
    written: list[list[int]] = [[] for _ in prompts]
    for length, indices in by_length.items():
        batch = torch.tensor([prompts[index] for index in indices])
        with torch.inference_mode():
            rows = model.generate(
                batch, attention_mask=torch.ones_like(batch), do_sample=False, num_beams=1,
                max_new_tokens=max_new_tokens,
            )  # fmt: skip
        for index, row in zip(indices, rows[:, 1 if config.is_encoder_decoder else length :].tolist(), strict=True):
            end = row.index(config.eos_token_id) + 1 if config.eos_token_id in row else len(row)
            written[index] = row[:end]
    return written
