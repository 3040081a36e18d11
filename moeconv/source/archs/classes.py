"""The classes in transformers that read a config.json. They compute nothing, and torch stays out (but of Gemma 4, whose
class imports what images are read with)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def config_class(model_type: str) -> Any:
    """Returns the class of the settings of this model_type."""
    with torch_later():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return CONFIG_MAPPING[model_type]


class _Torch:
    """Stands for the module, which is imported when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


@contextmanager
def torch_later() -> Iterator[None]:
    """Around what imports those classes. One module that they begin with, modeling_rope_utils, imports torch (in two
    seconds) for functions that no class of settings calls: here it gets it when one of them is called."""
    utils: Any = import_module("transformers.utils")
    name, asked = "transformers.modeling_rope_utils", utils.is_torch_available
    if name in sys.modules or not asked():
        yield
        return
    utils.is_torch_available = lambda: False
    try:
        rope_utils: Any = import_module(name)
    finally:
        utils.is_torch_available = asked
    rope_utils.torch = _Torch()
    yield
