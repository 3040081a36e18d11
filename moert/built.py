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
        return subprocess.check_output([*git, *asked], text=True, stderr=subprocess.DEVNULL, timeout=_LONGEST_S).strip()
    return None


def version_line(program: str, version: str, *more: str) -> str:
    """Returns "PROGRAM VERSION", followed by the commit, where it is known, and by what else is given."""
    found = commit()
    changes = " with changes" if found and found.endswith(_CHANGED) else ""
    known = [f"commit {found.removesuffix(_CHANGED)}{changes}"] if found else []
    return ", ".join([f"{program} {version}", *known, *more])
