"""What reading a pack's files takes is asked of --memory before it is taken, from the manifest on."""

from __future__ import annotations

from moert.budget.budget import AUTO_MEMORY, CacheLimit, MemoryLimit, spare_bytes
from moert.errors import BudgetTooSmall
from moert.machine.memory import held_bytes, most_bytes
from moert.pack.bounds import Room
from moert.stats import size
from moert.wording import said

_COVERED_BYTES = 8 << 20
"""What the margin of every budget has room for: so small a file is not asked about."""


def room_within(limit: MemoryLimit | CacheLimit | None) -> Room:
    """For a process with this limit; where it bounds no process, what the machine has bounds it. Raises
    BudgetTooSmall when it is asked for more than is left."""
    bounds = limit if isinstance(limit, MemoryLimit) else AUTO_MEMORY

    def room(nbytes: int, name: str) -> None:
        if nbytes <= _COVERED_BYTES:
            return
        held, machine = held_bytes(), most_bytes()
        most = machine if bounds is AUTO_MEMORY else bounds.resolve(held, machine)
        if most is None:
            return
        needed = held + nbytes + spare_bytes(most)
        if needed > most:
            smallest = -(-needed // 10**6) * 10**6
            raise BudgetTooSmall(
                f"{bounds.named(most)} is too small to read {name} of the pack, which may take {size(nbytes)} beside "
                f"{size(held)} that the process holds: give {said('memory', smallest)} ({size(smallest)})",
                smallest,
            )

    return room
