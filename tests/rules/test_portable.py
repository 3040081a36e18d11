"""What only some systems have is named in the rooms for it, where each has a fallback: of `os`, `mmap`, `signal` and
their like other modules use only what Linux, macOS and Windows share."""

from __future__ import annotations

import ast
import re

from tests.rules.test_imports import module_name, sources

# As the documentation of Python lists them for all three systems; a name that is not here is looked up there first.
SHARED = {
    "os": {
        "O_RDONLY", "O_RDWR", "O_WRONLY", "PathLike", "R_OK", "SEEK_END", "SEEK_SET", "W_OK", "X_OK", "_exit", "access",
        "close", "cpu_count", "devnull", "dup", "dup2", "environ", "fdopen", "fspath", "fstat", "fsync", "ftruncate",
        "getpid", "lseek", "name", "open", "path", "read", "rename", "replace", "scandir", "stat", "stat_result",
        "strerror", "truncate", "urandom", "utime", "walk", "write",
    },
    "mmap": {"ACCESS_COPY", "ACCESS_READ", "PAGESIZE", "mmap"},
    "signal": {"SIGINT", "SIGTERM", "SIG_DFL", "SIG_IGN", "Signals", "default_int_handler", "getsignal", "signal"},
}  # fmt: skip
ROOMS = {"moert.machine", "moert.experts.drive", "moert.kernels.memory"}
"""The machine, the drive, and memory: tests/unit/test_platforms.py switches off what they ask for."""
MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty", "multiprocessing"}
# What else names them, and what it does without: it imports where the import may fail; it is a process that is started
# only where limits_processes() says so, or bounds one as far as the system can.
ELSEWHERE = {
    "moert.command.chat": {"readline"},
    "moert.chat.sandbox": {"resource"},
    "moert.beside.compiling": {"resource"},
    "moeconv.calibration.apart": {"resource"},
    "moert.pack.fence": {"os.memfd_create"},
}
SYSTEM_PATH = re.compile(r"^/?(proc|sys|dev)/")


def unshared(tree: ast.Module) -> set[str]:
    """Names in a module that not all systems have."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in SHARED:
            found.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom) and node.module in SHARED:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} & MODULES
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and SYSTEM_PATH.match(node.value):
            found.add(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node).endswith("CDLL(None)"):
            found.add("CDLL(None)")
    return found - {f"{module}.{name}" for module, names in SHARED.items() for name in names}


def test_what_only_some_systems_have_stays_in_its_rooms() -> None:
    found = {module_name(path): unshared(ast.parse(path.read_text("utf-8"))) for path in sources("moert", "moeconv")}
    assert {name: each for name, each in found.items() if each - ELSEWHERE.get(name, set()) and name not in ROOMS} == {}
    assert {name: each for name, each in ELSEWHERE.items() if each - found[name]} == {}, "they are not named any more"


def test_such_names_are_seen() -> None:
    text = """
import os, resource
from os import fork
os.preadv(0, [], 0)
open("/proc/self/status"), root / "sys/block"
ctypes.CDLL(None)
"""
    names = {"resource", "os.fork", "os.preadv", "/proc/self/status", "sys/block", "CDLL(None)"}
    assert unshared(ast.parse(text)) == names
