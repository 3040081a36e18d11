"""What config.json says in published models, also of what no model looks at: numbers of at least one of each family.

Each in published.json is the file without what names people, places and versions. That of switch-xxl-128 says 48 and 12
layers, and networks without gates; the factors of Phi-3.5-MoE's and Phi-4-mini's positions are made up: as many numbers
of that size. Those of Solar Open, Hy3, Ling 3.0, GLM-5.3-Flash, DeepSeek-V4-Flash, Mistral Small 4, Ministral 3, Flint,
A.X K1 and granite-swash-2b are the defaults of transformers' classes; MiniMax-M3's is put together from its text
model's, North Mini Code's from what other programs say that run it; those of SmolLM2 and 3, Mistral 7B, Qwen2.5, Phi-4,
Gemma 1 to 3, Granite 3.3, EXAONE 4, ERNIE 4.5 0.3B, Seed-OSS, Hunyuan 7B, StarCoder2, LFM2 1.2B and 350M, Aya Expanse,
Command R, Phi-2, StableLM 2, Minitron 4B, AFM 4.5B, OLMo 1 to 3, FlexOlmo, Command R7B, Command A Vision, ERNIE 4.5 VL,
GLM-4.5V, Kimi Linear, LongCat-Flash, granite-swash-3b, Nemotron Nano 9B, Gemma 4 31B, Qwen3.8-Flash-Next, Mellum 2, and
Step 3.5 and 3.7 Flash were written without the file at hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]

_FOUND = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
PUBLISHED: dict[str, Config] = _FOUND["configs"]
"""By their names; the first of a family stands for it in docs/models.md."""
DEEPSEEK_V3_FP8, GLM_4_5_AIR = PUBLISHED["DeepSeek-V3"], PUBLISHED["GLM-4.5-Air"]
GPT_OSS_20B, MIXTRAL_8X7B = PUBLISHED["gpt-oss-20b"], PUBLISHED["Mixtral-8x7B"]
SWITCH_C_2048_AS_IT_IS: Config = _FOUND["others"]["switch-c-2048, as it is"]

MADE_UP = {
    "Granite with a shared expert": "none is known; these are the sizes of Granite 3b-a800m, with a shared expert"
}
"""Not published, but written by hand for a family of which nothing else is known."""

CORRECTED = {
    "switch-xxl-128": "48 layers in the encoder, 12 in the decoder, and networks without gates",
    "switch-c-2048": "12 layers without experts in the decoder",
}
"""What the config.json says of models whose weights are others; above are the numbers of those who made them."""

PARAMETERS: dict[str, tuple[float, float | None]] = {name: tuple(of) for name, of in _FOUND["parameters"].items()}
"""Thousand millions in all and for each token, as their makers say; None where they say no more than one digit. Tokens
of LongCat-Flash take up to the second number, 27 on the mean."""
