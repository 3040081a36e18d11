"""Recipes: what their entries become, and the one line for those that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeconv.artifacts import Target
from moeconv.command.cli import _exit_code
from moeconv.command.recipe import Expectations, Recipe, as_keys
from moeconv.conversion.settings import Settings
from moeconv.errors import SettingsError
from moeconv.measure.metrics import find_metric
from moert.pack.manifest import LossEstimate

ROOT = Path(__file__).resolve().parents[2]


def load(tmp_path: Path, *lines: str) -> Recipe:
    path = tmp_path / "small.toml"
    path.write_text("\n".join(['model = "m"', 'calib = "wiki"', *lines]) + "\n")
    return Recipe.load(path, tmp_path / "out")


def test_a_recipe_needs_little(tmp_path: Path) -> None:
    recipe = load(tmp_path)
    assert recipe.name == "small"
    assert recipe.paths
    out = tmp_path / "out"
    assert recipe.settings == Settings("m", out / "small.pack", out / "small.work", calib="wiki")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('loss = "3%"', {"target": Target("loss", 0.03)}),
        ("loss = 0.03", {"target": Target("loss", 0.03)}),
        ('size = "1.5MB"', {"target": Target("size", 1.5e6)}),
        ("bits_per_weight = 2.75", {"target": Target("bits", 2.75)}),
        ("bits_per_weight = 3", {"target": Target("bits", 3)}),
        ('confidence = "90%"', {"confidence": 0.9}),
        ("confidence = 0.9", {"confidence": 0.9}),
        ('confidence = "none"', {"confidence": None}),
        ('margin = "25%"', {"margin": 0.25}),
        ('memory = "1GiB"', {"memory_bytes": 1 << 30}),
        ("margin = 1e-05", {"margin": 1e-05}),
        ("margin = 0.25", {"margin": 0.25}),
        ("size = 1500000", {"target": Target("size", 1.5e6)}),
        ("memory = 1048576", {"memory_bytes": 1 << 20}),
        ("bits = [2, 4]", {"bits": (2, 4)}),
        ("dense_bits = 8", {"dense_bits": 8}),
        ('dense_bits = "attention=4,head=8"', {"dense_bits": {"attention": 4, "head": 8}}),
        ('quantizer = "group"\ngroup_size = 32', {"quantizer": "group", "group_size": 32}),
        ('allocation = "greedy"\nsignal = "metric"', {"allocation": "greedy", "signal": "metric"}),
        ("per_projection = true", {"per_projection": True}),
        ("samples = 20\nsweep_samples = 5\nheldout_samples = 30",
         {"samples": 20, "sweep_samples": 5, "heldout_samples": 30}),
        ("bits = 4", {"bits": (4,)}),
        ('bits = "4"', {"bits": (4,)}),
        ('bits = ["8", 2]', {"bits": (2, 8)}),
        ('samples = "20"\nbits_per_weight = "3.5"', {"samples": 20, "target": Target("bits", 3.5)}),
        ('resident = ["25%", 2e9]', {"resident": (0.25, 2e9)}),
        ("resident = 0.25", {"resident": (0.25,)}),
        ('fields = "input=question"', {"fields": {"input": "question"}}),
        ('metric = "f1"\nseed = 3\ncontext = 64', {"metric": "f1", "seed": 3, "context": 64}),
    ],
)  # fmt: skip
def test_entries_are_what_the_command_line_takes(tmp_path: Path, line: str, found: dict[str, Any]) -> None:
    settings = load(tmp_path, line).settings
    assert {name: getattr(settings, name) for name in found} == found


def test_names_of_fields_are_a_table(tmp_path: Path) -> None:
    recipe = load(tmp_path, "[fields]", 'input = "question"', 'target = "answer"')
    assert recipe.settings.fields == {"input": "question", "target": "answer"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('los = "5%"', "los is no setting: did you mean loss. There are allocation, bits, "),
        ("[expect]\nsize = 3", ".expect. size is no setting: there are calibration_loss_at_most, "),
        ("bits = 4.0", "bits '4.0': expected widths such as 2,4,8"),
        ("bits = true", "bits 'True': expected widths such as 2,4,8"),
        ("bits = [5]", "expected widths among"),
        ("dense_bits = 7", "dense_bits 7: expected a width among"),
        ("dense_bits = 8.0", "dense_bits = 8.0: expected a whole number or text or a table"),
        ("dense_bits = true", "dense_bits = True: expected a number or text"),
        ('dense_bits = "head"', "dense_bits 'head': expected a width such as 8"),
        ('dense_bits = "tail=8"', "dense_bits tail=8: there is no role tail: expected roles among"),
        ("samples = 4.5", "samples = 4.5: expected a whole number"),
        ("samples = true", "samples = True: expected a whole number"),
        ("per_projection = 1", "per_projection = 1: expected True or False"),
        ("bits_per_weight = true", "bits_per_weight"),
        ('bits_per_weight = "three"', "bits_per_weight 'three': expected a number"),
        ('profile_paths = "no"', "true or false"),
        ("expect = 3", "should be a table"),
        ('[expect]\nheldout_loss_at_most = "5%"', "heldout_loss_at_most = '5%': expected a number"),
        ('loss = "5%"\nsize = "1MB"', "one target at a time"),
        ("loss = 5", "loss 5: expected a share from 0 to less than 1"),
        ("loss = nan", "loss = nan: expected a number or text"),
        ('loss = "abc"', "loss 'abc': expected a share"),
        ("loss = true", "loss = True: expected a number or text"),
        ('margin = "abc"', "margin 'abc': expected a share"),
        ("margin = [1]", "margin = .1.: expected a number or text"),
        ('racing = "5%"', "racing is no setting"),
        ("margin = false", "margin = False: expected a number"),
        ("size = -3", "size -3: expected a number of bytes"),
        ("size = inf", "size = inf: expected a number"),
        ("bits_per_weight = 17", "bits_per_weight 17: expected more than 0, at most 16"),
        ("memory = true", "memory = True"),
        ("memory = 0", "memory 0: expected more than 0 bytes"),
        (f"memory = {10**400}", "memory = 1000"),
        ("max_new_tokens = 0", "max_new_tokens 0: expected 1 or more"),
        ('size = "much"', "is not a size"),
        ('target = "5%"', "as loss, size or bits_per_weight"),
        ('confidence = "30%"', "confidence 0.3"),
        ("confidence = true", "confidence"),
        ('memory = "lots"', "memory 'lots'"),
        ('allocation = "luck"', "allocation luck"),
        ('size = "1MB"\nmargin = "5%"', "margin has no effect"),
        ('fields = "question"', "fields 'question': expected pairs such as input=question"),
        ("[fields]\ninput = 3", "fields"),
    ],
)
def test_wrong_entries_are_one_line(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says) as error:
        load(tmp_path, line)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"{tmp_path / 'small.toml'}: ")
    assert "--" not in str(error.value), "an option, where entries have other names"


def test_what_a_recipe_lacks(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    for body, says in (
        ('calib = "c"\n', "model is missing"),
        ("", "model is missing: the folder of a model, relative to the recipe, or a hub id"),
        ('model = "m"\nbits = [16]\n', "without calib"),
        ('model = "m"\nbits = [16]\nprofile_paths = false\nsignal = "nll"\n', "signal has no effect without calib"),
        ('model = "m"\nout = "x"\n', "out is not a key of recipes"),
        ('model = "m"\nwork = "x"\n', "work is not a key of recipes"),
        ('model = "m"\noverwrite = true\n', "overwrite is not a key of recipes: give --overwrite"),
        ("model = [", "can't be read as TOML"),
    ):
        path.write_text(body)
        with pytest.raises(SettingsError, match=says) as error:
            Recipe.load(path, tmp_path)
        assert str(error.value).startswith(f"{path}: ")
    with pytest.raises(SettingsError, match="no such file"):
        Recipe.load(tmp_path / "none.toml", tmp_path)


@pytest.mark.parametrize("metric", ["mine.py", "mine.py:score", "./mine.py:-score"])
def test_a_program_runs_only_where_the_command_allows_it(
    tmp_path: Path, metric: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    line = f'metric = "{metric}"'
    with pytest.raises(SettingsError, match=r"mine\.py.*' is a program, .*: read it, then give --allow-code"):
        load(tmp_path, line)
    assert _exit_code(["recipe", "run", str(tmp_path / "small.toml"), "--out", str(tmp_path)]) == 2
    assert "give --allow-code" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert Recipe.load(tmp_path / "small.toml", tmp_path, allow_code=True).settings.metric is not None


def test_an_unknown_entry_lists_what_a_recipe_may_say(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        load(tmp_path, "memory_bytes = 3")
    known = str(error.value).partition("here are ")[2].split(", ")
    assert {"loss", "size", "bits_per_weight", "memory", "profile_paths", "expect", "model", "samples"} <= set(known)
    assert not {"target", "out", "work", "memory_bytes", "overwrite"} & set(known)
    assert known == sorted(known)


def test_paths_are_relative_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "models" / "mine").mkdir(parents=True)
    recipe, elsewhere = tmp_path / "a" / "r.toml", tmp_path / "elsewhere"
    (elsewhere / "models" / "other").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    recipe.write_text(
        'model = "models/mine"\ncalib = "text.jsonl"\nheldout = "../held.txt"\nmetric = "mine.py:score"\n'
    )
    settings = Recipe.load(recipe, Path("out"), allow_code=True).settings
    assert settings.model == str(tmp_path / "a" / "models" / "mine")
    assert settings.calib == str(tmp_path / "a" / "text.jsonl")
    assert settings.heldout == str(tmp_path / "a" / ".." / "held.txt")
    assert settings.metric == str(tmp_path / "a" / "mine.py:score")
    recipe.write_text('model = "owner/name"\ncalib = "hf:owner/text"\nmetric = "perplexity"\n')
    settings = Recipe.load(recipe, Path("out")).settings
    assert (settings.model, settings.calib, settings.metric) == ("owner/name", "hf:owner/text", "perplexity")
    recipe.write_text('model = "models/other"\ncalib = "text.jsonl"\n')
    with pytest.raises(SettingsError, match="paths in a recipe are relative to its folder"):
        Recipe.load(recipe, Path("out"))


def test_what_did_not_come_out_is_said_in_readable_figures() -> None:
    half = LossEstimate(10.0, 10.5, 0.05, 0.04, 0.06, 20)
    report = SimpleNamespace(heldout=half, calibration=None, expert_bytes={"pack": 3_932_160})
    limits = Expectations(heldout_loss_at_most=0.02, calibration_loss_at_most=0.02, expert_bytes_at_most=2_300_000,
                          reference_at_least=12.5)  # fmt: skip
    assert limits.failures(report) == [  # type: ignore[arg-type]
        "the held-out loss is 5.00%, expected at most 2.00%",
        "the calibration loss is not measured, expected at most 2.00%",
        "the bytes of all experts are 3,932,160, expected at most 2,300,000",
        "the reference is 10, expected at least 12.5",
    ]


def test_the_recipes_of_the_repository_load() -> None:
    found = [Recipe.load(path, Path("build"), allow_code=True) for path in sorted((ROOT / "recipes").glob("*.toml"))]
    assert [(recipe.name, recipe.settings.calib) for recipe in found] == [
        ("g2p", "g2p"), ("marks", "marks"), ("wiki", "wiki"), ("wikids", "wiki")
    ]  # fmt: skip
    assert all(recipe.settings.target == Target("loss", 0.05) for recipe in found)
    assert all((Path(recipe.settings.model) / "config.json").is_file() for recipe in found)
    assert [find_metric(recipe.settings.metric).generates for recipe in found] == [True, True, False, False]


def test_two_recipes_of_one_name_are_refused_before_the_first_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / folder / "model.toml" for folder in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text('model = "m"\ncalib = "wiki"\n')
    assert _exit_code(["recipe", "run", *map(str, paths), "--out", str(tmp_path / "out"), "--json"]) == 2
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert message.startswith(f"{paths[0]} and {paths[1]} would both write model.pack")
    assert not (tmp_path / "out").exists()


def test_an_error_of_a_run_names_the_recipe_and_its_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.toml"
    path.write_text('model = "models--owner--m"\ncalib = "wiki"\n')
    (tmp_path / "models--owner--m").mkdir()
    assert _exit_code(["recipe", "run", str(path), "--out", str(tmp_path / "out")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"moeconv: {path}: {tmp_path / 'models--owner--m'} ")


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("give another --work, or --dense-bits 8", "give another --out, or dense_bits 8"),
        ("choose another --out, or give --overwrite", "choose another --out, or give --overwrite"),
        ("/c/models--a--b/x: no --tune group-size=64", "/c/models--a--b/x: no group_size 64"),
    ],
)
def test_messages_name_keys_and_options_of_the_command(message: str, says: str) -> None:
    assert as_keys(message) == says
