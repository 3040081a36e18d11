"""Options and recipes: what is taken, and the one line for what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeconv.errors import SettingsError
from moeconv.recipe import Recipe
from moeconv.settings import Settings, parse_bits, parse_share


@pytest.mark.parametrize(("text", "value"), [("5%", 0.05), ("0.05", 0.05), (" 2.5 % ", 0.025), ("0", 0), (".1", 0.1)])
def test_loss(text: str, value: float) -> None:
    assert parse_share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["5", "five", "-1%", "100%", "1.0", "", "nan", "5%%"])
def test_bad_loss(text: str) -> None:
    with pytest.raises(SettingsError, match="--loss"):
        parse_share(text)


def test_margin_narrows_what_is_planned_for() -> None:
    settings = Settings("m", Path("o"), Path("w"), target_loss=0.04, margin=0.25, calib="c")
    assert settings.planned_loss == pytest.approx(0.03)
    with pytest.raises(SettingsError, match="--margin"):
        parse_share("2", "--margin")


def test_bits() -> None:
    assert parse_bits("8,2,2") == (2, 8)
    for text in ("5", "", "2;4", "2,x"):
        with pytest.raises(SettingsError, match="--bits"):
            parse_bits(text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quantizer": "magic"}, "--quantizer magic"),
        ({"metric": "bleu"}, "--metric bleu"),
        ({"group_size": 48, "quantizer": "group"}, "--group-size 48"),
        ({"group_size": 32}, "--group-size has no effect"),
        ({"calib": None, "bits": (16,), "metric": "rouge2"}, "--metric has no effect"),
        ({"out": Path("/")}, "expected new directories"),
        ({"calib": None}, "--calib is missing"),
        ({"samples": 0}, "--samples 0"),
        ({"context": 1}, "--context 1"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_bad_settings(change: dict, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Settings(**{"model": "m", "out": Path("o"), "work": Path("w"), "calib": "c", **change})


def test_recipe_rejects_what_it_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('model = "m"\ncalib = "c"\nlos = "5%"\n')
    with pytest.raises(SettingsError, match="unknown entry 'los'"):
        Recipe.load(path, tmp_path)
    path.write_text('model = "m"\ncalib = "c"\n[expect]\nsize = 3\n')
    with pytest.raises(SettingsError, match="unknown entry 'size'"):
        Recipe.load(path, tmp_path)
    for line, says in (
        ("bits = 4", "bits = 4 has the wrong type"),
        ('bits = [2, "4"]', "wrong type"),
        ("samples = 4.5", "wrong type"),
        ("samples = true", "wrong type"),
        ('profile_paths = "no"', "true or false"),
        ('out = "x"', "not for a recipe"),
        ("expect = 3", "should be a table"),
        ('[expect]\nheldout_loss_at_most = "5%"', "wrong type"),
    ):
        path.write_text(f'model = "m"\ncalib = "c"\n{line}\n')
        with pytest.raises(SettingsError, match=says):
            Recipe.load(path, tmp_path)
    path.write_text('calib = "c"\n')
    with pytest.raises(SettingsError, match="model is missing"):
        Recipe.load(path, tmp_path)
    path.write_text('model = "m"\nbits = [16]\n')
    with pytest.raises(SettingsError, match="without calib"):
        Recipe.load(path, tmp_path)
    path.write_text("model = [")
    with pytest.raises(SettingsError, match="can't be read as TOML"):
        Recipe.load(path, tmp_path)
    with pytest.raises(SettingsError, match="no such file"):
        Recipe.load(tmp_path / "none.toml", tmp_path)


def test_the_recipes_of_the_repository_load() -> None:
    for path in Path("recipes").glob("*.toml"):
        assert Recipe.load(path, Path("build")).settings.target_loss == 0.05
