"""GGUF files give the packs that safetensors files give, and their tokenizers and configs."""

from __future__ import annotations

import json
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import ARCHS, AS_LLAMA_CPP, RELATIVES, in_16_bits, write_gguf
from safetensors import safe_open
from tiny import TINY, tiny_of
from tokenizers import Tokenizer, pre_tokenizers
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from moeconv.artifacts import uniform
from moeconv.conversion.conversion import Conversion
from moeconv.conversion.settings import Settings
from moeconv.errors import ConversionError
from moeconv.matrices import projection_weights, read_expert, stored_matrices
from moeconv.packing.emit import Label, emit
from moeconv.packing.packed import verify
from moeconv.progress import unseen
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder
from moeconv.sentencepiece import Piece
from moeconv.source.archs.deepseek import INDEXERS_LEFT_OUT, MORE_PREDICTED
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.gguf.tokenizer import CUTS, KEY
from moeconv.source.outline import CheckpointError
from moert.pack.reader import Pack

TEXTS = (
    "Hello world, it's 2024!! I've 12345 apples & they're GOOD. DON'T", "  two\n\n\n and\ttabs \t x  \n",
    "naïve café déjà vu — “quotes” №5 ½",
    "中文分词 ひらがな 한국어", "🦙🦙 👨‍👩‍👧", "e\u0301 \u1100\u1161\u11a8", "a <|x|> b</s>c", "",
)  # fmt: skip


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf") / "mixtral"
    tiny_of("mixtral")(folder)
    in_16_bits(folder)
    return folder


def pack_of(source: Path, out: Path, bits: int = 4) -> Pack:
    checkpoint = Checkpoint.open(source)
    coder = ExpertCoder(checkpoint, QUANTIZERS["group"](32), None)
    emit(coder, uniform(checkpoint.spec, bits), out, seed=0, label=Label("tests"))
    return Pack.open(out)


def weights_of(pack: Pack) -> dict[str, bytes]:
    """Returns the bytes of the files with weights."""
    return {str(file.relative_to(pack.root)): file.read_bytes() for file in pack.root.rglob("*.safetensors")}


def file_of(family: str, folder: Path, variant: str = "plain", **metadata: Any) -> Path:
    """Writes a tiny checkpoint that llama.cpp can say all of to `folder`, and its file, with other `metadata`, beside
    it."""
    write, variants = TINY[family]
    write(folder, **AS_LLAMA_CPP.get(family, {}) | variants[variant])
    in_16_bits(folder)
    return write_gguf(folder, folder.with_suffix(".gguf"), **metadata)


@pytest.mark.parametrize("family", ARCHS)
def test_a_file_gives_the_pack_of_its_safetensors(family: str, tmp_path: Path) -> None:
    file = file_of(family, tmp_path / "m")
    theirs, ours = pack_of(tmp_path / "m", tmp_path / "a"), pack_of(file, tmp_path / "b")
    assert weights_of(ours) == weights_of(theirs)
    with_mamba2 = ("granitemoehybrid", "nemotron_h")  # whose files say that any text is short enough
    spec = theirs.manifest.model
    assert ours.manifest.model.max_positions == (1 << 20 if family in with_mamba2 else spec.max_positions)
    changed = {name: value for name, value in vars(spec).items() if getattr(ours.manifest.model, name) != value}
    assert set(changed) - {"max_positions"} == {"tokens"} & set(changed)
    assert verify(ours, Checkpoint.open(file)).worst is not None


@pytest.mark.parametrize("family", RELATIVES)
def test_a_file_as_of_a_relative_gives_the_same_pack(family: str, tmp_path: Path) -> None:
    file = file_of(family, tmp_path / "m")
    theirs, ours = pack_of(tmp_path / "m", tmp_path / "a"), pack_of(file, tmp_path / "b")
    assert weights_of(ours) == weights_of(theirs)
    spec = theirs.manifest.model
    assert ours.manifest.model.family == RELATIVES[family]
    assert replace(ours.manifest.model, family=family, tokens=spec.tokens) == spec


VARIANTS = [
    ("olmo2", "biases"),
    ("olmo2", "tied head"),
    ("olmo3", "yarn"),
    ("olmo3", "windows everywhere"),
    ("afmoe", "biases"),
    ("afmoe", "all layers with experts"),
    ("gemma4_text", "no experts"),
    ("nemotron_h", "no experts"),
    ("kimi_linear", "queries with a rank"),
    ("kimi_linear", "two shared"),
    ("cohere2_moe", "untied head"),
    ("cohere2_moe", "rms norms"),
    ("cohere2_moe", "windows everywhere"),
    ("cohere2_moe", "sigmoid as it is"),
    ("minimax_m3_vl", "all layers with experts"),
    ("bailing_hybrid", "not normed"),
    ("bailing_hybrid", "attention first, all layers with experts"),
    ("glm5_next", "decays without a bound"),
    ("glm5_next", "two shared"),
    ("granite_swa", "biases"),
    ("granitemoe_swa", "biases"),
    ("deepseek_v4", "yarn"),
    ("deepseek_v4", "no pools"),
    ("mellum", "yarn"),
    ("mellum", "biases"),
    ("mellum", "no windows"),
    ("granite", "biases"),
    ("exaone4", "no windows"),
    ("ernie4_5", "biases"),
    ("seed_oss", "all biases"),
    ("hunyuan_v1_dense", "biases"),
    ("starcoder2", "no biases"),
    ("phi", "shared key heads"),
    ("stablelm", "biases"),
    ("nemotron", "biases"),
    ("arcee", "biases"),
    ("arcee", "yarn"),
    ("olmo", "bounded"),
    ("lfm2", "biases"),
    ("qwen4_exp_text", "no tokens together"),
    ("qwen4_exp_text", "four together"),
    ("qwen4_exp_text", "some of a head turns"),
]


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_a_variant_has_the_settings_of_its_safetensors(family: str, variant: str, tmp_path: Path) -> None:
    file = file_of(family, tmp_path / "m", variant)
    ours, theirs = Checkpoint.open(file), Checkpoint.open(tmp_path / "m")
    most = {} if family != "nemotron_h" else {"max_positions": theirs.spec.max_positions}  # whose files say any is
    assert replace(ours.spec, tokens=theirs.spec.tokens, **most) == theirs.spec
    for name, part in theirs.spec.tensors.items():
        found, wanted = (each.backbone_tensor(name, part.shape) for each in (ours, theirs))
        assert torch.equal(found, wanted), name
    for key in theirs.spec.expert_keys():
        matrices = theirs.expert(key)
        assert all(np.array_equal(matrices[name], weight) for name, weight in ours.expert(key).items())


@pytest.mark.parametrize(("key", "value", "words"), [
    ("attention.compress_ratios", [0, 8, 0, 0], "should have one of 0, 4, 128 for each of 4 layers"),
    ("attention.compress_ratios", [0, 4], "should have one of 0, 4, 128 for each of 4 layers"),
    ("swiglu_clamp_exp", [1.0, 1.0, 1.0, 2.0], "should be the same number for all layers"),
    ("swiglu_clamp_shexp", [3.0] * 4, "should be the same number for all layers"),
    ("swiglu_clamp_exp", None, "should be the same number for all layers"),
    ("expert_gating_func", 7, "scoring_func 'number 7'"),
])  # fmt: skip
def test_settings_that_no_deepseek_v4_has_are_refused(key: str, value: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(file_of("deepseek_v4", tmp_path / "m", **{f"ARCH.{key}": value}))


def test_a_mistral3_file_without_sharper_queries_is_mistral(tmp_path: Path) -> None:
    file = file_of("ministral3", tmp_path / "m", **{"ARCH.attention.temperature_scale": None})
    spec = Checkpoint.open(file).spec
    assert (spec.family, spec.max_positions) == ("mistral", 512)


def test_positions_of_llama3_in_half_of_each_head(tmp_path: Path) -> None:
    """Factors for whole heads, of which those behind the half that turns are 1."""
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    ropes = {
        "full_attention": {**scaled, "original_max_position_embeddings": 64, "rope_theta": 10000.0,
                           "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }  # fmt: skip
    tiny_of("step3p5")(tmp_path / "m", rope_parameters=ropes, head_dim=16)
    in_16_bits(tmp_path / "m")
    theirs = Checkpoint.open(tmp_path / "m")
    found = theirs.backbone_tensor("rope.0.frequencies", (4,)).numpy()
    plain = 1 / 10000.0 ** (np.arange(0, 8, 2, dtype=np.float32) / 8)
    file = write_gguf(tmp_path / "m", tmp_path / "m.gguf", **{"ARCH.rope.freq_base": 10000.0})
    with_factors(file, np.append(plain / found, np.ones(4)).astype(np.float32))
    ours = Checkpoint.open(file)
    assert replace(ours.spec, tokens=theirs.spec.tokens) == theirs.spec
    np.testing.assert_array_equal(ours.backbone_tensor("rope.0.frequencies", (4,)).numpy(), found)


def test_windows_by_their_distance(tmp_path: Path) -> None:
    tiny_of("olmo3")(tmp_path / "m", layer_types=["full_attention"] * 4, sliding_window=7)
    in_16_bits(tmp_path / "m")
    for said, wanted in ((None, [7, 7, 7, None]), (2, [7, None, 7, None]), (0, [7] * 4), (1, [None] * 4)):
        key = {"ARCH.attention.sliding_window_pattern": said}
        spec = Checkpoint.open(write_gguf(tmp_path / "m", tmp_path / "m.gguf", **key)).spec
        assert [layer.attention and layer.attention.window for layer in spec.decoder] == wanted


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2_moe", "qwen3_vl_moe", "gpt_oss", "phi3", "smollm3", "kimi_linear", "qwen4_exp_text"]
)
def test_transformers_computes_the_same(family: str, tmp_path: Path) -> None:
    file = file_of(family, tmp_path / "m")
    ids = torch.tensor([[5, 9, 12, 30, 2, 7]])
    with torch.inference_mode():
        ours, theirs = (Checkpoint.open(each).model(torch.float32)(ids).logits for each in (file, tmp_path / "m"))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16"])
def test_coded_matrices_are_those_of_the_package(kind: str, tmp_path: Path) -> None:
    tiny_of("mixtral")(tmp_path / "m", hidden_size=64, intermediate_size=32)
    in_16_bits(tmp_path / "m")
    file = write_gguf(tmp_path / "m", tmp_path / "m.gguf", kind)
    checkpoint, spec = Checkpoint.open(file), Checkpoint.open(tmp_path / "m").spec
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for key in spec.expert_keys():
        for projection, weight in checkpoint.expert(key).items():
            tensor = reader[f"blk.{key.layer}.ffn_{projection}_exps.weight"]
            whole = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(spec.moe.n, *weight.shape)
            np.testing.assert_array_equal(weight, whole[key.expert])
    dtype = checkpoint.stored_tensor("decoder.0.attn.o.weight", (64, 64)).dtype
    assert dtype == (torch.bfloat16 if kind == "BF16" else torch.float16)
    assert checkpoint.coded_as is not None
    assert checkpoint.coded_as.startswith(kind)
    assert verify(pack_of(file, tmp_path / "p"), checkpoint).worst is not None


def test_experts_in_mxfp4_stay_as_they_are(tmp_path: Path) -> None:
    tiny_of("gpt_oss")(tmp_path / "m", hidden_size=64, intermediate_size=32, head_dim=8)
    in_16_bits(tmp_path / "m")
    file = write_gguf(tmp_path / "m", tmp_path / "m.gguf", "MXFP4")
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    pack, checkpoint = pack_of(file, tmp_path / "p", 16), Checkpoint.open(file)
    assert pack.manifest.quantization.mxfp4
    for key in checkpoint.spec.expert_keys():
        for projection, weight in checkpoint.expert(key).items():
            tensor = reader[f"blk.{key.layer}.ffn_{projection}_exps.weight"]
            whole = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(weight, whole.reshape(checkpoint.spec.moe.n, *weight.shape)[key.expert])
    verify(pack, checkpoint)


def test_numbers_beside_matrices_multiply_them(tmp_path: Path) -> None:
    """As files made of NVFP4 checkpoints have them: one number for a matrix, or one for each expert."""
    tiny_of("mixtral")(tmp_path / "m", hidden_size=64, intermediate_size=64)
    in_16_bits(tmp_path / "m")
    plain = Checkpoint.open(write_gguf(tmp_path / "m", tmp_path / "plain.gguf", "Q8_0"))
    each = np.linspace(0.1, 3, plain.spec.moe.n, dtype=np.float32)
    more = {
        "blk.0.ffn_up_exps.scale": each, "blk.1.ffn_down_exps.scale": each[::-1].copy(),
        "blk.0.attn_q.scale": np.float32([0.3]), "blk.0.attn_q.input_scale": np.float32([0.7]),
    }  # fmt: skip
    file = write_gguf(tmp_path / "m", tmp_path / "m.gguf", "Q8_0", more)
    ours = Checkpoint.open(file)
    assert any("rounding of activations are left out" in note for note in ours.notes)
    for key in plain.spec.expert_keys():
        for name, weight in plain.expert(key).items():
            by = more.get(f"blk.{key.layer}.ffn_{name}_exps.scale", np.ones_like(each))[key.expert]
            np.testing.assert_array_equal(ours.expert(key)[name], weight * by)
    for name, part in plain.spec.tensors.items():
        by = 0.3 if name == "decoder.0.attn.q.weight" else 1
        assert torch.equal(ours.backbone_tensor(name, part.shape), plain.backbone_tensor(name, part.shape) * by), name
    verify(pack_of(file, tmp_path / "p"), ours)
    for name, wrong in (("blk.0.ffn_up_exps.scale", each[1:]), ("blk.0.attn_q.scale", each)):
        file = write_gguf(tmp_path / "m", tmp_path / "wrong.gguf", "Q8_0", {name: wrong})
        with pytest.raises(CheckpointError, match=f"{name} has {len(wrong)} numbers"):
            pack_of(file, tmp_path / f"{len(wrong)}")


def test_nvfp4_gives_the_numbers_of_the_checkpoint_it_was_made_of(tmp_path: Path) -> None:
    """In groups of 16 inputs, of which llama.cpp's program puts the first eight into the lower halves of bytes."""
    with safe_open(Path(__file__).parents[1] / "golden" / "codings.safetensors", "pt") as golden:
        codes, scale, whole, expected = (
            golden.get_tensor(f"modelopt-nvfp4:{name}")
            for name in ("weight", "weight_scale", "weight_scale_2", "expected")
        )
    each = torch.stack((codes & 15, codes >> 4), -1).reshape(32, 2, 4, 16)
    blocks = (each[..., :8] | each[..., 8:] << 4).reshape(32, 2, 32)
    coded = torch.cat((scale.view(torch.uint8).reshape(32, 2, 4), blocks), 2).reshape(32, 72)
    tiny_of("mixtral")(tmp_path / "m", hidden_size=32, head_dim=32)
    in_16_bits(tmp_path / "m")
    at = "blk.0.attn_output"
    more = {f"{at}.weight": coded.numpy(), f"{at}.scale": whole.reshape(1).numpy()}
    found = Checkpoint.open(write_gguf(tmp_path / "m", tmp_path / "m.gguf", None, more))
    matrix = found.backbone_tensor("decoder.0.attn.o.weight", (32, 128))
    torch.testing.assert_close(matrix, expected, rtol=2**-22, atol=0)  # the order of two products


@pytest.mark.parametrize(("kind", "scaled", "stays"), [("Q4_0", False, True), ("Q4_0", True, False)])
def test_multiplied_codes_are_no_longer_the_types_own(kind: str, scaled: bool, stays: bool, tmp_path: Path) -> None:
    tiny_of("mixtral")(tmp_path / "m", hidden_size=64, intermediate_size=64)
    in_16_bits(tmp_path / "m")
    more = {"blk.0.ffn_up_exps.scale": np.float32([0.3])} if scaled else {}
    scheme = Checkpoint.open(write_gguf(tmp_path / "m", tmp_path / "m.gguf", kind, more)).description.scheme
    assert scheme is not None
    assert (scheme.group is not None) is stays


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("Q4_0", {"bits": (4,)}), ("Q4_1", {"bits": (4,)}), ("Q8_0", {"bits": (8,)}), ("Q4_0", {"bits": (2,)}),
        ("Q8_0", {"bits": (4,)}), ("Q4_0", {"bits": (4,), "quantizer": "channel"}),
    ],
)  # fmt: skip
def test_experts_stay_as_they_are_where_their_width_is_asked_for(kind: str, asked: Any, tmp_path: Path) -> None:
    tiny_of("mixtral")(tmp_path / "m", hidden_size=64, intermediate_size=96)
    in_16_bits(tmp_path / "m")
    file, said = write_gguf(tmp_path / "m", tmp_path / "m.gguf", kind), list[str]()
    Conversion(Settings(str(file), tmp_path / "p", tmp_path / "w", **asked), said.append, unseen).run()
    pack, checkpoint = Pack.open(tmp_path / "p"), Checkpoint.open(file)
    stays = asked == {"bits": (int(kind[1]),)}
    how = pack.manifest.quantization
    assert ((how.quantizer, how.group_size, how.codes) == ("source", 32, "plain")) is stays
    assert any("bits in groups of 32 in the checkpoint: they are stored as they are" in line for line in said) is stays
    same = [
        np.array_equal(weight, projection_weights(stored_matrices(pack, key, read_expert(pack, key))[name]))
        for key in checkpoint.spec.expert_keys()
        for name, weight in checkpoint.expert(key).items()
    ]
    assert all(same) if stays else not any(same)


def test_a_conversion_says_what_losses_are_against(tmp_path: Path) -> None:
    said: list[str] = []
    tiny_of("mixtral")(tmp_path / "m", hidden_size=64, intermediate_size=32)
    in_16_bits(tmp_path / "m")
    file = write_gguf(tmp_path / "m", tmp_path / "m.gguf", "Q8_0")
    settings = Settings(str(file), tmp_path / "p", tmp_path / "w", bits=(4,))
    manifest, _ = Conversion(settings, said.append, unseen).run()
    assert "note: the weights are coded by Q8_0, F32: a loss is against the numbers that these codes stand for" in said
    assert manifest.creator.endswith("of GGUF (Q8_0, F32)")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.gguf", "p"]


@pytest.mark.parametrize("given", [1, 2, 3])
def test_a_model_in_several_files(mixtral: Path, tmp_path: Path, given: int) -> None:
    whole = write_gguf(mixtral, tmp_path / "m.gguf")
    names = [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    split(whole, [tmp_path / name for name in names])
    ours, theirs = Checkpoint.open(tmp_path / names[given - 1]), Checkpoint.open(whole)
    assert ours.spec == theirs.spec
    for key in theirs.spec.expert_keys():
        for name, weight in theirs.expert(key).items():
            np.testing.assert_array_equal(ours.expert(key)[name], weight)


def split(whole: Path, files: list[Path]) -> None:
    """Writes a model in several files, as llama.cpp's program for this does: metadata in the first."""
    reader = gguf.GGUFReader(whole)
    for number, file in enumerate(files):
        writer = gguf.GGUFWriter(file, "llama" if number == 0 else "", endianess=gguf.GGUFEndian.LITTLE)
        if number:
            writer.kv_data[0].clear()
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                inner = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], inner)
        for key, value in (("no", number), ("count", len(files))):
            writer.add_uint16(f"split.{key}", value)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number :: len(files)]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


@pytest.mark.parametrize(("rope", "said"), [
    ({"rope_type": "linear", "factor": 4.0}, {"scaling.type": "linear", "scaling.factor": 4.0}),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 64}, None),
])  # fmt: skip
def test_scaled_positions(rope: dict[str, Any], said: dict[str, Any] | None, tmp_path: Path) -> None:
    tiny_of("mixtral")(tmp_path / "m", rope_parameters={"rope_theta": 10000.0, **rope}, head_dim=16)
    in_16_bits(tmp_path / "m")
    theirs = Checkpoint.open(tmp_path / "m")
    plain = 1 / 10000.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
    found = theirs.backbone_tensor("rope.0.frequencies", (8,)).numpy()
    file = write_gguf(tmp_path / "m", tmp_path / "m.gguf", **{f"ARCH.rope.{k}": v for k, v in (said or {}).items()})
    if said is None:  # as factors of turns
        with_factors(file, (plain / found).astype(np.float32))
    np.testing.assert_array_equal(Checkpoint.open(file).backbone_tensor("rope.0.frequencies", (8,)).numpy(), found)


def with_factors(file: Path, factors: np.ndarray) -> None:
    """Writes a file again with factors of its turns."""
    reader = gguf.GGUFReader(file)
    tensors = gguf.GGUFWriter(file.with_suffix(".new"), reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            tensors.add_key_value(field.name, field.contents(), field.types[0], inner)
    tensors.add_tensor("rope_freqs.weight", factors)
    for tensor in reader.tensors:
        tensors.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    tensors.write_header_to_file()
    tensors.write_kv_data_to_file()
    tensors.write_tensors_to_file()
    tensors.close()
    shutil.move(file.with_suffix(".new"), file)


# Tokenizers.


def of_bytes(merges: list[str]) -> list[str]:
    """Returns a vocabulary of GPT-2's letters for bytes, and the results of merges."""
    return [
        *dict.fromkeys(
            [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(pair.replace(" ", "") for pair in merges), "<|x|>", "</s>"]
        )
    ]


MERGES = ["Ġ t", "h e", "Ġt he", "i n", "l l", "e l", "ll o", "' s", "1 2", "12 3", "Ġ Ġ", "ĠĠ ĠĠ", "Ġ a", "n d", "Ã ©"]


def tokenizer_of(mixtral: Path, out: Path, model: str, pre: str, **more: Any) -> Tokenizer:
    tokens = of_bytes(MERGES)
    kinds = [3 if token in ("<|x|>", "</s>") else 1 for token in tokens]
    file = widened(mixtral, out, tokens, {
        "model": model, "pre": pre, "merges": MERGES, "token_type": kinds, "eos_token_id": len(tokens) - 1,
        "padding_token_id": None, **more,
    })  # fmt: skip
    checkpoint = Checkpoint.open(file)
    return Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))


def widened(mixtral: Path, out: Path, tokens: list[str], settings: dict[str, Any]) -> Path:
    """Writes a model of as many tokens."""
    folder = out / "wide"
    tiny_of("mixtral")(folder, vocab_size=len(tokens))
    in_16_bits(folder)
    keys = {f"{KEY}{name}": value for name, value in settings.items()}
    return write_gguf(folder, out / "wide.gguf", **{f"{KEY}tokens": tokens, **keys})


@pytest.mark.parametrize(("pre", "made"), [("qwen2", Qwen2Tokenizer), ("gpt-2", GPT2Tokenizer)])
def test_words_are_cut_as_transformers_cuts_them(mixtral: Path, tmp_path: Path, pre: str, made: Any) -> None:
    found = tokenizer_of(mixtral, tmp_path, "gpt2", pre)
    vocabulary = {token: number for number, token in enumerate(of_bytes(MERGES))}
    theirs = made(vocab=vocabulary, merges=[tuple(pair.split(" ")) for pair in MERGES], unk_token=None)
    theirs.add_special_tokens({"additional_special_tokens": ["<|x|>", "</s>"]})
    for text in TEXTS:
        ids = found.encode(text).ids
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert found.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


@pytest.mark.parametrize("pre", CUTS)
def test_every_known_way_to_cut_gives_text_back(mixtral: Path, tmp_path: Path, pre: str) -> None:
    found = tokenizer_of(mixtral, tmp_path, "gpt2", pre, bos_token_id=0)
    for text in TEXTS:
        ids = found.encode(text, add_special_tokens=False).ids
        back = found.decode(ids, skip_special_tokens=False)
        assert back == (unicodedata.normalize("NFC", text) if CUTS[pre].composed else text)
    assert (found.encode("a").ids[0] == 0) == CUTS[pre].first


def test_digits_in_threes_from_the_last(mixtral: Path, tmp_path: Path) -> None:
    cutter = tokenizer_of(mixtral, tmp_path, "gpt2", "afmoe").pre_tokenizer
    assert cutter is not None
    found = [word for word, _ in cutter.pre_tokenize_str("in 1234567 or 123 x 12")]
    assert [word for word in found if word.isdigit()] == ["1", "234", "567", "123", "12"]


def test_pieces_merge_by_their_scores(mixtral: Path, tmp_path: Path) -> None:
    texts = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "ab",
        "▁a",
        "▁ab",
        "bb",
    ]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 7]
    scores = [0.0] * 259 + [-1.0, -2.0, -3.0, -1.5, -1.2, -0.5, -4.0]
    settings = {"model": "llama", "pre": "default", "scores": scores, "token_type": kinds, "bos_token_id": 1,
                "eos_token_id": 2, "unknown_token_id": 0}  # fmt: skip
    checkpoint = Checkpoint.open(widened(mixtral, tmp_path, texts, settings))
    found = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
    ids = {Piece(text, 0, 0).text: number for number, text in enumerate(texts)}
    assert found.encode("ab bb é").tokens == ["<s>", "▁ab", "▁", "bb", "▁", "<0xC3>", "<0xA9>"]
    assert found.decode([ids["▁ab"], ids["<0xC3>"], ids["<0xA9>"]]) == "abé"


def test_end_tokens_and_template(mixtral: Path, tmp_path: Path) -> None:
    file = write_gguf(mixtral, tmp_path / "m.gguf", **{
        f"{KEY}eot_token_id": 5, f"{KEY}bos_token_id": 7, "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    })  # fmt: skip
    checkpoint = Checkpoint.open(file)
    assert checkpoint.spec.tokens.eos == (1, 5)
    assert checkpoint.spec.tokens.bos == 7
    config = json.loads((checkpoint.path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ messages[0]['content'] }}"
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize(("changes", "words"), [
    ({f"{KEY}pre": "superbpe"}, "how such a tokenizer cuts text into words"),
    ({f"{KEY}pre": None}, "how such a tokenizer cuts text into words"),
    ({f"{KEY}model": "bert"}, "only gpt2, llama, t5, gemma4 are known"),
    ({f"{KEY}eos_token_id": 96}, "there are 96 tokens"),
    ({f"{KEY}token_type": [1]}, "should have 96 values"),
    ({f"{KEY}tokens": [f"t{n}" for n in range(97)]}, "its embedding has 96 rows"),
    ({f"{KEY}tokens": ["a"] * 96}, "has a token twice"),
    ({f"{KEY}tokens": 7}, "should be a list of str"),
    ({f"{KEY}merges": ["ab"]}, "which is no pair"),
    ({f"{KEY}model": "llama"}, "should have a number for each token"),
    ({f"{KEY}model": "llama", f"{KEY}scores": [-1000.0] * 96}, "are all alike"),
    ({"ARCH.block_count": "two"}, "should be a int"),
    ({"ARCH.block_count": 0}, "expected 1 to"),
    ({"ARCH.block_count": 3}, "has no tensor"),
    ({"ARCH.block_count": 1}, "holds the tensor"),
    ({"ARCH.attention.head_count": None}, "has no llama.attention.head_count"),
    ({"ARCH.embedding_length": 32}, "has the shape"),
    ({"ARCH.expert_count": 5}, "has the shape"),
    ({"ARCH.expert_count": 0}, "has no tensor"),
    ({"ARCH.feed_forward_length": 41}, "has the shape"),
    ({"ARCH.rope.scaling.type": "su"}, "only none, linear, yarn and longrope are known"),
])  # fmt: skip
def test_refusals(mixtral: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    file = write_gguf(mixtral, tmp_path / "m.gguf", **changes)
    with pytest.raises(CheckpointError, match=words) as error:
        Checkpoint.open(file)
    assert "\n" not in str(error.value)
    assert str(file) in str(error.value)


WRONG = [
    ("olmo3", {"ARCH.attention.sliding_window_pattern": [True] * 3}, "should have 4 values"),
    ("olmo3", {"ARCH.attention.sliding_window_pattern": ["yes"] * 4}, "should be a list of bool"),
    ("qwen3_vl_moe", {"ARCH.expert_feed_forward_length": None}, "has no qwen3vlmoe.expert_feed_forward_length"),
    ("afmoe", {"ARCH.attention.sliding_window": None}, "has no afmoe.attention.sliding_window"),
    ("afmoe", {"ARCH.expert_weights_norm": None}, "sets route_norm False"),
    ("afmoe", {"ARCH.expert_gating_func": 1}, "sets score_func 'softmax'"),
    ("mimo_v2_flash", {"ARCH.attention.sliding_window_pattern": None}, "has no mimo2.attention.sliding_window_pattern"),
    ("mimo_v2_flash", {"ARCH.attention.head_count_kv": [1, 3, 3, 3, 3, 3]}, "sets swa_num_key_value_heads 3"),
    ("mimo_v2_flash", {"ARCH.attention.value_scale": None}, "has no mimo2.attention.value_scale"),
    ("mimo_v2_flash", {"ARCH.attention.value_length": 8}, "attn_v.weight has the shape"),
    ("mistral4", {"ARCH.expert_gating_func": 2}, "says sigmoid, expected softmax"),
    ("glm_moe_dsa", {"ARCH.attention.indexer.top_k": None}, "has no glm-dsa.attention.indexer.top_k"),
    ("glm_moe_dsa", {"ARCH.expert_gating_func": 1}, "sets scoring_func 'softmax'"),
    ("deepseek_v32", {"ARCH.attention.indexer.head_count": "two"}, "should be a int"),
    ("hy_v3", {"ARCH.expert_weights_norm": None}, "expert_weights_norm of its metadata is not true"),
    ("hy_v3", {"ARCH.expert_gating_func": 1}, "sets scoring_func 'softmax'"),
    ("mistral4", {"ARCH.rope.scaling.type": None}, "sets the rope type 'default'"),
    ("kimi_linear", {"ARCH.kda.head_dim": None}, "has no kimi-linear.kda.head_dim"),
    ("kimi_linear", {"ARCH.ssm.conv_kernel": 3}, "ssm_conv1d_q.weight has the shape"),
    ("step3p5", {"ARCH.swiglu_clamp_exp": [0.5, 0.5]}, "should have 4 values"),
    ("step3p5", {"ARCH.expert_weights_norm": False}, "sets norm_expert_weight False"),
    ("step3p5", {"ARCH.attention.head_count": [4, 8, 8, 4]}, "has the shape"),
    ("qwen4_exp_text", {"ARCH.ple.layers": [0, 2]}, "names several layers"),
    ("qwen4_exp_text", {"ARCH.ple.eos_token_id": None}, "has no qwen4exp.ple.eos_token_id"),
    ("qwen4_exp_text", {"ARCH.ple.layer_multipliers": [3, 5, 7]}, "layer_multipliers of its metadata has other"),
    ("qwen4_exp_text", {"ARCH.ple.head_vocab_sizes": [53, 59, 61, 71]}, "head_vocab_sizes of its metadata has other"),
    ("qwen4_exp_text", {"ARCH.ple.head_offsets": None}, "head_offsets of its metadata has other numbers"),
    ("qwen4_exp_text", {"ARCH.ple.heads_per_ngram": 1 << 20}, "can be packed"),
    ("qwen4_exp_text", {"ARCH.ple.head_vocab_sizes": None}, "ngram_vocab_size_base 0"),
    ("qwen4_exp_text", {"ARCH.embedding_length_per_layer_input": 5}, "has the shape"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "words"), WRONG)
def test_refusals_of_architectures(family: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = file_of(family, tmp_path / "m", **changes)
    with pytest.raises(ConversionError, match=words) as error:
        Checkpoint.open(file)
    assert "\n" not in str(error.value)


def test_a_table_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of("qwen4_exp_text", tmp_path / "m")
    monkeypatch.setattr("moeconv.source.gguf.tensors._MOST_AT_ONCE", 100 * 6)  # of 240 rows of 6 numbers
    ours, theirs, name = Checkpoint.open(file), Checkpoint.open(tmp_path / "m"), "decoder.0.ngrams.table"
    pieces = [*ours.table(name)]
    assert [len(each) for each in pieces] == [100, 100, 40]
    assert torch.equal(torch.cat(pieces), torch.cat([*theirs.table(name)]))
    numbers = torch.tensor([0, 99, 100, 239])
    assert torch.equal(ours.rows(name, numbers), theirs.rows(name, numbers))


def test_a_layer_behind_the_last_one_is_left_out_with_a_note(tmp_path: Path) -> None:
    file_of("qwen4_exp_text", tmp_path / "m")
    more = {"blk.3.nextn.eh_proj.weight": np.ones((24, 48), np.float16), "blk.3.hc_attn_norm.weight": np.ones(72, "f4")}
    said = {"block_count": 4, "nextn_predict_layers": 1, "attention.compress_ratios": [0, 8, 0, 0]}
    keys = {f"ARCH.{name}": value for name, value in said.items()}
    found = Checkpoint.open(write_gguf(tmp_path / "m", tmp_path / "m.gguf", more=more, **keys))
    assert len(found.spec.decoder) == 3
    assert sum(MORE_PREDICTED in note for note in found.notes) == 1


def test_indexers_are_left_out_with_a_note(tmp_path: Path) -> None:
    tiny_of("glm_moe_dsa")(tmp_path / "m")
    in_16_bits(tmp_path / "m")
    notes = Checkpoint.open(write_gguf(tmp_path / "m", tmp_path / "m.gguf")).notes
    assert sum(INDEXERS_LEFT_OUT in note for note in notes) == 1
    assert any("texts are at most 400 tokens long" in note for note in notes)


def test_unknown_architectures_and_types_are_refused_by_name(mixtral: Path, tmp_path: Path) -> None:
    file = write_gguf(mixtral, tmp_path / "m.gguf")
    body = file.read_bytes()
    file.write_bytes(body.replace(b"llama", b"lamma"))
    with pytest.raises(CheckpointError, match="the architecture 'lamma' is not supported: like it are llama, "):
        Checkpoint.open(file)
    for name, why in (("kimi-k3", "transformers lacks it"), ("longcat-flash", "llama.cpp has not settled the layout")):
        write_gguf(mixtral, file, None, None, **{"general.architecture": name})
        with pytest.raises(CheckpointError, match=f"'{name}' is not supported: {why}"):
            Checkpoint.open(file)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no file"):
        Checkpoint.open(tmp_path / "m.gguf")


@pytest.mark.parametrize(("given", "files"), [
    ("owner/name/m.gguf", ["m.gguf"]), ("owner/name:m.gguf", ["m.gguf"]), ("owner/name/q4/m.gguf", ["q4/m.gguf"]),
    ("owner/name/m-00002-of-00002.gguf", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
])  # fmt: skip
def test_a_file_of_the_hub(
    given: str, files: list[str], mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    found = write_gguf(mixtral, tmp_path / "m.gguf")

    def fetched(repository: str, name: str, tqdm_class: Any) -> str:
        asked.append((repository, name))
        return str(found)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetched)
    assert Checkpoint.open(given).spec.family == "mixtral"
    assert asked == [("owner/name", name) for name in files]
