"""This machine, as packs will find it. Another process says so: this one has libraries in it that moert never loads."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from moeconv.plan.outlook import Host

_OF_PROCESS = """
import json
from moert.command import cli, system
print(json.dumps(system.process_facts()))
"""


def facts() -> dict[str, Any]:
    """Returns what `moert info --system --json` says."""
    return _said("-m", "moert", "info", "--system", "--json")


def host_of(found: dict[str, Any]) -> Host:
    """Of these facts, those that a budget asks for."""
    process, widened = found["process"], found["native_kernels"]["missing"] is not None
    return Host(process["held_bytes"], process["thread_bytes"], widened)


def this_host() -> Host:
    """Returns the same of this machine, asked now, and nothing else: speeds take a second to measure."""
    return host_of(_said("-c", _OF_PROCESS))


def _said(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found
