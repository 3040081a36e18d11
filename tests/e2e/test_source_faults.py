"""What a source or a wish can have wrong that shows only when the model is run: one line each, or a note."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conversions import Done, settings_for
from tiny import tiny_olmoe
from tokenizers import Tokenizer, models
from transformers import OlmoeModel

from moeconv.conversion.additions import profile_paths
from moeconv.conversion.material import vocabulary_note
from moeconv.errors import SettingsError
from moeconv.source.archs.config import ModelFailed
from moert.pack.reader import Pack
from recipes.bench.shaped import OLMOE


def changed(model: Path, to: Path, **config: Any) -> Path:
    shutil.copytree(model, to)
    path = to / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return to


def fails(*_: Any, **__: Any) -> None:
    raise RuntimeError("the size of tensor a must match\nthe size of tensor b")


@pytest.mark.parametrize("when", ["while it is built", "while it is run"])
def test_what_transformers_refuses_is_one_line(
    when: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reason = tiny_olmoe(tmp_path / "m"), "size of tensor"
    if when == "while it is built":
        model, reason = changed(model, tmp_path / "c", pad_token_id=96), "Padding_idx"
    else:
        monkeypatch.setattr(OlmoeModel, "forward", fails)
    with pytest.raises(ModelFailed, match=reason) as caught:
        Done(settings_for(sources, "olmoe", tmp_path, model=str(model)))
    assert str(caught.value).startswith(f"transformers can't run the model in {model} (")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "m.pack").exists()


@pytest.mark.parametrize("family", ["olmoe", "switch"])
def test_a_tokenizer_larger_than_the_vocabulary_is_one_line(
    family: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(sources[family], tmp_path / "large"))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens(["ab"])
    tokenizer.save(str(model / "tokenizer.json"))
    with pytest.raises(
        SettingsError, match=r"makes token 96 of the text, the model's vocabulary .* has 96: "
    ) as caught:
        Done(settings_for(sources, family, tmp_path, model=str(model)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("known", "note"),
    [
        (96, None),
        (90, None),
        (40, "note: tokenizer.json knows 40 of the model's 96 tokens: is it the model's own"),
        (
            98,
            "note: 2 token(s) of tokenizer.json have no place in the model, whose vocab_size is 96: 'w96' is token 96; "
            "text with them is refused",
        ),
    ],
)
def test_a_tokenizer_that_is_not_the_models_is_noted(known: int, note: str | None) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(known)}, unk_token="w0"))
    assert vocabulary_note(tokenizer, replace(OLMOE, vocab_size=96)) == note


def test_what_is_cut_is_said(sources: dict[str, Path], tmp_path: Path) -> None:
    wishes = {"samples": 100_000, "sweep_samples": 20_000, "heldout_samples": 30_000, "context": 500}
    model = changed(sources["olmoe"], tmp_path / "short", max_position_embeddings=48)
    done = Done(settings_for(sources, "olmoe", tmp_path, model=str(model), bits=(8,), loss=0.9, **wishes))
    material = done.bench.material
    assert [line for line in done.said if line.startswith("note: --")] == [
        "note: --context 500: the model takes at most 48 tokens (its config.json), windows have as many",
        f"note: --samples 100,000: there are only {material.judged.samples} calibration samples to judge plans by, all "
        "of them are used",
        f"note: --tune sweep-samples=20,000: there are only {material.ranked.samples} calibration samples to rank "
        "experts by, all of them are used",
        f"note: --tune heldout-samples=30,000: there are only {material.heldout.samples} held-out samples, all of them "
        "are used",
    ]
    said: list[str] = []
    profile_paths(
        Pack.open(done.settings.out), calib=None, heldout=None, seed=None, samples=10_000, context=49, say=said.append
    )
    assert [line.partition(":")[0] for line in said if "note" in line] == ["note", "note", "note"]
    assert "--context 49" in said[0]


def test_a_context_that_has_no_effect_is_said(sources: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_for(sources, "switch", tmp_path, bits=(8,), loss=0.9, quantizer="channel", context=64)
    note = "note: --context 64 has no effect: an encoder-decoder model takes each input whole"
    assert note in Done(settings).said
    said: list[str] = []
    for context in (64, None):
        profile_paths(
            Pack.open(settings.out), calib=None, heldout=None, seed=None, samples=2, context=context, say=said.append
        )
    assert [line for line in said if "--context" in line] == [note]


def test_what_is_there_needs_no_note(sources: dict[str, Path], tmp_path: Path) -> None:
    done = Done(settings_for(sources, "olmoe", tmp_path, bits=(8,), loss=0.9, samples=3, sweep_samples=2))
    assert not [line for line in done.said if line.startswith("note: --")]
