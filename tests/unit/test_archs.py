"""The adapters: names that exist, views that write through, experts seen as they are called, refusals in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny import TINY, VARIANTS, VOCAB, features, tiny_switch, transformers_model, variant_id

from moeconv.dense import weighed
from moeconv.source.archs import FAMILIES, Description, UnsupportedModel
from moeconv.source.archs.weights import linears_of, parameter, put_tables
from moeconv.source.checkpoint import Checkpoint
from moert.pack.model_spec import LayerKey, ModelSpec
from tests.pairs import thinned
from tests.refusing import one_line
from tests.shapes import shapes_of

TinyModel = Callable[..., Path]
MAKERS: dict[str, Callable[..., Path]] = {name: make for name, (make, _) in TINY.items()}
_ROUNDED = 1e-6  # float32, where transformers rounds more often


@pytest.fixture(params=list(MAKERS))
def tiny(request: pytest.FixtureRequest, tiny_model: TinyModel) -> tuple[str, Path]:
    return request.param, tiny_model(request.param)


def description_of(family: str, path: Path) -> Description:
    config, generation = (json.loads((path / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    return FAMILIES[family].description(config, generation)


def test_every_family_is_tried_and_its_settings_are_those_of_its_model() -> None:
    assert set(TINY) == set(FAMILIES)
    for each in FAMILIES.values():
        found = each._class.config_class
        if each.sees is not None:
            found = found.sub_configs_defaults["text_config"].config_class
        assert found is each._config_class


@thinned("family, variant", VARIANTS, facts=features, ids=variant_id)
def test_names_shapes_and_frequencies_are_those_of_the_model(family: str, variant: str, tiny_model: TinyModel) -> None:
    path = tiny_model(family, variant)
    described = description_of(family, path)
    check_names_and_shapes(described, path)
    check_frequencies(described, FAMILIES[family].tower(FAMILIES[family].empty(path), "decoder"))


def check_names_and_shapes(described: Description, path: Path) -> None:
    """Every tensor of the file has a canonical name of the same shape, and the other way round."""
    spec, shapes = described.spec, shapes_of(described.spec)
    assert set(described.backbone) | set(described.computed) == set(shapes)
    assert set(described.parameters) == set(described.backbone)
    assert {name: tuple(tensor.shape) for name, tensor in described.computed.items()}.items() <= shapes.items()
    implied = {
        name: source.shape or shapes[canonical]
        for canonical, source in described.backbone.items() for name in source.names
    }  # fmt: skip
    implied |= {source.name: source.shape or () for pieces in described.tables.values() for source in pieces}
    implied |= {name: (len(numbers),) for name, numbers in described.stated.items()}
    for key in spec.expert_keys():
        for projection in spec.moe.ffn.projections:
            shape = spec.projection_shape(projection)
            found = [(described.experts(key, projection), shape)]
            if described.biases is not None:
                found.append((described.biases(key, projection), shape[:1]))
            for source, each in found:
                one = source.shape or each
                implied[source.name] = one if source.index is None else (spec.moe.n, *one)
    with safe_open(path / "model.safetensors", "pt") as file:
        stored = {name: tuple(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
    doubled = {other for _, other in described.copies} - set(implied)
    left_out = {name for name in stored if any(re.match(pattern, name) for pattern in described.left_out)}
    assert implied == {name: shape for name, shape in stored.items() if name not in doubled | left_out}


def check_frequencies(described: Description, model: Any) -> None:
    modules = {name: part for name, part in model.named_modules() if "RotaryEmbedding" in type(part).__name__}
    modules = {name: part for name, part in modules.items() if "compressor" not in name}  # each has those of the model
    of_layers = [part for name, part in modules.items() if "rotary_embs." in name]
    ours = [value for name, value in described.computed.items() if name.startswith("rope.")]
    theirs = [
        (_in_order(module, b), module.config.rope_parameters.get("short_mscale") or _factor(module, name))
        for module in (of_layers if "SWA" in type(model).__name__ else modules.values())
        for name, b in module.named_buffers() if not name.endswith("original_inv_freq")
    ]  # fmt: skip
    assert len(described.spec.ropes) == len(ours) == len(theirs)
    for rope, mine in zip(described.spec.ropes, ours, strict=True):
        assert any(
            mine.shape == each.shape and np.allclose(mine, each, rtol=_ROUNDED, atol=0) and rope.factor == factor
            for each, factor in theirs
        )


def _in_order(module: Any, frequencies: torch.Tensor) -> torch.Tensor:
    """ERNIE 4.5's are in another order while an image's positions have several numbers."""
    return frequencies.sort(descending=True).values if "Ernie4_5_VL" in type(module).__name__ else frequencies


def _factor(module: Any, frequencies: str) -> float:
    """The factor of the features that these frequencies turn."""
    return float(getattr(module, f"{frequencies.removesuffix('inv_freq')}attention_scaling", 1.0))


def test_loaded_experts_are_views_of_the_stored_ones(tiny: tuple[str, Path]) -> None:
    family, path = tiny
    arch, described = FAMILIES[family], description_of(family, path)
    spec = described.spec
    model = Checkpoint.open(path).model(torch.float32)
    assert not model.training
    key = spec.expert_keys()[-1]
    with safe_open(path / "model.safetensors", "pt") as file:
        for projection in spec.moe.ffn.projections:
            view = arch.expert_weight(model, key, projection)
            source = described.experts(key, projection)
            stored = source.read(
                lambda name, index: file.get_tensor(name) if index is None else file.get_tensor(name)[index],
                spec.projection_shape(projection),
            )
            assert torch.equal(view, stored.float())
    before = run(model, spec)
    for key in spec.expert_keys():
        arch.expert_weight(model, key, "down").zero_()
    assert not torch.allclose(before, run(model, spec)), "writing to the views changed nothing"


def test_experts_are_called_in_order_and_say_what_was_chosen(tiny: tuple[str, Path]) -> None:
    family, path = tiny
    arch, spec = FAMILIES[family], description_of(family, path).spec
    model, seen = Checkpoint.open(path).model(torch.float32), list[Any]()
    for place in spec.moe_layers():
        arch.experts_module(model, place).register_forward_pre_hook(
            lambda _module, inputs, place=place: seen.append((place, inputs[0], *arch.routed(*inputs[1:])))
        )
    run(model, spec)
    assert [place for place, *_ in seen] == spec.moe_layers()
    for (stack, _), x, experts, weights in seen:
        tokens = 2 * (3 if stack == "decoder" and spec.encoder else 5)
        assert experts.dtype == torch.int64
        assert experts.shape == weights.shape == (tokens, spec.moe.router.top_k)
        assert x.shape == (tokens, spec.expert_width)
        assert 0 <= int(experts.min()) <= int(experts.max()) < spec.moe.n + spec.moe.router.identities
        assert (weights > 0).all()


def test_tokens_dropped_by_capacity_are_marked(tmp_path: Path) -> None:
    arch, path = FAMILIES["switch_transformers"], tiny_switch(tmp_path, expert_capacity=2, num_experts=2)
    model = Checkpoint.open(path).model(torch.float32)
    seen: list[Any] = []
    arch.experts_module(model, LayerKey("encoder", 0)).register_forward_pre_hook(
        lambda _module, inputs: seen.append(arch.routed(*inputs[1:])[0])
    )
    with torch.inference_mode():
        model.get_submodule("encoder")(torch.arange(2, 29).view(3, 9))
    for row in seen[0].view(3, 9):
        assert all(int((row == expert).sum()) <= 2 for expert in (0, 1))
        assert int((row < 0).sum()) >= 9 - 2 * 2
        assert (row[:2] >= 0).all()  # the first two fit, whoever they go to


def test_a_tower_cut_short_goes_on_from_hidden_states(tiny: tuple[str, Path]) -> None:
    family, path = tiny
    arch, spec = FAMILIES[family], description_of(family, path).spec
    model = Checkpoint.open(path).model(torch.float32)
    tower = arch.tower(model, "encoder" if spec.encoder else "decoder")
    layers = getattr(tower, arch.layer_list)
    assert arch.parts * len(layers) == len(spec.encoder or spec.decoder) >= 2
    kept: list[torch.Tensor] = []
    hook = layers[0].register_forward_hook(
        lambda _module, _inputs, output: kept.append(output if isinstance(output, torch.Tensor) else output[0])
    )
    with torch.inference_mode():
        whole = tower(torch.arange(2, 12).view(2, 5)).last_hidden_state
        hook.remove()
        setattr(tower, arch.layer_list, torch.nn.ModuleList(arch.resumed(layers, 1)))
        with arch.resuming(tower):
            assert torch.allclose(tower(inputs_embeds=kept[0]).last_hidden_state, whole, atol=1e-6)


def test_linear_modules_have_the_inputs_of_the_matrices_that_they_stand_for(tiny: tuple[str, Path]) -> None:
    """Each output of a matrix is, but for its factor, one of the outputs of its module for the same inputs."""
    _, path = tiny
    checkpoint = Checkpoint.open(path)
    spec, model = checkpoint.spec, checkpoint.model(torch.float32)
    linears = linears_of(model, checkpoint.description, weighed(spec))
    assert {name.split(".")[0] for name in linears} >= {stack for stack, _ in spec.moe_layers()}
    for name, module in linears.items():
        x = torch.randn(module.in_features, generator=torch.Generator().manual_seed(1))
        weight = parameter(model, checkpoint.description, name)
        factor = checkpoint.description.parameters[name].factor
        outputs, found = weight @ x / factor, module.weight @ x
        nearest = (outputs[:, None] - found).abs().min(1).values
        assert nearest.max() < 1e-4 * found.abs().max(), name


def test_an_empty_model_is_filled_like_a_loaded_one(tiny: tuple[str, Path]) -> None:
    family, path = tiny
    arch, spec = FAMILIES[family], description_of(family, path).spec
    loaded, empty = Checkpoint.open(path).model(torch.float32), arch.empty(path)
    assert not empty.training
    assert {name: value.shape for name, value in empty.named_parameters()} == {
        name: value.shape for name, value in loaded.named_parameters()
    }
    empty.load_state_dict(loaded.state_dict())
    put_tables(empty, description_of(family, path), Checkpoint.open(path).rows)
    expected = run(loaded, spec)  # where weights lie in memory may change the order of sums: seen with jamba, by > 2e-6
    assert torch.allclose(run(empty, spec), expected, atol=2e-5 * float(expected.abs().max()))


def run(model: Any, spec: ModelSpec) -> torch.Tensor:
    """Logits of two rows of five tokens (three in the decoder of an encoder–decoder)."""
    ids = torch.arange(2, 12).view(2, 5) % VOCAB
    with torch.inference_mode():
        if spec.encoder is None:
            return model(ids).logits.clone()
        return model(ids, decoder_input_ids=ids[:, :3]).logits.clone()


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("switch_transformers", {"router_bias": True}, "router_bias"),
        ("switch_transformers", {"router_dtype": "bfloat16"}, "router_dtype"),
        ("switch_transformers", {"dense_act_fn": "gated-gelu"}, "gated-gelu"),
        ("switch_transformers", {"is_gated_act": True, "feed_forward_proj": "gelu"}, "is_gated_act True and feed"),
        ("switch_transformers", {"feed_forward_proj": "gated-gelu"}, "is_gated_act False and feed_forward_proj 'gated"),
        ("switch_transformers", {"num_selected_experts": 2}, "num_selected_experts 2"),
        ("switch_transformers", {"router_type": "experts_masked"}, "router_type 'experts_masked'"),
        ("switch_transformers", {"batch_prioritized_routing": True}, "batch_prioritized_routing True"),
        ("switch_transformers", {"is_full_sparse": True, "decoder_sparse_step": 0}, "only 2 of 4 layers would have"),
        ("nllb-moe", {"router_dtype": "float16"}, "router_dtype 'float16'"),
        ("deepseek_v4", {"expert_dtype": "int4"}, "expert_dtype 'int4'"),
        ("deepseek_v4", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("deepseek_v4", {"scoring_func": "softmax"}, "scoring_func 'softmax': only sqrtsoftplus, sigmoid"),
        ("deepseek_v4", {"sliding_window": 1}, "sliding_window 1: it should be a whole number from 2 on"),
        ("deepseek_v4", {"n_shared_experts": 2}, "n_shared_experts 2"),
        ("kimi_linear", {"linear_attn_config": {"gate": 1}}, "gate in linear_attn_config"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope False"),
        ("longcat_flash", {"zero_expert_type": "drop"}, "zero_expert_type 'drop'"),
        ("longcat_flash", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("longcat_flash", {"head_dim": 8}, "head_dim 8"),
        ("bailing_hybrid", {"kda_lower_bound": 0.5}, "kda_lower_bound 0.5: it should be below 0"),
        ("bailing_hybrid", {"q_lora_rank": 8}, "q_lora_rank 8"),
        ("nllb-moe", {"second_expert_policy": "random"}, "second_expert_policy 'random'"),
        ("nllb-moe", {"moe_eval_capacity_token_fraction": 0.5}, "moe_eval_capacity_token_fraction 0.5: an expert"),
        ("nllb-moe", {"moe_eval_capacity_token_fraction": -1.0}, "moe_eval_capacity_token_fraction -1.0"),
        ("nllb-moe", {"moe_token_dropout": 1.0}, "moe_token_dropout 1.0"),
        ("nllb-moe", {"router_type": "experts_masked"}, "router_type 'experts_masked'"),
        ("nllb-moe", {"num_experts": 1}, "num_experts 1: it should be a whole number from 2"),
        ("nllb-moe", {"decoder_attention_heads": 5}, "decoder_attention_heads 5 for d_model 24"),
        ("nllb-moe", {"pad_token_id": None}, "pad_token_id None"),
        ("nllb-moe", {"pad_token_id": 96}, "pad_token_id 96"),
        ("nllb-moe", {"max_position_embeddings": 65536}, "max_position_embeddings 65536"),
        ("nllb-moe", {"activation_function": "mish"}, "mish"),
        ("switch_transformers", {"expert_capacity": 0}, "expert_capacity"),
        ("gptsan-japanese", {"router_dtype": "bfloat16"}, "router_dtype 'bfloat16'"),
        ("gptsan-japanese", {"tie_word_embeddings": False}, "its head is its embedding"),
        ("gptsan-japanese", {"num_layers": 5}, "num_layers 5, num_switch_layers and num_ext_layers 2 . 0"),
        ("gptsan-japanese", {"num_heads": 5}, "num_heads 5 for d_model 24"),
        ("gptsan-japanese", {"expert_capacity": 0}, "expert_capacity 0"),
        ("gptsan-japanese", {"separator_token_id": -1}, "separator_token_id -1"),
        ("gptsan-japanese", {"max_position_embeddings": 65536}, "max_position_embeddings 65536"),
        ("switch_transformers", {"decoder_start_token_id": None, "pad_token_id": None}, "decoder_start_token_id"),
        ("olmoe", {"attention_bias": True}, "attention_bias"),
        ("olmoe", {"hidden_act": "mish"}, "mish"),
        ("olmoe", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e-324}}, "turns heads by up to inf"),
        ("olmoe", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias"),
        ("mixtral", {"quantization_config": {"quant_method": "eetq"}}, "coded by 'eetq'"),
        ("mixtral", {"hidden_act": "gelu_fast"}, "gelu_fast"),
        ("olmoe", {"head_dim": 12}, "head_dim"),
        ("olmoe", {"sliding_window": 8}, "sliding_window"),
        ("olmoe", {"hidden_size": 100}, "num_attention_heads 4 for hidden_size 100, so that a head has 25 features"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before False: only layers with their norms before"),
        ("opt", {"word_embed_proj_dim": 12}, "word_embed_proj_dim 12: only embeddings of hidden_size"),
        ("opt", {"num_attention_heads": 5}, "num_attention_heads 5 for hidden_size 24"),
        ("opt", {"max_position_embeddings": 65536}, "max_position_embeddings 65536"),
        ("opt", {"activation_function": "gelu_fast"}, "gelu_fast"),
        ("opt", {"head_dim": 12}, "head_dim 12"),
        ("opt", {"num_key_value_heads": 2}, "num_key_value_heads 2"),
    ],
)
def test_what_a_pack_cannot_say_is_refused(
    family: str, change: dict[str, Any], named: str, tiny_model: TinyModel
) -> None:
    config = json.loads((tiny_model(family) / "config.json").read_text())
    with one_line(UnsupportedModel, named):
        FAMILIES[family].description({**config, **change}, {})


@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [
        ("olmoe", "swiglu_limit", 7.0),
        ("switch_transformers", "activation_limit", 7.0),
        ("qwen3_moe", "shared_expert_intermediate_size", 8),
    ],
)
def test_a_setting_that_the_family_does_not_know_is_a_note(
    family: str, setting: str, value: float, tiny_model: TinyModel
) -> None:
    """Other families have them; these compute the same in transformers with them and without."""
    config = json.loads((tiny_model(family) / "config.json").read_text())
    found, plain = (FAMILIES[family].description({**config, **more}, {}) for more in ({setting: value}, {}))
    assert found.spec == plain.spec
    assert found.without_effect == (setting,)
    assert plain.without_effect == ()


def test_generation_config_has_the_last_word_on_special_tokens(tiny_model: TinyModel) -> None:
    config = json.loads((tiny_model("switch_transformers") / "config.json").read_text())
    generation = {"eos_token_id": [4, 5], "decoder_start_token_id": 7}
    tokens = FAMILIES["switch_transformers"].description(config, generation).spec.tokens
    assert (tokens.eos, tokens.start, tokens.pad) == ((4, 5), 7, 0)


@pytest.mark.parametrize(
    ("given", "start"),
    [({"decoder_start_token_id": 5}, 5), ({"bos_token_id": 4}, 4), ({}, 0), ({"decoder_start_token_id": 0}, 0)],
)
def test_a_decoder_begins_with_the_token_that_is_given_or_with_what_switch_was_trained_with(
    given: dict[str, int], start: int, tiny_model: TinyModel
) -> None:
    """Some published ones say nothing."""
    config = json.loads((tiny_model("switch_transformers") / "config.json").read_text())
    del config["decoder_start_token_id"]
    assert FAMILIES["switch_transformers"].description({**config, **given}, {}).spec.tokens.start == start


def test_a_first_token_is_one_of_what_is_written_behind_an_encoder(tiny_model: TinyModel) -> None:
    forced = {"forced_bos_token_id": 11}
    for family in ("switch_transformers", "nllb-moe"):
        config = json.loads((tiny_model(family) / "config.json").read_text())
        assert FAMILIES[family].description(config, {}).spec.tokens.first is None
        assert FAMILIES[family].description(config, forced).spec.tokens.first == 11
        assert FAMILIES[family].description({**config, **forced}, {"forced_bos_token_id": 12}).spec.tokens.first == 12
    config = json.loads((tiny_model("olmoe") / "config.json").read_text())
    assert FAMILIES["olmoe"].description(config, forced).spec.tokens.first is None


@pytest.mark.parametrize("overrides", [{}, {"d_model": 27, "encoder_attention_heads": 3, "decoder_attention_heads": 9}])
def test_positions_are_those_of_the_model(overrides: dict[str, Any], tmp_path: Path) -> None:
    path = MAKERS["nllb-moe"](tmp_path, pad_token_id=3, max_position_embeddings=70, **overrides)
    described, model = description_of("nllb-moe", path), FAMILIES["nllb-moe"].empty(path)
    for stack in ("encoder", "decoder"):
        found, theirs = described.computed[f"{stack}.positions.weight"], model.get_submodule(f"model.{stack}")
        table = theirs.embed_positions.weights[4:]  # that grows when it is asked for more
        np.testing.assert_allclose(found[:68], table, rtol=0, atol=70 * _ROUNDED)
        ids = torch.tensor([[7, 3, 3, 8, 9]])
        past = 5 if stack == "decoder" else 0
        places = theirs.embed_positions(ids, past_key_values_length=past)[0]
        expected = [0, None, None, 1, 2] if stack == "encoder" else [5, None, None, 8, 9]
        rows = [np.zeros(found.shape[1]) if place is None else found[place] for place in expected]
        np.testing.assert_allclose(places, np.stack(rows), rtol=0, atol=70 * _ROUNDED)


def test_experts_of_nllb_moe_are_those_that_the_router_says(tiny_model: TinyModel) -> None:
    path = tiny_model("nllb-moe")
    ours, theirs = Checkpoint.open(path).model(torch.float32), transformers_model(path)
    ids = torch.arange(2, 32).view(3, 10)
    with torch.inference_mode():
        expected = theirs(ids, decoder_input_ids=ids[:, :4]).logits
        assert torch.allclose(ours(ids, decoder_input_ids=ids[:, :4]).logits, expected, atol=1e-5)
