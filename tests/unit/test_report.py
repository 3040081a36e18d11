"""The report of a pack: what its page says, what it refuses, and the figures it computes itself."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from report_packs import LARGE, NASTY, SWITCH, bare_pack, bare_report, full_pack, full_report, report_pack

from moeconv.artifacts import ConversionReport, DenseReport, Standing, Step, Target, to_json
from moeconv.command.present import conversion_table
from moeconv.errors import ConversionError
from moeconv.report import curves
from moeconv.report.curves import path_shares, prediction, top_share
from moeconv.report.page import Chart, duration, percent, result, size
from moeconv.report.sections import marked
from moeconv.report.writer import read_report, write_report
from moeconv.routes import build
from moert.pack.manifest import LossEstimate
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.pack.reader import Pack

pytest.importorskip("matplotlib", reason="the report's figures need matplotlib")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return Pack.open(full_pack(tmp_path_factory.mktemp("full") / "p"))


@pytest.fixture(scope="module")
def written(pack: Pack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "report"
    write_report(pack, out)
    return out


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return Pack.open(bare_pack(tmp_path_factory.mktemp("bare") / "p"))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages with empty figures: to draw those of a report takes seconds."""
    monkeypatch.setattr(curves, "draw", lambda name, *_: Chart(name, "<svg></svg>", b"<svg></svg>", b""))


def page_of(root: Path) -> str:
    return (root / "index.html").read_text("utf-8")


def test_the_report_comes_back_as_it_was_written(pack: Pack) -> None:
    assert read_report(pack) == full_report(SWITCH)


def test_a_bare_report_comes_back_too(bare: Pack) -> None:
    assert read_report(bare) == bare_report(SWITCH)


def test_page_and_figures_are_written(written: Path, pack: Pack, tmp_path: Path) -> None:
    files = write_report(pack, tmp_path / "r")
    assert files[0] == tmp_path / "r" / "index.html"
    assert sorted(files) == sorted(path for path in (tmp_path / "r").rglob("*") if path.is_file())
    names = {path.name for path in files}
    for name in ("importance-metric", "importance-nll", "importance-kl", "widths", "size-loss", "paths-share",
                 "paths-prediction", "coverage"):  # fmt: skip
        assert {f"{name}.svg", f"{name}.png"} <= names
        assert (tmp_path / "r/figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for path in files:
        assert path.read_bytes() == (written / path.relative_to(tmp_path / "r")).read_bytes()


def test_page_says_the_result(written: Path) -> None:
    page = page_of(written)
    for text in ("switch-tiny &lt;8&gt;", "4.98 MB", "16% of what FP16 takes", "60% of what uniform INT4",
                 "3.10% (95% interval 1.80% to 4.50%", "stays under 4.30% with 95% confidence", "(1 of 64): E00/E000.",
                 "3 min 10 s", "met on held-out"):  # fmt: skip
        assert text in page


@pytest.mark.usefixtures("undrawn")
def test_a_bound_without_confidence_is_called_what_it_is(tmp_path: Path) -> None:
    note = "3 documents to judge plans by are too few for a promise at 95%"
    standing = Standing(0.95, 3, 2.5, 2, 30, 6, 2, (note,))
    report = replace(full_report(SWITCH), confidence=None, standing=standing)
    pack = Pack.open(report_pack(tmp_path / "p", SWITCH, to_json(report)))
    assert read_report(pack) == report
    write_report(pack, tmp_path / "r")
    page = page_of(tmp_path / "r")
    assert "No promise is given: more text of the same documents would lose less than 4.30%" in page
    assert f"Note: {note}." in page
    assert "95% confidence" not in page
    table = conversion_table(report, "m.pack")
    assert "no promise: more text of the same documents was to lose less than 4.30%" in table
    assert note in table


@pytest.mark.usefixtures("undrawn")
def test_a_perplexity_has_its_unit_and_that_per_token_beside_it(tmp_path: Path) -> None:
    calibration, heldout = (
        LossEstimate(300.0, 309.0, 0.03, 0.02, 0.04, 9, 60.0, 61.5),
        LossEstimate(296.25, 306.5, 0.0346, 0.021, 0.049, 9, 65.643, 67.32),
    )
    report = replace(full_report(SWITCH), metric="perplexity", calibration=calibration, heldout=heldout)
    pack = Pack.open(report_pack(tmp_path / "p", SWITCH, to_json(report)))
    assert read_report(pack) == report
    write_report(pack, tmp_path / "r")
    text = "There perplexity per word is 306.5, 296.2 unquantized (per token 67.32, 65.64 unquantized)."
    assert text in page_of(tmp_path / "r")
    table = conversion_table(report, "m.pack").splitlines()
    assert "worse perplexity per word is than" in table[2]
    assert [line.split()[:4] for line in table[5:8:2]] == [
        ["per", "token", "60.0000", "61.5000"],
        ["per", "token", "65.6430", "67.3200"],
    ]
    other = replace(full_report(SWITCH), calibration=replace(heldout, value_per_token=None))
    assert "per token" not in conversion_table(other, "m.pack")


@pytest.mark.usefixtures("undrawn")
def test_dense_widths_and_their_loss_are_on_the_page(tmp_path: Path) -> None:
    dense = DenseReport("group", 64, {"attention": 4, "head": 8}, 500_000, 1_600_000,
                        LossEstimate(0.82, 0.81, 0.0123, 0.004, 0.021, 600))  # fmt: skip
    report = replace(full_report(SWITCH), dense=dense)
    pack = Pack.open(report_pack(tmp_path / "p", SWITCH, to_json(report)))
    assert read_report(pack) == report
    write_report(pack, tmp_path / "r")
    page = page_of(tmp_path / "r")
    for text in (
        "31% of what they have in the source", "quantizer group, in groups of 64", "<td>attention</td>",
        "<td>head</td>", "lose 1.23% (95% interval 0.40% to 2.10%, 600 samples)",
    ):  # fmt: skip
        assert text in page
    assert "lose 1.23%" in conversion_table(report, "m.pack")
    assert "dense matrices: attention 4, head 8 bits" in conversion_table(report, "m.pack")
    assert "500,000 = 31.2% of the source's" in conversion_table(report, "m.pack")


@pytest.mark.usefixtures("undrawn")
def test_reused_measurements_are_on_the_page_with_what_they_had_taken(written: Path, tmp_path: Path) -> None:
    steps = (Step("reference", 0.0, 22.0), Step("sweep", 1.0, 190.0), Step("pack", 4.2))
    report = replace(full_report(SWITCH), steps=steps)
    pack = Pack.open(report_pack(tmp_path / "p", SWITCH, to_json(report)))
    assert read_report(pack) == report
    write_report(pack, tmp_path / "r")
    page = page_of(tmp_path / "r")
    assert "Measurements of earlier runs were reused, which had taken 3 min 32 s" in page
    assert "reused from earlier runs</th>" in page
    assert page.index("<td>sweep</td>") < page.index("<td>reference</td>") < page.index("<td>pack</td>")
    assert "reused" not in page_of(written)


def test_a_page_without_dense_widths_says_so(written: Path) -> None:
    assert "Stored as in the source, in 7 bytes." in page_of(written)


def test_page_needs_nothing_from_elsewhere(written: Path) -> None:
    page = page_of(written)
    assert "default-src 'none'" in page
    for attribute in ('src="', 'href="', "url("):
        for rest in page.split(attribute)[1:]:
            assert rest.startswith(("#", "data:")), attribute + rest[:60]
    assert "@import" not in page
    assert " onclick" not in page
    ids = [rest.split('"')[0] for rest in page.split(' id="')[1:]]
    assert len(ids) == len(set(ids))


def test_text_of_samples_stays_text(written: Path) -> None:
    page = page_of(written)
    assert "<script>alert" not in page
    assert NASTY.split("&")[0].replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;") in page


def test_all_experts_are_in_the_table(written: Path) -> None:
    page = page_of(written)
    assert page.count("<tr><td>") == len(SWITCH.expert_keys()) + 5  # and the steps
    assert "<td>D03/E007</td>" in page


def test_missing_parts_become_sentences(bare: Pack, tmp_path: Path) -> None:
    write_report(bare, tmp_path / "r")
    page = page_of(tmp_path / "r")
    for text in ("loss was not measured", "moeconv profile-paths", "Not measured", "No curve", "Not counted",
                 "None were kept"):  # fmt: skip
        assert text in page
    assert [path.name for path in (tmp_path / "r/figures").glob("*.svg")] == ["widths.svg"]
    assert "None" not in page.replace("None were kept", "")
    assert "nan" not in page


def test_the_page_grows_by_a_few_hundred_bytes_an_expert(tmp_path: Path) -> None:
    page = write_report(Pack.open(full_pack(tmp_path / "p", LARGE)), tmp_path / "r")[0]
    assert page.stat().st_size < 300_000 + 300 * len(LARGE.expert_keys())


def result_of(**changes: object) -> str:
    return result(replace(full_report(SWITCH), **changes), 64)  # type: ignore[arg-type]


def test_a_missed_target_and_other_targets_are_named() -> None:
    assert "missed on held-out" in result_of(target=Target("loss", 0.01))
    assert "a size of 5 MB" in result_of(target=Target("size", 5e6))
    assert "2.8 bits a weight" in result_of(target=Target("bits", 2.8))
    assert "relative rise of perplexity" in result_of(metric="perplexity")


def refusal(pack: Path, out: Path) -> str:
    with pytest.raises(ConversionError) as caught:
        write_report(Pack.open(pack), out)
    text = str(caught.value)
    assert "\n" not in text
    assert not list(out.parent.glob(f".{out.name}.*"))
    return text


def damaged(report: ConversionReport) -> dict[str, object]:
    document = to_json(report)
    document["sensitivity"]["coverage"] = {"first": 1}
    return document


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "has no report.json"),
        (b"{", "is not JSON"),
        (b"[]", "schema None"),
        (b'{"schema": 1}', "schema 1, this version of moeconv reads"),
        (json.dumps(damaged(full_report(SWITCH))).encode(), "'first' names no expert"),
        (json.dumps({"schema": to_json({})["schema"]}).encode(), "is not what moeconv quantize writes"),
    ],
)
def test_packs_without_a_usable_report_are_refused(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = report_pack(tmp_path / "p", SWITCH, content, paths=False)
    assert said in refusal(path, tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.usefixtures("undrawn")
def test_only_a_report_is_replaced(bare: Pack, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "index.html").write_text("mine")
    assert "would be lost" in refusal(bare.root, other)
    assert (other / "index.html").read_text() == "mine"
    assert "not a report" in refusal(bare.root, other / "index.html")
    ours = tmp_path / "ours"
    write_report(bare, ours)
    (ours / "figures" / "stale.svg").write_text("old")
    write_report(bare, ours)
    assert not (ours / "figures" / "stale.svg").exists()
    (ours / "notes.txt").write_text("mine")
    assert "would be lost" in refusal(bare.root, ours)
    assert (ours / "notes.txt").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert write_report(bare, empty)[0].is_file()


@pytest.mark.usefixtures("undrawn")
def test_a_failed_write_leaves_the_old_report(bare: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r"
    write_report(bare, out)
    before = page_of(out)

    def full(self: Path, body: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert "No space left" in refusal(bare.root, out)
    assert page_of(out) == before


def test_without_matplotlib_one_line_says_what_to_install(
    pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'moert[report]'" in refusal(pack.root, tmp_path / "r")


def test_figures_follow_the_page_and_stand_alone(written: Path) -> None:
    alone = (written / "figures/size-loss.svg").read_text("utf-8")
    assert alone.startswith("<?xml")
    assert "prefers-color-scheme" in alone
    assert page_of(written).count("var(--ink)") > 50
    assert "#1b1f24" not in page_of(written).split("</style>")[1]


def test_paths_and_prediction_by_hand() -> None:
    """Four tokens on one path, one on another: after expert 0 comes 1, unless it is the odd token."""
    same, odd = [0, 1, 2], [0, 1, 3]
    routes = np.array([same] * 4 + [odd])
    table = build(4, {LayerKey("decoder", layer): routes[:, [layer]] for layer in range(3)})
    shares = path_shares(table, "decoder")
    assert shares is not None
    assert shares[0].tolist() == [0, 0.5, 1]
    assert shares[1].tolist() == pytest.approx([0, 0.8, 1])
    assert top_share(shares, 0.5) == pytest.approx(0.8)
    assert prediction(table, 1) == [pytest.approx((0.8, 0.8, 0.8))] * 3  # the odd one is unseen without itself


def test_prediction_leaves_the_judged_choice_out() -> None:
    routes = np.arange(40).reshape(40, 1)
    table = build(40, {LayerKey("decoder", layer): routes for layer in range(3)})
    assert prediction(table, 1) == [(0, 0, 0)] * 3
    two = build(40, {LayerKey("decoder", layer): routes for layer in range(2)})
    assert prediction(two, 1) is None
    assert path_shares(two, "decoder") is None


def test_differences_are_marked_word_by_word() -> None:
    assert marked("a b c", "a <x> c") == ("a <del>b</del> c", "a <ins>&lt;x&gt;</ins> c")
    assert marked("same", "same") == ("same", "same")
    assert marked("", "new") == ("", "<ins>new</ins>")


def test_units() -> None:
    assert [size(n) for n in (17, 4_390_912, 2.43e9, 999_900)] == ["17 bytes", "4.39 MB", "2.43 GB", "1 MB"]
    assert [duration(s) for s in (4.24, 30.2, 312, 7260)] == ["4.2 s", "30 s", "5 min 12 s", "2 h 1 min"]
    assert percent(-0.00001, 2) == "0.00%"


def test_keys_of_many_experts_are_read(tmp_path: Path) -> None:
    report = full_report(SWITCH)
    assert report.sensitivity is not None
    key = ExpertKey("encoder", 104, 1023)
    changed = replace(report, sensitivity=replace(report.sensitivity, coverage={key: 5}))
    pack = Pack.open(report_pack(tmp_path / "p", SWITCH, to_json(changed), paths=False))
    assert read_report(pack) == changed
