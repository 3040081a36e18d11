"""Which settings transformers looks at, as far as its source says: the source is read, not run."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

_SHARED = (
    "configuration_utils.py", "modeling_rope_utils.py", "modeling_utils.py", "modeling_layers.py", "masking_utils.py",
    "cache_utils.py", "integrations/moe.py", "integrations/sdpa_attention.py",
)  # fmt: skip
"""Files of transformers that run for every family."""
_READ = re.compile(r'config\.(\w+)|(?:getattr|hasattr)\([\w.]*config, "(\w+)"|"(\w+)" (?:not )?in [\w.]*config')


def without_effect(names: Collection[str], config_class: Any) -> tuple[str, ...]:
    """Returns those of the names of settings that can't change an answer of the class's model: neither the class nor
    its modelling code knows them, or transformers drops them, since they say how texts are written."""
    from transformers import GenerationConfig

    if not names:
        return ()
    module = Path(str(sys.modules[config_class.__module__].__file__))
    models = module.parent.glob(module.name.replace("configuration_", "modeling_"))
    of_class = {*dir(config_class), *config_class.attribute_map, *_words(module)}
    of_model = {word for file in models for word in _words(file)} | _shared()
    dropped = set(vars(GenerationConfig())) - of_class  # type: ignore[no-untyped-call]
    return tuple(sorted(name for name in names if name in dropped or name not in of_class | of_model))


def _words(file: Path) -> Iterator[str]:
    """Yields all names and strings of a program, without its comments."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        for found in (getattr(node, field, None) for field in ("id", "attr", "arg", "value")):
            if isinstance(found, str):
                yield found


def _shared() -> Set[str]:
    """Returns the settings that are read for every family."""
    import transformers

    folder, found = Path(str(transformers.__file__)).parent, set()
    for file in (folder / name for name in _SHARED if (folder / name).is_file()):
        found |= {name for read in _READ.findall(file.read_text("utf-8")) for name in read}
    return found


def on(settings: Mapping[str, Any], name: str) -> bool:
    """Whether a setting says anything."""
    return settings[name] not in (None, False, [], {}) or name == "is_causal"
