"""What every program that writes a page of docs/ anew ends with."""

from __future__ import annotations

import sys
from pathlib import Path


def brought_up_to_date(page: Path, fresh: str) -> int:
    """Writes the page where it differs and --write was given. Returns the exit status: 1 if it differs and was not."""
    if page.exists() and page.read_text(encoding="utf-8") == fresh:
        return 0
    if "--write" in sys.argv[1:]:
        page.write_text(fresh, encoding="utf-8")
        return 0
    sys.stderr.write(f"docs/{page.name} is outdated: run make readme\n")
    return 1
