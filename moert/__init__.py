"""moert: runs a model.pack inside a memory budget."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from moert.chat.conversation import Conversation
    from moert.chat.speaker import Reply
    from moert.engine import Engine
    from moert.errors import RunError
    from moert.generation.answer import Answer, Interrupted
    from moert.generation.settings import GenerationSettings
    from moert.pack.errors import Error, PackError
    from moert.settings import EngineOptions, EngineSettings

__version__ = "0.1.0"
_PLACES = {  # read when they are first asked for, since most take numpy
    "Answer": "moert.generation.answer", "Conversation": "moert.chat.conversation", "Engine": "moert.engine",
    "EngineSettings": "moert.settings", "Error": "moert.pack.errors", "GenerationSettings": "moert.generation.settings",
    "Interrupted": "moert.generation.answer", "PackError": "moert.pack.errors", "Reply": "moert.chat.speaker",
    "RunError": "moert.errors",
}  # fmt: skip
__all__ = [
    "Answer", "Conversation", "Engine", "EngineSettings", "Error", "GenerationSettings", "Interrupted", "PackError",
    "Reply", "RunError", "__version__", "load",
]  # fmt: skip


def load(path: str | os.PathLike[str], **settings: Unpack[EngineOptions]) -> Engine:
    """Opens a pack: `load("model.pack", memory="1.5GB").generate("Once")`. `settings`: those of EngineSettings. Close
    the engine that comes of it, or use it in a with block.

    Raises Error: PackError for a damaged pack, RunError for what can't be run as asked.
    """
    from moert.engine import Engine

    return Engine.open(path, **settings)


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
