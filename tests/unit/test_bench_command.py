"""`moert bench`: what it counts, the JSON line, the tables and the pictures. Nothing here is timed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moert.bench import figures, sweeps
from moert.bench.bound import Unavoidable, belady, bound_s
from moert.bench.command import bench, summary_of, texts_of
from moert.bench.figures import Figure
from moert.bench.measure import BenchSettings, Measurement, Sample, measure
from moert.bench.plot import check_drawing, draw
from moert.bench.summary import percentile, summarize, summary_lines, tokens_sha256
from moert.budget import Budget, CacheLimit
from moert.errors import DrawingImpossible, InputInvalid
from moert.experts.drive import IoSettings
from moert.experts.replay import Step
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from tests import tiny_packs

SETTINGS = BenchSettings(
    cache=CacheLimit(share=0.5), io=IoSettings(False, 1), eviction="lru", predictor="none", threads=1, new_tokens=3
)


@pytest.fixture(scope="module", autouse=True)
def _short_look_at_the_drive() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moert.bench.measure._DISK_S", 0.02)
        yield


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_packs.write_pack(tmp_path_factory.mktemp("packs") / "tiny.pack", tiny_packs.DECODER)


@pytest.fixture(scope="module")
def measured(pack: Path) -> Measurement:
    return measure(pack, SETTINGS, ["one small step", "hello"])


# The bound ------------------------------------------------------------------------------------------------------------


def test_unavoidable_bytes_are_counted_part_by_part() -> None:
    trace = [Step("decoder", 0, (expert,)) for expert in (0, 1, 2, 0, 1, 0)]
    nbytes = {ExpertKey("decoder", 0, expert): 10 * (expert + 1) for expert in range(3)}
    whole = belady(trace, nbytes, 60)
    assert whole == [Unavoidable(6, 3, 60)]
    assert whole[0].hit_rate == 0.5
    assert belady(trace, nbytes, 60, [0, 2]) == [Unavoidable(2, 2, 30), Unavoidable(4, 1, 30)]


def test_the_bound_is_the_slower_of_both() -> None:
    assert bound_s(2.0, 100, 10.0) == 10.0
    assert bound_s(20.0, 100, 10.0) == 20.0
    assert bound_s(2.0, 100, None) == 2.0


# Measuring ------------------------------------------------------------------------------------------------------------


def test_every_sample_has_the_length_that_was_asked_for(measured: Measurement) -> None:
    assert [sample.prompt_tokens for sample in measured.samples] == [14, 5]
    assert [(len(sample.tokens), len(sample.later_s)) for sample in measured.samples] == [(3, 2), (3, 2)]
    assert all(sample.first_s > 0 for sample in measured.samples)


def test_only_the_samples_count_not_the_warm_up(measured: Measurement) -> None:
    assert measured.demands == sum(len(step.experts) for step in measured.trace) == measured.best.demands
    assert len(measured.trace) == 2 * 3 * 3  # samples, passes, layers
    assert measured.cache_bytes == measured.expert_bytes // 2
    assert 0 < measured.best.bytes_read <= measured.bytes_read
    assert measured.resident_s is not None
    assert measured.resident_s > 0


def test_without_prompts_there_are_built_in_ones(pack: Path, tmp_path: Path) -> None:
    built_in = measure(pack, SETTINGS, None, disk_bytes_per_s=1e9)
    assert [sample.prompt_tokens for sample in built_in.samples] == [24] * 4
    assert built_in.resident_s is None
    silent = tiny_packs.write_pack(tmp_path / "silent.pack", tiny_packs.DECODER, paths=False, tokenizer=False)
    assert len(measure(silent, SETTINGS, None, 1e9).samples) == 4


# The summary ----------------------------------------------------------------------------------------------------------


def test_the_json_line_has_every_figure(measured: Measurement) -> None:
    found = summary_of(measured)
    assert set(found) == {
        "hardware", "pack", "settings", "samples", "prompt_tokens", "new_tokens", "prompt_tokens_per_s",
        "tokens_per_s", "time_to_first_token_s", "token_latency_s", "sample_latency_s", "bytes", "hit_rate", "stall_s",
        "bound", "tokens_sha256",
    }  # fmt: skip
    assert len(found["pack"]["sha256"]) == len(found["tokens_sha256"]) == 64
    assert found["settings"]["cache"] == {"nbytes": None, "share": 0.5}
    assert set(found["bytes"]) == {"disk_read", "cache", "experts", "backbone", "peak_process"}
    assert set(found["token_latency_s"]) == {"p50", "p90", "p99"}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_speeds_and_the_bound_follow_from_the_times(measured: Measurement) -> None:
    samples = (Sample(10, (1, 2, 3), 2.0, (0.5, 0.5)), Sample(30, (4,), 2.0, ()))
    known = replace(measured, samples=samples, stall_s=1.0, best=Unavoidable(4, 1, 300), disk_bytes_per_s=100.0)
    found = summarize(replace(known, resident_s=2.5), {}, "")
    assert (found["prompt_tokens_per_s"], found["tokens_per_s"], found["time_to_first_token_s"]) == (10.0, 2.0, 2.0)
    assert found["sample_latency_s"] == [3.0, 2.0]
    assert found["bound"]["least_s"] == 3.0
    assert found["bound"]["share"] == pytest.approx(0.6)
    unknown = summarize(replace(known, resident_s=None), {}, "")["bound"]
    assert (unknown["compute_s"], unknown["compute"], unknown["least_s"]) == (4.0, "not waiting", 4.0)


def test_one_token_each_has_no_latency_of_later_ones(measured: Measurement) -> None:
    found = summarize(replace(measured, samples=(Sample(3, (1,), 1.0, ()),)), {"processor": "x", "cores": 1}, "")
    assert found["token_latency_s"] is None
    assert not any(line.startswith("token latency") for line in summary_lines(found))


def test_the_hash_of_the_tokens_tells_samples_apart() -> None:
    assert tokens_sha256([(1, 2), (3,)]) == tokens_sha256([[1, 2], [3]])
    assert tokens_sha256([(1, 2), (3,)]) != tokens_sha256([(1,), (2, 3)])


def test_percentiles_are_values_that_were_there() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, q) for q in (1, 20, 50, 90, 100)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_ends_with_one_json_line(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench([pack], SETTINGS, ["hello"], as_json=True)
    alone = capsys.readouterr().out.splitlines()
    bench([pack], SETTINGS, ["hello"])
    with_table = capsys.readouterr().out.splitlines()
    assert len(alone) == 1
    assert len(with_table) > 5
    assert json.loads(alone[0])["tokens_sha256"] == json.loads(with_table[-1])["tokens_sha256"]


def test_prompts_come_from_one_place(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "a"}\n{"input": "b"}\n')
    assert texts_of(None, None) is None
    assert texts_of("a", None) == ["a"]
    assert texts_of(None, lines) == ["a", "b"]
    with pytest.raises(InputInvalid, match="exclude each other"):
        texts_of("a", lines)
    lines.write_text("\n")
    with pytest.raises(InputInvalid, match="no prompts"):
        texts_of(None, lines)


def test_pictures_come_with_their_tables(pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    shutil.copytree(pack, tmp_path / "other.pack")
    bench([pack, tmp_path / "other.pack"], SETTINGS, ["hello"], plot=tmp_path / "new" / "folder")
    out = capsys.readouterr().out
    pictures = {path.name for path in (tmp_path / "new/folder").iterdir()}
    names = ("latencies", "hit-rates-tiny.pack", "hit-rates-other.pack", "budgets", "ablation", "targets")
    assert pictures == {f"{name}.png" for name in names}
    assert all((tmp_path / "new/folder" / name).read_bytes()[:4] == b"\x89PNG" for name in pictures)
    for title in ("Time of a sample", "Hit rate", "part by part", "target"):
        assert title in out


def test_pictures_without_matplotlib_or_a_folder_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DrawingImpossible, match="can't be made a folder"):
        check_drawing(tmp_path / "file", [])
    with pytest.raises(DrawingImpossible, match="two have the same"):
        check_drawing(tmp_path / "fine", [tmp_path / "a/my.pack", tmp_path / "b/my.pack"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DrawingImpossible, match="pip install"):
        check_drawing(tmp_path, [])


# Figures --------------------------------------------------------------------------------------------------------------


def test_a_table_has_a_line_for_each_place() -> None:
    figure = Figure("name", "Title", "cache", "ms", "lines", {"a": [("25%", 1.5), ("50%", 1.0)], "b": [("50%", 20.0)]})
    assert figure.table().splitlines() == ["Title (ms)", "cache    a   b", "25%    1.5    ", "50%      1  20"]


def test_bars_and_lines_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for kind in ("lines", "bars"):
        figure = Figure(kind, "Title", "x", "y", kind, {"a": [("1", 1.0)], "b": [("1", 2.0)]})  # type: ignore[arg-type]
        assert draw(figure, tmp_path).read_bytes()[:4] == b"\x89PNG"


def test_hit_rates_grow_with_the_cache_and_stay_below_the_best(measured: Measurement) -> None:
    series = figures.hit_rates(measured).series
    best = [value for _, value in series["best possible"]]
    assert best == sorted(best)
    assert {"paper", "lru", "lfu", "fifo"} < set(series)
    assert all(
        value <= top + 1e-9 for name in ("lru", "lfu") for (_, value), top in zip(series[name], best, strict=True)
    )


def test_targets_are_named_by_their_loss_or_else_their_bits(measured: Measurement) -> None:
    assert figures.target_of(measured) == f"{measured.pack.manifest.effective_bits():.2f} bits"
    samples = [replace(measured, samples=(Sample(1, (1, 2), 9.0, (0.002,)),))]
    assert figures.targets(samples).series["time"][0][1] == pytest.approx(2)


def test_each_step_of_the_ablation_adds_one_part(pack: Path) -> None:
    layer = Budget.of(Pack.open(pack).manifest).layer_bytes
    settings = BenchSettings(eviction="auto", predictor="transitions")
    first, second, third = sweeps.ablation_steps(settings, layer).values()
    assert (first.cache, first.predictor) == (CacheLimit(nbytes=layer), "none")
    assert (second.cache, second.predictor) == (CacheLimit(nbytes=2 * layer), "transitions")
    assert third == replace(settings, cache=CacheLimit(share=0.5))
    assert sweeps.ablation_steps(SETTINGS, layer)["+ cache"].cache == SETTINGS.cache
