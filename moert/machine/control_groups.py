"""The control groups that this process runs in, as Linux shows them: limits beyond those of the machine."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")


def control_groups(root: Path, controller: str) -> list[Path]:
    """Folders of the process's control groups and those above them, of version 2 and of one controller in version 1.

    Inside a container the path named in /proc may not exist; its own group is then the root of what is mounted.
    """
    folders = []
    for line in text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = Path(path.lstrip("/"))
        folders += [mount / part for part in (group, *group.parents)]
    return folders


def text(path: Path) -> str:
    """What the file holds; nothing if it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
