"""This machine, as packs will find it."""

from __future__ import annotations

import json
import subprocess
import sys

from moeconv.plan.outlook import Host


def this_host() -> Host:
    """As `moert info --system` says, run by itself: this process has libraries in it that moert never loads."""
    command = [sys.executable, "-m", "moert", "info", "--system", "--json"]
    facts = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    process, widened = facts["process"], facts["native_kernels"]["missing"] is not None
    return Host(process["held_bytes"], process["thread_bytes"], widened)
