"""Installs the wheels of dist/ where there is no compiler, and runs a pack there: that for this machine on the Python
that runs this, without its packages; the one for 64-bit ARM in an emulator, on a Python out of Debian's packages. Both
must write what this checkout writes. `make test-wheel` runs it."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moert import __version__
from moert.built import commit, version_line
from tests.parity.packs import pack_of
from tests.tiny import tiny_olmoe

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("apt-get", "dpkg-deb", "qemu-aarch64")
ARM = "aarch64"


class Failed(Exception):
    """A wheel is not what it should be; the message says why."""


def output_of(command: Sequence[object], packages: Path, folder: Path) -> str:
    """What a command says that finds no program and no packages but those. Raises Failed."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, cwd=folder,
        env={"PATH": "", "PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def install(wheel: Path, packages: Path, *options: str) -> None:
    """Raises Failed where the wheel has no native kernels."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--only-binary=:all:"]
    subprocess.run([*pip, f"--target={packages}", *options, str(wheel)], check=True, cwd=packages.parent)
    if not (packages / "moert" / "kernels" / "_native.so").is_file():
        raise Failed(f"{wheel.name} has no native kernels")


def debian(system: Path, folder: Path) -> Path:
    """A Python for ARM and what it needs, unpacked into a folder; this system stays as it is."""
    state = folder / "apt"
    for part in ("lists/partial", "archives/partial"):
        (state / part).mkdir(parents=True)
    (state / "status").touch()
    options = {
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "root",
        "Dir::State": state, "Dir::State::status": state / "status", "Dir::Cache": state,
    }  # fmt: skip
    apt = ["apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    subprocess.run([*apt, "update"], check=True)
    wanted = ("python3", "libstdc++6")
    subprocess.run([*apt, "install", "--download-only", "--yes", "--no-install-recommends", *wanted], check=True)
    for package in sorted((state / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, system], check=True)
    return next((system / "usr" / "bin").glob("python3.[0-9]*"))


def prepare(wheel: Path, folder: Path) -> tuple[list[object], Path]:
    """Python as a command, and the folder with the wheel and what it needs."""
    packages, system = folder / "packages", folder / "system"
    packages.mkdir()
    if platform.machine() == ARM or ARM not in wheel.name:
        install(wheel, packages)
        return [sys.executable, "-S"], packages
    python = debian(system, folder)
    platforms = (f"--platform={name}_{ARM}" for name in ("manylinux2014", "manylinux_2_28"))
    install(wheel, packages, f"--python-version={python.name.removeprefix('python')}", *platforms)
    return [shutil.which("qemu-aarch64"), "-L", system, python, "-S"], packages


def writes(python: Sequence[object], packages: Path, folder: Path, pack: Path) -> str:
    asked = ("run", pack, "abc", "--max-new-tokens", 24, "--memory", "200MB", "--tune", "threads=2")
    return output_of([*python, "-m", "moert", *asked], packages, folder)


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as made:
        pack = pack_of(tiny_olmoe(Path(made) / "model"), Path(made) / "model.pack", 4).root
        expected = writes([sys.executable], ROOT, Path(made), pack)
        for wheel in sorted(Path(arguments[0]).resolve().glob("*.whl")):
            print(wheel.name, flush=True)
            foreign = ARM in wheel.name and platform.machine() != ARM
            if foreign and (lacking := [name for name in NEEDED if shutil.which(name) is None]):
                print(f"  not tried: there is no {lacking[0]}")
                continue
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                python, packages = prepare(wheel, folder)
                print(version := output_of([*python, "-m", "moert", "--version"], packages, folder), end="")
                if (known := commit()) is not None and version_line("moert", __version__) not in version:
                    raise Failed(f"{wheel.name} says {version!r}, this checkout has commit {known}")
                if not foreign:  # kernels are measured, which takes minutes in an emulator
                    print(output_of([*python, "-m", "moert", "info", "--system"], packages, folder), end="")
                if (found := writes(python, packages, folder, pack)) != expected:
                    raise Failed(f"{wheel.name} writes {found!r}, this checkout {expected!r}")
                print(f"  writes {found.strip()!r}, as this checkout does")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except Failed as error:
        raise SystemExit(str(error)) from None
