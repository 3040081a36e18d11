"""How far rotary positions turn a pair of features at each token, as transformers has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moert.pack.codec import F32

Parameters = Mapping[str, Any]
"""The rope_parameters of config.json."""


def turns(theta: float, dims: int, of: int | None = None) -> F32:
    """Returns frequencies [dims / 2] of a head of `of` features (None: `dims`), of which that many turn. Powers are
    computed in float64 and rounded once."""
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(of or dims)
    with np.errstate(all="ignore"):  # the caller looks at what comes out
        found: F32 = np.float32(1) / np.power(float(theta), exponents.astype(np.float64)).astype(np.float32)
    return found


def frequencies(parameters: Parameters, dims: int, longest: int) -> tuple[F32, float]:
    """Returns frequencies [dims / 2] of a kind of KINDS, and the factor of what they turn; `longest`: the positions of
    the model. Raises KeyError, TypeError, ValueError or ArithmeticError for parameters that a kind can't take."""
    plain = turns(parameters["rope_theta"], dims)
    with np.errstate(all="ignore"):
        found, factor = KINDS[parameters["rope_type"]](parameters, plain, longest)
    return found.astype(np.float32), float(factor)


def _linear(parameters: Parameters, plain: F32, _: int) -> tuple[F32, float]:
    return plain / parameters["factor"], 1.0


def _llama3(parameters: Parameters, plain: F32, _: int) -> tuple[F32, float]:
    """Long waves become longer, short ones stay, and those between change by degrees."""
    factor, low, high = (parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    length = parameters["original_max_position_embeddings"]
    waves = 2 * math.pi / plain
    degree = (length / waves - low) / (high - low)
    between = (1 - degree) * plain / factor + degree * plain
    found = np.where(waves > length / low, plain / factor, np.where(waves < length / high, plain, between))
    return found, 1.0


def _yarn(parameters: Parameters, plain: F32, longest: int) -> tuple[F32, float]:
    """YaRN (arXiv 2309.00071)."""
    pairs, theta, length = len(plain), parameters["rope_theta"], parameters["original_max_position_embeddings"]
    factor = _factor(parameters, longest)

    def place(turns_in_all: float) -> float:
        """Returns the pair, between two, that turns so often in a text of the original length."""
        return pairs * math.log(length / (turns_in_all * 2 * math.pi)) / math.log(theta)

    low, high = place(parameters.get("beta_fast") or 32), place(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high += 0.001 if low == high else 0
    kept = 1 - np.clip((np.arange(pairs, dtype=np.float32) - low) / (high - low), 0, 1)
    found = plain / factor * (1 - kept) + plain * kept
    if (said := parameters.get("attention_factor")) is not None:
        return found, said
    if (wide := parameters.get("mscale")) and (all_dims := parameters.get("mscale_all_dim")):
        return found, _scale(factor, wide) / _scale(factor, all_dims)
    return found, _scale(factor, 1)


def _scale(factor: float, wide: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * wide * math.log(factor) + 1.0


def _longrope(parameters: Parameters, plain: F32, longest: int) -> tuple[F32, float]:
    """Of the short factors, which transformers uses for texts of any length."""
    short, length = np.asarray(parameters["short_factor"], np.float32), parameters["original_max_position_embeddings"]
    if (said := parameters.get("attention_factor")) is None:
        factor = _factor(parameters, longest)
        said = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    return plain / short, said


def _factor(parameters: Parameters, longest: int) -> float:
    said = parameters.get("factor")
    return longest / parameters["original_max_position_embeddings"] if said is None else float(said)


KINDS: Mapping[str, Callable[[Parameters, F32, int], tuple[F32, float]]] = {
    "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope,
}  # fmt: skip
