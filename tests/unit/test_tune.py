"""--tune NAME=VALUE: what it takes, refuses, lists and completes; and that commands have few options beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from moeconv.command import cli as moeconv_cli
from moeconv.conversion.settings import FISHER, NEURONS, ROUTES, SIGNALS, Options, Settings
from moeconv.plan import ALLOCATORS
from moeconv.tuned import TUNED
from moert.beside.flash.keeping import KEEPING
from moert.beside.flash.runner import NEURONS as NEURONS_RUN
from moert.beside.gpu.placement import RULES
from moert.beside.gpu.residents import KEEPS
from moert.command import cli
from moert.command.settings import SETTINGS
from moert.described import Misasked, Setting, completed, listed, values_of
from moert.engine.generation import GenerationSettings
from moert.engine.registry import PREDICTS
from moert.engine.settings import EngineSettings
from moert.experts.names import EVICTIONS
from tests.command_line import Moert

ROOT = Path(__file__).resolve().parents[2]
SOME = (
    Setting("eviction", "Experts", ("run",), "Which leaves.", default="lru", choices=("lru", "lfu")),
    Setting("logit_bias", "Sampling", ("run",), "Adds a value.", values="ID=VALUE", many=True),
    Setting("threads", "Machine", ("run",), "Threads.", int, least=1),
    Setting("min_p", "Sampling", ("run",), "A share.", float, 0.0),
    Setting("raw", "Printed", ("run",), "As it is.", bool, False),
)


@pytest.fixture
def moert(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Moert:
    return Moert(capsys, monkeypatch)


def test_values_have_the_types_of_their_settings() -> None:
    given = ["eviction=lfu", "logit-bias=9=4", "logit-bias=11=-3.5", "threads=2", "min-p=0.5", "raw"]
    assert values_of(given, SOME) == {
        "eviction": "lfu", "logit_bias": ["9=4", "11=-3.5"], "threads": 2, "min_p": 0.5, "raw": True,
    }  # fmt: skip
    assert values_of(["min_p=0.5", "raw=false", "threads=3", "threads=4"], SOME) == {
        "min_p": 0.5, "raw": False, "threads": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("evicton=lru", "--tune evicton=lru: did you mean eviction? --tune help lists all"),
        ("luck=1", "--tune luck=1: there is no setting 'luck'; --tune help lists all"),
        ("=1", "--tune =1: --tune help lists all"),
        ("eviction", "--tune eviction has no value: give --tune eviction=lru|lfu"),
        ("eviction=luck", "--tune eviction=luck: 'luck' is not one of 'lru', 'lfu'"),
        ("threads=many", "--tune threads=many: 'many' should be a whole number"),
        ("threads=0", "--tune threads=0: 0 should be at least 1"),
        ("min-p=half", "--tune min-p=half: 'half' should be a number"),
        ("raw=1", "--tune raw=1: '1' should be true or false"),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_do(given: str, message: str) -> None:
    with pytest.raises(Misasked) as caught:
        values_of([given], SOME)
    assert str(caught.value) == message


def test_words_are_completed() -> None:
    assert completed("", SOME) == ["help", "eviction=", "logit-bias=", "threads=", "min-p=", "raw="]
    assert completed("ev", SOME) == completed("eviction=", SOME) == ["eviction=lru", "eviction=lfu"]
    assert completed("eviction=lf", SOME) == ["eviction=lfu"]
    assert completed("threads=", SOME) == ["threads="]
    assert completed("x", SOME) == []


def test_all_are_listed() -> None:
    lines = listed(SOME, 60).splitlines()
    assert "  eviction=lru|lfu  [default: lru]" in lines
    assert lines.index("Sampling:") < lines.index("  logit-bias=ID=VALUE") < lines.index("Machine:")
    assert max(map(len, lines)) <= 60


def test_the_commands_list_and_refuse(moert: Moert, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "chat", "score", "bench"):
        assert moert(command, "--tune", "help") == 0
        assert "  eviction=auto|expected|paper|lru|layer-lru|lfu  [default: auto]" in moert.out
        assert ("  beams=" in moert.out) == (command == "run")
        assert "--tune evicton=lru: did you mean eviction?" in moert.refuses(command, "p", "--tune", "evicton=lru")
        now = "moert: --eviction is now --tune eviction=auto|expected|paper|lru|layer-lru|lfu"
        assert moert.refuses(command, "p", "--eviction", "lru").startswith(now)
    assert moert.refuses("run", "p", "--raw").startswith("moert: --raw is now --tune raw (")
    assert "No such option: --beams" in moert.refuses("score", "p", "--beams", "2")
    for words in (["quantize", "m"], ["plan", "m"]):
        assert moeconv_cli._exit_code([words[0], "--tune", "help"]) == 0
        assert "  signal=kl|nll|metric|fisher  [default: kl]" in capsys.readouterr().out
        assert moeconv_cli._exit_code([*words, "--signal", "nll"]) == 2
        assert "moeconv: --signal is now --tune signal=kl|nll|metric|fisher" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("app", "command", "most"),
    [(cli.app, "run", 18), (cli.app, "chat", 14), (cli.app, "bench", 10), (moeconv_cli.app, "quantize", 22)],
)
def test_commands_have_few_options(app: typer.Typer, command: str, most: int) -> None:
    options = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    assert sum(each.param_type_name == "option" for each in options) <= most


def test_every_setting_in_python_is_one_of_the_command_line() -> None:
    names = {each.name for each in SETTINGS}
    for kind in (EngineSettings, GenerationSettings):
        assert {each.name for each in fields(kind)} - names <= {"ignore_eos"}
    options = {each.name for each in typer.main.get_command(moeconv_cli.app).commands["quantize"].params}  # type: ignore[attr-defined]
    assert {*Options.__annotations__} <= options | {each.name for each in TUNED}


def test_defaults_and_values_are_those_of_python() -> None:
    described = {each.name: each for each in SETTINGS}
    usual = {"memory", "io", "stop", "early_stopping"}  # said in other words on the command line
    for kind in (EngineSettings, GenerationSettings):
        for each in fields(kind):
            if each.name in described and each.name not in usual:
                assert described[each.name].default == each.default, each.name
    known = {
        "eviction": EVICTIONS, "predict": PREDICTS, "neurons": NEURONS_RUN, "keep_neurons": KEEPING,
        "device_keep": KEEPS, "device_experts": RULES,
    }  # fmt: skip
    assert {name: {*described[name].choices} for name in known} == {name: {*each} for name, each in known.items()}
    tuned = {each.name: each for each in TUNED}
    found = {"allocation": ALLOCATORS, "signal": (*SIGNALS, FISHER), "route": ROUTES, "neurons": NEURONS}
    assert {name: {*tuned[name].choices} for name in found} == {name: {*each} for name, each in found.items()}
    for each in fields(Settings):
        if each.name in tuned and each.name != "margin":
            assert tuned[each.name].default == each.default, each.name


@pytest.mark.parametrize(
    ("program", "words", "place", "expected"),
    [
        ("moert", ["moert", "run", "--tune", "ev"], 3, "eviction=auto"),
        ("moert", ["moert", "run", "--tune", "eviction", "="], 4, "auto"),
        ("moert", ["moert", "run", "--tune", "eviction", "=", "la"], 5, "layer-lru"),
        ("moert", ["moert", "run", "--tune", "eviction", "=", "lru", "--tune", "ra"], 7, "raw=true"),
        ("moeconv", ["moeconv", "quantize", "--tune", "signal", "=", "f"], 5, "fisher"),
    ],
)
def test_bash_completes(program: str, words: list[str], place: int, expected: str) -> None:
    asked = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(place), f"_{program.upper()}_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-m", program], env={**os.environ, **asked}, cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert expected in done.stdout.split(), done.stderr


def test_the_shell_is_told_how_to_ask() -> None:
    environment = {**os.environ, "_MOERT_COMPLETE": "source_bash"}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'moert'; from moert.__main__ import main; main()"],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "complete_bash" in done.stdout, done.stderr
