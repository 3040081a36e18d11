"""Whole conversions of tiny models: the options of `moeconv quantize`, reruns, interruption, refusals."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_olmoe, tiny_switch

from moeconv.archs import ARCHS
from moeconv.calibration import Sample
from moeconv.checkpoint import Checkpoint
from moeconv.conversion import Conversion
from moeconv.errors import CalibrationError, ConversionError, SettingsError, TargetMissed, VerifyFailed
from moeconv.metrics import METRICS
from moeconv.packed import PackedModel
from moeconv.profile import profile_paths
from moeconv.quantizers import QUANTIZERS
from moeconv.recipe import Expectations, Recipe
from moeconv.scorers.build import build_scorer, load_tokenizer
from moeconv.settings import Settings
from moeconv.trial import Trial
from moeconv.verify import verify
from moeconv.workdir import WorkDir
from moert.pack.errors import HashMismatch, WriteFailed
from moert.pack.model_spec import ExpertKey
from moert.pack.paths import PATHS, TransitionTable
from moert.pack.reader import Pack

WORDS = ["ab", "cde", "fghi", "kl", "mno", "pqrs", "tu", "vwx", "yz", "aeiou"]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family, and text for each."""
    root, rng = tmp_path_factory.mktemp("sources"), random.Random(0)
    tiny_switch(root / "switch")
    tiny_olmoe(root / "olmoe")
    pairs = [{"input": words(rng, 3) + str(i % 10), "target": words(rng, 2)} for i in range(48)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    rows = [{"text": words(rng, 18)} for _ in range(60)]
    (root / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {path.stem: path for path in root.iterdir()}


def settings_for(sources: dict[str, Path], family: str, tmp_path: Path, **changes: object) -> Settings:
    calib = sources["pairs" if family == "switch" else "text"]
    base = {
        "model": str(sources[family]), "out": tmp_path / "m.pack", "work": tmp_path / "work", "calib": str(calib),
        "metric": "perplexity", "context": 32, "max_new_tokens": 6 if family == "switch" else None,
    }  # fmt: skip
    if changes.get("calib", "") is None:
        base |= {"metric": None, "max_new_tokens": None}
    return Settings(**{**base, **changes})  # type: ignore[arg-type]


def convert(settings: Settings):
    said: list[str] = []
    conversion = Conversion(settings, said.append, lambda items, total: items)
    manifest, report = conversion.run()
    return conversion, manifest, report


def test_a_packed_model_answers_like_its_source(tmp_path: Path) -> None:
    """Also where transformers keeps copies of what a pack stores once."""
    ids = torch.tensor([[5, 9, 14, 3]])
    for name, source in (
        ("untied", tiny_switch(tmp_path / "untied", tie_word_embeddings=False)),
        ("tied", tiny_olmoe(tmp_path / "tied", tie_word_embeddings=True)),
    ):
        settings = Settings(model=str(source), out=tmp_path / f"{name}.pack", work=tmp_path / "work", bits=(16,))
        convert(settings)
        packed = PackedModel.open(Pack.open(settings.out))
        original = Checkpoint.open(source).arch.load(source, torch.float32)
        inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if packed.spec.encoder else {})
        with torch.inference_mode():
            assert torch.equal(packed.model(**inputs).logits, original(**inputs).logits)


@pytest.mark.parametrize("family", ["switch", "olmoe"])
def test_conversion_meets_its_target_and_the_pack_is_the_model_that_was_measured(
    sources: dict[str, Path], family: str, tmp_path: Path
) -> None:
    settings = settings_for(sources, family, tmp_path, target_loss=0.02)
    conversion, manifest, report = convert(settings)
    assert report.calibration is not None
    assert report.calibration.loss <= 0.02
    assert len(report.bits_histogram) == 2, "the target was chosen between two widths"
    assert report.bounds is not None
    assert report.bounds.losses[report.bounds.high] <= 0.02 < report.bounds.losses[report.bounds.low]
    assert report.sensitivity is not None
    assert set(report.sensitivity.importance) == set(manifest.model.expert_keys())
    assert all(entry.importance == report.sensitivity.importance[entry.key] for entry in manifest.experts)
    assert report.expert_bytes["pack"] == manifest.expert_tensor_bytes()
    pack = Pack.open(settings.out)
    found = verify(pack, Checkpoint.open(settings.model))
    assert found.worst is not None
    assert 0 < found.worst <= 1
    packed = PackedModel.open(pack)
    for key in manifest.model.expert_keys():
        for name in manifest.model.moe.projections:
            trial = conversion.trial.arch.expert_weight(conversion.trial.model, key, name)
            assert torch.equal(trial, packed.arch.expert_weight(packed.model, key, name))


def test_a_margin_is_left_free_on_the_calibration_text(sources: dict[str, Path], tmp_path: Path) -> None:
    _, _, plain = convert(settings_for(sources, "olmoe", tmp_path, target_loss=0.06))
    _, _, wary = convert(settings_for(sources, "olmoe", tmp_path, target_loss=0.06, margin=0.9))
    assert plain.calibration.loss > 0.006 >= wary.calibration.loss
    assert plain.expert_bytes["pack"] < wary.expert_bytes["pack"]
    assert wary.target_loss == 0.06


def test_a_second_loss_plans_from_the_same_journal(sources: dict[str, Path], tmp_path: Path) -> None:
    first, _, before = convert(settings_for(sources, "olmoe", tmp_path, target_loss=0.02))
    lines = first.journal.path.read_text().splitlines()
    second, _, after = convert(settings_for(sources, "olmoe", tmp_path, target_loss=0.06, out=tmp_path / "b.pack"))
    assert second.journal.path == first.journal.path
    added = second.journal.path.read_text().splitlines()[len(lines) :]
    assert all(" at 2" in line or " at 3" in line or " at 4" in line for line in added)
    assert not any("others at" in line for line in added), "an expert was measured twice"
    assert after.expert_bytes["pack"] <= before.expert_bytes["pack"]


def test_a_killed_sweep_resumes_without_repeating_a_measurement(sources: dict[str, Path], tmp_path: Path) -> None:
    work = tmp_path / "work"
    command = [
        sys.executable, "-m", "moeconv.cli", "quantize", str(sources["switch"]), "--calib", str(sources["pairs"]),
        "--metric", "perplexity", "--loss", "2%", "--work", str(work), "--out", str(tmp_path / "m.pack"),
        "--max-new-tokens", "6", "--json",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = None
    while process.poll() is None:
        journal = next(iter(work.glob("*/journal.jsonl")), None)
        if journal is not None and len(journal.read_text().splitlines()) >= 4:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.005)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "finished before it could be killed"
    assert not (tmp_path / "m.pack").exists()
    assert journal is not None
    with journal.open("a") as stream:
        stream.write('{"id": "cut off by the cra')
    before = [json.loads(line)["id"] for line in journal.read_text().splitlines()[:-1]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    after = [json.loads(line)["id"] for line in journal.read_text().splitlines()]
    assert after[: len(before)] == before
    assert len(set(after)) == len(after), "a measurement was repeated"
    assert json.loads(done.stdout)["calibration"]["loss"] <= 0.02


@pytest.fixture(scope="module")
def answered(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs with what the unquantised model writes to them as targets: a random model scores nothing on any other."""
    trial = Trial(Checkpoint.open(sources["switch"]), QUANTIZERS["channel"](None))
    inputs = [json.loads(line)["input"] for line in sources["pairs"].read_text().splitlines()]
    samples = [Sample(text, "abc") for text in inputs]
    tokenizer = load_tokenizer(sources["switch"] / "tokenizer.json")
    scorer = build_scorer(trial, tokenizer, samples, METRICS["rouge2"], limit=None, context=32, max_new_tokens=12)
    outputs = scorer.score().outputs
    path = tmp_path_factory.mktemp("answered") / "answered.jsonl"
    rows = [{"input": text, "target": output} for text, output in zip(inputs, outputs, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rouge_and_exact_match_judge_generated_text(sources: dict[str, Path], answered: Path, tmp_path: Path) -> None:
    for metric in ("rouge2", "exact_match"):
        settings = settings_for(
            sources, "switch", tmp_path, metric=metric, target_loss=0.3, max_new_tokens=12, calib=str(answered)
        )
        _, _, report = convert(settings)
        assert report.metric == metric
        assert report.calibration is not None
        assert report.calibration.reference > 0.5
        assert 0 < report.calibration.loss <= 0.3
        assert report.bounds.losses[2] > 0.3, "two bits cost nothing: nothing was tested"
        assert set(report.samples[0]) == {"input", "target", "reference", "pack"}


def test_a_reference_that_scores_nothing_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no loss can be measured"):
        convert(settings_for(sources, "switch", tmp_path, metric="exact_match"))
    assert not (tmp_path / "m.pack").exists()


def test_importance_is_the_loss_of_that_expert_alone(sources: dict[str, Path], tmp_path: Path) -> None:
    conversion, _, report = convert(settings_for(sources, "olmoe", tmp_path, target_loss=0.02))
    trial, metric = conversion.trial, conversion.metric
    scorer = conversion._scorer(conversion.splits.calibration, None)

    def loss(widths: dict) -> float:
        trial.assign(widths)
        return metric.loss(conversion.measure.reference, metric.value(scorer.score().per_sample))

    base = dict.fromkeys(trial.spec.expert_keys(), 4)
    found = report.sensitivity.importance
    for key in (ExpertKey("decoder", 0, 1), ExpertKey("decoder", 1, 4)):
        assert found[key] == pytest.approx(loss({**base, key: 2}) - loss(base), abs=1e-6)
        assert found[key] != 0
    ranking = report.sensitivity.ranking()
    low = {entry.key for entry in conversion_entries(tmp_path) if entry.bits["up"] == report.bounds.low}
    assert low == set(ranking[: len(low)])
    assert low


def conversion_entries(tmp_path: Path):
    return Pack.open(tmp_path / "m.pack").manifest.experts


def test_float32_sources_are_rounded_in_the_pack_and_in_no_reference(tmp_path: Path, sources: dict[str, Path]) -> None:
    from safetensors.torch import load_file, save_file

    path = tiny_olmoe(tmp_path / "f32")
    tensors = {name: tensor.float() * 1.0001 for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    both = [
        convert(settings_for(sources, "olmoe", tmp_path, model=str(path), bits=bits, work=tmp_path / str(bits)))[2]
        for bits in ((16,), (8, 16))
    ]
    assert both[0].calibration.reference == both[1].calibration.reference
    assert both[0].calibration.loss == pytest.approx(both[1].bounds.losses[16])
    assert both[0].calibration.loss != 0


def test_a_recipe_that_misses_its_heldout_target_fails(sources: dict[str, Path], tmp_path: Path) -> None:
    """The held-out text is of another kind, so that the loss there is another too."""
    _, _, report = convert(settings_for(sources, "olmoe", tmp_path, target_loss=0.02))
    recipe = Recipe("r", settings_for(sources, "olmoe", tmp_path), Expectations(), paths=False)
    missed = replace(report, heldout=replace(report.heldout, loss=0.021))
    met = replace(report, heldout=replace(report.heldout, loss=0.019))
    assert any("above the target" in line for line in recipe.failures(missed))
    assert recipe.failures(met) == []
    limits = Expectations(heldout_loss_at_most=0.02, expert_bytes_at_most=10, reference_at_most=1.0)
    assert len(limits.failures(missed)) == 3


def test_work_and_out_are_refused_before_anything_long(sources: dict[str, Path], tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep me")
    with pytest.raises(WriteFailed):
        convert(settings_for(sources, "olmoe", tmp_path, out=mine))
    assert (mine / "notes.txt").read_text() == "keep me"
    with pytest.raises(ConversionError, match="work directory"):
        convert(settings_for(sources, "olmoe", tmp_path, work=mine / "notes.txt"))
    assert not (tmp_path / "work").exists()


def test_one_work_directory_serves_one_run_at_a_time(tmp_path: Path) -> None:
    with WorkDir(tmp_path / "w"), pytest.raises(ConversionError, match="another run"), WorkDir(tmp_path / "w"):
        pass
    with WorkDir(tmp_path / "w") as work:
        (work.path / "reference-all.npz").write_bytes(b"damaged")
        assert work.load_scores("reference-all.npz") is None


def test_group_quantizer_and_chosen_widths(sources: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_for(sources, "olmoe", tmp_path, quantizer="group", group_size=32, bits=(3, 8), target_loss=0.02)
    _, manifest, report = convert(settings)
    assert set(report.bits_histogram) <= {3, 8}
    assert manifest.quantization.group_size == 32
    assert report.effective_bits > 3 + 32 / 40  # scale and minimum of at least two groups a row
    assert verify(Pack.open(settings.out), Checkpoint.open(settings.model)).worst <= 1


def test_sixteen_bits_alone_need_no_text_and_lose_nothing(sources: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_for(sources, "switch", tmp_path, calib=None, bits=(16,))
    _, manifest, report = convert(settings)
    assert manifest.quality is None
    assert report.bits_histogram == {16: len(manifest.experts) * 2}
    checkpoint, pack = Checkpoint.open(settings.model), Pack.open(settings.out)
    for key in manifest.model.expert_keys():
        stored = pack.projections(key, pack.read_expert(key))
        for name, weight in checkpoint.expert(key).items():
            assert np.array_equal(stored[name], weight)


def test_unreachable_target_writes_nothing(sources: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_for(sources, "olmoe", tmp_path, bits=(2,), target_loss=0.0001)
    with pytest.raises(TargetMissed, match="all experts at 2 bits"):
        convert(settings)
    assert not settings.out.exists()


def test_text_that_does_not_fit_the_model_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="needs the field 'text'"):
        convert(settings_for(sources, "olmoe", tmp_path, calib=str(sources["pairs"])))
    with pytest.raises(SettingsError, match="use perplexity"):
        convert(settings_for(sources, "olmoe", tmp_path, metric="rouge2"))
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "ab"}\n{"text": "cd"}\n')
    with pytest.raises(CalibrationError, match="too few"):
        convert(settings_for(sources, "olmoe", tmp_path, calib=str(short)))


def test_verify_finds_other_weights_and_damage(sources: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_for(sources, "switch", tmp_path, bits=(4,), target_loss=0.9)
    convert(settings)
    other = tiny_switch(tmp_path / "other", seed=1)
    with pytest.raises(VerifyFailed, match="made from other weights"):
        verify(Pack.open(settings.out), Checkpoint.open(other))
    with pytest.raises(VerifyFailed, match="shapes differ"):
        verify(Pack.open(settings.out), Checkpoint.open(sources["olmoe"]))
    victim = settings.out / "tokenizer.json"
    victim.write_bytes(victim.read_bytes().replace(b"a", b"b", 1))
    with pytest.raises(HashMismatch):
        verify(Pack.open(settings.out), None)


@pytest.mark.parametrize("family", ["switch", "olmoe"])
def test_profiled_paths_are_what_the_routers_chose(sources: dict[str, Path], family: str, tmp_path: Path) -> None:
    settings = settings_for(sources, family, tmp_path, bits=(8,), target_loss=0.9)
    convert(settings)
    found, nbytes = profile_paths(
        Pack.open(settings.out), calib=None, heldout=None, seed=None, samples=None, context=None, say=lambda line: None
    )
    pack = Pack.open(settings.out)
    table = TransitionTable.from_bytes(pack.read_file(PATHS))
    assert nbytes == (settings.out / PATHS).stat().st_size
    moe = pack.manifest.model.moe
    for stack, layers in table.stacks.items():
        totals = {int(layer.frequency.sum()) for layer in layers}
        assert len(totals) == 1, "each layer saw each token"
        assert totals.pop() % moe.top_k == 0
        assert 0.2 <= found.coverage20[stack] <= 1
    assert found.accuracy == (None, None, None), "two layers: none has two before it"
    if family == "olmoe":
        windows = found.tokens // 32
        packed, arch = PackedModel.open(pack), ARCHS["olmoe"]
        assert windows * 32 == found.tokens
        assert [place for place, _ in arch.router_modules(packed.model)] == pack.manifest.model.moe_layers()


def test_named_errors_reach_the_shell_as_one_line(sources: dict[str, Path], tmp_path: Path) -> None:
    def moeconv(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "moeconv.cli", *arguments], capture_output=True, text=True, check=False
        )

    for arguments in (
        ["quantize", str(tmp_path / "none"), "--calib", str(sources["pairs"])],
        ["quantize", str(sources["switch"])],
        ["quantize", str(sources["switch"]), "--loss", "5"],
        ["quantize", str(sources["switch"]), "--frobnicate"],
        ["verify", str(tmp_path)],
        ["profile-paths", str(tmp_path / "none.pack")],
        ["recipe", "run", str(tmp_path / "none.toml")],
    ):
        done = moeconv(*arguments)
        assert done.returncode == 2, arguments
        assert done.stderr.startswith("moeconv: "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stdout == ""


def test_every_error_is_a_conversion_error() -> None:
    for kind in (CalibrationError, SettingsError, TargetMissed, VerifyFailed):
        assert issubclass(kind, ConversionError)
