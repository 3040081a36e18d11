"""What the system reads beyond what a page fault asks for: as much as Linux does by default, on every machine.

A program that maps its weights, as llama.cpp does, reads this much around each page that it touches. Some virtual
machines set megabytes, which fill its memory with what it did not ask for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.cgroups import disk_of

USUAL_KB = 128
ROOT = Path("/sys/dev/block")


@contextmanager
def read_ahead(path: Path, kb: int = USUAL_KB, root: Path = ROOT) -> Iterator[int | None]:
    """Inside the block files that are opened on the disk under `path` are read ahead by so much; afterwards as before.
    Gives what holds, as a result is to say it: `kb`; what was set, where it can't be changed, which is said; None for
    what lies on no disk of this machine."""
    setting = root / disk_of(path) / "queue/read_ahead_kb"
    if not setting.exists():
        yield None
        return
    before = setting.read_text()
    try:
        setting.write_text(f"{kb}\n")
        holds = kb
    except OSError as error:
        holds = int(before)
        print(f"{setting} stays at {before.strip()} ({error.strerror})", file=sys.stderr, flush=True)
    try:
        yield holds
    finally:
        with suppress(OSError):
            setting.write_text(before)
