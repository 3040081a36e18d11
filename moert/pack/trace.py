"""trace.safetensors: the experts that calibration samples went through, in order. SPEC.md has the layout.

A cache's hits on them can be replayed (moert.experts.policy.replay). The eviction policy that hits most often at each
of EVICTION_SHARES is chosen when the file is made, and stands in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.pack.errors import HeaderInvalid
from moert.pack.model_spec import STACKS, ModelSpec, StackName
from moert.pack.tensors import TensorFile, to_bytes

TRACE = "trace.safetensors"
VERSION = 1
DROPPED = 65535
"""Stands where a token was sent to no expert, since the one it selected was full."""
MOST_ENTRIES = 1 << 17
"""Entries (one expert of one token in one layer) that are recorded at most: 256 KiB."""

EVICTION_SHARES = (12, 25, 50, 75)
"""Shares of the experts' bytes, in percent, that eviction policies are chosen for."""
EVICTION = "eviction"

U16 = npt.NDArray[np.uint16]
_POLICY = re.compile("([1-9][0-9]{0,2})=([a-z-]{1,32})")
SampleRoutes = Mapping[StackName, npt.NDArray[np.integer[Any]]]
"""For each stack with experts [tokens, layers, top_k]: experts of one sample, -1 where it was dropped. The layers are
those with experts, in order."""


@dataclass(frozen=True)
class StackTrace:
    """experts [tokens, layers, top_k] u16, DROPPED where there is none; sample i has the tokens starts[i] to
    starts[i + 1] - 1, starts [samples + 1] u32."""

    experts: U16
    starts: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Trace:
    """The routing of some samples: the encoder reads all tokens of a sample at once, the decoder one by one.

    `eviction`: share of the experts' bytes that has room, in percent → the name of the eviction policy that hits most
    often there; ascending, empty in files of older writers.
    """

    num_experts: int
    stacks: Mapping[StackName, StackTrace]
    eviction: Mapping[int, str] = field(default_factory=dict)

    def eviction_at(self, share: float) -> str | None:
        """Returns the name of the policy for the recorded share that is nearest to `share` (a fraction), of two as near
        the smaller one; None where none is recorded."""
        nearest = min(self.eviction, key=lambda percent: abs(percent - 100 * share), default=None)
        return None if nearest is None else self.eviction[nearest]

    @property
    def n_samples(self) -> int:
        return min((len(stack.starts) - 1 for stack in self.stacks.values()), default=0)

    @property
    def decoder_tokens(self) -> int:
        return len(self.stacks["decoder"].experts) if "decoder" in self.stacks else 0

    def sample(self, index: int) -> dict[StackName, U16]:
        """Experts of one sample [tokens, layers, top_k], the encoder's first."""
        return {
            name: self.stacks[name].experts[self.stacks[name].starts[index] : self.stacks[name].starts[index + 1]]
            for name in STACKS
            if name in self.stacks
        }

    def check(self, spec: ModelSpec) -> None:
        """Raises HeaderInvalid if this is not the routing of a model of this shape."""
        found = {name: trace.experts.shape[1:] for name, trace in self.stacks.items()}
        counts = {name: len(spec.moe_layers(name)) for name in STACKS}
        expected = {name: (count, spec.moe.router.top_k) for name, count in counts.items() if count}
        if self.num_experts != spec.moe.n or found != expected:
            raise HeaderInvalid(
                f"{TRACE} names {self.num_experts} experts in (layers, top_k) {found}, the model has "
                f"{spec.moe.n} in {expected}: profile the paths of this pack again"
            )

    def to_bytes(self) -> bytes:
        """The file's content; equal traces give equal bytes."""
        tensors: dict[str, npt.NDArray[Any]] = {}
        for name, stack in self.stacks.items():
            tensors[f"{name}.experts"], tensors[f"{name}.samples"] = stack.experts, stack.starts
        metadata: dict[str, object] = {
            "format": "model.pack trace",
            "version": VERSION,
            "num_experts": self.num_experts,
        }
        if self.eviction:
            metadata[EVICTION] = ",".join(f"{percent}={name}" for percent, name in self.eviction.items())
        return to_bytes(tensors, metadata)

    @classmethod
    def from_bytes(cls, body: bytes) -> Trace:
        """Raises HeaderInvalid or FormatTooNew."""
        file = TensorFile(TRACE, body, VERSION)
        num_experts = file.number("num_experts", 65535)
        stacks: dict[StackName, StackTrace] = {}
        for name in STACKS:
            if file.has_tensor(f"{name}.experts"):
                stacks[name] = _stack(file, name, num_experts)
        entries = sum(stack.experts.size for stack in stacks.values())
        if entries > MOST_ENTRIES:
            raise file.wrong(f"has {entries} entries, none has more than {MOST_ENTRIES}")
        if not stacks or len({len(stack.starts) for stack in stacks.values()}) > 1:
            raise file.wrong("has no stack, or stacks with different numbers of samples")
        return cls(num_experts, stacks, _eviction(file))


def record(num_experts: int, samples: Iterable[SampleRoutes]) -> Trace:
    """The first samples, as many as MOST_ENTRIES allows; the first one may be cut short."""
    kept: list[SampleRoutes] = []
    room = MOST_ENTRIES
    for sample in samples:
        entries = sum(routes.size for routes in sample.values())
        if entries > room:
            if not kept:
                kept.append({name: routes[: len(routes) * room // entries] for name, routes in sample.items()})
            break
        kept.append(sample)
        room -= entries
    stacks: dict[StackName, StackTrace] = {}
    for name in STACKS:
        parts = [sample[name] for sample in kept if name in sample]
        if parts:
            starts = np.cumsum([0, *map(len, parts)]).astype(np.uint32)
            stacks[name] = StackTrace(_as_u16(np.concatenate(parts), num_experts), starts)
    return Trace(num_experts, stacks)


def _as_u16(experts: npt.NDArray[np.integer[Any]], num_experts: int) -> U16:
    if experts.size and not -1 <= experts.min() <= experts.max() < num_experts:
        raise ValueError(f"a trace names experts {experts.min()} to {experts.max()}, there are {num_experts}")
    return np.where(experts < 0, DROPPED, experts).astype(np.uint16)


def _eviction(file: TensorFile) -> dict[int, str]:
    """Returns the policies by share, of text as 12=lru,25=expected."""
    if not file.has(EVICTION):
        return {}
    text = file.text(EVICTION)
    parts = _POLICY.findall(text)
    shares = [int(percent) for percent, _ in parts]
    joined = ",".join(f"{percent}={name}" for percent, name in parts)
    if joined != text or not parts or shares != sorted(set(shares)) or not 0 < shares[0] <= shares[-1] <= 100:
        raise file.wrong(f"{EVICTION} should be policies by rising percent, as 12=lru,25=expected, found {text[:40]!r}")
    return {int(percent): name for percent, name in parts}


def _stack(file: TensorFile, name: StackName, num_experts: int) -> StackTrace:
    experts: U16 = file.tensor(f"{name}.experts", np.uint16, 3)
    starts: npt.NDArray[np.uint32] = file.tensor(f"{name}.samples", np.uint32)
    sound = (
        len(starts) > 1
        and starts[0] == 0
        and starts[-1] == len(experts)
        and bool((starts[1:] >= starts[:-1]).all())
        and bool(((experts < num_experts) | (experts == DROPPED)).all())
    )
    if not sound:
        raise file.wrong(f"the routing of the {name} contradicts itself")
    return StackTrace(experts, starts)
