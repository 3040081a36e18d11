"""Every setting is read, known to have no effect, or refused: whatever it says, there is a right answer or a reason."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published import PUBLISHED
from tiny import TINY
from transformers import CONFIG_MAPPING

from moeconv.source.archs import FAMILIES, Description, UnsupportedModel
from moeconv.source.archs.config import ConfigInvalid
from moeconv.source.outline import CheckpointError, Outline
from tests.refusing import one_line

Settings = dict[str, Any]
CHANGED_AT_ONCE = (1, 1, 1, 2)
MANY = pytest.mark.slow
VALUES: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 24, 65537, 1 << 40, 0.0, 1.5, -0.5, 1e-9, float("inf"), float("nan"), True, False, None, "", "x",
    "silu", "default", "full_attention", [], [0], [1, 2], ["sparse", "dense"], ["full_attention"], {}, {"a": 1},
    {"rope_type": "yarn"}, {"rope_type": "linear", "factor": 0}, {"rope_type": "default", "rope_theta": -1},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
)  # fmt: skip
_OF_LAYERS = {"layer_group_size", "first_k_dense_replace"}
# Read, and without effect as long as something else is as in these configs.
RESTING: dict[str, set[str]] = {
    "qwen3_moe": {"intermediate_size", "sliding_window", "use_sliding_window", "max_window_layers"},
    "qwen2_moe": {"intermediate_size", "sliding_window", "max_window_layers"},
    "mellum": {"intermediate_size"},
    "qwen2": {"sliding_window", "max_window_layers"},
    "qwen3": {"sliding_window", "max_window_layers"},
    "phi3": {"original_max_position_embeddings"},
    "smollm3": {"sliding_window"},
    "qwen3_next": {"intermediate_size"},
    "deepseek_v2": {"n_group", "topk_group"},
    "dots1": {"sliding_window", "max_window_layers"},
    "ernie4_5_moe": {"moe_layer_end_index", "moe_norm_min"},
    "deepseek_v3": {"rope_interleave"},  # it says where the numbers of a matrix go, which is compared elsewhere
    "kimi_k2": {"rope_interleave"},
    "axk1": {"rope_interleave"},
    "gemma": {"use_bidirectional_attention"},  # false is as none
    "gemma2": {"use_bidirectional_attention"},
    "cohere2_moe": {"norm_topk_prob", "rope_theta"},
    "deepseek_v4": {"partial_rotary_factor", "qk_rope_head_dim", "rope_theta", "compress_rope_theta"},  # of each rope
    "kimi_linear": {"moe_renormalize"},  # all numbers but 0 are true
    # of which transformers has written what follows from them
    "bailing_hybrid": {"moe_renormalize", "head_dim", "short_conv_kernel_size", *_OF_LAYERS, "rope_theta"},
    "mistral4": {"rope_interleave"},
    "nllb-moe": {"moe_eval_capacity_token_fraction"},
    "glm4_moe_lite": {"rope_interleave"},
    "gptsan-japanese": {"d_ext"},
    "qwen4_exp_text": {"output_gate_type", "split_ngram_parts"},  # silu as without; where rows of tables lie
}


@pytest.fixture(params=list(TINY))
def tiny(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> tuple[str, Settings]:
    return request.param, json.loads((tiny_model(request.param) / "config.json").read_text())


def test_every_field_of_the_class_is_asked_for(tiny: tuple[str, Settings]) -> None:
    family, settings = tiny
    _, asked = FAMILIES[family].described(settings, {})
    assert asked.unread() == set()
    whole = {each.name for each in fields(CONFIG_MAPPING.get(family, asked.parsed))}
    known = {each.name for each in fields(asked.parsed)} | asked.idle | FAMILIES[family].beside
    assert whole <= known | {"text_config", "tie_word_embeddings"}


@pytest.mark.parametrize("changes", [35, pytest.param(100, marks=MANY)])
def test_whatever_a_setting_says_there_is_an_answer_or_a_reason(tiny: tuple[str, Settings], changes: int) -> None:
    family, settings = tiny
    chance, outcomes = random.Random(family), set()
    names = sorted(set(settings) - {"model_type"})
    for _ in range(changes):
        changed = {name: chance.choice(VALUES) for name in chance.sample(names, chance.choice(CHANGED_AT_ONCE))}
        outcomes.add(outcome(family, {**settings, **changed}))
    assert outcomes == {"right", "refused"}


@pytest.mark.parametrize("changes", [2, pytest.param(8, marks=MANY)])
def test_whatever_a_published_setting_says_there_is_an_answer_or_a_reason(changes: int) -> None:
    chance = random.Random(1)
    for settings in PUBLISHED.values():
        for _ in range(changes):
            field = chance.choice(sorted(set(settings) - {"model_type"}))
            outcome(settings["model_type"], {**settings, field: chance.choice(VALUES)})


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("switch_transformers", {"relative_attention_num_buckets": 7}, "7 buckets of distances, it should be even"),
        ("switch_transformers", {"relative_attention_max_distance": 8}, "largest distance is 8, it should be above 8"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "heads share 3 heads of keys, which does not divide them"),
        ("deepseek_v3", {"n_group": 5, "topk_group": 1}, "experts are in 5 groups, which does not divide them"),
        ("deepseek_v4", {"o_groups": 3}, "4 heads are in 3 groups, which does not divide them"),
        ("llama4_text", {"num_experts_per_tok": 2}, "its router weighs what experts get, and a token goes to more"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, "moe_topk .* a pack has one for all layers"),
    ],
)
def test_what_contradicts_itself_is_named(
    family: str, changes: Settings, said: str, tiny_model: Callable[[str], Path]
) -> None:
    settings = json.loads((tiny_model(family) / "config.json").read_text())
    with one_line(CheckpointError, said):
        Outline.of({**settings, **changes}, {}, Path("hf/config.json"))


def outcome(family: str, settings: Settings) -> str:
    """Raises whatever is neither an answer nor a refusal of ours."""
    with suppress(UnsupportedModel, ConfigInvalid):
        FAMILIES[family].description(settings, {})
    try:
        outline = Outline.of(settings, {}, Path("hf/config.json"))
    except CheckpointError:
        return "refused"
    assert next(outline.spec.contradictions(), None) is None
    assert all(np.isfinite(tensor).all() for tensor in outline.description.computed.values())
    return "right"


def test_what_changes_nothing_is_known_to_have_no_effect(tiny: tuple[str, Settings]) -> None:
    """A setting with another value gives another description, unless the family says that nothing looks at it."""
    family, settings = tiny
    base, asked = FAMILIES[family].described(settings, {})
    plain, silent, resting = said(base), set(), asked.idle | FAMILIES[family].beside | RESTING.get(family, set())
    for field in sorted(set(settings) - resting):
        for value in (1, 2, 3, 7, 1.5, True, False, "x", "silu"):
            if value == settings[field]:
                continue
            try:
                found = FAMILIES[family].description({**settings, field: value}, {})
            except (UnsupportedModel, ConfigInvalid):
                continue
            if said(found) == plain:
                silent.add(field)
    assert silent == set()


def said(description: Description) -> tuple[object, ...]:
    """All of it that can be compared."""
    places = [(name, source.name, source.shape, source.factor) for name, source in description.backbone.items()]
    computed = {name: tensor.tolist() for name, tensor in description.computed.items()}
    return description.spec, places, computed, sorted(description.left_out)
