"""Dense models, above all OPT: networks as the only experts of their layers, and a router that decides nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import ROUTED, TINY, VARIANTS, features, tiny_of, transformers_model, variant_id

from moeconv.measure.trial import LoadedModel
from moeconv.source.archs import FAMILIES, UnsupportedModel
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import CheckpointError
from moeconv.source.outline import features as phrases
from moert.kernels import AUTO_KERNELS, REFERENCE, open_backend
from moert.pack.model_spec import ExpertKey
from tests.pairs import thinned
from tests.parity.packs import open_model, pack_of

MASK = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


def batch() -> torch.Tensor:
    return torch.arange(2, 20).view(3, 6)


def logits(model: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(batch(), attention_mask=mask).logits
    return found


@thinned("family, variant", [case for case in VARIANTS if case[0] not in ROUTED], facts=features, ids=variant_id)
def test_networks_called_as_experts_give_the_same_bits(
    tiny_model: Callable[[str, str], Path], family: str, variant: str
) -> None:
    """But for the order of sums in phi3, which multiplies by gate and up at once, and the steps of phi's gelu_new."""
    path, close = tiny_model(family, variant), 1e-5 if family in ("phi", "phi3") else 0
    plain, ours = transformers_model(path), Checkpoint.open(path).model(torch.float32)
    measured = LoadedModel(Checkpoint.open(path)).model
    for mask in (None, MASK):
        expected = logits(plain, mask)
        assert torch.equal(logits(ours, mask), expected)
        assert torch.allclose(logits(measured, mask), expected, atol=close, rtol=0)


def without_head(path: Path) -> Path:
    """The checkpoint as OPTModel saves it, and as the published ones are: names have no `model.`."""
    tensors = load_file(path / "model.safetensors")
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
        path / "model.safetensors", {"format": "pt"},
    )  # fmt: skip
    return path


@pytest.mark.parametrize("variant", ["plain", "untied head", "no biases"])
def test_names_may_lack_what_they_begin_with(variant: str, tmp_path: Path) -> None:
    overrides = TINY["opt"][1][variant]
    whole = Checkpoint.open(tiny_of("opt")(tmp_path / "whole", **overrides))
    short = Checkpoint.open(without_head(tiny_of("opt")(tmp_path / "short", **overrides)))
    for key in whole.spec.expert_keys():
        assert {name: value.tobytes() for name, value in short.expert(key).items()} == {
            name: value.tobytes() for name, value in whole.expert(key).items()
        }
        assert {name: value.tobytes() for name, value in short.biases(key).items()} == {
            name: value.tobytes() for name, value in whole.biases(key).items()
        }
    for name, tensor in whole.spec.tensors.items():
        assert torch.equal(short.backbone_tensor(name, tensor.shape), whole.backbone_tensor(name, tensor.shape))
    assert torch.equal(logits(short.model(torch.float32)), logits(whole.model(torch.float32)))


def test_what_lacks_its_beginning_in_part_is_incomplete(tmp_path: Path) -> None:
    path = tiny_of("opt")(tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = "model.decoder.layers.1.fc1.weight"
    tensors[name.removeprefix("model.")] = tensors.pop(name)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has no tensor 'model\.decoder\.layers\.1\.fc1\.weight'"):
        Checkpoint.open(path)


def test_the_first_two_rows_of_positions_are_of_none(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_of("opt")(tmp_path, max_position_embeddings=30))
    stored = load_file(tmp_path / "model.safetensors")["model.decoder.embed_positions.weight"]
    found = checkpoint.backbone_tensor("decoder.positions.weight", (30, 24))
    assert stored.shape == (32, 24)
    assert torch.equal(found, stored[2:])
    assert checkpoint.spec.max_positions == 30


def test_a_token_that_fills_up_elsewhere_has_a_position_like_others(tmp_path: Path) -> None:
    """Transformers tells padding by the mask alone, and so does a pack, which has none."""
    source = tiny_of("opt")(tmp_path / "hf")
    model, _ = open_model(pack_of(source, tmp_path / "model.pack"))
    assert model.spec.tokens.pad == 0
    ids = [0, 7, 0, 0, 9, 2]
    with torch.inference_mode():
        expected = transformers_model(source)(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(model.forward_all(ids), expected, atol=5e-3)  # keys and values have 16 bits


@pytest.mark.parametrize("kernels", [AUTO_KERNELS, REFERENCE])
def test_the_weight_of_an_only_expert_is_one(tmp_path: Path, kernels: str) -> None:
    """Also behind a router of two bits."""
    pack = pack_of(tiny_of("opt")(tmp_path / "hf"), tmp_path / "model.pack")
    model, runner = open_model(pack, open_backend(kernels))
    model.forward_all([5, 6, 7, 8])
    assert len(runner.decided) == 2
    for experts, weights in runner.decided:
        assert experts.tolist() == [[0]] * 4
        assert weights.tolist() == [[1.0]] * 4


def test_routers_are_computed_and_are_no_parameters(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_of("opt")(tmp_path))
    spec, described = checkpoint.spec, checkpoint.description
    assert [str(key) for key in spec.expert_keys()] == ["D00/E000", "D01/E000"]
    assert set(described.computed) == {"decoder.0.router.weight", "decoder.1.router.weight"}
    assert not any(tensor.any() for tensor in described.computed.values())
    assert not spec.moe.chooses
    assert "one network a layer, which is its only expert" in phrases(spec)
    assert not any("router" in phrase for phrase in phrases(spec))


def test_views_write_through_to_the_model(tmp_path: Path) -> None:
    family, model = FAMILIES["opt"], Checkpoint.open(tiny_of("opt")(tmp_path)).model(torch.float32)
    before = logits(model)
    family.expert_bias(model, ExpertKey("decoder", 1, 0), "up").add_(1.0)
    assert not torch.equal(logits(model), before)


def test_the_one_published_shape_that_differs_is_refused_in_one_line(tmp_path: Path) -> None:
    """OPT-350m: norms behind, and embeddings that are half as wide."""
    config = json.loads((tiny_of("opt")(tmp_path) / "config.json").read_text())
    other = {**config, "do_layer_norm_before": False, "word_embed_proj_dim": 12}
    with pytest.raises(UnsupportedModel, match="as all but OPT-350m have") as caught:
        FAMILIES["opt"].description(other, {})
    assert "\n" not in str(caught.value)
