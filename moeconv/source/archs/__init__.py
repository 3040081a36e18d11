"""One small file for each model family: its names and settings on one side, a tree of parts on the other."""

from __future__ import annotations

from collections.abc import Mapping

from moeconv.source.archs.description import Description
from moeconv.source.archs.errors import UnsupportedModel
from moeconv.source.archs.family import Family
from moeconv.source.archs.mixtral import Mixtral
from moeconv.source.archs.olmoe import Olmoe
from moeconv.source.archs.qwen3_moe import Qwen3Moe
from moeconv.source.archs.switch import SwitchTransformers

__all__ = ["FAMILIES", "Description", "Family", "UnsupportedModel"]

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (SwitchTransformers(), Olmoe(), Qwen3Moe(), Mixtral())
}
"""By the model_type of config.json."""
