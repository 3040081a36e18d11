"""With --json a command that fails prints an object too, in one shape for both programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeconv.command import cli
from moeconv.errors import TargetMissed


def failed(*command: str, cwd: Path) -> tuple[int, dict[str, Any], str]:
    """Returns the status of a Python process, the object on stdout and the line on stderr."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.stderr.count("\n") == 1
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("moert run no.pack x --json", "ManifestMissing"),
        ("moert run no.pack --json --file none.txt", "InputInvalid"),
        ("moert run no.pack x --json --memory 5X", "InvalidMemory"),
        ("moert run no.pack x --json --temperature -1", "SettingInvalid"),
        ("moert run --json --tempature 3", "UsageError"),
        ("moert run --json", "UsageError"),
        ("moert chat no.pack --json", "ManifestMissing"),
        ("moert bench no.pack --json", "ManifestMissing"),
        ("moert bench no.pack --drive --json --memory 3GB", "RunError"),
        ("moert info no.pack --json", "ManifestMissing"),
        ("moert info --json", "RunError"),
        ("moert nothing --json", "UsageError"),
        ("moeconv quantize no/such/model --json", "SettingsError"),
        ("moeconv quantize no/such/model --json --bits 4", "CheckpointError"),
        ("moeconv quantize --json --bits", "UsageError"),
        ("moeconv check no/such/model --json", "CheckpointError"),
        ("moeconv plan no/such/work --json", "SettingsError"),
        ("moeconv report no.pack --json", "ManifestMissing"),
        ("moeconv profile-paths no.pack --json", "ManifestMissing"),
        ("moeconv train-hash no.pack --json", "ManifestMissing"),
        ("moeconv train-neurons no.pack --json", "ManifestMissing"),
        ("moeconv verify no.pack --json", "ManifestMissing"),
        ("moeconv recipe run none.toml --json", "SettingsError"),
        ("moeconv recipe walk --json", "UsageError"),
    ],
)
def test_every_command_says_as_json_why_it_failed(line: str, kind: str, tmp_path: Path) -> None:
    code, found, said = failed("-m", *line.split(), cwd=tmp_path)
    assert code == 2
    assert set(found) == {"error"}
    assert {"code": 2, "kind": kind} == {name: found["error"][name] for name in ("code", "kind")}
    assert said == f"{line.split()[0]}: {found['error']['message']}\n"


def test_what_stands_behind_two_dashes_is_no_option(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moert", "run", "no.pack", "--", "--json"], cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")


def test_a_program_that_can_not_begin_says_so_too(tmp_path: Path) -> None:
    for program in ("moert", "moeconv"):
        code = (
            "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (100_000_000, 100_000_000)); "
            f"sys.argv = [{program!r}, 'x', '--json']; from {program}.__main__ import main; main()"
        )
        status, found, said = failed("-c", code, cwd=tmp_path)
        assert (status, found["error"]["kind"]) == (2, "OutOfMemory")
        assert said == f"{program}: {found['error']['message']}\n"


def test_a_missed_target_is_an_object_with_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> None:
        raise TargetMissed("no widths do")

    monkeypatch.setattr(cli, "_convert", run)
    assert cli._exit_code(["quantize", "m", "--bits", "4", "--json"]) == 3
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"error": {"code": 3, "kind": "TargetMissed", "message": "no widths do"}}
    assert printed.err == "moeconv: no widths do\n"


def test_a_result_that_misses_its_target_has_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("moeconv.conversion.conversion.Conversion.run", lambda self: (SimpleNamespace(files={}), {}))
    monkeypatch.setattr("moeconv.command.present.missed_target", lambda report: "the held-out loss is above")
    monkeypatch.setattr(cli, "_as_json", lambda report: {"model": "m"})
    assert cli._exit_code(["quantize", "m", "--bits", "4", "--json"]) == 3
    error = {"code": 3, "kind": "TargetMissed", "message": "the held-out loss is above"}
    assert json.loads(capsys.readouterr().out) == {"model": "m", "error": error}
