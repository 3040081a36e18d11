"""How much a sweep keeps in memory beside the model, and in how many blocks its samples fit a bound."""

from __future__ import annotations

import math

from moeconv.errors import SettingsError
from moeconv.measure.scorers.build import Volume
from moeconv.measure.scorers.head import LOGIT_BYTES
from moeconv.sweep.probes.generated import WAITING_TOKENS
from moeconv.sweep.probes.rewrites import WRITTEN_TOKENS
from moeconv.sweep.probes.text import BATCH_TOKENS
from moert.pack.model_spec import ModelSpec

_STATES_A_TOKEN = 12  # hidden states alive at once while a batch runs
_FLOAT = 4


def kept_bytes(spec: ModelSpec, volume: Volume) -> int:
    """Bytes kept of a base run: for each token and layer what left the layer and what its experts were asked; and what
    is scored."""
    a_layer = (spec.d_model + spec.expert_width) * _FLOAT + 16 * spec.moe.router.top_k
    encoder_layers = len(spec.encoder) if spec.encoder else 0
    layers = volume.encoder_tokens * encoder_layers + volume.decoder_tokens * len(spec.decoder)
    scored = volume.decoder_tokens * (2 * spec.d_model * _FLOAT + 32)
    return layers * a_layer + scored + volume.encoder_tokens * spec.d_model * _FLOAT


def batch_bytes(spec: ModelSpec) -> int:
    """Most bytes that the running batch takes. While text is written, every decoder layer keeps its keys and values of
    the inputs, twice when finished rows leave the batch."""
    states = BATCH_TOKENS * spec.d_model * _FLOAT * _STATES_A_TOKEN + 3 * LOGIT_BYTES
    if spec.encoder is None:
        return states
    heads = [spec.decoder[layer].attention for layer in range(len(spec.decoder))]
    keys_and_values = sum(2 * each.kv_features for each in heads if each is not None)
    return states + (WRITTEN_TOKENS * 2 * keys_and_values + WAITING_TOKENS * spec.d_model) * _FLOAT


def blocks_for(spec: ModelSpec, volume: Volume, memory_bytes: int) -> int:
    """The fewest blocks in which a sweep stays within `memory_bytes`. Raises SettingsError."""
    kept, batch = kept_bytes(spec, volume), batch_bytes(spec)
    room = memory_bytes - batch
    least = batch + math.ceil(2 * kept / volume.samples)  # blocks are not quite equal
    if room <= 0 or memory_bytes < least:
        raise SettingsError(
            f"--memory {memory_bytes / 1e6:,.0f}MB is too little for the sweep beside the model: give at least "
            f"{math.ceil(least / 1e6):,}MB"
        )
    return min(volume.samples, math.ceil(kept / room))
