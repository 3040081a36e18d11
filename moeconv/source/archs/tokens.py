"""Special tokens: generation_config.json has the last word, config.json the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeconv.source.archs.config import Config
from moeconv.source.archs.errors import UnsupportedModel
from moert.pack.model_spec import Tokens

_FIELDS = {"bos": "bos", "pad": "pad", "start": "decoder_start", "first": "forced_bos"}


def token_id(name: str, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> int | None:
    """One id, or None where neither file has it."""
    value = generation_config.get(name)
    return config.get(name) if value is None else value


def special_tokens(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> Tokens:
    """All that a ModelSpec names."""
    found = {name: token_id(f"{field}_token_id", config, generation_config) for name, field in _FIELDS.items()}
    return Tokens(eos=token_ids("eos_token_id", config, generation_config), **found)


def token_ids(name: str, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """One id or a list of them, as a tuple; empty where neither file has it."""
    value = token_id(name, config, generation_config)
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def checked_start(config: Config, tokens: Tokens) -> Tokens:
    """Those of a model with an encoder, whose decoder begins with a token: where none is given, with that which begins
    texts, or the pad token. Raises UnsupportedModel."""
    config.get("forced_bos_token_id")  # it is in `tokens`
    start = next((token for token in (tokens.start, tokens.bos, tokens.pad) if token is not None), None)
    if start is None:
        raise UnsupportedModel("config.json has no decoder_start_token_id: an encoder–decoder model needs one")
    return replace(tokens, start=start)
