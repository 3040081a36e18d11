"""moeconv.quantize: the same as the command, with arguments in the place of options."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from converting import command, contents, run, running_text
from tiny import tiny_olmoe

import moeconv
import moert
from moeconv.command import cli
from moeconv.conversion.settings import Options, Settings
from moeconv.errors import ConversionError
from moeconv.tuned import TUNED
from moert.pack.errors import PackError
from moert.pack.reader import Pack


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_olmoe(tmp_path_factory.mktemp("model") / "olmoe")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return running_text(tmp_path_factory.mktemp("text") / "text.jsonl")


def test_it_writes_the_pack_that_the_command_writes(model: Path, text: Path, tmp_path: Path) -> None:
    done = run(command(model, text, tmp_path / "a.pack", tmp_path / "a.work", "--loss", "20%", "--bits", "2,4"))
    assert done.returncode == 0, done.stderr
    said: list[str] = []
    report = moeconv.quantize(
        model, tmp_path / "b.pack", loss="20%", calib=text, metric="perplexity", context="32", bits=[2, 4],
        say=said.append,
    )  # fmt: skip
    assert contents(tmp_path / "a.pack") == contents(tmp_path / "b.pack")
    assert (tmp_path / "b.pack.work").is_dir()
    for what in ("reference", "the pack"):
        line = rf"{what} on held-out text: perplexity per word ([\d.]+) \(per token ([\d.]+)\)"
        measured = re.search(line, "\n".join(said))
        assert measured is not None, what
        assert float(measured[1]) > float(measured[2]) > 1
        last = measured
    assert report.target.value == 0.2
    assert report.heldout is not None
    assert f"{report.heldout.value:.4f} {report.heldout.value_per_token:.4f}" == f"{last[1]} {last[2]}"
    quality = Pack.open(tmp_path / "b.pack").manifest.quality
    assert quality is not None
    assert (quality.calibration, quality.heldout) == (report.calibration, report.heldout)
    with moert.load(tmp_path / "b.pack") as opened:
        assert opened.generate("ab cde", max_new_tokens=4).result.tokens


def test_steps_go_to_stderr_unless_they_are_not_wanted(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told, said = [], list[str]()
    for at, how in enumerate(({}, {"progress": False}, {"say": said.append})):
        moeconv.quantize(model, tmp_path / f"{at}.pack", bits=4, **how)
        told.append(capfd.readouterr())
    assert [each.out for each in told] == ["", "", ""]
    assert told[0].err.splitlines() == [line.replace("/2.pack", "/0.pack") for line in said]
    assert [each.err for each in told[1:]] == ["", ""]
    assert said


def test_options_of_the_command_are_arguments() -> None:
    options = {*inspect.signature(cli.quantize).parameters} - {"model", "out", "work", "as_json", "tune"}
    assert {*Options.__annotations__} == options | {each.name for each in TUNED if "quantize" in each.commands}
    held = {each.name for each in fields(Settings)} - {"model", "out", "work", "target", "memory_bytes"}
    assert {*Options.__annotations__} == held | {"loss", "size", "bits_per_weight", "memory"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"los": "5%"}, "los is no setting: did you mean loss? There are allocation, "),
        ({"loss": "5X%"}, "loss '5X%': expected a share such as 5% or 0.05"),
        ({"loss": 0.05, "size": "1MB"}, "loss and size: one target at a time"),
        ({"loss": True}, "loss = True: expected a number or text"),
        ({"quantizer": "magic"}, "quantizer magic: expected one of channel, group, gptq"),
        ({"group_size": 48}, "group_size 48: expected one of"),
        ({"bits": "2,5"}, "bits '2,5': expected widths among"),
        ({"bits": [2, 5]}, "bits '2,5': expected widths among"),
        ({"bits": 5}, "bits '5': expected widths among"),
        ({"work": 3}, "work = 3: expected text or a path"),
        ({"calib": None}, "calib is missing"),
        ({"context": "long"}, "context = 'long': expected a whole number"),
    ],
)
def test_mistakes_name_arguments_and_write_nothing(
    model: Path, text: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConversionError) as error:
        moeconv.quantize(model, tmp_path / "m.pack", **{"calib": str(text), **settings})
    assert str(error.value).startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_would_be_lost_is_refused(model: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(PackError, match="choose another out"):
        moeconv.quantize(model, tmp_path, calib=text)
