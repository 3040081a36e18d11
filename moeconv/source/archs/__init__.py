"""One small file for each model family: its names and settings on one side, a tree of parts on the other."""

from __future__ import annotations

from collections.abc import Mapping

from moeconv.source.archs.config import UnsupportedModel
from moeconv.source.archs.deepseek_v2 import DeepseekV2
from moeconv.source.archs.deepseek_v3 import DeepseekV3, KimiK2
from moeconv.source.archs.description import Description
from moeconv.source.archs.dots1 import Dots1
from moeconv.source.archs.ernie4_5_moe import Ernie45Moe
from moeconv.source.archs.exaone_moe import ExaoneMoe
from moeconv.source.archs.family import Family
from moeconv.source.archs.gemma4 import Gemma4, Gemma4Text
from moeconv.source.archs.glm4_moe import Glm4Moe
from moeconv.source.archs.glm4_moe_lite import Glm4MoeLite
from moeconv.source.archs.gpt_oss import GptOss
from moeconv.source.archs.gptsan_japanese import GptsanJapanese
from moeconv.source.archs.granitemoe import GraniteMoe, GraniteMoeShared
from moeconv.source.archs.granitemoehybrid import GraniteMoeHybrid
from moeconv.source.archs.hunyuan_v1_moe import HunyuanV1Moe
from moeconv.source.archs.jamba import Jamba
from moeconv.source.archs.lfm2_moe import Lfm2Moe
from moeconv.source.archs.llama4 import Llama4, Llama4Text
from moeconv.source.archs.minimax_m2 import MiniMaxM2
from moeconv.source.archs.mixtral import Mixtral
from moeconv.source.archs.nemotron_h import NemotronH
from moeconv.source.archs.nllb_moe import NllbMoe
from moeconv.source.archs.olmoe import Olmoe
from moeconv.source.archs.opt import Opt
from moeconv.source.archs.phimoe import Phimoe
from moeconv.source.archs.qwen2_moe import Qwen2Moe
from moeconv.source.archs.qwen3_5_moe import Qwen35Moe, Qwen35MoeText
from moeconv.source.archs.qwen3_moe import Qwen3Moe
from moeconv.source.archs.qwen3_next import Qwen3Next
from moeconv.source.archs.switch import SwitchTransformers

__all__ = ["FAMILIES", "Description", "Family", "UnsupportedModel"]

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        SwitchTransformers(), Olmoe(), Qwen3Moe(), Mixtral(), Qwen2Moe(), GptOss(), DeepseekV2(), DeepseekV3(),
        Glm4Moe(), Glm4MoeLite(), MiniMaxM2(), Ernie45Moe(), HunyuanV1Moe(), Dots1(), GraniteMoe(),
        GraniteMoeShared(), Phimoe(), ExaoneMoe(), Llama4(), Llama4Text(), Gemma4(), Gemma4Text(), KimiK2(),
        Lfm2Moe(), NllbMoe(), Jamba(), Qwen3Next(), Qwen35Moe(), Qwen35MoeText(), GraniteMoeHybrid(),
        NemotronH(), GptsanJapanese(), Opt(),
    )
}  # fmt: skip
"""model_type of config.json → its family."""
