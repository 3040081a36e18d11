"""Whole packs with random weights that the engine can run: experts of mixed widths, backbone, tokenizer, paths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from moert.engine import Engine
from moert.pack.codec import QuantizedMatrix, n_groups, pack_codes
from moert.pack.layout import group_of
from moert.pack.manifest import Quantization
from moert.pack.model_spec import ExpertKey, ModelSpec, MoeSpec, Stack, StackSpec, backbone_tensors
from moert.pack.paths import PATHS, build
from moert.pack.reader import Pack, Projection
from moert.pack.writer import PackWriter, add_to_pack

VOCAB, PAD, EOS, UNKNOWN = 64, 0, 1, 2
DECODER = ModelSpec(
    family="olmoe", vocab_size=VOCAB, d_model=24, n_heads=4, n_kv_heads=2, head_dim=6, encoder=None,
    decoder=StackSpec(4, (0, 1, 3)),
    moe=MoeSpec(num_experts=8, top_k=2, d_ff=20, activation="silu", gated=True, norm_topk=False, capacity=None),
    d_ff_dense=16, norm_eps=1e-5, positions="rope", rope_theta=10000.0, relative_buckets=0, relative_max_distance=0,
    attention_scale=0.408, qk_norm=True, clip_qkv=None, tied_head=False, logit_scale=1.0, max_positions=400,
    bos_token_id=None, eos_token_ids=(EOS,), pad_token_id=PAD, decoder_start_token_id=None,
)  # fmt: skip
SWITCH = replace(
    DECODER,
    family="switch", encoder=StackSpec(2, (0, 1)), decoder=StackSpec(3, (0, 1, 2)), n_kv_heads=4,
    moe=MoeSpec(num_experts=6, top_k=1, d_ff=28, activation="relu", gated=False, norm_topk=False, capacity=5),
    d_ff_dense=0, positions="relative", rope_theta=0.0, relative_buckets=8, relative_max_distance=16,
    attention_scale=1.0, qk_norm=False, tied_head=True, max_positions=None, decoder_start_token_id=PAD,
)  # fmt: skip
SPECS = {"decoder": DECODER, "switch": SWITCH}
PROMPTS = ("one small step", "hello world", "zigzag", "the quick brown fox jumps over the lazy dog")
_GROUP, _WIDTHS = 8, (2, 16, 3, 8, 4)


def write_pack(out: Path, spec: ModelSpec, paths: bool = True, tokenizer: bool = True, seed: int = 0) -> Path:
    """`paths` are counted on PROMPTS, so that predictions come true."""
    writer = PackWriter(out, spec, Quantization("group", _GROUP, "BF16", seed), f"seed {seed}")
    rng = np.random.default_rng(seed)
    for index, key in enumerate(spec.expert_keys()):
        widths = [_WIDTHS[(index + at) % len(_WIDTHS)] for at in range(len(spec.moe.projections))]
        names = zip(spec.moe.projections, widths, strict=True)
        writer.write_expert(key, {name: _matrix(rng, *spec.projection_shape(name), bits) for name, bits in names})
    writer.write_file("backbone.safetensors", save(backbone(spec, seed)))
    writer.write_file("config.json", b"{}\n")
    if tokenizer:
        writer.write_file("tokenizer.json", _tokenizer().to_str().encode())
    manifest = writer.finish("tests", None)
    if paths:
        add_to_pack(out, manifest, PATHS, build(spec.moe.num_experts, record_routes(out)).to_bytes())
    return out


def backbone(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """In bfloat16, each matrix of a size that keeps the signal's."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in backbone_tensors(spec).items():
        noise = torch.randn(shape, generator=generator)
        keep = name.startswith("embed") or "bias" in name
        values = 1 + 0.1 * noise if len(shape) == 1 else noise if keep else 1.5 * noise * shape[-1] ** -0.5
        weights[name] = values.to(torch.bfloat16)
    return weights


def run_greedy(engine: Engine, ids: list[int], n_tokens: int) -> tuple[list[int], Tensor]:
    """(tokens, logits [n_tokens, vocab]) of a greedy run that no end token stops."""
    engine.reserve(len(ids), n_tokens)
    state, logits = engine.model.prefill(ids)
    tokens, rows = [int(logits.argmax())], [logits]
    while len(tokens) < n_tokens:
        rows.append(engine.model.step(state, tokens[-1]))
        tokens.append(int(rows[-1].argmax()))
    return tokens, torch.stack(rows)


def record_routes(root: Path, prompts: tuple[str, ...] = PROMPTS) -> dict[Stack, list[np.ndarray]]:
    """What the routers select on the prompts and 30 greedy tokens after each: one [tokens, top_k] a layer.

    On the reference, whose steps go the same way as its prompts.
    """
    seen: dict[tuple[Stack, int], list[np.ndarray]] = {}
    with Engine.open(root, predictor="none", kernels="reference") as engine:
        inner = engine.runner.run

        def run(stack: Stack, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor, out: Tensor) -> None:
            seen.setdefault((stack, layer), []).append(experts.numpy().copy())
            inner(stack, layer, hidden, experts, weights, out)

        engine.runner.run = run  # type: ignore[method-assign]
        for prompt in prompts:
            run_greedy(engine, engine.encode(prompt), 30)
        order = engine.spec.moe_layers()
    routes: dict[Stack, list[np.ndarray]] = {}
    for stack, layer in order:
        routes.setdefault(stack, []).append(np.concatenate(seen[stack, layer]))
    return routes


def damage_expert(root: Path, key: ExpertKey) -> None:
    """Flips one byte of the weights of an expert, so that only reading it can tell."""
    path = root / Pack.open(root).entry(key).path
    body = bytearray(path.read_bytes())
    body[5000] ^= 1
    path.write_bytes(body)


def _matrix(rng: np.random.Generator, out_features: int, in_features: int, bits: int) -> Projection:
    spread = 1.5 * in_features**-0.5
    if bits == 16:
        values: Any = torch.from_numpy(rng.normal(size=(out_features, in_features)) * spread).bfloat16().float()
        return values.numpy()
    group = group_of(in_features, _GROUP)
    shape = (out_features, n_groups(in_features, group))
    codes = rng.integers(0, 1 << bits, (out_features, in_features)).astype(np.uint8)
    scale = np.full(shape, 3.4 * spread / ((1 << bits) - 1), dtype=np.float16)
    return QuantizedMatrix(
        bits, in_features, group, pack_codes(codes, bits), scale, np.full(shape, -1.7 * spread, dtype=np.float16)
    )


def _tokenizer() -> Tokenizer:
    """One token per letter; words begin with a mark; the rest of the vocabulary are pairs that nothing encodes to."""
    letters = "▁abcdefghijklmnopqrstuvwxyz"
    vocabulary = {"<pad>": PAD, "</s>": EOS, "<unk>": UNKNOWN}
    for piece in [*letters, *(f"{a}{b}" for a in letters for b in letters)]:
        if len(vocabulary) < VOCAB:
            vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return tokenizer
