"""`python -m recipes.bench.sweeps`: experts that tokens go to, the runs behind pictures, drawing. Nothing is timed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moert.bench import drive
from moert.bench.curve import CHUNKS, IN_FLIGHT, Curve
from moert.bench.drive import Figure
from moert.bench.measure import BenchRun, BenchSettings, Sample, measure
from moert.engine.budget import Budget, CacheLimit
from moert.engine.engine import Engine
from moert.engine.settings import EngineSettings
from moert.errors import BudgetTooSmall
from moert.experts.policy import Demand
from moert.kernels.backend import I64
from moert.pack.reader import Pack
from recipes.bench import choices, sweeps
from recipes.bench.choices import Change, Input, Reader, changes, shares_idle, shares_kept
from recipes.bench.sweeps import DrawingImpossible, _png, bench, check_drawing, draw, folder_of
from tests import tiny_packs
from tests.tiny_bench import SETTINGS, but

# Experts that tokens go to --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_packs.write_pack(tmp_path_factory.mktemp("packs") / "switch.pack", tiny_packs.SWITCH)


def inputs(*all_ids: Sequence[int]) -> list[Input]:
    return [Input(ids, ids) for ids in all_ids]


def by_token(asked: Sequence[Input]) -> list[I64]:
    """Two layers with top-2 of 8 experts: the first layer goes by the token alone, the second by the token before."""
    found = []
    for each in asked:
        ids = np.array(each.ids)
        before = np.concatenate([[0], ids[:-1]])
        found.append(np.stack([np.stack([ids % 4, ids % 4 + 4], 1), np.stack([before % 4, before % 4 + 4], 1)], 1))
    return found


def test_what_no_token_goes_to_is_idle() -> None:
    shares = shares_idle(by_token, inputs([1, 1, 2, 1], [1, 2]), 8)
    assert shares == {1: 75, 2: pytest.approx(100 * (1 - (2 + 4 + 4 + 4) / 4 / 8)), 3: 50, 4: 37.5}

    def full(asked: Sequence[Input]) -> list[I64]:
        return [np.where(experts < 4, -1, experts) for experts in by_token(asked)]

    assert shares_idle(full, inputs([1]), 8) == {1: 87.5}  # what was dropped went nowhere


def test_a_length_that_hardly_an_input_has_is_left_out() -> None:
    assert list(shares_idle(by_token, inputs(*[[1, 2]] * 20, [1, 2, 3]), 8)) == [1, 2]


def test_a_cache_holds_those_used_last_when_a_token_comes() -> None:
    experts = np.array([[0, 1], [1, 2], [3, -1], [0, 2]])
    assert choices.states(experts, 5, 3).tolist() == [
        [2, 1, 1, 2], [2, 3, 1, 1], [0, 2, 1, 3], [0, 0, 2, 1], [0, 0, 0, 0],
    ]  # fmt: skip


def test_experts_that_stay_are_counted_by_distance() -> None:
    asked, changed = inputs([1, 2, 3]), inputs([3, 2, 3], [2, 1, 3])
    tried = [(0, changed[0], Change([0], [(1, 1), (2, 2)])), (0, changed[1], Change([0, 1], [(2, 1)]))]
    assert shares_kept(by_token, asked, tried) == {1: 50, 2: 100}


def test_of_an_encoder_both_sides_change_and_of_a_decoder_what_came_before() -> None:
    ids = [9, 5, 6, 7, 1]  # 1 and 9 are special: they stay, and nobody looks at them
    assert list(changes(ids, {1, 9}, causal=False)) == [
        Change([2, 3], [(1, 1)]), Change([3], [(1, 2)]), Change([1, 3], [(2, 1)]), Change([1, 2], [(3, 1)]),
        Change([1], [(3, 2)]),
    ]  # fmt: skip
    assert list(changes(ids, {1, 9}, causal=True)) == [Change([1], [(2, 1), (3, 2)]), Change([1, 2], [(3, 1)])]
    assert not list(changes([9, 5, 1], {1, 9}, causal=False))
    for change in changes(list(range(20)), (), causal=False):
        ((token, distance),) = change.seen
        assert min(abs(token - gone) for gone in change.gone) >= distance


def test_random_tokens_differ_from_those_they_replace_and_come_from_the_inputs() -> None:
    spec = tiny_packs.DECODER
    asked = inputs([5, 6, 7, 8, spec.tokens.eos[0]], [10, 11])
    changed = choices._changed(spec, asked, causal=True)
    assert {number for number, _, _ in changed} == {0, 1}
    assert changed == choices._changed(spec, asked, causal=True)
    for number, each, change in changed:
        for place, (old, new) in enumerate(zip(asked[number].ids, each.ids, strict=True)):
            assert (old != new) == (place in change.gone)
            assert new in {5, 6, 7, 8, 10, 11} or old == new
    (_, each, _), *_ = choices._changed(spec, inputs([5, 5]), causal=True)
    assert each.ids[0] != 5


@pytest.mark.parametrize("limit", [100, 10_000_000])
def test_changes_and_inputs_are_no_more_than_asked_for(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(choices, "_CHANGED_TOKENS", limit)
    changed = choices._changed(tiny_packs.DECODER, inputs(list(range(5, 35))), causal=False)
    assert len(changed) == 3 if limit == 100 else len(changed) > 100
    monkeypatch.setattr(choices, "_INPUT_TOKENS", 300)
    found = choices._inputs(tiny_packs.DECODER, "decoder", [[5] * 400, [5] * 40, [5] * 5], [[]] * 3)
    assert [len(each.ids) for each in found] == [256, 40]


def test_behind_an_encoder_the_decoder_reads_what_it_wrote_before_the_end() -> None:
    spec = tiny_packs.SWITCH
    start, end = spec.tokens.start, spec.tokens.eos[0]
    found = choices._inputs(spec, "decoder", [[5, 6], [7]], [[8, 9, end, 9], [10, 11]])
    assert found == [Input([5, 6], [start, 8, 9]), Input([7], [start, 10])]
    assert found[0].having([start, 3]) == Input([5, 6], [start, 3])


def test_each_input_is_read_as_if_alone_and_as_the_engine_demands_it(switch: Path) -> None:
    trace: list[Demand] = []
    asked = [Input([5, 6, 7, 8], [0, 9, 10]), Input([11, 12], [0, 13])]
    with Engine.open(switch, SETTINGS.engine, trace=trace) as engine:
        own = dict(engine.model.routers)
        for name in ("encoder", "decoder"):
            reader = Reader(engine, name)
            together = reader.read([each if name == "decoder" else Input(each.given, each.given) for each in asked])
            for each, experts in zip(asked, together, strict=True):
                given = each if name == "decoder" else Input(each.given, each.given)
                trace.clear()
                assert np.array_equal(reader.read([given])[0], experts)
                used = [set(layer[layer >= 0].tolist()) for layer in experts.swapaxes(0, 1)]
                assert used == [set(demand.experts) for demand in trace if demand.at.stack == name]
        assert engine.model.routers == own


def test_as_many_are_read_at_once_as_fit(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = inputs(*([5 + n, 6, 7] for n in range(5)))
    with Engine.open(pack, SETTINGS.engine) as engine:
        reader, begun = Reader(engine, "decoder"), list[int]()
        whole = reader.read(asked)

        def reserve(prompt_tokens: int, new_tokens: int) -> None:
            if prompt_tokens > 6:
                raise BudgetTooSmall("too small", 0)
            begun.append(prompt_tokens)

        monkeypatch.setattr(engine, "reserve", reserve)
        assert all(map(np.array_equal, reader.read(asked), whole))
        assert begun == [6, 3, 6]
        with pytest.raises(BudgetTooSmall):
            reader.read(inputs([5] * 7))


@pytest.mark.parametrize("changed", [{}, {"predict": "gate"}, {"cache": None}])
def test_of_one_token_all_but_top_k_are_idle_and_of_more_fewer(pack: Path, changed: dict[str, object]) -> None:
    found = choices.choices(
        measure(pack, but(**changed), ["one small step", "hello"], 1e9), ["one small step", "hello"]
    )
    assert list(found.idle) == list(found.same) == ["decoder"]
    idle = list(found.idle["decoder"].values())
    assert idle[0] == 75
    assert idle[-1] < idle[1] < idle[0]
    assert next(iter(found.same["decoder"])) == 1
    assert all(0 <= share <= 100 for share in found.same["decoder"].values())


def test_both_stacks_of_an_encoder_decoder_are_seen(switch: Path) -> None:
    measured = measure(switch, replace(SETTINGS, new_tokens=6), ["one small step"], 1e9)
    found = choices.choices(measured, ["one small step"])
    assert list(found.idle) == ["encoder", "decoder"]
    assert max(found.idle["encoder"]) == 12
    figure = sweeps.idle_experts([measured], [found])
    assert list(figure.series) == ["switch.pack, encoder", "switch.pack, decoder"]
    assert figure.series["switch.pack, encoder"][0] == ("1", pytest.approx(100 * 5 / 6))
    chosen = sweeps.chosen_experts(measured, found)
    cells = np.array([[state for _, state in points] for points in chosen.series.values()])
    assert cells.shape == (6, len(found.first["decoder"]))
    assert ((cells >= 2).sum(0) == (found.first["decoder"][:, 0] >= 0).sum(1)).all()
    assert "D01" in chosen.caption


def test_a_pack_without_a_tokenizer_reads_made_up_tokens(tmp_path: Path) -> None:
    root = tiny_packs.write_pack(tmp_path / "bare.pack", tiny_packs.DECODER, paths=False, tokenizer=False)
    found = choices.choices(measure(root, SETTINGS, None, 1e9))
    assert max(found.idle["decoder"]) == 24
    assert max(found.same["decoder"]) == 16


def test_inputs_of_one_token_depend_on_nothing_and_that_is_said(
    measured: BenchRun, capsys: pytest.CaptureFixture[str]
) -> None:
    found = sweeps._of_choices([replace(measured, samples=measured.samples[:1])], ["a"])
    assert [figure.name for figure in found] == ["idle-experts", "chosen-experts-tiny.pack"]
    assert capsys.readouterr().err.count("no picture") == 1


# Pictures, and the runs behind them -----------------------------------------------------------------------------------


def test_pictures_come_with_their_tables(pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    shutil.copytree(pack, tmp_path / "other.pack")
    packs = [pack, tmp_path / "other.pack"]
    bench(packs, SETTINGS, ["hello"], folder_of(str(tmp_path / "new/folder"), packs, False), False)
    out = capsys.readouterr().out
    pictures = {path.name for path in (tmp_path / "new/folder").iterdir()}
    single = ("latencies", "budgets", "ablation", "targets", "idle-experts", "dependence")
    names = (*single, *(f"{name}-{each.name}" for name in ("hit-rates", "chosen-experts") for each in packs))
    assert pictures == {f"{name}.png" for name in names}
    assert all((tmp_path / "new/folder" / name).read_bytes()[:4] == b"\x89PNG" for name in pictures)
    assert [json.loads(line)["samples"] for line in out.splitlines() if line.startswith("{")] == [1, 1]
    for title in ("Time of a sample", "Hit rate", "part by part", "target", "stay idle", "away change", "and cached"):
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
        folder_of("", [], False)
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
    for kind, place in (("lines", "1%"), ("bars", "1%"), ("shares", "1%"), ("counts", "4"), ("states", "1")):
        figure = Figure(kind, "Title", "x", "no, yes, both", kind, {"a": [(place, 1.0)], "b": [(place, 2.0)]})  # type: ignore[arg-type]
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
    bench([pack], SETTINGS, ["hello"], tmp_path, False)
    captions = [line for line in capsys.readouterr().out.splitlines() if "Machine: " in line]
    assert len(captions) == 7
    assert all("tiny.pack: " in caption and "bits" in caption for caption in captions)
    assert len({caption.split(" (")[0] for caption in captions}) == 7


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
    series = sweeps.hit_rates(measured).series
    best = [value for _, value in series["furthest-first"]]
    assert best == sorted(best)
    assert {"paper", "lru", "lfu"} < set(series)
    assert all(
        value <= top + 1e-9 for name in ("lru", "lfu") for (_, value), top in zip(series[name], best, strict=True)
    )


def test_targets_are_named_by_their_loss_or_else_their_bits(measured: BenchRun) -> None:
    assert sweeps.target_of(measured) == f"{measured.pack.manifest.effective_bits():.2f} bits"
    samples = [replace(measured, samples=(Sample(1, (1, 2), 9.0, (0.002,)),))]
    assert sweeps.targets(samples).series["time"][0][1] == pytest.approx(2)


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


def test_what_was_measured_is_printed_before_a_picture_can_fail(
    pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*rest: object) -> None:
        raise DrawingImpossible("full")

    monkeypatch.setattr(sweeps, "draw", fails)
    monkeypatch.setattr(sweeps, "all_figures", lambda *rest: [Figure("a", "Title", "x", "y", "lines", {})])
    with pytest.raises(DrawingImpossible):
        bench([pack], SETTINGS, ["hello"], tmp_path, False)
    out = capsys.readouterr().out
    assert '"tokens_sha256"' in out
    assert "Title" in out


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """No drive is measured."""
    speeds = {(chunk, count): float(chunk * count * 1000) for chunk in CHUNKS for count in IN_FLIGHT}
    monkeypatch.setattr(drive, "curve_of", lambda files: Curve(speeds, 1))


@pytest.mark.usefixtures("curve")
def test_a_picture_of_each_drive(pack: Path, switch: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert sweeps.exit_code([str(pack), str(switch), "--drive", "--plot", str(tmp_path / "new")]) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"drive-tiny.pack.png", "drive-switch.pack.png"}


def test_a_run_takes_every_setting_of_the_engine(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("cache=50%", "eviction=lfu", "predict=none", "io=buffered,1", "threads=1")
    flags = " ".join(f"--tune {each}" for each in settings) + " --max-new-tokens 2 --json"
    assert sweeps.exit_code([str(pack), *flags.split()]) == 0
    found = json.loads(capsys.readouterr().out)["settings"]
    assert (found["eviction"], found["predict"]) == ("lfu", "none")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--overwrite", "--overwrite goes with --plot: nothing else is replaced"),
        ("--drive --memory 1GB", "--memory has no effect with --drive: it runs no model: leave it out"),
        ("--tune neurons=predicted --plot {out}", "--plot draws what becomes of whole experts"),
    ],
)
def test_mistakes_are_one_line(
    flags: str, line: str, pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert sweeps.exit_code([str(pack), *flags.format(out=tmp_path).split()]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
