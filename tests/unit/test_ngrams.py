"""Streams that gates mix, and tokens together: the formulas of SPEC.md one number after the other, transformers'
modules, tokens alone and among others, and the rows that are read."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_packs import EOS, GATED, PROMPTS, TOGETHER, write_pack
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextConfig,
    Qwen4ExpTextGatedResidual,
    Qwen4ExpTextNGramEmbedding,
)

from moeconv.packing.packed import check_backbone
from moeconv.source.archs.qwen4 import _primes, multipliers_of
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import CheckpointError
from moeconv.writer import add_to_pack
from moert.engine.engine import Engine
from moert.kernels import library, open_backend
from moert.kernels.backend import Floats
from moert.kernels.reference import ReferenceBackend
from moert.models.footprint import _ngrams_bytes, activation_bytes
from moert.models.model import Builder
from moert.models.ngrams import NgramMixer
from moert.models.streams import StreamGates
from moert.pack.codec import F32
from moert.pack.errors import FileTruncated, HeaderInvalid
from moert.pack.manifest import NGRAMS
from moert.pack.mixers import ShortConv
from moert.pack.model_spec import Layer
from moert.pack.parts import GatedStreams, Ngrams, Norm
from moert.pack.reader import Pack, StoredRows, tables_of
from tests.refusing import one_line
from tests.tiny import rewrite, tiny_of

EPS, D_MODEL, N = 1e-3, 6, 3
BACKENDS = [ReferenceBackend] if library.load() is None else [ReferenceBackend, open_backend]
IDS = [5, 9, EOS, 7, 7, EOS, EOS, 3, 5, 9, 11, 12, 13, 5, 9]
PARTS = [
    TOGETHER, Ngrams(2, 3, 60, 2, EOS, (3, 5), (17, 19, 23), Norm(EPS)),
    Ngrams(4, 2, 40, 3, EOS, (3, 5, 1 << 40, 7), (13, 11, 7), Norm(EPS)),
]  # fmt: skip


class Case:
    """A layer with tokens together in front of its streams, and the tensors that it is made of."""

    def __init__(self, part: Ngrams, make: Any, d_model: int = D_MODEL) -> None:
        rng, self.part, self.backend = np.random.default_rng(part.n), part, make()
        streams = GatedStreams(N, 5, Norm(EPS))
        self.layer = layer = Layer(None, ShortConv(3), None, None, streams=streams, ngrams=part)
        named = [*part.tensors("x", d_model, N), part.table("x"), *streams.tensors("y", d_model)]
        self.tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape, _ in named}
        builder = Builder({name: Floats("F32", each.copy()) for name, each in self.tensors.items()}, (), self.backend)
        mixer, gates = builder.ngrams(layer, "x"), builder.streams(layer, "y")
        assert isinstance(mixer, NgramMixer)
        assert isinstance(gates, StreamGates)
        self.mixer, self.gates = mixer, gates
        self.width, self.streams = N * d_model, rng.normal(size=(len(IDS), N, d_model)).astype(np.float32)

    def state(self) -> list[F32]:
        return [np.zeros(shape, np.float32) for shape in self.part.state_shapes(self.width)]

    def joined(self, pieces: list[int]) -> F32:
        """The streams of IDS, which are read in pieces of so many tokens."""
        state, found, start = self.state(), self.streams.copy(), 0
        for count in pieces:
            self.mixer.join(found[start : start + count], IDS[start : start + count], state)
            start += count
        return found


def normed(x: list[float], weight: list[float]) -> list[float]:
    length = math.sqrt(sum(each * each for each in x) / len(x) + EPS)
    return [each / length * w for each, w in zip(x, weight, strict=True)]


def each_normed(streams: list[list[float]], weight: F32) -> list[list[float]]:
    return [normed(x, w) for x, w in zip(streams, weight.reshape(N, -1).tolist(), strict=True)]


def times(matrix: F32, x: list[float]) -> list[float]:
    return [sum(w * each for w, each in zip(row, x, strict=True)) for row in matrix.tolist()]


def rows_by_the_text(part: Ngrams, at: int) -> list[int]:
    """The rows of the token at a place of IDS."""
    t = [IDS[at]]
    for j in range(1, part.n):
        lost = at - j < 0 or EOS in t[1:]
        t.append(part.end if lost else IDS[at - j])
    found, each = [], len(part.sizes) // (part.n - 1)
    for h, size in enumerate(part.sizes):
        number = 0
        for j in range(h // each + 2):
            number ^= t[j] * part.multipliers[j]
        found.append(number % size + sum(part.sizes[:h]))
    return found


def by_the_text(case: Case) -> list[Any]:
    """All streams of IDS, in the words of SPEC.md."""
    part, named, found, zs = case.part, {key[2:]: each for key, each in case.tensors.items()}, [], list[list[float]]()
    for at, streams in enumerate(case.streams.tolist()):
        e = [number for row in rows_by_the_text(part, at) for number in named["table"][row].tolist()]
        flat = times(named["key.weight"], e)
        k = each_normed([flat[i * D_MODEL : (i + 1) * D_MODEL] for i in range(N)], named["key_norm.weight"])
        q, w = each_normed(streams, named["stream_norm.weight"]), times(named["value.weight"], e)
        y = []
        for i in range(N):
            a = sum(one * other for one, other in zip(k[i], q[i], strict=True)) / math.sqrt(D_MODEL)
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(a), 1e-6)), a)))
            y.append([gate * each for each in w])
        zs.append([each for x in each_normed(y, named["conv_norm.weight"]) for each in x])
        taps, back = named["conv.weight"].tolist(), [at - j * part.n for j in range(part.taps)]
        made = [
            sum(taps[c][part.taps - 1 - j] * zs[place][c] for j, place in enumerate(back) if place >= 0)
            for c in range(N * D_MODEL)
        ]
        made = [each / (1 + math.exp(-each)) for each in made]
        found.append([
            [streams[i][f] + y[i][f] + made[i * D_MODEL + f] for f in range(D_MODEL)] for i in range(N)
        ])  # fmt: skip
    return found


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"up to {part.n}")
def test_tokens_together_join_as_the_text_says(part: Ngrams, make: Any) -> None:
    case = Case(replace(part, norm=Norm(EPS)), make)
    close = 1e-4 if case.backend.widens else 0.03  # the others round the input of a matrix
    np.testing.assert_allclose(case.joined([len(IDS)]), np.array(by_the_text(case)), rtol=close, atol=close)


@pytest.mark.skipif(library.load() is None, reason="no native kernels: numpy's products differ with their rows")
@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"up to {part.n}")
def test_tokens_have_the_same_bits_in_any_pieces(part: Ngrams) -> None:
    case = Case(part, open_backend)
    whole = case.joined([len(IDS)])
    for pieces in ([1] * len(IDS), [2, 1, 7, 5], [1, 14]):
        assert case.joined(pieces).tobytes() == whole.tobytes()


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("tokens", [300, 3000])
def test_the_bound_on_memory_is_above_the_peak_and_not_far(tokens: int, make: Any) -> None:
    part, d_model = replace(TOGETHER, dim=64, taps=3), 128
    case = Case(part, make, d_model)
    ids, state = [5, 9, 7] * (tokens // 3), case.state()
    streams = np.ones((tokens, N, d_model), np.float32)
    bound = _ngrams_bytes(d_model, case.layer, tokens)
    tracemalloc.start()
    try:
        case.mixer.join(streams, ids, state)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < bound < 4 * peak


def test_the_memory_of_a_pass_has_room_for_tokens_together() -> None:
    spec, wide = GATED, 1 << 14
    kinds = tuple(
        kind if kind.ngrams is None else replace(kind, ngrams=replace(kind.ngrams, dim=wide))
        for kind in spec.decoder.kinds
    )
    spec = replace(spec, decoder=replace(spec.decoder, kinds=kinds))
    most = max(_ngrams_bytes(spec.d_model, kind, 64) for kind in kinds)
    assert activation_bytes(spec, 64, widened=False) > most > activation_bytes(GATED, 64, widened=False)


@pytest.mark.parametrize(("n", "seed", "layer"), [(3, 1234, 0), (2, 7, 2), (4, 0, 1)])
def test_rows_are_those_of_transformers(n: int, seed: int, layer: int) -> None:
    config = Qwen4ExpTextConfig(
        vocab_size=96, ngram_size=n, heads_per_ngram=2, ngram_vocab_size_base=50, seed=seed, eos_token_id=EOS,
        make_ngram_vocab_size_divisible_by=8, num_hidden_layers=4,
    )  # fmt: skip
    theirs = Qwen4ExpTextNGramEmbedding(config, (n - 1) * 2, 0, layer)
    heads, primes = (n - 1) * 2, _primes(50)
    sizes = [[next(primes) for _ in range(heads)] for _ in range(layer + 1)][layer]
    multipliers = multipliers_of(96, n, seed + 10007 * layer)
    assert theirs.layer_multipliers.tolist() == [*multipliers]
    assert theirs.head_vocab_sizes == sizes
    with torch.no_grad():
        theirs.ngram_embedding.weight.copy_(torch.arange(len(theirs.ngram_embedding.weight))[:, None])
        expected = theirs(torch.tensor([IDS]), None)[0].long().tolist()
    part = Ngrams(n, 1, sum(sizes), 2, EOS, multipliers, tuple(sizes), Norm(EPS))
    assert [rows_by_the_text(part, at) for at in range(len(IDS))] == expected


@pytest.mark.parametrize("make", BACKENDS)
def test_gates_are_those_of_transformers(make: Any) -> None:
    case = Case(TOGETHER, make)
    config = Qwen4ExpTextConfig(hc_count=N, hc_lowrank=5, hidden_size=D_MODEL, rms_norm_eps=EPS)
    theirs = Qwen4ExpTextGatedResidual(config)
    places = {
        "norm": (theirs.hc_norm, 1.0), "narrow": (theirs.input_mix_weight_down, 0.0),
        "wide": (theirs.input_mix_weight_up, 0.0), "join": (theirs.block_inject_weight, 0.0),
    }  # fmt: skip
    with torch.no_grad():
        for name, (module, less) in places.items():
            module.weight.copy_(torch.from_numpy(case.tensors[f"y.{name}.weight"]) - less)
        streams = torch.from_numpy(case.streams)[None].flatten(2)
        x, before, joins = theirs(streams)
        expected = before + (torch.sin(x)[..., None, :] * joins[..., None]).flatten(-2)
    found = case.streams.copy()
    case.gates.around(found, _add_sine)
    close = 1e-5 if case.backend.widens else 0.03
    np.testing.assert_allclose(found.reshape(len(IDS), -1), expected[0].numpy(), rtol=close, atol=close)
    np.testing.assert_allclose(case.gates.end(case.streams), x[0].numpy(), rtol=close, atol=close)


@pytest.mark.skipif(library.load() is None, reason="no native kernels: numpy's products differ with their rows")
def test_a_token_alone_has_the_bits_that_it_has_among_others() -> None:
    case = Case(TOGETHER, open_backend)
    many = np.tile(case.streams, (40, 1, 1))  # several pieces
    together, alone = many.copy(), case.streams.copy()
    case.gates.around(together, _add_sine)
    for at in range(len(alone)):
        case.gates.around(alone[at : at + 1], _add_sine)
    assert together.tobytes() == np.tile(alone, (40, 1, 1)).tobytes()
    assert case.gates.end(many)[:1].tobytes() == case.gates.end(many[:1]).tobytes()


def _add_sine(x: F32) -> None:
    x += np.sin(x)


def test_numbers_that_config_json_does_not_give_are_refused(tmp_path: Path) -> None:
    path = tiny_of("qwen4_exp_text")(tmp_path / "hf")
    name = "model.layers.2.ple.ple_embedding.layer_multipliers"
    rewrite(path, lambda tensors: tensors[name].add_(2))
    with one_line(CheckpointError, f"{name} has other numbers than follow from config.json"):
        Checkpoint.open(path)


def test_only_rows_that_tokens_ask_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_pack(tmp_path / "p.pack", GATED, paths=False)
    asked = list[int]()
    inner = StoredRows.__getitem__

    def heard(rows: StoredRows, numbers: Any) -> Any:
        asked.extend(numbers.tolist())
        return inner(rows, numbers)

    monkeypatch.setattr(StoredRows, "__getitem__", heard)
    with Engine.open(root) as engine:
        prompt = engine.encode(PROMPTS[0])
        engine.generate(prompt, max_new_tokens=3, ignore_eos=True)
    heads, layers = len(TOGETHER.sizes), 2
    assert len(asked) == layers * heads * (len(prompt) + 2)


def test_a_sequence_goes_on_from_a_copy_and_from_a_mark(tmp_path: Path) -> None:
    """Tokens before the copy or the mark count among the tokens together."""
    with Engine.open(write_pack(tmp_path / "p.pack", GATED, paths=False)) as engine:
        engine.reserve(len(IDS), 9)
        model = engine.model
        _, expected = model.prefill(IDS)
        state, _ = model.prefill(IDS[:9])
        twin = state.copy()
        state.mark()
        model.read([state], [[20, 21, 22]])
        assert state.reach(11) == 9
        assert state.cut(9)
        for each in (state, twin):
            assert model.read([each], [IDS[9:]])[0].tobytes() == expected.tobytes()


def test_a_table_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    root = write_pack(tmp_path / "p.pack", GATED, paths=False)
    manifest, body = Pack.open(root).manifest, (root / NGRAMS).read_bytes()
    check_backbone(Pack.open(root))
    for changed, fault in (
        (body.replace(b"decoder.0.ngrams", b"decoder.1.ngrams"), "has other tables than the model"),
        (body.replace(b'"BF16"', b'"U16" '), "expected .224, 4. of F32, F16, BF16"),
    ):
        add_to_pack(root, manifest, NGRAMS, changed)
        with pytest.raises(HeaderInvalid, match=fault):
            tables_of(Pack.open(root))
    add_to_pack(root, manifest, NGRAMS, body[:-2] + b"\x80\x7f")  # infinity
    with pytest.raises(HeaderInvalid, match=f"{NGRAMS}: .* not finite"):
        check_backbone(Pack.open(root))
    opened = Pack.open(root)
    table = tables_of(opened)["decoder.4.ngrams.table"]
    with (root / NGRAMS).open("rb+") as file:
        file.truncate(len(body) - 400)
    with pytest.raises(FileTruncated, match=r"read .* of 8 bytes"):
        _ = table[np.array([223])]
    with pytest.raises(FileTruncated, match="the manifest says"):
        tables_of(opened)
