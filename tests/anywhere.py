"""Proves that no test depends on where it runs: the suite in three orders, as an ordinary user, in a process that
holds 2 GB, on one core, and where others take most of the time. `make test-anywhere` runs it; it takes ten times as
long as `make test`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (1, 2, 3)
SUITE = ("-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile")
USER = 65534  # nobody
LEFT_OUT = ("build", ".venv", ".git", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis")

Proof = Callable[[list[str]], int | None]
"""Runs the suite with more arguments: its exit status, None where this machine can't try it."""


def suite(arguments: list[str], before: tuple[str, ...] = (), root: Path = ROOT) -> int:
    command = [*before, sys.executable, *SUITE, *arguments]
    return subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=False).returncode


def in_three_orders(arguments: list[str]) -> int:
    return max(suite([f"--randomly-seed={seed}", *arguments]) for seed in SEEDS)


def holding_memory(arguments: list[str]) -> int:
    return suite(["-p", "tests.hold_memory", *arguments])


def on_one_core(arguments: list[str]) -> int | None:
    if shutil.which("taskset") is None:
        return None
    return suite(arguments, ("taskset", "-c", str(min(os.sched_getaffinity(0)))))


def beside_others(arguments: list[str]) -> int:
    """With as many processes on each core as leave a quarter of it."""
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * len(os.sched_getaffinity(0)))
    ]
    try:
        return suite(arguments)
    finally:
        for other in others:
            other.kill()
            other.wait()


def as_an_ordinary_user(arguments: list[str]) -> int | None:
    """In a copy that the user owns, with its own temporary folder, and with a copy of Python, as root's may lie where
    nobody else can read it."""
    if os.geteuid() != 0:
        return suite(arguments)
    if shutil.which("setpriv") is None:
        return None
    with tempfile.TemporaryDirectory(prefix="moert-user-") as folder:
        home = Path(folder)
        copy, python, temporary = home / "copy", home / "python", home / "tmp"
        temporary.mkdir()
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for name in ("data", "demo"):
            if (ROOT / "build" / name).exists():
                shutil.copytree(ROOT / "build" / name, copy / "build" / name)
        shutil.copytree(sys.base_prefix, python, symlinks=True, ignore=shutil.ignore_patterns("site-packages", "test"))
        for place in (home, *home.rglob("*")):
            os.chown(place, USER, USER, follow_symlinks=False)
        environment = {
            **os.environ, "HOME": str(home), "TMPDIR": str(temporary), "PYTHONHOME": str(python),
            "PYTHONPATH": f"{copy}:{sysconfig.get_path('purelib')}", "LD_LIBRARY_PATH": str(python / "lib"),
        }  # fmt: skip
        user = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
        program = python / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        return subprocess.run([*user, program, *SUITE, *arguments], cwd=copy, env=environment, check=False).returncode


PROOFS: dict[str, Proof] = {
    "orders": in_three_orders,
    "user": as_an_ordinary_user,
    "memory": holding_memory,
    "core": on_one_core,
    "others": beside_others,
}


def main(arguments: list[str]) -> int:
    """The first arguments may name proofs, all by default; the others are pytest's."""
    named = [name for name in arguments if name in PROOFS]
    rest, failed = [other for other in arguments if other not in PROOFS], False
    said = []
    for name in named or PROOFS:
        print(f"== {name}", flush=True)
        status = PROOFS[name](rest)
        failed |= status not in (0, None)
        said.append(f"{name}: {'not possible here' if status is None else 'failed' if status else 'passed'}")
    print("; ".join(said))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
