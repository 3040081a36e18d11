"""`moeconv recipe run` as a script reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeconv.command.cli import _exit_code
from moert.pack.paths import PATHS
from moert.pack.reader import Pack


def test_the_json_names_the_recipe_and_says_whether_it_passed(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = (
        f'model = "{sources["olmoe"]}"\ncalib = "{sources["text"]}"\nmetric = "perplexity"\ncontext = 32\n'
        'bits = [8]\nloss = "90%"\nconfidence = "none"\nprofile_paths = false\n'
    )
    (tmp_path / "good.toml").write_text(entries)
    (tmp_path / "bad.toml").write_text(entries + "[expect]\nexpert_bytes_at_most = 10\n")
    recipes = [str(tmp_path / name) for name in ("good.toml", "bad.toml")]
    assert _exit_code(["recipe", "run", *recipes, "--out", str(tmp_path / "out"), "--json"]) == 3
    out, err = capsys.readouterr()
    good, bad = map(json.loads, out.splitlines())
    assert (good["recipe"], good["passed"], good["failures"]) == ("good", True, [])
    nbytes = bad["expert_bytes"]["pack"]
    failure = f"the bytes of all experts are {nbytes:,}, expected at most 10"
    assert (bad["recipe"], bad["passed"], bad["failures"]) == ("bad", False, [failure])
    assert ("error" in good, bad["error"]) == (False, {"code": 3, "kind": "TargetMissed", "message": failure})
    assert err.splitlines()[-1] == f"moeconv: bad: {failure}"


def test_a_target_that_no_width_meets_is_a_result_and_the_next_recipe_runs(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = f'model = "{sources["olmoe"]}"\nprofile_paths = false\n'
    (tmp_path / "small.toml").write_text(f'{entries}size = "1kB"\n')
    (tmp_path / "four.toml").write_text(f"{entries}bits = 4\n")
    recipes = [str(tmp_path / name) for name in ("small.toml", "four.toml")]
    assert _exit_code(["recipe", "run", *recipes, "--out", str(tmp_path / "out"), "--json"]) == 3
    out, err = capsys.readouterr()
    small, four = map(json.loads, out.splitlines())
    assert (small["recipe"], small["passed"], four["recipe"], four["passed"]) == ("small", False, "four", True)
    (failure,) = small["failures"]
    assert small["error"] == {"code": 3, "kind": "TargetMissed", "message": failure}
    assert "size " in failure
    assert "--" not in failure
    assert err.splitlines()[-1] == f"moeconv: small: {failure}"
    assert (tmp_path / "out" / "four.pack").is_dir()


def test_a_recipe_that_profiles_again_does_not_say_that_paths_are_gone(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = (
        f'model = "{sources["olmoe"]}"\ncalib = "{sources["text"]}"\nmetric = "perplexity"\ncontext = 32\n'
        'loss = "90%"\nconfidence = "none"\nquantizer = "channel"\n'
    )
    recipe, out = tmp_path / "r.toml", tmp_path / "out"
    for bits, lines, is_said in (("8", "", False), ("4", "", False), ("8", "profile_paths = false\n", True)):
        recipe.write_text(f"{entries}bits = [{bits}]\n{lines}")
        assert _exit_code(["recipe", "run", str(recipe), "--out", str(out)]) == 0
        assert ("is gone: run moeconv profile-paths" in capsys.readouterr().err) is is_said
        assert (PATHS in Pack.open(out / "r.pack").manifest.files) is not is_said
