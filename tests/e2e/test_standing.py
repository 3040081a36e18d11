"""What a conversion says where its text does not carry the promise that was asked for."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from conversions import Done, settings_for, words

from moeconv.artifacts import Target
from moeconv.command.present import conversion_table
from moeconv.errors import TargetMissed
from moeconv.report.page import result
from moeconv.report.writer import read_report
from moert.pack.reader import Pack


def in_documents(folder: Path, documents: int, rows: int = 6) -> str:
    rng, path = random.Random(1), folder / f"{documents}.jsonl"
    lines = [{"text": words(rng, 40), "title": f"article {at}"} for at in range(documents) for _ in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return str(path)


def test_too_few_documents_give_no_promise(sources: dict[str, Path], tmp_path: Path) -> None:
    done = Done(settings_for(
        sources, "olmoe", tmp_path, calib=in_documents(tmp_path, 12), fields={"document": "title"}, confidence=0.95,
        loss=0.9, bits=(2, 4),
    ))  # fmt: skip
    standing, report = done.report.standing, read_report(Pack.open(done.settings.out))
    assert standing is not None
    assert standing == report.standing
    assert (report.confidence, standing.asked, standing.needed) == (None, 0.95, 30)
    assert standing.documents <= 6
    assert report.upper_bound is not None
    spoken = [conversion_table(report, "p").replace("95% interval", ""), result(report, 6).replace("95% interval", "")]
    spoken += [line for line in done.said if "95% interval" not in line]
    for text in spoken:
        assert "at 95%" not in text.replace("for a promise at 95%", "")
        assert "with 95% confidence" not in text
    assert any("too few for a promise at 95%, which takes 30" in line for line in done.said)
    assert "no promise: more text of the same documents" in spoken[0]
    assert "No promise is given" in spoken[1]
    assert "too few for a promise" in spoken[1]


def test_strict_refuses_them_before_anything_is_measured(sources: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_for(
        sources, "olmoe", tmp_path, calib=in_documents(tmp_path, 12), fields={"document": "title"}, confidence=0.95,
        loss=0.9, bits=(2, 4), strict=True,
    )  # fmt: skip
    with pytest.raises(TargetMissed, match=r"--tune strict: .* documents to judge plans by"):
        Done(settings)
    assert not list(tmp_path.glob("work/looks.jsonl"))


@pytest.mark.parametrize("target", [Target("loss", 0.9), Target("size", 1e6)])
def test_so_few_samples_that_no_bound_can_be_told(sources: dict[str, Path], tmp_path: Path, target: Target) -> None:
    """Two windows of each: every fourth draw has none of one kind or the other."""
    settings = settings_for(
        sources, "olmoe", tmp_path, confidence=0.99, bits=(8,), samples=2, sweep_samples=2, heldout_samples=2,
        target=target,
    )  # fmt: skip
    if target.kind == "loss":
        with pytest.raises(TargetMissed, match="no bound can be told"):
            Done(settings)
        return
    done = Done(settings)
    assert done.report.confidence is None
    assert "inf" not in conversion_table(done.report, "p").replace("information", "")
    assert any("no bound of the loss can be told" in line for line in done.said)


def test_another_seed_is_another_look_and_the_same_command_is_not(sources: dict[str, Path], tmp_path: Path) -> None:
    text = in_documents(tmp_path, 12)

    def looks(name: str, **changes: object) -> int:
        done = Done(settings_for(
            sources, "olmoe", tmp_path, fields={"document": "title"}, bits=(2, 4), out=tmp_path / name,
            **{"calib": text, "target": Target("loss", 0.9), **changes},
        ))  # fmt: skip
        assert done.report.standing is not None
        assert (done.report.standing.looks > 1) == any("judged on this text" in line for line in done.said)
        return done.report.standing.looks

    assert looks("a.pack") == 1
    assert looks("a.pack") == 1
    assert looks("b.pack", seed=5) == 2
    assert looks("c.pack", quantizer="channel") == 3
    assert looks("d.pack", target=Target("loss", 0.8)) == 4
    assert looks("a.pack") == 4
    assert looks("e.pack", calib=in_documents(tmp_path, 14)) == 1
