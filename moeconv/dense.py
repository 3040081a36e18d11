"""Widths of the matrices outside the experts: by role, or by units of them, which get widths of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from moeconv.artifacts import DenseUnit
from moeconv.errors import SettingsError
from moert.pack.manifest import Dense, Quantization, stored_tensors
from moert.pack.model_spec import ModelSpec
from moert.pack.parts import TRELLIS_ROLES
from moert.pack.tensors import DTYPE_BITS

# Widths of the matrices outside the experts, by role.

QUANTIZER, GROUP_SIZE = "group", 64
WEIGHED = "gptq"
"""The quantizer where moments of the inputs weigh the errors of matrices."""
MOST_WEIGHED = 4096
"""The most inputs of such a matrix: their moments take 67 MB, and twelve times that while they are factored."""


SOURCE = "source"
"""The word for matrices that are stored as in the checkpoint."""
DenseBits = int | str | Mapping[str, int]
"""Widths outside the experts: one for all roles that the model has, one for each role, or SOURCE."""


def dense_of(spec: ModelSpec, wanted: DenseBits | None) -> Dense | None:
    """Returns the widths by role; None where all is stored as in the checkpoint. Raises SettingsError for a role that
    the model lacks."""
    if wanted is None or isinstance(wanted, str):
        return None
    roles = spec.roles()
    bits = dict.fromkeys(map(str, roles), wanted) if isinstance(wanted, int) else dict(wanted)
    unknown = [role for role in bits if role not in roles]
    if unknown:
        raise SettingsError(
            f"--dense-bits {dense_bits_text(wanted)}: this {spec.family} model has no {unknown[0]} matrices of its "
            f"own, only {', '.join(roles)}: leave {unknown[0]} out"
        )
    return Dense(QUANTIZER, GROUP_SIZE, {role: bits[role] for role in roles if role in bits})


def dense_bits_text(wanted: DenseBits) -> str:
    """Returns `wanted` in the form of the command line."""
    if not isinstance(wanted, Mapping):
        return str(wanted)
    return ",".join(f"{role}={width}" for role, width in wanted.items())


def width_text(bits: Mapping[str, int]) -> str:
    """Returns widths as text for a person: {"attention": 4, "head": 8} → "attention 4, head 8 bits"."""
    return ", ".join(f"{role} {width}" for role, width in bits.items()) + " bits"


# Units: the matrices of one role in one layer, or a part of them, which get one width.

PARTS: Mapping[str, Mapping[str, str]] = {
    "attention": dict.fromkeys(("k", "v", "kv_a", "k_turn", "keys", "values"), "keys and values"),
    "ffn": {"down": "down"},
}
"""By role, the matrices that are a unit of their own in each layer, with its name: fewer than the rest, and errors in
them cost more."""

UNIT_GROUP_SIZE = 128
"""Inputs that share a scale where the widths of units are chosen: of GROUP_SIZE, scales cost more than they gain."""
UNQUANTIZED = 16
"""The widest width of a unit, whose matrices a pack stores in 16 bits."""
TRELLIS_WIDTHS = (-2, -3, -4)
"""Widths of units in trellis codes, of roles that may have them: below 0, as kinds of matrices are in moert.h."""
USUAL = 8
"""The width where no loss decides: 8 bits change weights by a few thousandths."""


def may_be_coded(unit: DenseUnit, purpose: str) -> bool:
    """Returns whether plans of a purpose (artifacts.PURPOSES) want trellis codes for a unit: not where they save time,
    since products with trellis codes may take longer than their bytes, but for an embedding, of which rows are read."""
    return purpose != "speed" or unit.role == "embed"


def usual_widths(spec: ModelSpec) -> dict[str, int]:
    """Returns the widths by role where no loss decides them: USUAL for all but routers, which are small and decide on
    everything behind them."""
    return {role: USUAL for role in spec.roles() if role != "router"}


def dense_units(spec: ModelSpec, by_layer: bool = True) -> dict[DenseUnit, list[str]]:
    """Returns the units of a model, in the order of its tensors, with the canonical names of their matrices: each role
    of each layer, in parts where it has PARTS, the embedding, the head. Not `by_layer`: each role of all layers.
    Routers belong to none."""
    found: dict[DenseUnit, list[str]] = {}
    for name, tensor in spec.tensors.items():
        if tensor.role not in (None, "router"):
            found.setdefault(_unit(name, tensor.role, by_layer), []).append(name)
    return found


def _unit(name: str, role: str, by_layer: bool) -> DenseUnit:
    words = name.removesuffix(".weight").split(".")
    if not by_layer or len(words) < 3 or not words[1].isdecimal():
        return DenseUnit(role)
    return DenseUnit(role, words[0], int(words[1]), PARTS.get(role, {}).get(words[-1], ""))


def weighed(spec: ModelSpec) -> list[str]:
    """Returns the canonical names of the matrices of units whose inputs are collected when text runs: all but the
    embedding, keys and values of another sequence, with its padding, and matrices of more than MOST_WEIGHED inputs."""
    named = (name for names in dense_units(spec).values() for name in names if name != "embed.weight")
    seen = (name for name in named if not name.endswith((".cross.k.weight", ".cross.v.weight")))
    return [name for name in seen if spec.tensors[name].shape[-1] <= MOST_WEIGHED]


def head_of(spec: ModelSpec) -> str:
    """Returns the canonical name of the matrix that gives logits."""
    return "embed.weight" if spec.head.tied else "head.weight"


def _all_as(spec: ModelSpec, units: Collection[DenseUnit]) -> dict[DenseUnit, list[str]]:
    """Returns all units of the kind of these: by layer, or of all layers."""
    return dense_units(spec, by_layer=any(unit.stack for unit in units))


def dense_of_units(spec: ModelSpec, widths: Mapping[DenseUnit, int], quantizer: str = QUANTIZER) -> Dense | None:
    """Returns the manifest's entry for widths of all units; None for none. A role has the width of most of its
    matrices, others have their own."""
    if not widths:
        return None
    named = _all_as(spec, widths)
    each = {name: abs(bits) for unit, bits in widths.items() for name in named[unit]}
    trellis = tuple(role for role in TRELLIS_ROLES if any(unit.role == role and widths[unit] < 0 for unit in widths))
    usual = {
        role: Counter(bits for name, bits in each.items() if spec.tensors[name].role == role).most_common(1)[0][0]
        for role in dict.fromkeys(unit.role for unit in widths)
    }
    own = {name: bits for name, bits in each.items() if bits != usual[spec.tensors[name].role or ""]}
    return Dense(quantizer, UNIT_GROUP_SIZE, usual, matrices=own or None, trellis=trellis)


def unit_bytes(spec: ModelSpec, units: Sequence[DenseUnit], bits: int) -> dict[DenseUnit, int]:
    """Returns the bytes of each unit's tensors in a pack at a width, scales and minima counted."""
    trellis = TRELLIS_ROLES if bits < 0 else ()
    dense = Dense(QUANTIZER, UNIT_GROUP_SIZE, dict.fromkeys(spec.roles(), abs(bits)), trellis=trellis)
    tensors, named = stored_tensors(spec, Quantization("", 0, "BF16", 0, dense)), _all_as(spec, units)
    return {
        unit: sum(
            DTYPE_BITS[dtype or "BF16"] // 8 * int(np.prod(shape))
            for name in named[unit]
            for dtype, shape in tensors[name].values()
        )
        for unit in units
    }
