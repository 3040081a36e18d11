"""The pictures of `moert bench --plot`: the runs behind them, their tables, and drawing. Nothing here is timed."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moert.bench import figures, sweeps
from moert.bench.command import bench
from moert.bench.figures import Figure
from moert.bench.measure import BenchRun, BenchSettings, Sample, measure
from moert.bench.plot import _png, check_drawing, draw
from moert.engine.budget import Budget, CacheLimit
from moert.engine.settings import EngineSettings
from moert.errors import DrawingImpossible
from moert.pack.reader import Pack
from tests.tiny_bench import SETTINGS


def test_pictures_come_with_their_tables(pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    shutil.copytree(pack, tmp_path / "other.pack")
    bench([pack, tmp_path / "other.pack"], SETTINGS, ["hello"], plot=tmp_path / "new" / "folder")
    out = capsys.readouterr().out
    pictures = {path.name for path in (tmp_path / "new/folder").iterdir()}
    single = ("latencies", "budgets", "ablation", "targets", "idle-experts", "dependence")
    names = (*single, "hit-rates-tiny.pack", "hit-rates-other.pack")
    assert pictures == {f"{name}.png" for name in names}
    assert all((tmp_path / "new/folder" / name).read_bytes()[:4] == b"\x89PNG" for name in pictures)
    assert [json.loads(line)["samples"] for line in out.splitlines() if line.startswith("{")] == [1, 1]
    for title in ("Time of a sample", "Hit rate", "part by part", "target", "stay idle", "tokens further away change"):
        assert title in out


def test_pictures_without_matplotlib_or_a_folder_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DrawingImpossible, match="can't be made a folder"):
        check_drawing(tmp_path / "file", [])
    with pytest.raises(DrawingImpossible, match="two have the same"):
        check_drawing(tmp_path / "fine", [tmp_path / "a/my.pack", tmp_path / "b/my.pack"])
    with pytest.raises(DrawingImpossible, match="/proc can't be written to"):
        check_drawing(Path("/proc"), [])
    check_drawing(tmp_path / "fine", [])
    assert not list((tmp_path / "fine").iterdir())
    with pytest.raises(DrawingImpossible, match="has no folder"):
        bench([], SETTINGS, plot="")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DrawingImpossible, match="pip install"):
        check_drawing(tmp_path, [])


def test_a_table_has_a_line_for_each_place() -> None:
    figure = Figure(
        "name", "Title", "cache", "ms", "lines", {"a": [("25%", 1.5), ("50%", 1.0)], "b": [("50%", 20.0)]}, "All of it."
    )
    assert figure.table().splitlines() == [
        "Title (ms)",
        "cache    a   b",
        "25%    1.5    ",
        "50%      1  20",
        "All of it.",
    ]


def test_bars_and_lines_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for kind, place in (("lines", "1%"), ("bars", "1%"), ("shares", "1%"), ("counts", "4")):
        figure = Figure(kind, "Title", "x", "y", kind, {"a": [(place, 1.0)], "b": [(place, 2.0)]})  # type: ignore[arg-type]
        assert draw(figure, tmp_path).read_bytes()[:4] == b"\x89PNG"


def test_time_lies_along_the_x_axis_where_shares_of_samples_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    seen: dict[str, list[float]] = {}
    step, plot = Axes.step, Axes.plot

    def noted_step(self: Axes, x: list[float], y: list[float], **named: Any) -> Any:
        seen["shares"] = [*x, *y]
        return step(self, x, y, **named)

    def noted_plot(self: Axes, x: list[float], y: list[float], *rest: Any, **named: Any) -> Any:
        seen.setdefault("lines", [*x, *y])
        return plot(self, x, y, *rest, **named)

    monkeypatch.setattr(Axes, "plot", noted_plot)
    assert _png(Figure("a", "Title", "cache", "ms", "lines", {"a": [("25%", 3.0), ("50%", 2.0)]}))
    assert seen["lines"] == [25, 50, 3, 2]
    monkeypatch.setattr(Axes, "step", noted_step)
    assert _png(Figure("a", "Title", "share", "s", "shares", {"a": [("50%", 0.5), ("100%", 0.75)]}))
    assert seen["shares"] == [0.5, 0.75, 50, 100]


def test_every_caption_says_what_is_seen_the_pack_and_the_machine(
    pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    bench([pack], SETTINGS, ["hello"], plot=tmp_path)
    captions = [line for line in capsys.readouterr().out.splitlines() if "Machine: " in line]
    assert len(captions) == 6
    assert all("tiny.pack: " in caption and "bits" in caption for caption in captions)
    assert len({caption.split(" (")[0] for caption in captions}) == 6


def test_a_picture_that_can_t_be_written_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    figure = Figure("a", "Title", "x", "y", "lines", {"a $b$ \\frac": [("1", 1.0)], "c$^$": [("1", 1.0)]})
    old = draw(figure, tmp_path).read_bytes()

    def cut_short(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", cut_short)
        with pytest.raises(DrawingImpossible, match=r"a\.png can't be written: No space left"):
            draw(figure, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert (tmp_path / "a.png").read_bytes() == old
    (tmp_path / "b.png").mkdir()
    with pytest.raises(DrawingImpossible, match=r"b\.png can't be written"):
        draw(replace(figure, name="b"), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "b.png"}


def test_runs_behind_the_pictures_say_nothing(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = Budget.of(Pack.open(pack).manifest).layer_bytes
    small = sweeps.with_cache(SETTINGS, layer)
    assert measure(pack, small, ["hello"], 1e9).cache_bytes == layer
    assert "moert: " in capsys.readouterr().err  # what a user who asked for it is told
    measure(pack, small, ["hello"])
    assert capsys.readouterr().err.count("moert: ") == 1  # not again for the run in memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeps, "BUDGETS", (0.01,))
        sweeps.all_figures([measure(pack, SETTINGS, ["hello"], 1e9)], SETTINGS, ["hello"])
    assert capsys.readouterr().err == ""


def test_hit_rates_grow_with_the_cache_and_stay_below_the_best(measured: BenchRun) -> None:
    series = figures.hit_rates(measured).series
    best = [value for _, value in series["furthest-first"]]
    assert best == sorted(best)
    assert {"paper", "lru", "lfu"} < set(series)
    assert all(
        value <= top + 1e-9 for name in ("lru", "lfu") for (_, value), top in zip(series[name], best, strict=True)
    )


def test_targets_are_named_by_their_loss_or_else_their_bits(measured: BenchRun) -> None:
    assert figures.target_of(measured) == f"{measured.pack.manifest.effective_bits():.2f} bits"
    samples = [replace(measured, samples=(Sample(1, (1, 2), 9.0, (0.002,)),))]
    assert figures.targets(samples).series["time"][0][1] == pytest.approx(2)


def test_each_step_of_the_ablation_adds_one_part(pack: Path) -> None:
    layer = Budget.of(Pack.open(pack).manifest).layer_bytes
    settings = BenchSettings(EngineSettings(eviction="auto", predict="transitions"))
    first, second, third = (step.engine for step in sweeps.ablation_steps(settings, layer).values())
    assert (first.cache, first.predict) == (layer, "none")
    assert (second.cache, second.predict) == (2 * layer, "transitions")
    assert third == settings.engine.but(cache=CacheLimit(share=0.5))
    assert sweeps.ablation_steps(SETTINGS, layer)["+ cache"].engine.cache == SETTINGS.engine.cache


def test_a_step_that_reads_nothing_ahead_is_not_called_preloading(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = measure(pack, SETTINGS, ["hello"], 1e9)
    for ahead, name in ((0, "+ preload (nothing was worth it)"), (5, "+ preload")):
        monkeypatch.setattr(sweeps, "measure", lambda *rest, ahead=ahead: replace(run, ahead_bytes=ahead))
        (steps,) = sweeps._steps([run], SETTINGS, ["hello"]).values()
        assert [step for step, _ in steps] == ["low bits, on demand", name, "+ cache"]
