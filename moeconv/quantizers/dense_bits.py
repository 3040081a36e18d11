"""Which widths the matrices outside the experts get, by role."""

from __future__ import annotations

from collections.abc import Mapping

from moeconv.errors import SettingsError
from moert.pack.manifest import Dense
from moert.pack.model_spec import ModelSpec

QUANTIZER, GROUP_SIZE = "group", 64


def dense_of(spec: ModelSpec, wanted: int | Mapping[str, int] | None) -> Dense | None:
    """One width stands for all roles that the model has. Raises SettingsError for a role that it has not."""
    if wanted is None:
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


def dense_bits_text(wanted: int | Mapping[str, int]) -> str:
    """`wanted` as it is written on the command line."""
    if isinstance(wanted, int):
        return str(wanted)
    return ",".join(f"{role}={width}" for role, width in wanted.items())


def width_text(bits: Mapping[str, int]) -> str:
    """As a person reads it: {"attention": 4, "head": 8} → "attention 4, head 8 bits"."""
    return ", ".join(f"{role} {width}" for role, width in bits.items()) + " bits"
