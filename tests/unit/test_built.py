"""The line that says which version runs: commits of checkouts and packages, and never one of somebody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moert import built
from moert.kernels import auto_name, library

NOBODY = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *NOBODY, *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "-am", "a name that is no commit", "v1")
    return tmp_path


def test_a_checkout_has_its_commit_and_whether_it_was_changed(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = git(checkout, "rev-parse", "--short=12", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(checkout / "another"))  # as in a hook of another repository
    assert built.commit(checkout) == head
    (checkout / "file").write_text("two")
    assert built.commit(checkout) == f"{head}-dirty"


def test_a_worktree_counts_as_a_checkout(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("worktrees") / "other"
    git(checkout, "worktree", "add", "-q", str(other))
    assert built.commit(other) == git(checkout, "rev-parse", "--short=12", "HEAD")


def test_a_package_within_a_checkout_of_somebody_else_has_its_record_or_none(checkout: Path) -> None:
    packages = checkout / "site-packages"
    packages.mkdir()
    assert built.commit(packages, packages / "commit.txt") is None
    (packages / "commit.txt").write_text("0123456789ab\n")
    assert built.commit(packages, packages / "commit.txt") == "0123456789ab"


def test_without_git_nothing_is_said(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert built.commit(checkout) is None
    monkeypatch.setattr(built, "commit", lambda: None)
    assert built.version_line("moert", "1.2", "kernels avx2") == "moert 1.2, kernels avx2"


def test_changes_are_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built, "commit", lambda: "0123456789ab-dirty")
    assert built.version_line("moeconv", "1.2") == "moeconv 1.2, commit 0123456789ab with changes"


def test_the_kernels_are_those_that_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = library.load()
    assert found is None or auto_name() == next(each.name for each in found.instruction_sets if each.runs)
    monkeypatch.setattr(library, "PATH", tmp_path / "_native.so")
    assert auto_name() == "reference"


@pytest.mark.parametrize("program", ["moert", "moeconv"])
def test_the_version_needs_neither_numpy_nor_torch(program: str) -> None:
    code = (
        f"import sys; from {program}.command import cli\n"
        "try: cli.app(['--version'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'numpy', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line, loaded = done.stdout.splitlines()
    assert line.startswith(f"{program} ")
    assert loaded == "[]"


def test_a_build_records_the_commit_in_the_sources_and_in_the_wheel(tmp_path: Path) -> None:
    """Out of the checkout itself: setuptools is asked as an installation asks it, without compiling."""
    code = (
        "import sys; from setuptools import setup\n"
        "from moert.kernels.build import RecordedPackages, RecordedSources\n"
        f"setup(name='some', packages=['moert'], script_args=['-q', 'build_py', '--build-lib', {str(tmp_path)!r}],\n"
        "      cmdclass={'build_py': RecordedPackages})\n"
        f"made = RecordedSources(__import__('setuptools').Distribution())\n"
        f"made.make_release_tree({str(tmp_path / 'sources')!r}, ['moert/built.py'])"
    )
    root = Path(built.__file__).parents[1]
    known = built.commit()
    if known is None:
        pytest.skip("this is no checkout")
    subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    for folder in (tmp_path, tmp_path / "sources"):
        assert built.commit(folder, folder / "moert" / built.RECORD.name) == known
    assert not built.RECORD.exists()
