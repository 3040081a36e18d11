"""Special tokens: generation_config.json has the last word, config.json the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moert.pack.model_spec import Tokens


def token_id(name: str, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> int | None:
    """One id, or None where neither file has it."""
    value = generation_config.get(name)
    return config.get(name) if value is None else value


def special_tokens(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> Tokens:
    """All that a ModelSpec names."""
    found = {
        name: token_id(f"{field}_token_id", config, generation_config)
        for name, field in (("bos", "bos"), ("pad", "pad"), ("start", "decoder_start"))
    }
    return Tokens(eos=token_ids("eos_token_id", config, generation_config), **found)


def token_ids(name: str, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """One id or a list of them, as a tuple; empty where neither file has it."""
    value = token_id(name, config, generation_config)
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
