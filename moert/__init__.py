"""moert: runs a model.pack inside a memory budget."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from moert.chat.conversation import Conversation, Reply
    from moert.engine.constraint import Grammar
    from moert.engine.engine import Engine
    from moert.engine.generation import GenerationSettings
    from moert.engine.session import Answer, Interrupted
    from moert.engine.settings import EngineOptions, EngineSettings
    from moert.errors import RunError
    from moert.pack.errors import Error, PackError

__version__ = "0.2.0"
_PLACES = {  # imported at their first use, since most take numpy
    "Answer": "moert.engine.session", "Conversation": "moert.chat.conversation", "Engine": "moert.engine.engine",
    "EngineSettings": "moert.engine.settings", "Error": "moert.pack.errors",
    "GenerationSettings": "moert.engine.generation", "Grammar": "moert.engine.constraint",
    "Interrupted": "moert.engine.session",
    "PackError": "moert.pack.errors", "Reply": "moert.chat.conversation", "RunError": "moert.errors",
}  # fmt: skip
__all__ = [
    "Answer", "Conversation", "Engine", "EngineSettings", "Error", "GenerationSettings", "Grammar", "Interrupted",
    "PackError", "Reply", "RunError", "__version__", "load",
]  # fmt: skip


def load(path: str | os.PathLike[str], **settings: Unpack[EngineOptions]) -> Engine:
    """Opens a pack and returns its engine: `load("model.pack", memory="1.5GB").generate("Once")`. `settings`: the
    fields of EngineSettings, by name. Close the engine, or use it in a with block.

    Raises Error: PackError for a damaged pack, RunError where the pack can't run with these settings on this machine.
    """
    from moert.engine.engine import Engine

    return Engine.open(path, **settings)


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
