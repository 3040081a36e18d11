"""Divides --memory: what is fixed, and what is left for the expert cache. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from moert.errors import BudgetTooSmall, InvalidMemory
from moert.pack.manifest import BACKBONE, Manifest
from moert.pack.model_spec import backbone_tensors
from moert.stats import size

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}
_SIZE = re.compile(r"([0-9]+|[0-9]*\.[0-9]+)\s*([A-Za-z]*|%)")


_ROUNDED = 16  # bytes an activation takes: as float32, and rounded in up to three orders with its scales


@dataclass(frozen=True)
class MemoryLimit:
    """--memory as given: bytes in all, or everything that is fixed plus a share of the experts' bytes."""

    nbytes: int | None = None
    share: float | None = None


def parse_memory(text: str) -> MemoryLimit:
    """'1.5GB', '800MB', '512MiB', '123456' (bytes) or '50%'. Raises InvalidMemory."""
    hint = "expected a size like 1.5GB, 800MB or 512MiB, or a share like 50%"
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in (*_UNITS, "%"):
        raise InvalidMemory(f"--memory {text!r} is not a size: {hint}")
    number, unit = Fraction(match[1]), match[2].upper()
    if unit == "%":
        if not 0 < number <= 100:
            raise InvalidMemory(f"--memory {text!r} should be more than 0% and at most 100%")
        return MemoryLimit(share=float(number / 100))
    nbytes = int(number * _UNITS[unit])
    if not 0 < nbytes < 1 << 62:
        raise InvalidMemory(f"--memory {text!r} is not a size that a machine can have: {hint}")
    return MemoryLimit(nbytes=nbytes)


@dataclass(frozen=True)
class Budget:
    """What a pack needs in memory, in bytes.

    backbone: everything but the experts. scratch: one expert unpacked, or the rounded activations of one token's
    experts. layer: the most that one token can demand of one layer (its top_k largest experts). token: that, over all
    layers of the decoder. experts: all of them. An expert counts with its whole file, which is what is kept of it.
    """

    backbone_bytes: int
    scratch_bytes: int
    layer_bytes: int
    token_bytes: int
    expert_bytes: int

    @classmethod
    def of(cls, manifest: Manifest, widened: bool = False) -> Budget:
        """`widened`: weights are computed with in float32; otherwise they stay as they are stored."""
        spec = manifest.model
        per_layer: dict[tuple[str, int], list[int]] = {}
        for entry in manifest.experts:
            per_layer.setdefault((entry.key.stack, entry.key.layer), []).append(entry.file_bytes)
        demand = {at: sum(sorted(sizes)[-spec.moe.top_k :]) for at, sizes in per_layer.items()}
        return cls(
            backbone_bytes=_widened_bytes(manifest) if widened else _stored_bytes(manifest),
            scratch_bytes=4 * spec.weights_per_expert()
            if widened
            else _ROUNDED * spec.moe.top_k * (spec.d_model + spec.moe.d_ff),
            layer_bytes=max(demand.values(), default=0),
            token_bytes=sum(nbytes for (stack, _), nbytes in demand.items() if stack == "decoder"),
            expert_bytes=sum(entry.file_bytes for entry in manifest.experts),
        )

    def fixed_bytes(self, state_bytes: int) -> int:
        """All but the expert cache, for a request whose keys and values take `state_bytes`."""
        return self.backbone_bytes + self.scratch_bytes + state_bytes

    def smallest_bytes(self, state_bytes: int) -> int:
        """The smallest --memory that such a request runs in."""
        return self.fixed_bytes(state_bytes) + self.layer_bytes

    def cache_bytes(self, limit: MemoryLimit | None, state_bytes: int) -> int:
        """What is left for the expert cache; without a limit, room for all experts. Raises BudgetTooSmall."""
        if limit is None:
            return self.expert_bytes
        if limit.share is not None:
            left = int(limit.share * self.expert_bytes)
        else:
            left = (limit.nbytes or 0) - self.fixed_bytes(state_bytes)
        if left < self.layer_bytes:
            smallest = self.smallest_bytes(state_bytes)
            asked = limit.nbytes or self.fixed_bytes(state_bytes) + left
            percent = "" if limit.nbytes is None or limit.nbytes > 100 else f"; did you mean {limit.nbytes}%?"
            raise BudgetTooSmall(
                f"a memory budget of {asked} bytes is too small: this request needs --memory {smallest} "
                f"({size(smallest)}): {size(self.backbone_bytes + self.scratch_bytes)} for all but the experts, "
                f"{size(state_bytes)} for keys and values, {size(self.layer_bytes)} for one token's experts of a layer"
                f"{percent}",
                smallest,
            )
        return min(left, self.expert_bytes)


def _stored_bytes(manifest: Manifest) -> int:
    return manifest.files[BACKBONE].nbytes if BACKBONE in manifest.files else 0


def _widened_bytes(manifest: Manifest) -> int:
    return 4 * sum(prod(shape) for shape in backbone_tensors(manifest.model).values())
