"""Calibration text of every kind, through a whole conversion and the command line."""

from __future__ import annotations

import csv
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from conversions import WORDS, Done, settings_for, words

from moeconv.artifacts import Target
from moeconv.conversion.additions import profile_paths
from moeconv.conversion.planning import plan
from moeconv.report.writer import write_report
from moert.pack.reader import Pack

TEMPLATE = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }}\n{% endfor %}"


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(count: int, choices: int) -> list[dict[str, Any]]:
    rng = random.Random(1)
    return [
        {"input": words(rng, 4) + str(at), "choices": rng.sample(WORDS, choices), "label": rng.randrange(choices)}
        for at in range(count)
    ]


@pytest.mark.parametrize("family", ["switch", "olmoe"])
@pytest.mark.parametrize("metric", [None, "f1"])
def test_choices_are_scored_by_likelihood(
    sources: dict[str, Path], family: str, metric: str | None, tmp_path: Path
) -> None:
    calib = jsonl(tmp_path / "questions.jsonl", questions(48, 2 if metric else 3))
    done = Done(
        settings_for(
            sources, family, tmp_path, calib=str(calib), metric=metric, loss=0.4, quantizer="channel",
            max_new_tokens=None,
        )
    )  # fmt: skip
    report = done.report
    assert report.metric == (metric or "accuracy")
    assert report.calibration is not None
    assert 0 < report.calibration.reference < 1, "a random model is sometimes right"
    assert report.calibration.loss <= 0.4
    assert report.calibration.samples == 18
    assert report.samples == ()
    assert report.sensitivity is not None
    assert any(cost[2] > 0 for cost in report.sensitivity.costs.values()), "no distribution changed"
    text = (done.settings.out / "report.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["metric"] == report.metric, "NaN is not JSON"
    assert plan(done.settings.work, done.settings.target, "knapsack", "kl", None).chosen.loss is not None


def test_a_ranking_text_that_the_model_gets_all_wrong(sources: dict[str, Path], tmp_path: Path) -> None:
    """No loss can be told there; divergences rank the experts all the same."""
    calib = jsonl(tmp_path / "questions.jsonl", questions(48, 3))
    settings = settings_for(
        sources, "olmoe", tmp_path, calib=str(calib), metric=None, target=Target("bits", 3.7), bits=(2, 3, 4)
    )
    done = Done(settings)
    table = done.report.sensitivity
    assert table is not None
    assert all(math.isnan(cost[0]) and math.isfinite(cost[2]) for cost in table.costs.values())
    assert all(entry.importance is None for entry in done.manifest.experts)
    planned = plan(settings.work, settings.target, "knapsack", "kl", None)
    assert planned.chosen.nbytes == done.report.expert_bytes["pack"]
    pytest.importorskip("matplotlib")
    assert write_report(Pack.open(settings.out), tmp_path / "page")


def test_plain_text_is_cut_into_windows(sources: dict[str, Path], tmp_path: Path) -> None:
    rng = random.Random(2)
    calib = tmp_path / "book.txt"
    calib.write_text("\n\n".join(words(rng, 40) for _ in range(30)))
    done = Done(settings_for(sources, "olmoe", tmp_path, calib=str(calib), loss=0.5))
    assert done.report.metric == "perplexity"
    assert done.report.calibration is not None
    assert done.report.calibration.samples > 8


def test_chat_is_text_by_the_model_s_own_template(sources: dict[str, Path], tmp_path: Path) -> None:
    """The template comes into the pack with the tokenizer, so that its paths can be profiled on the same text."""
    rng = random.Random(3)
    model = tmp_path / "chatty"
    shutil.copytree(sources["olmoe"], model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    rows = [
        {"messages": [{"role": "user", "content": words(rng, 9)}, {"role": "assistant", "content": words(rng, 9)}]}
        for _ in range(40)
    ]
    calib = jsonl(tmp_path / "chat.jsonl", rows)
    done = Done(settings_for(sources, "olmoe", tmp_path, model=str(model), calib=str(calib), loss=0.5))
    assert done.bench.material.splits.calibration[0].source.startswith("user ")
    pack = Pack.open(done.settings.out)
    found, _ = profile_paths(
        pack, calib=None, heldout=None, seed=None, samples=None, context=None, say=lambda line: None
    )
    assert found.tokens > 0


def test_other_names_of_fields_and_a_heldout_file(sources: dict[str, Path], tmp_path: Path) -> None:
    rng = random.Random(4)
    paths = [tmp_path / "questions.csv", tmp_path / "more.csv"]
    for path in paths:
        with path.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["question", "answer", "unused"])
            writer.writerows([words(rng, 4), words(rng, 2), at] for at in range(24))
    fields = {"input": "question", "target": "answer"}
    settings = settings_for(
        sources, "switch", tmp_path, calib=str(paths[0]), heldout=str(paths[1]), fields=fields, loss=0.5
    )
    report = Done(settings).report
    assert report.calibration is not None
    assert report.heldout is not None
    assert (report.calibration.samples, report.heldout.samples) == (18, 24)
    assert report.fields == fields
    found, _ = profile_paths(
        Pack.open(settings.out), calib=None, heldout=None, seed=None, samples=None, context=None, say=lambda line: None
    )
    assert found.tokens > 0, "the pack knows what its own text calls the fields"


def test_samples_are_bounded_apart(sources: dict[str, Path], tmp_path: Path) -> None:
    """Those that rank, those that judge, those held out."""
    done = Done(
        settings_for(
            sources, "olmoe", tmp_path, loss=0.5, samples=20, sweep_samples=9, heldout_samples=11, quantizer="channel"
        )
    )  # fmt: skip
    assert done.report.calibration is not None
    assert done.report.heldout is not None
    assert (done.report.calibration.samples, done.report.heldout.samples) == (20, 11)
    base = next(entry["base"] for entry in done.bench.journal.entries() if "rows" in entry)
    assert len(base["nats"]) == 9
    material = done.bench.material
    parts = material.ranking, material.acceptance, material.splits.heldout
    texts = [{sample.source for sample in part} for part in parts]
    assert not texts[0] & texts[1]
    assert not (texts[0] | texts[1]) & texts[2]
    assert 0.15 < len(texts[0]) / len(texts[0] | texts[1]) < 0.35
