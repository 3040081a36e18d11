"""Every program of recipes/bench answers --help at once, and says in one line that a file is missing."""

from __future__ import annotations

import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

from recipes.bench import program, sweeps
from recipes.bench.program import Missing, as_program, need, own_recipe

ROOT = Path(__file__).resolve().parents[2]
PEERS = {"llama"}
"""Programs of another Python, whose packages may be missing here."""
OWN = {"virtual"}
"""moeconv's own command line, under another name."""
PROGRAMS = sorted(
    path.stem
    for path in (ROOT / "recipes" / "bench").glob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8") and path.stem not in OWN
)


def ended(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        as_program(*arguments)  # type: ignore[arg-type]
    return (int(end.value.code or 0), *capsys.readouterr())


def test_every_program_begins_alike() -> None:
    without = [
        name
        for name in PROGRAMS
        if "as_program(" not in (ROOT / f"recipes/bench/{name}.py").read_text(encoding="utf-8").partition("__main__")[2]
    ]
    assert without == ["sweeps"]


def started(name: str, *arguments: str) -> int:
    """Runs a program in this process and returns its status."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a test may have imported it before
        patch.setattr(sys, "argv", [f"recipes/bench/{name}.py", *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_module(f"recipes.bench.{name}", run_name="__main__")
    return int(end.value.code or 0)


def test_help_starts_no_bench(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in sorted({*PROGRAMS} - PEERS - {"sweeps"}):
        status, (out, err) = started(name, "--help"), capsys.readouterr()
        assert (status, err) == (0, ""), name
        assert out.startswith("usage: "), name
    assert sweeps.exit_code(["--help"]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["cards", "fiddler", "rounding", "speed"])
def test_missing_packs_are_one_line(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert started(name) == 2
    assert re.fullmatch(rf"{name}: .* missing: run `make [a-z-]+`\n", capsys.readouterr().err)


def test_arguments_are_those_of_the_form(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[int]()
    monkeypatch.setattr(program.sys, "argv", ["recipes/bench/some.py", "--fast"])
    code, out, err = ended(capsys, lambda: called.append(1), "About it.")
    assert (code, out, err) == (2, "", "some: takes no argument --fast; usage: python -m recipes.bench.some\n")
    assert ended(capsys, lambda: called.append(1), "About it.", "[PACK]") == (0, "", "")
    monkeypatch.setattr(program.sys, "argv", ["recipes/bench/some.py"])
    code, _, err = ended(capsys, lambda: called.append(1), "About it.", "PACK")
    assert (code, err) == (2, "some: takes arguments; usage: python -m recipes.bench.some PACK\n")
    assert called == [1]


def test_mistakes_are_one_line_and_faults_are_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(program.sys, "argv", ["recipes/bench/some.py"])
    assert ended(capsys, lambda: 1) == (1, "", "")
    code, _, err = ended(capsys, lambda: need([tmp_path, tmp_path / "x", tmp_path / "y"], "demo"))
    assert (code, err) == (2, f"some: {tmp_path / 'x'} and {tmp_path / 'y'} missing: run `make demo`\n")
    code, _, err = ended(capsys, lambda: (tmp_path / "x").read_text())
    assert (code, err) == (2, f"some: {tmp_path / 'x'} is not there\n")
    with pytest.raises(ZeroDivisionError):
        as_program(lambda: 1 // 0)
    with pytest.raises(Missing):
        need([tmp_path / "x"], "demo")


@pytest.mark.parametrize("name", sorted(path.stem for path in Path("recipes").glob("*.toml")))
def test_benches_and_the_demo_load_every_recipe(name: str, tmp_path: Path) -> None:
    """Also those whose metric is a program, which a user has to allow."""
    assert own_recipe(name, tmp_path).settings.out.parent == tmp_path
