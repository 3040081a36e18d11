"""One layer of each kind of every published model at full size, with 4-bit weights drawn at random, on the native
kernels: it computes, a step goes on from what was read, and all is what plain arithmetic gives but for rounding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from published import PUBLISHED

from moeconv.source.archs import Description
from moeconv.source.outline import Outline
from moeconv.writer import choose_page_bytes
from moert.kernels import REFERENCE, library, open_backend
from moert.kernels.backend import Backend, Expert, ExpertView, Floats, ProjectionView, Stored
from moert.models.model import Model, Weights
from moert.pack.codec import F32, QuantizedMatrix, n_groups, row_bytes
from moert.pack.layout import Coding, ExpertLayout, expert_layout, group_of
from moert.pack.model_spec import Layer, LayerKey, ModelSpec, Stack
from moert.pack.parts import Experts
from tests.pairs import OTHERS

pytestmark = pytest.mark.slow
if library.load() is None:
    pytest.skip(f"no native kernels: {library.missing()}", allow_module_level=True)

VOCAB, BITS, GROUP = 640, 4, 64
PROMPT, NEXT = [3, 17, 5, 600, 42], 77
_MIDDLE, _SPREAD = 7.5, 4.61  # of codes from 0 to 15
WORST, MEDIAN = 0.2, 0.03  # what rounding activations changes, in proportion to the largest logit


class SharedWeights:
    """Runs experts of which all have the same weights, so that they fit into memory."""

    def __init__(self, spec: ModelSpec, backend: Backend) -> None:
        self.parts, self.backend, self.buffer = spec.experts, backend, expert_buffer(spec)
        self.expert: Expert = backend.expert(ExpertView(self.buffer, views(spec)))
        self.chosen: set[int] = set()

    def run(
        self, at: LayerKey, hidden: F32, experts: npt.NDArray[np.int64], weights: F32, out: F32, x: F32
    ) -> None:  # fmt: skip
        chosen = {*experts.ravel().tolist()} - {-1}
        self.chosen |= chosen
        if self.backend.widens:  # each call unpacks its experts: one call for all of them
            experts, weights = np.zeros((len(experts), 1), np.int64), (weights * (experts >= 0)).sum(1, keepdims=True)
            chosen = {0} if chosen else set()
        for number in sorted(chosen):
            taken = experts == number
            tokens = np.flatnonzero(taken.any(1)).astype(np.int32)
            self.backend.mixture([self.expert], [len(tokens)], tokens, weights[taken], hidden, out, self.parts[at].ffn)


def views(spec: ModelSpec) -> dict[str, ProjectionView]:
    """Where the projections of any expert lie in its file."""
    found, layout = {}, layout_of(spec)
    for name in spec.moe.ffn.projections:
        shape = spec.projection_shape(name)
        places = [layout.data_offset + layout.slot(f"{name}.{part}").start for part in ("qweight", "scale", "min")]
        bias = layout.data_offset + layout.slot(f"{name}.bias").start if spec.moe.ffn.bias else None
        found[name] = ProjectionView(shape, BITS, group_of(shape[1], GROUP), "BF16", tuple(places), bias)
    return found


def layout_of(spec: ModelSpec) -> ExpertLayout:
    key, widths = spec.expert_keys()[0], dict.fromkeys(spec.moe.ffn.projections, BITS)
    return expert_layout(spec, key, widths, Coding(GROUP, "BF16"), choose_page_bytes(spec))


def expert_buffer(spec: ModelSpec) -> npt.NDArray[np.uint8]:
    """The file of one expert, on a page."""
    layout, rng = layout_of(spec), np.random.default_rng(7)
    page = choose_page_bytes(spec)
    room = np.zeros(layout.file_bytes + page, np.uint8)
    start = -room.ctypes.data % page
    buffer = room[start : start + layout.file_bytes]
    for name in spec.moe.ffn.projections:
        drawn = matrix(*spec.projection_shape(name), rng)
        parts = [("qweight", drawn.qweight), ("scale", drawn.scale), ("min", drawn.minimum)]
        if spec.moe.ffn.bias:
            parts.append(("bias", (0.1 * rng.standard_normal(spec.projection_shape(name)[0])).astype(np.float32)))
        for part, values in parts:
            slot = layout.slot(f"{name}.{part}")
            buffer[layout.data_offset + slot.start : layout.data_offset + slot.stop] = values.ravel().view(np.uint8)
    return buffer


def matrix(out_features: int, in_features: int, rng: np.random.Generator) -> QuantizedMatrix:
    """Codes at random, with scales by which what it gives is about as large as what it gets."""
    group = group_of(in_features, GROUP)
    size = row_bytes(in_features, BITS)
    codes = np.frombuffer(rng.bytes(out_features * size), np.uint8).reshape(out_features, size)
    scale = np.full((out_features, n_groups(in_features, group)), in_features**-0.5 / _SPREAD, np.float16)
    return QuantizedMatrix(BITS, in_features, group, codes, scale, (-_MIDDLE * scale).astype(np.float16))


def weights_of(spec: ModelSpec, description: Description) -> Weights:
    """Everything but the experts."""
    rng, found = np.random.default_rng(1), dict[str, Stored]()
    for name, shape, _ in spec.tables.values():
        found[name] = Floats("F32", rng.standard_normal(shape).astype(np.float32))
    for name, (_, shape, role) in spec.tensors.items():
        if name.startswith("rope.") or (name.endswith(".positions.weight") and name in description.computed):
            found[name] = Floats("F32", description.computed[name])
        elif name in description.computed:  # norms without weights, whose layers have other numbers here
            found[name] = Floats("F32", np.ones(shape, np.float32))
        elif role is not None:
            found[name] = matrix(shape[0], shape[1], rng)
        elif name.endswith(".table"):
            table = rng.random((shape[0], spec.moe.n)).argsort(axis=1)[:, : shape[1]]
            found[name] = Floats("F32", table.astype(np.float32))
        else:
            middle = 1.0 if len(shape) == 1 and name.endswith("norm.weight") else 0.0
            found[name] = Floats("F32", (middle + 0.1 * rng.standard_normal(shape)).astype(np.float32))
    return found


def one_of_each(spec: ModelSpec) -> ModelSpec:
    """A model with one layer of each kind, and few tokens, of which few together have rows."""

    def few(kind: Layer) -> Layer:
        if not isinstance(kind.ffn, Experts) or kind.ffn.router.by_token is None:
            return kind
        return replace(kind, ffn=replace(kind.ffn, router=replace(kind.ffn.router, by_token=VOCAB)))

    def cut(stack: Stack) -> Stack:
        kinds = tuple(few(with_few_rows(kind)) for kind in stack.kinds)
        return replace(stack, kinds=kinds, layers=tuple(range(len(stack.kinds))))

    encoder = None if spec.encoder is None else cut(spec.encoder)
    return replace(spec, vocab_size=VOCAB, encoder=encoder, decoder=cut(spec.decoder))


def with_few_rows(kind: Layer) -> Layer:
    if (part := kind.ngrams) is None:
        return kind
    sizes = tuple(range(101, 101 + len(part.sizes)))
    return replace(kind, ngrams=replace(part, end=1, sizes=sizes, rows=sum(sizes)))


SAME = {
    "Qwen3-VL-30B-A3B": "Qwen3-30B-A3B", "DeepSeek-V3.2": "DeepSeek-V3", "Kimi-K2.5": "Kimi-K2-Thinking",
    "Llama-4-Scout, text": "Llama-4-Scout", "Gemma-4-26B-A4B, text": "Gemma-4-26B-A4B",
    "Qwen3.5-35B-A3B, text": "Qwen3.5-35B-A3B", "Qwen3.5-27B, text": "Qwen3.5-27B",
    "Qwen3.8-Flash-Next, text": "Qwen3.8-Flash-Next",
    "Mistral-7B-v0.3": "Llama-3.1-8B", "GLM-5.2": "GLM-5",
    "ERNIE-4.5-VL-28B-A3B": "ERNIE-4.5-21B-A3B", "GLM-4.5V": "GLM-4.5-Air",
}  # fmt: skip
"""Models whose layers are those of another one."""


def outline_of(name: str) -> Outline:
    return Outline.of(PUBLISHED[name], {}, Path("hf/config.json"))


@pytest.mark.parametrize("name", SAME)
def test_models_that_are_left_out_have_the_layers_of_others(name: str) -> None:
    mine, theirs = outline_of(name).spec, outline_of(SAME[name]).spec
    assert (mine.decoder.kinds, mine.d_model, mine.encoder) == (theirs.decoder.kinds, theirs.d_model, theirs.encoder)
    assert SAME[name] not in SAME


def values(part: Any, field: str = "") -> Iterator[tuple[str, Hashable]]:
    """Yields each field of a part of a model and of its own parts, with its value."""
    if is_dataclass(part):
        yield field, type(part).__name__
        for one in fields(part):
            yield from values(getattr(part, one.name), f"{field}.{one.name}")
    elif isinstance(part, tuple):
        for one in part:
            yield from values(one, field)
    else:
        yield field, part


def settings_of(name: str) -> set[tuple[str, Hashable]]:
    spec = outline_of(name).spec
    return set(values((spec.moe, *(kind for stack in spec.stacks.values() for kind in stack.kinds))))


MODELS = [name for name in PUBLISHED if name not in SAME]
FEW = {
    "switch-base-128", "GPTSAN-japanese", "granite-4.0-h-tiny", "DeepSeek-V2-Lite", "GLM-4.7-Flash", "LFM2-8B-A1B",
    "North-Mini-Code-1.0", "Qwen1.5-MoE-A2.7B", "Qwen3-Next-80B-A3B", "nllb-moe-54b", "switch-c-2048", "OPT-2.7B",
    "Gemma-4-26B-A4B", "gpt-oss-120b", "Phi-3-mini-4k", "FlexOlmo-7x7B-1T", "Jamba-1.5-Mini", "MiMo-V2-Flash",
    "Mistral-Small-4", "Nemotron-3-Super-120B-A12B", "Phi-3.5-MoE", "switch-xxl-128", "DeepSeek-V2",
    "Llama-4-Scout", "GLM-5", "MiniMax-M3", "DeepSeek-V3",
    "Kimi-Linear-48B-A3B", "Ling-3.0-Flash", "LongCat-Flash", "Step-3.7-Flash", "granite-swash-3b-a600m",
    "GLM-5.3-Flash", "DeepSeek-V4-Flash", "Qwen3.8-Flash-Next", "Gemma-2-2b",
}  # fmt: skip
"""Models that have between them each setting that any has; fields with more values than VALUES are lengths."""
VALUES = 8


def test_few_models_have_each_setting() -> None:
    all_of, few = ({pair for name in names for pair in settings_of(name)} for names in (MODELS, FEW))
    counts = Counter(field for field, _ in all_of)
    assert {(field, value) for field, value in all_of - few if counts[field] <= VALUES} == set()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FEW else OTHERS) for name in MODELS])
def test_a_layer_of_each_kind_computes_at_full_size(name: str) -> None:
    outline = outline_of(name)
    spec = one_of_each(outline.spec)
    assert next(spec.contradictions(), None) is None
    weights, found, ids = weights_of(spec, outline.description), {}, [*PROMPT, NEXT]
    for kernels in ("auto", REFERENCE):
        backend = open_backend(kernels)
        runner = SharedWeights(spec, backend)
        model = Model(spec, dict(weights), runner, backend)
        if kernels == REFERENCE and spec.encoder is None:  # in one pass: it unpacks all weights in each
            found[kernels] = model.forward_all(ids)[-2:]
        else:
            state, logits = model.prefill(PROMPT)
            found[kernels] = np.stack((logits, model.step(state, NEXT)))
        assert np.isfinite(found[kernels]).all()
        assert found[kernels][0].std() > 1e-3
        router = spec.moe.router
        assert len(runner.chosen) >= (1 if router.identities else router.top_k)
        if kernels == "auto" and spec.encoder is None:
            np.testing.assert_array_equal(found[kernels][1], model.prefill(ids)[1])
        backend.close()
        del model, runner
    off = np.abs(found["auto"] - found[REFERENCE]) / np.abs(found[REFERENCE]).max()
    assert off.max() < WORST
    assert np.median(off) < MEDIAN
