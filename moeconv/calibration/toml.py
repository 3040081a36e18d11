"""TOML from the standard library, or from its backport where Python is older than 3.11."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from moeconv.errors import SettingsError
from moeconv.strict_json import bounded

_MOST_BYTES = 1 << 20


def read_toml(path: Path) -> dict[str, Any]:
    """Raises SettingsError."""
    try:
        document: dict[str, Any] = tomllib.loads(bounded(path, _MOST_BYTES).decode("utf-8-sig"))
        return document
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path}: can't be read as TOML ({error})") from None
