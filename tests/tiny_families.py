"""Settings of tiny models of all families, and what to try of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

Variants = dict[str, dict[str, Any]]


class Tiny(NamedTuple):
    """`model`: its class in transformers, and `config` that of its settings, both without ForCausalLM or Config where
    they are called after each other; `kind`: what stands in place of ForCausalLM. Of a model that is published inside a
    larger one, `whole` is that, `outer` its class where that is called otherwise, `sees` its settings of other parts.
    `apart`: a family that tests treat by itself."""

    model: str
    settings: dict[str, Any]
    variants: Variants
    config: str = ""
    whole: str = ""
    outer: str = ""
    sees: dict[str, Any] | None = None
    kind: str = "ForCausalLM"
    apart: bool = False


ALL: dict[str, Tiny] = {
    name: Tiny(**of) for name, of in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items()
}
FAMILIES = {name: tiny for name, tiny in ALL.items() if not tiny.apart}
