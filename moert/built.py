"""The version of both programs in one line: the release, and the commit that it was built from.

The build of a package loads this file alone (moert/kernels/build.py), so it imports nothing of moert.
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

RECORD = Path(__file__).with_name("commit.txt")  # beside this file in a package, never in a source tree
_CHANGED = "-dirty"
_LONGEST_S = 5.0


def commit(root: Path = RECORD.parents[1], record: Path = RECORD) -> str | None:
    """Returns the commit of the source tree at `root`, marked where files differ from it; the one that was recorded
    with a package; None where neither is known."""
    with suppress(OSError, subprocess.SubprocessError):
        if not (root / ".git").exists():  # a checkout further up is of somebody else
            return record.read_text(encoding="ascii").strip()
        git = ["git", "--no-optional-locks", f"--git-dir={root / '.git'}", f"--work-tree={root}"]
        asked = ["describe", "--always", "--exclude=*", "--abbrev=12", f"--dirty={_CHANGED}"]
        done = subprocess.run(
            [*git, *asked], capture_output=True, text=True, check=True, cwd=root, timeout=_LONGEST_S
        )  # fmt: skip
        return done.stdout.strip()
    return None


def version_line(program: str, version: str, *more: str) -> str:
    """Returns "PROGRAM VERSION", followed by the commit, where it is known, and by what else is given."""
    found = commit()
    parts = (
        [] if found is None else [f"commit {found.removesuffix(_CHANGED)}{' with changes' * found.endswith(_CHANGED)}"]
    )
    return ", ".join([f"{program} {version}", *parts, *more])
