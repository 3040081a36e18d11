"""What a conversion may aim at: a loss, with or without confidence, a size, bits a weight; and what it then plans."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from conversions import Done, settings_for

from moeconv import artifacts
from moeconv.artifacts import Target
from moeconv.command.cli import _exit_code
from moeconv.command.present import conversion_table
from moeconv.conversion.additions import profile_paths
from moeconv.conversion.planning import plan
from moeconv.errors import SettingsError, TargetMissed
from moeconv.packing.packed import verify
from moeconv.plan.problem import Storage
from moeconv.plan.search import check_budget, uniform_bytes, weights_of
from moeconv.source.checkpoint import Checkpoint
from moert.command.description import description_lines
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.pack.reader import Pack


def test_a_promised_bound_lies_between_the_loss_and_the_target(sources: dict[str, Path], tmp_path: Path) -> None:
    done = Done(settings_for(sources, "olmoe", tmp_path, loss=0.08, confidence=0.9))
    report = done.report
    assert report.confidence == 0.9
    assert report.calibration is not None
    assert report.upper_bound is not None
    assert report.calibration.loss < report.upper_bound <= 0.08
    chosen = [point for point in report.curve if point.chosen]
    assert [(point.loss, point.upper) for point in chosen] == [(report.calibration.loss, report.upper_bound)]
    without = Done(settings_for(sources, "olmoe", tmp_path, loss=0.08, out=tmp_path / "b.pack"))
    assert without.report.expert_bytes["pack"] < report.expert_bytes["pack"], "certainty cost nothing"
    assert without.bench.journal.path == done.bench.journal.path
    assert without.swept() == 0


def test_too_little_text_is_said_before_the_sweep(sources: dict[str, Path], tmp_path: Path) -> None:
    done = Done(settings_for(sources, "olmoe", tmp_path, loss=0.08, confidence=0.9))
    notes = [place for place, line in enumerate(done.said) if line.startswith("note: ")]
    sweep = next(place for place, line in enumerate(done.said) if line.startswith("sweep of "))
    note = next(done.said[place] for place in notes if "few to promise" in done.said[place])
    assert done.said.index(note) < sweep
    assert "calibration documents" in note or f"{done.report.calibration.samples} calibration samples" in note  # type: ignore[union-attr]
    assert "8.00% at 90%" in note
    wanted = [int(word) for word in note.replace(":", "").split() if word.isdigit()]
    assert wanted[-1] > done.report.calibration.samples, note  # type: ignore[union-attr]


def test_no_pack_is_larger_than_the_uniform_one_that_meets_the_target(sources: dict[str, Path], tmp_path: Path) -> None:
    """On text as noisy as this the search may well end above it."""
    for place, loss in enumerate((0.001, 0.02, 0.06, 0.15)):
        done = Done(settings_for(sources, "olmoe", tmp_path, loss=loss, out=tmp_path / f"{place}.pack"))
        limit = uniform_bytes(done.bench.spec, max(done.tried))
        assert done.report.expert_bytes["pack"] <= limit
        assert done.report.calibration is not None
        assert done.report.calibration.loss <= loss


def test_two_bits_that_meet_the_target_are_what_is_written(sources: dict[str, Path], tmp_path: Path) -> None:
    done = Done(settings_for(sources, "switch", tmp_path, loss=0.9))
    assert set(done.report.bits_histogram) == {2}
    assert [line for line in done.said if line.startswith("all experts at")] == [
        line for line in done.said if line.startswith("all experts at  2 bits")
    ]


@pytest.mark.parametrize("family", ["switch", "olmoe"])
@pytest.mark.parametrize("quantizer", ["channel", "group"])
def test_a_size_is_kept_and_used_up(sources: dict[str, Path], family: str, quantizer: str, tmp_path: Path) -> None:
    spec = Checkpoint.open(sources[family]).spec
    storage = Storage(0 if quantizer == "channel" else 64)
    low, high = uniform_bytes(spec, 2, storage), uniform_bytes(spec, 4, storage)
    step = (high - low) / len(spec.expert_keys()) / 2 * 1.01  # the largest: of one expert, by one bit
    for place, share in enumerate((0.2, 0.6)):
        size = low + share * (high - low)
        done = Done(
            settings_for(
                sources, family, tmp_path, target=Target("size", float(int(size))), bits=(2, 3, 4),
                quantizer=quantizer, out=tmp_path / f"{place}.pack",
            )
        )  # fmt: skip
        found = done.report.expert_bytes["pack"]
        assert done.manifest.expert_tensor_bytes() == found
        assert found <= size
        # bytes are left over where more of them would be predicted to do no good
        best = max(point.nbytes for point in done.report.curve)
        assert size - found < step or found == best
        assert done.manifest.quality is not None
        assert done.manifest.quality.target_loss is None
        assert "target loss" not in "\n".join(description_lines(Pack.open(done.settings.out)))


def test_bits_a_weight_are_kept(sources: dict[str, Path], tmp_path: Path) -> None:
    target = Target("bits", 3.9)
    done = Done(settings_for(sources, "olmoe", tmp_path, target=target, bits=(2, 3, 4)))
    spec = done.bench.spec
    assert done.report.effective_bits <= 3.9
    step = 8 * (uniform_bytes(spec, 4) - uniform_bytes(spec, 3)) / len(spec.expert_keys()) / weights_of(spec)
    assert done.report.effective_bits > 3.9 - step


def test_a_size_that_nothing_fits_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_for(sources, "olmoe", tmp_path, target=Target("size", 1000.0), bits=(2, 4))
    with pytest.raises(TargetMissed, match=r"all experts at 2 bits have .* more than the 1,000 asked for"):
        Done(settings)
    assert not settings.out.exists()


def test_the_smallest_size_is_named_where_no_width_is_narrower(sources: dict[str, Path], tmp_path: Path) -> None:
    spec = Checkpoint.open(sources["olmoe"]).spec
    least = uniform_bytes(spec, 2)
    settings = settings_for(sources, "olmoe", tmp_path, target=Target("size", 1000.0), quantizer="channel")
    with pytest.raises(
        TargetMissed, match=f"there is no narrower width; .* --size {least}B or --bits-per-weight "
    ) as no:
        Done(settings)
    bits = float(str(no.value).split()[-1])
    for target in (Target("size", float(least)), Target("bits", bits)):
        check_budget(target, spec, 2, Storage())
    with pytest.raises(TargetMissed, match=f"allow narrower experts with --bits .all at 2 have {least:,} bytes"):
        check_budget(Target("size", 1000.0), spec, 4, Storage())


def test_a_success_says_that_all_is_well_and_what_to_run_next(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my pack"
    words = ["quantize", str(sources["olmoe"]), "--calib", str(sources["text"]), "--metric", "perplexity", "--context",
             "32", "--bits", "8", "--loss", "90%", "--confidence", "none", "--out", str(out)]  # fmt: skip
    assert _exit_code(words) == 0
    printed = capsys.readouterr().out.splitlines()
    commands = [line.split("   ")[0] for line in map(str.strip, printed[printed.index("  next:") + 1 :])]
    assert commands == [f"moert run '{out}' \"some text\"", f"moert info '{out}'", f"moeconv profile-paths '{out}'",
                        f"moeconv report '{out}'"]  # fmt: skip
    for command in commands[2:]:
        assert _exit_code(shlex.split(command)[1:]) == 0
    capsys.readouterr()
    assert _exit_code(["verify", str(out), "--against", str(sources["olmoe"])]) == 0
    assert _exit_code(["verify", str(out)]) == 0
    against, alone = capsys.readouterr().out.splitlines()
    assert against.startswith(f"{out} is whole, and was made from {sources['olmoe']}: ")
    assert alone.startswith(f"{out} is whole: ")
    assert _exit_code(words) == 0
    assert "profile-paths" not in capsys.readouterr().out, "the pack has its paths still"


def test_a_second_run_says_what_its_measurements_had_taken(sources: dict[str, Path], tmp_path: Path) -> None:
    first = Done(settings_for(sources, "olmoe", tmp_path, loss=0.02, quantizer="channel")).report
    again = Done(settings_for(sources, "olmoe", tmp_path, loss=0.02, quantizer="channel")).report
    assert [step.reused_seconds for step in first.steps] == [0] * len(first.steps)
    reused = {step.name: step.reused_seconds for step in again.steps}
    assert first.sweep_cost is not None
    assert reused["sweep"] == pytest.approx(first.sweep_cost.seconds, rel=0.5)
    assert reused["uniform widths"] > 0
    seconds = sum(reused.values())
    assert f", with measurements of earlier runs that had taken {seconds:.0f} s" in conversion_table(again, "m.pack")
    assert "earlier runs" not in conversion_table(first, "m.pack")


def test_an_unreachable_loss_ends_with_3_before_the_sweep(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quantize", str(sources["olmoe"]), "--calib", str(sources["text"]), "--metric", "perplexity",
             "--context", "32", "--bits", "2", "--quantizer", "gptq", "--loss", "0.01%", "--confidence", "none",
             "--out", str(tmp_path / "m.pack"), "--work", str(tmp_path / "work")]  # fmt: skip
    assert _exit_code(arguments) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "moeconv: with all experts at 2 bits" in err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["work"]
    assert not list(tmp_path.glob("work/*/planning.json")), "it swept first"


def test_mistakes_are_one_line_and_2(sources: dict[str, Path], tmp_path: Path, capsys) -> None:
    model = str(sources["switch"])
    text = ["--calib", str(sources["pairs"])]
    for arguments, says in (
        (["quantize", model], "--calib is missing"),
        (["quantize", model, *text, "--loss", "5"], "--loss '5'"),
        (["quantize", model, *text, "--loss", "5%", "--size", "1MB"], "--loss and --size"),
        (["quantize", model, *text, "--size", "1MB", "--bits-per-weight", "3"], "--size and --bits-per-weight"),
        (["quantize", model, *text, "--size", "much"], "--size 'much'"),
        (["quantize", model, *text, "--confidence", "20%"], "--confidence 0.2"),
        (["quantize", model, *text, "--confidence", "sure"], "--confidence 'sure'"),
        (["quantize", model, *text, "--tune", "racing=5%"], "there is no setting 'racing'"),
        (["quantize", model, *text, "--memory", "1KB", "--out", str(tmp_path / "m.pack")], "--memory"),
        (["quantize", model, *text, "--tune", "allocation=luck"], "--tune allocation=luck"),
        (["quantize", model, *text, "--tune", "signal=noise"], "--tune signal=noise"),
        (["quantize", model, *text, "--fields", "input"], "--fields 'input'"),
        (["quantize", model, *text, "--frobnicate"], "frobnicate"),
        (["quantize", model, "--bits", "16", "--tune", "strict"], "--tune strict has no effect without --calib"),
        (["quantize", model, *text, "--bits-per-weight", "inf"], "--bits-per-weight inf"),
        (["plan", str(tmp_path)], "no finished sweep"),
        (["plan", str(tmp_path), "--tune", "allocation=luck"], "--tune allocation=luck"),
        (["plan", str(tmp_path), "--tune", "signal=noise"], "--tune signal=noise"),
        (["plan", str(tmp_path), "--bits-per-weight", "inf"], "--bits-per-weight inf"),
        (["plan", str(tmp_path), "--bits-per-weight", "nan"], "--bits-per-weight nan"),
        (["report", str(tmp_path)], "manifest"),
        (["verify", str(tmp_path)], "manifest"),
        (["profile-paths", str(tmp_path / "none.pack")], "none.pack"),
        (["recipe", "run", str(tmp_path / "none.toml")], "none.toml"),
    ):
        assert _exit_code(arguments) == 2, arguments
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("moeconv: "), err
        assert err.count("\n") == 1, err
        assert says in err, err


def test_projections_get_widths_of_their_own(sources: dict[str, Path], tmp_path: Path) -> None:
    """And such a pack is verified, planned again and run."""
    target = Target("bits", 3.7)
    done = Done(settings_for(sources, "olmoe", tmp_path, target=target, bits=(2, 3, 4), per_projection=True))
    mixed = [entry for entry in done.manifest.experts if len(set(entry.bits.values())) > 1]
    assert mixed, "every expert has one width for all its projections"
    assert done.report.effective_bits <= 3.7
    assert all(entry.importance is None for entry in done.manifest.experts), "no expert was probed as a whole"
    verify(Pack.open(done.settings.out), None)
    planned = plan(done.settings.work, target, "knapsack", "kl", None)
    assert planned.chosen.nbytes == done.report.expert_bytes["pack"]
    with Engine.open(done.settings.out, predict="none") as engine:
        tokens = engine.generate([5, 9, 14], GenerationSettings(max_new_tokens=4)).result.tokens
    assert len(tokens) == 4


@pytest.mark.parametrize("family", ["switch", "olmoe"])
def test_the_command_plan_shows_what_was_converted(
    sources: dict[str, Path], family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = Checkpoint.open(sources[family]).spec
    size = uniform_bytes(spec, 2) + 0.6 * (uniform_bytes(spec, 4) - uniform_bytes(spec, 2))
    target = ["--size", f"{size / 1e3:.3f}KB"]
    settings = settings_for(
        sources, family, tmp_path, target=Target("size", float(int(size))), bits=(2, 3, 4), quantizer="channel"
    )
    done = Done(settings)
    before = {path: path.stat().st_mtime_ns for path in settings.work.rglob("*")}
    assert _exit_code(["plan", str(settings.work), *target, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"]["nbytes"] == done.report.expert_bytes["pack"]
    assert found["chosen"]["loss"] == done.report.calibration.loss  # type: ignore[union-attr]
    assert [point["nbytes"] for point in found["points"]] == sorted(point["nbytes"] for point in found["points"])
    assert sum(point["chosen"] for point in found["points"]) == 1
    assert _exit_code(["plan", str(done.bench.journal.path.parent), *target, "--curve"]) == 0
    table = capsys.readouterr().out
    assert table.count("  chosen\n") == 1
    assert "upper" not in table, "a bound, where nothing was promised"
    assert f"{done.report.calibration.loss:.2%}" in table  # type: ignore[union-attr]
    assert {path: path.stat().st_mtime_ns for path in settings.work.rglob("*")} == before, "it wrote something"


def test_the_command_plan_inside_the_work_directory(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = Done(settings_for(sources, "olmoe", tmp_path, target=Target("bits", 3.7), bits=(2, 4), quantizer="channel"))
    monkeypatch.chdir(done.bench.journal.path.parent)
    assert _exit_code(["plan", ".", "--curve"]) == 0
    assert "  chosen\n" in capsys.readouterr().out


def test_paths_of_a_pack_with_an_older_report(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pack can be profiled all the same, with text that is given."""
    settings = settings_for(sources, "switch", tmp_path, calib=None, bits=(16,))
    calls: dict[str, Any] = {"heldout": None, "seed": None, "samples": 4, "context": None, "say": lambda line: None}
    with monkeypatch.context() as older:
        older.setattr(artifacts, "SCHEMA", 1)
        Done(settings)
    pack = Pack.open(settings.out)
    with pytest.raises(SettingsError, match=r"report\.json .* has schema 1, .*: give --calib") as caught:
        profile_paths(pack, calib=None, **calls)
    assert "\n" not in str(caught.value)
    found, _ = profile_paths(pack, calib=str(sources["pairs"]), **calls)
    assert found.tokens > 0


def test_the_command_plan_for_a_loss(sources: dict[str, Path], tmp_path: Path) -> None:
    """After a conversion for that loss its plan is predicted to meet it, and a larger loss never takes more bytes."""
    settings = settings_for(sources, "switch", tmp_path, loss=0.02, quantizer="channel")
    done = Done(settings)
    sizes = []
    for loss in (0.02, 0.05, 0.5):
        planned = plan(settings.work, Target("loss", loss), "knapsack", "kl", None)
        assert planned.chosen.predicted_loss is not None
        assert planned.chosen.predicted_loss <= loss
        sizes.append(planned.chosen.nbytes)
    assert sizes[0] == done.report.expert_bytes["pack"]
    assert sizes == sorted(sizes, reverse=True)
    with pytest.raises(SettingsError, match="--bits 16"):
        plan(settings.work, Target("loss", 0.05), "knapsack", "kl", (2, 16))


def test_the_knapsack_is_never_predicted_to_lose_more_than_greedy(sources: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_for(sources, "olmoe", tmp_path, target=Target("bits", 3.7), bits=(2, 3, 4))
    Done(settings)
    better = 0
    for bits in (3.3, 3.6, 3.9, 4.2):
        losses = []
        for allocation in ("knapsack", "greedy", "uniform"):
            planned = plan(settings.work, Target("bits", bits), allocation, "kl", None)
            assert planned.chosen.predicted_loss is not None
            losses.append(planned.chosen.predicted_loss)
        assert losses[0] <= losses[1] + 1e-12
        better += losses[0] < losses[2]
    assert better, "every allocation plans the same: nothing was compared"


@pytest.mark.parametrize("allocation", ["greedy", "uniform"])
@pytest.mark.parametrize("signal", ["metric", "nll"])
def test_other_allocations_and_signals_meet_the_target(
    sources: dict[str, Path], tmp_path: Path, allocation: str, signal: str
) -> None:
    settings = settings_for(
        sources, "switch", tmp_path, loss=0.02, allocation=allocation, signal=signal, quantizer="channel"
    )
    report = Done(settings).report
    assert (report.allocation, report.signal) == (allocation, signal)
    assert report.calibration is not None
    assert report.calibration.loss <= 0.02
    if allocation == "uniform":
        assert len(report.bits_histogram) == 1
    if allocation == "greedy":
        assert len(report.bits_histogram) <= 2
