"""What reading a pack's files, and texts, takes is asked of --memory before it is taken, from the manifest on."""

from __future__ import annotations

from dataclasses import replace

from moert.budget.budget import AUTO_MEMORY, Budget, CacheLimit, MemoryLimit, spare_bytes
from moert.errors import BudgetTooSmall
from moert.machine.memory import held_bytes, most_bytes
from moert.pack.bounds import COVERED_BYTES, NOTHING, TEXT_BYTES, TOKENIZER, Room, Taken, bound_of, tokenizer_takes
from moert.pack.reader import Pack
from moert.stats import size
from moert.wording import said

Limit = MemoryLimit | CacheLimit | None
_ANY = 1 << 40  # letters, where nobody knows how much memory there is
_PART = 1 << 20


def room_within(limit: Limit) -> Room:
    """For a process with this limit; where it bounds no process, what the machine has bounds it. Raises
    BudgetTooSmall when it is asked for more than is left."""

    def room(nbytes: int, name: str) -> None:
        if nbytes <= COVERED_BYTES:
            return
        held = held_bytes()
        most, called = _most(limit, held)
        if most is None:
            return
        needed = held + nbytes + spare_bytes(most)
        if needed > most:
            smallest = -(-needed // 10**6) * 10**6
            raise BudgetTooSmall(
                f"{called} is too small to read {name} of the pack, which may take {size(nbytes)} beside "
                f"{size(held)} that the process holds: give at least {said('memory', smallest)} ({size(smallest)})",
                smallest,
            )

    return room


def budget_of(pack: Pack, widened: bool, thread_bytes: int, beside_bytes: int) -> Budget:
    """Returns the Budget of a pack, its tokenizer included; see Budget.of. Raises FileMissing or FileTruncated."""
    budget = Budget.of(pack.manifest, widened, thread_bytes, beside_bytes=beside_bytes)
    return replace(budget, tokenizer=_tokenizer(pack))


def _tokenizer(pack: Pack) -> Taken:
    """Returns what its tokenizer takes; nothing where it is too large to be read at all."""
    entry = pack.manifest.files.get(TOKENIZER)
    if entry is None or entry.nbytes > bound_of(TOKENIZER).most_bytes:
        return NOTHING
    with pack.opened(TOKENIZER) as file:
        starts = range(0, file.nbytes, _PART)
        return tokenizer_takes(file.read(min(_PART, file.nbytes - at), at) for at in starts)


def letters_within(limit: Limit) -> tuple[int, str]:
    """The most letters of a text that there is room to make tokens of, and the limit in words."""
    held = held_bytes()
    most, called = _most(limit, held)
    if most is None:
        return _ANY, called
    return max(COVERED_BYTES, most - held - spare_bytes(most)) // TEXT_BYTES, called


def _most(limit: Limit, held: int) -> tuple[int | None, str]:
    """Bytes that the process may come to hold, if anybody knows, and the limit in words."""
    bounds, machine = limit if isinstance(limit, MemoryLimit) else AUTO_MEMORY, most_bytes()
    most = machine if bounds is AUTO_MEMORY else bounds.resolve(held, machine)
    return most, "" if most is None else bounds.named(most)
