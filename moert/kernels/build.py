"""The build of _native.so from csrc, by `pip install`, and by `make native` after a change.

A plain shared library without Python in it: one for all versions of Python. setuptools loads this file alone, so it
imports nothing of moert.
"""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
FLAGS = [
    "-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC",
    "-pthread",
]  # fmt: skip
LINK = ["-shared", "-pthread", "-Wl,--strip-debug"]  # some compilers put debug symbols in unasked


class CompilerMissing(Exception):
    """There is no C compiler. Install one, such as gcc; without one moert works too, but slowly."""


class CompilationFailed(Exception):
    """The C compiler failed; the message gives the reason. Name another one by the environment's CC."""


def find_compiler() -> list[str]:
    """Returns the C compiler as a command: $CC, or the first of the usual names. Raises CompilerMissing,
    CompilationFailed."""
    given = os.environ.get("CC", "")
    try:
        named = shlex.split(given)
    except ValueError as error:
        raise CompilationFailed(f"CC={given} is no command: {error}") from None
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise CompilerMissing(f"CC={shlex.join(named)} is no program" if named else "found no cc, gcc or clang")


def compile_library(target: Path) -> None:
    """Writes the library to `target`; if that fails, an old library does not stay. Raises CompilerMissing,
    CompilationFailed."""
    sources = sorted((HERE / "csrc").glob("*.c"))
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(".partial")  # a process that has the old one open keeps it
    try:
        compiler = find_compiler()
        fresh.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [os.path.join(folder, f"{source.stem}.o") for source in sources]
            pairs = zip(sources, objects, strict=True)
            list(pool.map(lambda pair: _run([*compiler, *FLAGS, "-c", str(pair[0]), "-o", pair[1]]), pairs))
            _run([*compiler, *LINK, *objects, "-o", str(fresh), "-lm"])
        if not fresh.exists():
            raise CompilationFailed(f"{compiler[0]} wrote no library: is it a C compiler?")
    except BaseException:
        fresh.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
        raise
    fresh.replace(target)


def _run(command: list[str]) -> None:
    """Runs a command. Raises CompilationFailed if it fails."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise CompilationFailed(f"{command[0]} does not run: {error.strerror}") from None
    if found.returncode:
        raise CompilationFailed(f"{command[0]} ended with {found.returncode}:\n{found.stderr.strip()}")


class BuildNative(build_ext):  # type: ignore[misc]
    """The step of an installation that compiles the library. Without a compiler, or with one that fails, the
    installation goes on: moert then computes with numpy."""

    def run(self) -> None:
        """Builds without the compiler that setuptools sets up, which fails for some $CC; straight to the library's
        place among the sources in an editable installation."""
        for ext in self.extensions:
            self.build_extension(ext)

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        try:
            compile_library(Path(self.get_ext_fullpath(ext.name)))
        except (CompilerMissing, CompilationFailed) as error:
            _say(f"the native kernels were not built, moert will be slow: {error}")


def record_commit(folder: Path) -> None:
    """Writes the commit of this source tree into the package in `folder`, where it is known."""
    built = runpy.run_path(str(HERE.parent / "built.py"))
    if (found := built["commit"]()) is not None:
        (folder / "moert" / built["RECORD"].name).write_text(found, encoding="ascii")


class RecordedPackages(build_py):  # type: ignore[misc]
    """The step that collects a wheel's files: the commit is among them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            record_commit(Path(self.build_lib))


class RecordedSources(sdist):  # type: ignore[misc]
    """The step that collects the sources, from which a wheel may be built outside the checkout."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        record_commit(Path(base_dir))


class PlainWheel(bdist_wheel):  # type: ignore[misc]
    """A wheel without Python in its library: one wheel of a platform is for all versions of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def _say(message: str) -> None:
    print(f"moert: {message}", file=sys.stderr)


def _is_current(target: Path) -> bool:
    """Returns whether a library is newer than its sources, as an installation just before has left it. The compiler
    makes no difference."""
    sources = [Path(__file__), HERE / "csrc", *(HERE / "csrc").iterdir()]
    return target.is_file() and target.stat().st_mtime_ns > max(source.stat().st_mtime_ns for source in sources)


def main() -> int:
    """Compiles the library for developers where its sources have changed: a change that does not compile is an error; a
    missing compiler is none."""
    target = HERE / "_native.so"
    if _is_current(target):
        return 0
    try:
        compile_library(target)
    except CompilerMissing as error:
        _say(f"the native kernels were not built, moert will be slow: {error}")
    except CompilationFailed as error:
        _say(f"the native kernels were not built: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
