"""Tiny checkpoints with random weights, laid out on disk as transformers does it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tests import gptsan
from tests.tiny_families import FAMILIES

VOCAB, PAD, EOS = 96, 0, 1
_LETTERS = "abcdefghijklmnopqrstuvwxyz"

SWITCH_VARIANTS: dict[str, dict[str, Any]] = {
    "all layers sparse": {},
    "every second layer sparse": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    # asking for more sparse layers than there are gives none, asking for 0 gives one
    "dense encoder": {"num_sparse_encoder_layers": 3},
    "untied head": {"tie_word_embeddings": False},
    "small capacity": {"expert_capacity": 2},
    "silu": {"dense_act_fn": "silu"},
    "deeper encoder": {"num_layers": 3, "num_sparse_encoder_layers": 3},
    "few buckets": {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12},
    "gates": {"is_gated_act": True, "feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new"},
    "a first token": {"forced_bos_token_id": 7},
}
NLLB_MOE_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all layers sparse": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "dense encoder": {"encoder_sparse_step": 0, "encoder_ffn_dim": 52},
    "untied head": {"tie_word_embeddings": False},
    "routers with biases": {"router_bias": True},
    "embeddings not scaled": {"scale_embedding": False},
    "other heads": {"encoder_attention_heads": 3, "decoder_attention_heads": 2, "decoder_layers": 3},
    "silu without dropout": {"moe_token_dropout": 0.0, "activation_function": "silu"},
    "odd width": {"d_model": 25, "encoder_attention_heads": 5, "decoder_attention_heads": 5},
    "a first token": {"forced_bos_token_id": 7},
}
OLMOE_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared key heads": {"num_key_value_heads": 2},
    "tied head": {"tie_word_embeddings": True},
    "normed top-k": {"norm_topk_prob": True},
    "clipped": {"clip_qkv": 0.7},
    "gelu": {"hidden_act": "gelu"},
    "gelu_new": {"hidden_act": "gelu_new"},
    "top-1": {"num_experts_per_tok": 1},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}
QWEN3_MOE_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed top-k": {"norm_topk_prob": True},
    "some layers dense": {"mlp_only_layers": [0]},
    "every second layer dense": {"decoder_sparse_step": 2},
    "wider heads": {"head_dim": 10},
    "window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                 "original_max_position_embeddings": 128}},
}  # fmt: skip
MIXTRAL_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied head": {"tie_word_embeddings": True},
    "window": {"sliding_window": 5},
    "top-1": {"num_experts_per_tok": 1},
    "llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
}  # fmt: skip


def tiny_switch(path: Path, seed: int = 0, **overrides: Any) -> Path:
    """Writes a Switch checkpoint of 2 + 2 layers and 4 experts in bf16 to `path`; overrides go to its config."""
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    settings = {
        "vocab_size": VOCAB, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_heads": 3, "num_experts": 4,
        "num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2,
        "expert_capacity": 64, "relative_attention_num_buckets": 16, "relative_attention_max_distance": 40,
        "pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": PAD,
    }  # fmt: skip
    first, config = overrides.pop("forced_bos_token_id", None), SwitchTransformersConfig(**{**settings, **overrides})
    with _gated_networks(config):
        return _save(SwitchTransformersForConditionalGeneration(config), path, seed, first)


@contextmanager
def _gated_networks(config: Any) -> Iterator[None]:
    """Transformers' Switch builds networks without gates, whatever its config says; inside, those of T5 stand for them
    where it says gates."""
    from transformers.models.switch_transformers import modeling_switch_transformers as modeling
    from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

    before = modeling.SwitchTransformersDenseActDense
    if getattr(config, "is_gated_act", False):
        named = {"wi": property(lambda self: self.wi_0)}
        modeling.SwitchTransformersDenseActDense = type("Gated", (T5DenseGatedActDense,), named)
    yield
    modeling.SwitchTransformersDenseActDense = before


def tiny_nllb_moe(path: Path, seed: int = 0, **overrides: Any) -> Path:
    """Writes an NLLB-MoE checkpoint of 2 + 2 layers, every second with 5 experts, in bf16 to `path`."""
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    settings = {
        "vocab_size": VOCAB, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "encoder_sparse_step": 2,
        "decoder_sparse_step": 2, "num_experts": 5, "max_position_embeddings": 512, "pad_token_id": PAD,
        "bos_token_id": 2, "eos_token_id": EOS, "decoder_start_token_id": EOS,
    }  # fmt: skip
    first, config = overrides.pop("forced_bos_token_id", None), NllbMoeConfig(**{**settings, **overrides})
    return _save(NllbMoeForConditionalGeneration(config), path, seed, first)


def tiny_olmoe(path: Path, seed: int = 0, **overrides: Any) -> Path:
    """Writes an OLMoE checkpoint of 2 layers and 6 experts, 2 of them active, in bf16 to `path`."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    settings = {
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 6, "num_experts_per_tok": 2,
        "max_position_embeddings": 512, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None,
    }  # fmt: skip
    return _save(OlmoeForCausalLM(OlmoeConfig(**{**settings, **overrides})), path, seed)


def tiny_qwen3_moe(path: Path, seed: int = 0, **overrides: Any) -> Path:
    """Writes a Qwen3-MoE checkpoint of 2 layers and 6 experts, 2 of them active, in bf16 to `path`."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings = {
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 52, "moe_intermediate_size": 20,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 6,
        "num_experts_per_tok": 2, "max_position_embeddings": 512, "pad_token_id": PAD, "eos_token_id": EOS,
    }  # fmt: skip
    return _save(Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**settings, **overrides})), path, seed)


def tiny_mixtral(path: Path, seed: int = 0, **overrides: Any) -> Path:
    """Writes a Mixtral checkpoint of 2 layers and 4 experts, 2 of them active, in bf16 to `path`."""
    from transformers import MixtralConfig, MixtralForCausalLM

    settings = {
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "max_position_embeddings": 512, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None,
    }  # fmt: skip
    return _save(MixtralForCausalLM(MixtralConfig(**{**settings, **overrides})), path, seed)


def tiny_gptsan(path: Path, seed: int = 0, **overrides: Any) -> Path:
    """Writes a GPTSAN-japanese checkpoint of 2 layers and 5 experts in bf16 to `path`."""
    gptsan.write(path, seed, **overrides)
    _save_tokenizer(path)
    return path


_SEES: dict[str, dict[str, Any]] = {
    "llama4": {
        "vision_config": {
            "hidden_size": 8,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
            "vision_output_dim": 8,
            "projector_input_dim": 8,
            "projector_output_dim": 8,
        }
    },
    "gemma4": {"vision_config": None, "audio_config": None},
    "qwen3_5_moe": {
        "vision_config": {
            "depth": 1,
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 24,
            "num_position_embeddings": 16,
            "patch_size": 4,
        }
    },
}
"""The other parts of models that text is only one of."""


def tiny_of(model_type: str) -> Callable[..., Path]:
    """What writes a checkpoint in bf16 of one of tests.tiny_families."""

    def write(path: Path, seed: int = 0, **overrides: Any) -> Path:
        import transformers

        tiny = FAMILIES[model_type]
        config = getattr(transformers, f"{tiny.config or tiny.model}Config")(**{**tiny.settings, **overrides})
        if not tiny.whole:
            _save(getattr(transformers, f"{tiny.model}ForCausalLM")(config), path, seed)
            saved = json.loads((path / "config.json").read_text())  # some are another family by another name
            (path / "config.json").write_text(json.dumps({**saved, "model_type": model_type}))
            return path
        whole = getattr(transformers, f"{tiny.whole}Config")(text_config=config, **_SEES[model_type])
        return _save(getattr(transformers, f"{tiny.whole}ForConditionalGeneration")(whole), path, seed)

    return write


TINY: dict[str, tuple[Callable[..., Path], dict[str, dict[str, Any]]]] = {
    "switch_transformers": (tiny_switch, SWITCH_VARIANTS),
    "nllb-moe": (tiny_nllb_moe, NLLB_MOE_VARIANTS),
    "olmoe": (tiny_olmoe, OLMOE_VARIANTS),
    "qwen3_moe": (tiny_qwen3_moe, QWEN3_MOE_VARIANTS),
    "mixtral": (tiny_mixtral, MIXTRAL_VARIANTS),
    "gptsan-japanese": (tiny_gptsan, gptsan.VARIANTS),
    **{name: (tiny_of(name), tiny.variants) for name, tiny in FAMILIES.items()},
}
"""Every family: what writes a tiny checkpoint of it, and what to try of its config."""

VARIANTS = [(family, name) for family, (_, variants) in TINY.items() for name in variants]
"""Every variant of every family."""

ROUTED = {name: tiny for name, tiny in TINY.items() if name != "opt"}
"""The same without those whose layers have one expert, so that there is nothing to choose."""


def variant_id(case: tuple[Any, ...]) -> str:
    """Returns the name of a case that begins with a variant."""
    return f"{case[0]}: {'-'.join(str(getattr(value, '__name__', value)) for value in case[1:])}"


def features(case: tuple[Any, ...]) -> Iterator[Any]:
    """Yields what a case that begins with a variant tries: its family, each setting that the variant changes (numbers
    are alike but for 0, tables by their type), and the family with each of the case's other values."""
    family, name, *others = case
    yield family
    for key, value in TINY[family][1][name].items():
        yield key, _kind(value)
    for place, value in enumerate(others):
        yield family, place, value


def _kind(value: Any) -> Any:
    if isinstance(value, dict):
        return value.get("rope_type")
    if isinstance(value, (bool, str)) or not value:
        return value
    return type(value).__name__


def transformers_model(path: Path) -> Any:
    """A tiny checkpoint as transformers itself runs it, in float32 and eval mode: nothing of ours in between.

    The experts of NLLB-MoE, of which transformers 5 runs the wrong ones, are as they were in 4.57.6. Steps of
    Nemotron-H, which it bounds by a setting for new weights (pull request 48989), are bounded by time_step_limit. Of
    GPTSAN-japanese, which transformers 5 has not, it is our module, which tests/golden compares with 4.57.6.
    """
    import transformers

    config = json.loads((path / "config.json").read_text())
    if config["model_type"] == "gptsan-japanese":
        return gptsan.Reference(path)
    found = getattr(transformers, config["architectures"][0])
    known = found.config_class.from_pretrained(path, local_files_only=True)
    known.model_type = found.config_class.model_type  # else weights of one by another name are not found
    with _gated_networks(known):
        model = found.from_pretrained(path, config=known, dtype=torch.float32, local_files_only=True).eval()
    for module in model.modules():
        if type(module).__name__ == "NllbMoeExperts":
            module.forward = partial(_nllb_experts, module)
        if type(module).__name__ == "NemotronHMamba2Mixer":
            module.time_step_limit = tuple(known.time_step_limit)
    return model


def _nllb_experts(experts: Any, x: torch.Tensor, _: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Every expert for all tokens, most of whose weights are 0."""
    made = torch.stack([experts[f"expert_{number}"](x) for number in range(experts.num_experts)])
    return torch.einsum("etd,te->td", made * (1 - experts.moe_token_dropout), weights)


def _save(model: Any, path: Path, seed: int, first: int | None = None) -> Path:
    """Fills every matrix so that the signal keeps its size from layer to layer, and routing and output vary. `first`:
    the token that it begins to write with."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *_kept_buffers(model)):
            noise = torch.randn(weight.shape, generator=generator)
            if "bias" in name and "relative" not in name:
                weight.copy_(0.2 * noise)
            elif name.endswith("A_log"):
                weight.copy_(noise - 2)  # states that last for some tokens, or for hundreds
            elif weight.dim() == 1:
                less_one = "norm" in name and not weight.any()  # what it begins with, where it stands for a 1
                weight.copy_(0.2 * noise if less_one else 1.0 + 0.2 * noise)
            elif "relative" in name:
                weight.copy_(noise)
            elif name.endswith("shared.weight") or "embed" in name:
                weight.copy_(0.2 * noise)  # small, or a tied head would repeat the last token
            elif ".wi_" in name:  # of a gate and what it multiplies, in Switch, whose attention is not scaled
                weight.copy_(0.8 * noise * weight.shape[-1] ** -0.5)
            elif "cross_attention" in name:  # large, or positions would say more than what was read
                weight.copy_(4.0 * noise * weight.shape[-1] ** -0.5)
            else:
                weight.copy_(1.5 * noise * weight.shape[-1] ** -0.5)
        inside = getattr(model, "model", model)
        for stack in ("encoder", "decoder"):
            if hasattr(inside, "shared") and hasattr(inside, stack):  # if untied, these are three, and a pack has one
                getattr(inside, stack).embed_tokens.weight.copy_(inside.shared.weight)
        if first is not None:
            model.generation_config.forced_bos_token_id = first
    model.to(torch.bfloat16).save_pretrained(path)
    _save_tokenizer(path)
    return path


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Changes the tensors of a checkpoint in one file: `change` returns others, or None where it alters those."""
    tensors = load_file(path / "model.safetensors")
    found = change(tensors)
    save_file(found if isinstance(found, dict) else tensors, path / "model.safetensors", {"format": "pt"})


def reconfigure(path: Path, **changes: Any) -> dict[str, Any]:
    """Changes fields of config.json; returns all of them."""
    config = {**json.loads((path / "config.json").read_text()), **changes}
    (path / "config.json").write_text(json.dumps(config))
    return config


def _kept_buffers(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Those that are saved with the parameters."""
    kept = model.state_dict()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


def _save_tokenizer(path: Path) -> None:
    """One token per letter, the space among them; the rest of the vocabulary are byte pairs that nothing encodes to."""
    vocabulary = {"<pad>": PAD, "</s>": EOS, "<unk>": 2, "▁": 3}
    for letter in _LETTERS:
        vocabulary[letter] = len(vocabulary)
    for index in range(len(vocabulary), VOCAB):
        vocabulary[f"▁{_LETTERS[index % 26]}{_LETTERS[index // 26]}"] = index
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    if json.loads((path / "config.json").read_text())["model_type"] in ("switch_transformers", "nllb-moe"):
        tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>", '
        '"unk_token": "<unk>"}\n'
    )
