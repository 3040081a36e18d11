"""moert: runs a model.pack inside a memory budget."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moert.engine import Engine

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(path: str | os.PathLike[str], **settings: Any) -> Engine:
    """Opens a pack: `load("model.pack", memory="1.5GB").generate("Once")`. `settings`: those of
    moert.settings.EngineSettings. Close what comes of it, or use it in a with block.

    Raises moert.pack.errors.PackError for a damaged pack and moert.errors.RunError for what can't be run as asked.
    """
    from moert.engine import Engine

    return Engine.open(path, **settings)
