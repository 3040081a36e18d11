"""Mamba-2 in the families that have it: the places of its tensors, and the check that its steps have no bounds."""

from __future__ import annotations

import math

from moeconv.source.archs.config import Config, UnsupportedModel
from moeconv.source.archs.description import Place, rows
from moert.pack.parts import Mamba2

UNBOUNDED = (0.0, math.inf)
_LARGEST = 2.0**128  # no step is: they are float32, and over 0


def unbounded_steps(config: Config, *names: str) -> None:
    """Raises UnsupportedModel if the setting, whose name in the class is the first of `names`, bounds steps."""
    limit, config.allowed[names[0]] = config.get(*names), (UNBOUNDED,)
    pair = isinstance(limit, (tuple, list)) and len(limit) == 2
    numbers = pair and all(isinstance(each, (int, float)) for each in limit)
    if not numbers or not (limit[0] <= 0 and limit[1] >= _LARGEST):
        raise UnsupportedModel(
            f"config.json sets {names[0]} {limit!r}: transformers bounds the steps of tokens that it reads together, "
            "but not of one that it reads alone, so that its answer depends on the pieces in which a text came"
        )


def places(part: Mamba2, d_model: int, at: str) -> dict[str, Place]:
    """Returns the places of Mamba-2's tensors: the matrices of `in` and of steps are one after the other in a tensor of
    the module `at`."""
    wide = part.features + part.channels
    both = (wide + part.n, d_model)
    return {
        "mixer.in": Place(f"{at}.in_proj", rows(0, wide), both),
        "mixer.dt": Place(f"{at}.in_proj", rows(wide), both),
        "mixer.conv": Place(f"{at}.conv1d", shape=(part.channels, 1, part.taps)),
    }
