"""What is asked of a device with memory of its own: a GPU, torch's code for it on the CPU, or a simulated one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NewType, Protocol

from moert.devices.costs import Clock, DeviceCosts
from moert.errors import RunError
from moert.kernels.backend import I32, Backend, ExpertView, ProjectionView
from moert.pack.codec import F32
from moert.pack.parts import Ffn

STAGING_BUFFERS = 4
"""Pinned pieces of memory that copies go through, shared by all layers (Mixtral-offloading, Eliseev & Mazur 2023)."""

Held = NewType("Held", object)
"""An expert in a device's memory, or on its way there: only the device that holds it looks inside."""
Running = NewType("Running", object)
"""What a device was asked to compute: alike."""


class DeviceFull(Exception):
    """The device has no memory left for what is asked: give experts back and ask again."""


class DeviceMissing(RunError):
    """A device that is not there, or can't be used here."""


class Device(Protocol):
    """Used by one thread, the model's. What is asked is done in the order asked, copies and computing side by side.

    All but `finish`, `wait` and `wait_left` come back at once; a copy may wait for one of the STAGING_BUFFERS."""

    name: str
    """As `open_device` takes it: "cuda:0"."""
    title: str
    """For people: the name of the card; of a simulated one it says that it is simulated."""
    simulated: bool
    """Whether its times are those of another machine: then they are taken from `clock`."""
    capacity_bytes: int
    """The most that it holds: experts, and what it computes with."""

    @property
    def clock(self) -> Clock:
        """What its times are of."""
        ...

    @property
    def used_bytes(self) -> int:
        """Memory that it holds now, everything included."""
        ...

    def weigh(self, nbytes: int, projections: Mapping[str, ProjectionView]) -> int:
        """Bytes that an expert takes there, of which `nbytes` lie in a buffer of the host."""
        ...

    def scratch_bytes(self, rows: int, d_model: int, d_ff: int) -> int:
        """What a mixture of so many rows takes there beside the experts, at most."""
        ...

    def copy(self, view: ExpertView) -> Held:
        """Begins to copy an expert there, packed as it is, out of a staging buffer, on the stream of copies. The
        buffer of the view is not changed or freed before `wait_left`. Raises DeviceFull."""
        ...

    def wait_left(self, held: Held) -> None:
        """Waits until the buffer that it was copied from is not needed any more: it lies in a staging buffer."""
        ...

    def has(self, held: Held) -> bool:
        """Whether its copy has come."""
        ...

    def wait(self, held: Held) -> None:
        """Waits until it has come."""
        ...

    def free(self, held: Held) -> None:
        """Gives its memory back, once all that was begun with it has ended."""
        ...

    def begin(
        self, experts: Sequence[Held], counts: Sequence[int], tokens: I32, x: F32, spec: Ffn
    ) -> Running:  # fmt: skip
        """Begins to compute expert after expert, each with the next `counts` of the tokens [rows]; those that are still
        on their way are waited for by the device, not by the caller. x [tokens of the pass, d_model] may be changed
        once this returns. Raises DeviceFull, and then has begun nothing."""
        ...

    def finish(self, running: Running, parts: F32) -> None:
        """Waits for it: parts [rows, d_model] = expert(x[token]) for each row, in the order given, not weighted.
        Whoever asks adds them up, so that the order of additions is the same wherever experts are computed."""
        ...

    def costs(self) -> DeviceCosts:
        """What things take there: measured in under a second, or remembered from the last time."""
        ...

    def backend(self, host: Backend) -> Backend | None:
        """One that has everything but the experts there, keys and values included, and hands to `host` what it can't
        do; None: all of that stays on the host."""
        ...

    def full(self, give_back: Callable[[], bool]) -> None:
        """From now on this is asked where that backend finds no room: whether experts gave some of theirs back."""
        ...

    def close(self) -> None:
        """Ends its streams and gives all of its memory back."""
        ...
