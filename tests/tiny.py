"""Tiny checkpoints with random weights, laid out on disk as transformers does it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from moeconv.source.archs import FAMILIES
from moeconv.source.archs.dense import Dense
from tests import gptsan
from tests.tiny_families import ALL

VOCAB, PAD, EOS = 96, 0, 1
_BLOCKS = "language_model.model.blocks.", "language_model.model.layers."
_DENSE = re.compile(r"\.block_sparse_moe\.((gate|up|down)_proj)")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


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


def tiny_gptsan(path: Path, seed: int = 0, **overrides: Any) -> Path:
    """Writes a GPTSAN-japanese checkpoint of 2 layers and 5 experts in bf16 to `path`."""
    gptsan.write(path, seed, **overrides)
    _save_tokenizer(path)
    return path


def tiny_of(model_type: str) -> Callable[..., Path]:
    """Returns the writer of a checkpoint in bf16 of one of tests.tiny_families; overrides go to its config."""

    def write(path: Path, seed: int = 0, **overrides: Any) -> Path:
        import transformers

        tiny = ALL[model_type]
        first = None if tiny.kind == "ForCausalLM" else overrides.pop("forced_bos_token_id", None)
        config = getattr(transformers, f"{tiny.config or tiny.model}Config")(**{**tiny.settings, **overrides})
        if not tiny.whole:
            with _gated_networks(config) if model_type == "switch_transformers" else nullcontext():
                model = getattr(transformers, f"{tiny.model}{tiny.kind}")(config)
            _save(model, path, seed, first)
            saved = json.loads((path / "config.json").read_text())  # some are another family by another name
            (path / "config.json").write_text(json.dumps({**saved, "model_type": model_type}))
            if model_type == "kimi_linear":  # whose dense networks transformers writes with the names of experts
                rewrite(path, lambda found: {_DENSE.sub(r".mlp.\1", name): each for name, each in found.items()})
            return path
        whole = getattr(transformers, f"{tiny.whole}Config")(text_config=config, **(tiny.sees or {}))
        _save(getattr(transformers, f"{tiny.outer or tiny.whole}ForConditionalGeneration")(whole), path, seed)
        if model_type == "step3p5":  # whose text model transformers runs inside a larger one alone
            text = json.loads((path / "config.json").read_text())["text_config"]
            (path / "config.json").write_text(
                json.dumps({**text, "architectures": ["Step3p7ForConditionalGeneration"]})
            )
            rewrite(path, lambda found: {name: tensor for name, tensor in found.items() if not name.startswith("vi")})
        if model_type == "kimi_k25":  # whose layers transformers names otherwise when it writes than when it reads
            rewrite(path, lambda found: {name.replace(*_BLOCKS): tensor for name, tensor in found.items()})
        return path

    return write


tiny_switch, tiny_nllb_moe, tiny_olmoe, tiny_qwen3_moe = map(
    tiny_of, ("switch_transformers", "nllb-moe", "olmoe", "qwen3_moe")
)
_OF_ALL = {name: (tiny_of(name), tiny.variants) for name, tiny in ALL.items()}
TINY: dict[str, tuple[Callable[..., Path], dict[str, dict[str, Any]]]] = {
    **{name: each for name, each in _OF_ALL.items() if ALL[name].apart},
    "gptsan-japanese": (tiny_gptsan, gptsan.VARIANTS),
    **_OF_ALL,
}
"""Every family: what writes a tiny checkpoint of it, and what to try of its config."""

VARIANTS = [(family, name) for family, (_, variants) in TINY.items() for name in variants]
"""Every variant of every family."""

ROUTED = {name: tiny for name, tiny in TINY.items() if not isinstance(FAMILIES[name], Dense)}
"""The same without those whose layers have one expert, so that there is nothing to choose."""


def variant_id(case: tuple[Any, ...]) -> str:
    """Returns the name of a case that begins with a variant."""
    return f"{case[0]}: {'-'.join(str(getattr(value, '__name__', value)) for value in case[1:])}"


def features(case: tuple[Any, ...]) -> Iterator[Any]:
    """Yields what a case that begins with a variant tries: its family, each setting that the variant changes (numbers
    are alike but for 0, tables by their type), and its kin with each of the case's other values."""
    family, name, *others = case
    yield family
    for key, value in TINY[family][1][name].items():
        yield key, _kind(value)
    for place, value in enumerate(others):
        yield kin_of(family), place, value


def kinds(case: tuple[Any, ...]) -> Iterator[Any]:
    """Yields the kin of a case that begins with a family or a variant, and its file with each of the case's other
    values: for tests of a mechanism, which rest on another that tries every family and setting."""
    family, *others = case
    yield kin_of(family)
    for place, value in enumerate(others):
        if value not in TINY[family][1]:
            yield type(FAMILIES[family]).__module__, place, value


def each_family(case: tuple[Any, ...]) -> Iterator[Any]:
    """Yields the family of a case that begins with a variant."""
    yield case[0]


def kin_of(family: str) -> type:
    """Returns the class that a family's own extends in the same file, or its own: packs of families that share it have
    the same parts, with other settings. All decoders without experts are kin."""
    made = type(FAMILIES[family])
    if made.__module__ == Dense.__module__:
        return Dense
    return [each for each in made.__mro__ if each.__module__ == made.__module__][-1]


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
    if config["model_type"] == "step3p5":
        sees = {**(ALL["step3p5"].sees or {}), "tie_word_embeddings": config["tie_word_embeddings"]}
        known = found.config_class(text_config=config, **sees)
    else:
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
            if name.endswith("tid2eid"):
                experts = torch.rand(len(weight), model.config.n_routed_experts, generator=generator)
                weight.copy_(experts.argsort(dim=1)[:, : weight.shape[1]])
            elif "bias" in name and "relative" not in name:
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
    """Those of floats, and tables of tokens, that are saved with the parameters."""
    kept = [(name, buffer) for name, buffer in model.named_buffers() if name in model.state_dict()]
    return [(name, buffer) for name, buffer in kept if buffer.is_floating_point() or name.endswith("tid2eid")]


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
