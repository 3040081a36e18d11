"""This machine, as packs will find it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from moeconv.plan.outlook import Host


def facts() -> dict[str, Any]:
    """What `moert info --system --json` says, run by itself: this process has libraries in it that moert never
    loads."""
    command = [sys.executable, "-m", "moert", "info", "--system", "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def host_of(found: dict[str, Any]) -> Host:
    """Of these facts, those that a budget asks for."""
    process, widened = found["process"], found["native_kernels"]["missing"] is not None
    return Host(process["held_bytes"], process["thread_bytes"], widened)


def this_host() -> Host:
    """See Host; asked now."""
    return host_of(facts())
