"""Widths and routing under one loss: what was measured is what the pack promises and the runtime does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conversions import Done, settings_for

from moeconv.artifacts import Assignment, Target, to_json, uniform
from moeconv.command.present import conversion_table, plan_table
from moeconv.conversion import choosing, measuring
from moeconv.conversion.material import Coding
from moeconv.conversion.planning import plan
from moeconv.conversion.settings import Settings
from moeconv.errors import SettingsError
from moeconv.measure.scoring import build_scorer, load_tokenizer
from moeconv.packing.packed import PackedModel
from moeconv.plan.outlook import Host
from moeconv.plan.problem import layout_bytes
from moeconv.report.writer import read_report, write_report
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.experts import Pass
from moeconv.source.routers import Preferring
from moert.command.description import description_lines
from moert.engine.engine import Engine
from moert.pack.reader import Pack

LOSS = 0.4


def settings_of(sources: dict[str, Path], family: str, tmp_path: Path, **changes: object) -> Settings:
    asked = {"loss": LOSS, "quantizer": "channel", "bits": (2, 4), "resident": (0.5, 0.75), **changes}
    return settings_for(sources, family, tmp_path, **asked)


@pytest.fixture(scope="module", params=["olmoe", "switch"])
def done(request: pytest.FixtureRequest, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Done:
    return Done(settings_of(sources, request.param, tmp_path_factory.mktemp(request.param)))


def test_both_keep_the_loss_together(done: Done) -> None:
    assert [one.share for one in done.report.residences] == [0.5, 0.75]
    for one in done.report.residences:
        assert one.calibration.loss <= LOSS
        assert one.bytes <= one.exact_bytes
        assert max(one.bonus) > 0
        assert one.together
        assert one.alone
    assert [one.share for one in done.manifest.preferences] == [0.5, 0.75]
    for stored, told in zip(done.manifest.preferences, done.report.residences, strict=True):
        assert (stored.recent, stored.sure, stored.bonus) == (told.recent, told.sure, told.bonus)
        assert (stored.calibration, stored.heldout) == (told.calibration, told.heldout)


def test_the_pack_loses_with_its_routing_what_was_measured(done: Done) -> None:
    material, pack = done.bench.material, Pack.open(done.settings.out)
    tokenizer = load_tokenizer(done.settings.out / "tokenizer.json")
    packed = PackedModel.open(pack)
    scorer = build_scorer(packed, tokenizer, material.splits.heldout, material.metric, material.extent(None))
    preferring = Preferring(packed.model, done.bench.trial.checkpoint.description)
    packed.calls.now = Pass(rerouting=preferring)
    exact = material.metric.value(scorer.score().scores)
    values = []
    for preference, told in zip(pack.manifest.preferences, done.report.residences, strict=True):
        with preferring.on(preference):
            values.append(material.metric.value(scorer.score().scores))
        assert values[-1] == pytest.approx(told.heldout.value, rel=1e-5)
        of_width = layout_bytes(pack.manifest.model, done.bench.coding.storage)
        nbytes = {
            entry.key: sum(of_width(name, bits) for name, bits in entry.bits.items()) for entry in pack.manifest.experts
        }
        read = sum(
            nbytes[at.expert(number)] * int(count)
            for at, counts in preferring.missed.items()
            for number, count in enumerate(counts)
        )
        assert told.bytes == read / preferring.tokens
    assert exact not in values


def test_the_report_and_the_tables_have_it(done: Done, tmp_path: Path) -> None:
    out = done.settings.out
    stored = json.loads((out / "report.json").read_text())
    assert stored["residences"] == to_json(done.report)["residences"]
    assert read_report(Pack.open(out)).residences == done.report.residences
    table = conversion_table(done.report, str(out))
    assert "with 50% of the experts in memory: " in table
    assert "with 75% of the experts in memory: " in table
    pytest.importorskip("matplotlib", reason="the report's figures need matplotlib")
    files = write_report(Pack.open(out), tmp_path / "report")
    assert {"read-50.svg", "read-75.svg"} <= {file.name for file in files}
    page = (tmp_path / "report/index.html").read_text()
    assert "Bytes a token against loss" in page
    planned = plan(done.settings.work, Target("loss", LOSS), "knapsack", "kl", None)
    assert planned.residences == done.report.residences
    lines = plan_table(planned, Target("loss", LOSS), True).splitlines()
    assert sum(line.startswith("    widths and routing") for line in lines) == sum(
        len(one.together) for one in done.report.residences
    )
    assert "in memory: kB a token" not in plan_table(planned, Target("loss", LOSS), False)


def test_the_runtime_takes_what_fits(done: Done) -> None:
    said: list[str] = []
    prompt = "ab cde" if done.bench.spec.encoder is not None else "ab cde fghi"
    with Engine.open(done.settings.out, cache="60%", notify=said.append, predict="none") as engine:
        engine.generate(prompt, max_new_tokens=4)
        assert engine.stats().routing == "50%"
    assert any("routing prefers" in line for line in said)
    lines = "\n".join(description_lines(Pack.open(done.settings.out)))
    assert "50%" in lines
    assert "75%" in lines


def test_the_same_command_measures_nothing_again(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as unloaded:
        unloaded.delattr(measuring, "LoadedModel")
        again = Done(done.settings)
    assert again.manifest.preferences == done.manifest.preferences
    assert again.report.residences == done.report.residences


def test_without_it_nothing_is_different(sources: dict[str, Path], done: Done, tmp_path: Path) -> None:
    family = "switch" if done.bench.spec.encoder is not None else "olmoe"
    plain = Done(settings_of(sources, family, tmp_path, resident=()))
    assert plain.manifest.preferences == ()
    assert "residences" not in json.loads((plain.settings.out / "report.json").read_text())
    old, new = (json.loads((one.settings.out / "manifest.json").read_text()) for one in (plain, done))
    assert "preferences" not in old
    assert (old["minor"], new["minor"]) == (0, 1)


def test_what_memory_has_room_for_is_found(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a process holds more, experts get less."""
    held, some = [0], 200_000_000
    monkeypatch.setattr(choosing, "this_host", lambda: Host(held_bytes=held[0], thread_bytes=0, widened=False))
    asked = settings_of(sources, "olmoe", tmp_path, resident=(1e6,))
    with pytest.raises(SettingsError, match=r"--resident 1MB: moert can't run this model in that: give \d+MB or more"):
        Done(asked)
    assert not asked.work.exists()
    coding, widths = Coding.open(asked), uniform(Checkpoint.open(asked.model).spec, 2)
    for held[0] in range(100_000_000, some, 20_000):
        if room(coding, widths, some) < 0.95:
            break
    assert room(coding, widths, some) > 0.6
    done = Done(replace(asked, resident=(float(some), 1e9)))
    (found,) = done.report.residences
    assert f"{some / 1e6:g}MB has room for {found.share:.0%} of the experts" in done.said
    assert "routing for 100% in memory: exact" in done.said
    assert 0.2 < found.share < 1
    again = Done(done.settings)
    assert again.report.residences == (found,)


def room(coding: Coding, widths: Assignment, memory_bytes: int) -> float:
    try:
        return choosing._room(coding, widths, memory_bytes)
    except SettingsError:
        return 0.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"resident": (1.0,)}, r"--resident 100%: expected different shares of the experts below 100%"),
        ({"resident": (0.5, 0.5)}, r"--resident 50%,50%: expected different shares"),
        ({"target": Target("size", 0.5), "loss": None}, r"--resident divides a loss between widths and routing"),
    ],
)
def test_what_can_not_be_is_refused(
    sources: dict[str, Path], tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    asked = {key: value for key, value in changes.items() if value is not None}
    base = {"quantizer": "channel", "bits": (2, 4), **({} if "target" in asked else {"loss": LOSS}), **asked}
    with pytest.raises(SettingsError, match=said):
        settings_for(sources, "olmoe", tmp_path, **{"resident": (0.5,), **base})
