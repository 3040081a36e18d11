"""Model families: the names and settings of each on one side, a tree of parts on the other."""

from __future__ import annotations

from collections.abc import Mapping

from moeconv.source.archs.cohere import Cohere, Cohere2, Cohere2Moe, Cohere2Vision
from moeconv.source.archs.config import UnsupportedModel
from moeconv.source.archs.deepseek import (
    Axk1,
    DeepseekV2,
    DeepseekV3,
    DeepseekV32,
    Dots1,
    ExaoneMoe,
    Glm4Moe,
    Glm4MoeLite,
    Glm4vMoe,
    GlmMoeDsa,
    HyV3,
    KimiK2,
    KimiK25,
    Mistral4,
    SolarOpen,
)
from moeconv.source.archs.deepseek_v4 import DeepseekV4
from moeconv.source.archs.dense import (
    Ernie45,
    Exaone4,
    Gemma3,
    Gemma3Text,
    HunyuanV1Dense,
    Llama,
    Ministral3,
    Mistral,
    Olmo,
    Olmo2,
    Olmo3,
    Phi3,
    Qwen2,
    Qwen3,
    SeedOss,
    SmolLM3,
)
from moeconv.source.archs.description import Description
from moeconv.source.archs.family import Family
from moeconv.source.archs.gemma import Gemma, Gemma2
from moeconv.source.archs.gemma4 import Gemma4, Gemma4Text
from moeconv.source.archs.gpt_oss import GptOss
from moeconv.source.archs.gptsan_japanese import GptsanJapanese
from moeconv.source.archs.granite import Granite, GraniteMoe, GraniteMoeShared, GraniteMoeSwa, GraniteSwa
from moeconv.source.archs.hybrids import GraniteMoeHybrid, Jamba, Lfm2, Lfm2Moe, NemotronH
from moeconv.source.archs.kda import BailingHybrid, Glm5Next, KimiLinear
from moeconv.source.archs.llama4 import Llama4, Llama4Text
from moeconv.source.archs.longcat import LongcatFlash
from moeconv.source.archs.mimo import MiMoV2Flash
from moeconv.source.archs.mistral3 import Mistral3
from moeconv.source.archs.nemotron import Arcee, Nemotron
from moeconv.source.archs.nllb_moe import NllbMoe
from moeconv.source.archs.opt import Opt
from moeconv.source.archs.phi import Phi
from moeconv.source.archs.plain import (
    Afmoe,
    Ernie45Moe,
    Ernie45VlMoe,
    FlexOlmo,
    HunyuanV1Moe,
    MiniMaxM2,
    MiniMaxM3Vl,
    Mixtral,
    Olmoe,
    Phimoe,
)
from moeconv.source.archs.qwen import (
    Flint,
    Mellum,
    Qwen2Moe,
    Qwen3Moe,
    Qwen3Next,
    Qwen3Vl,
    Qwen3VlMoe,
    Qwen35,
    Qwen35Moe,
    Qwen35MoeText,
    Qwen35Text,
)
from moeconv.source.archs.qwen4 import Qwen4Exp, Qwen4ExpText
from moeconv.source.archs.stablelm import StableLm
from moeconv.source.archs.starcoder2 import Starcoder2
from moeconv.source.archs.step import Step3p5, Step3p7
from moeconv.source.archs.switch import SwitchTransformers

__all__ = ["FAMILIES", "NOT_COMPARED", "REFUSED", "Description", "Family", "UnsupportedModel"]

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        SwitchTransformers(), Olmoe(), Qwen3Moe(), Mixtral(), Qwen2Moe(), GptOss(), DeepseekV2(), DeepseekV3(),
        Glm4Moe(), Glm4MoeLite(), MiniMaxM2(), Ernie45Moe(), HunyuanV1Moe(), Dots1(), GraniteMoe(),
        GraniteMoeShared(), Phimoe(), ExaoneMoe(), Llama4(), Llama4Text(), Gemma4(), Gemma4Text(), KimiK2(),
        Lfm2Moe(), NllbMoe(), Jamba(), Qwen3Next(), Qwen35Moe(), Qwen35MoeText(), GraniteMoeHybrid(),
        NemotronH(), GptsanJapanese(), Opt(), Llama(), Mistral(), Qwen2(), Qwen3(), SmolLM3(),
        Phi3(), Gemma3(), Gemma3Text(), Olmo2(), Olmo3(), FlexOlmo(), Qwen3VlMoe(), KimiK25(), Mistral4(),
        SolarOpen(), HyV3(), Afmoe(), Ernie45VlMoe(), Cohere2Vision(), Step3p5(), Step3p7(), Glm4vMoe(),
        DeepseekV32(), GlmMoeDsa(), MiMoV2Flash(), MiniMaxM3Vl(), Cohere2(), Cohere2Moe(),
        Qwen3Vl(), Qwen35(), Qwen35Text(), KimiLinear(), BailingHybrid(), Glm5Next(), LongcatFlash(),
        GraniteMoeSwa(), GraniteSwa(), DeepseekV4(), Qwen4Exp(), Qwen4ExpText(), Mellum(), Ministral3(), Mistral3(),
        Gemma(), Gemma2(), Granite(), Exaone4(), Ernie45(), SeedOss(), HunyuanV1Dense(), Starcoder2(), Flint(), Axk1(),
        Lfm2(), Cohere(), Phi(), StableLm(), Olmo(), Nemotron(), Arcee(),
    )
}  # fmt: skip
"""model_type of config.json → its family."""

NOT_COMPARED = "transformers lacks it, so that no pack of it could be compared with anything"
REFUSED: Mapping[str, str] = {
    "bailing_moe": NOT_COMPARED, "bailing_moe_v2": NOT_COMPARED,
    "deepseek_ref": "transformers knows DeepSeek-V4 as deepseek_v4: take a checkpoint of that form",
    "kimi_k3": NOT_COMPARED,
    "mimo": NOT_COMPARED,
    "minimax_m3": "transformers knows MiniMax-M3 as minimax_m3_vl alone: take a checkpoint of that form",
    "nemotron-nas": NOT_COMPARED,
}  # fmt: skip
"""model_type of a known family that can't be packed → the reason."""
