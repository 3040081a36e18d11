"""How many documents a promise takes, how looks at a text are counted, and what is said of both."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeconv.artifacts import SensitivityTable, Standing, Summary
from moeconv.errors import ConversionError, SettingsError
from moeconv.measure.metrics import METRICS
from moeconv.measure.scoring import entropy_of
from moeconv.measure.trial import Evaluation, Measure
from moeconv.promise import judging
from moeconv.promise.bound import Evidence, Needed, Terms, alike, effective, least, least_heldout, samples_needed
from moeconv.promise.judging import (
    LOOKS,
    Judge,
    at_chance,
    bound_doubt,
    bound_text,
    check_reference,
    estimate,
    look,
    looks_text,
    needed_text,
    standing,
    unreached_text,
)
from moert.pack.model_spec import ExpertKey
from tests.refusing import one_line


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_documents_of_unlike_sizes_count_for_less(numbers: list[int]) -> None:
    found = effective(np.array(numbers))
    distinct = len(set(numbers))
    assert 1 <= found <= distinct + 1e-9
    assert effective(np.repeat(numbers, 3)) == pytest.approx(found)
    if len({numbers.count(number) for number in numbers}) == 1:
        assert found == pytest.approx(distinct)


def test_a_promise_takes_thirty_documents_at_95_percent() -> None:
    assert [least(share) for share in (0.9, 0.95, 0.99)] == [15, 30, 150]
    assert least_heldout(0.95) == 6
    many, few = np.repeat(np.arange(30), 5), np.repeat(np.arange(29), 5)
    assert Evidence(many, few).enough(0.95)
    assert not Evidence(few, many).enough(0.95)
    assert Evidence(np.append(many, [0] * 15), many).enough(0.95), "worth 22 of one size"
    assert not Evidence(many, np.repeat(np.arange(5), 40)).enough(0.95)
    assert not Evidence(np.append(many, [0] * 100), many).enough(0.95), "one large document is no thirty"


def test_the_heldout_text_counts_in_documents_and_never_for_more_than_its_samples() -> None:
    judged = np.repeat(np.arange(40), 10)
    assert Evidence(judged, np.repeat(np.arange(20), 10)).heldout_number == pytest.approx(20)
    assert Evidence(judged, np.repeat(np.arange(20), 80)).heldout_number == pytest.approx(20)
    assert Evidence(judged, np.arange(40)).heldout_number == pytest.approx(4), "one sample of each is little"


class Scored:
    """A measure of which only scores are asked for."""

    metric = METRICS["exact_match"]

    def __init__(self, right: np.ndarray) -> None:
        self.reference = scored(right)

    def summary(self, evaluation: Evaluation) -> Summary:
        before, after = (self.metric.value(each.columns()) for each in (self.reference, evaluation))
        return Summary(after, self.metric.loss(before, after), 0, 0)


def scored(right: np.ndarray) -> Evaluation:
    rows = tuple((float(one), 1.0) for one in right)
    return Evaluation("", rows, (1.0,) * len(rows), (1,) * len(rows), (0.0,) * len(rows), 0.0, 0)


def judged(right: np.ndarray, evidence: Evidence, confidence: float = 0.95) -> Judge:
    return Judge(cast("Measure", Scored(right)), evidence, 0.05, confidence, 0)


def test_without_a_confidence_the_measured_loss_decides() -> None:
    ones, documents = np.arange(4) < 4, np.arange(4)
    judge = Judge(cast("Measure", Scored(ones)), Evidence(documents, documents), 0.25, None, 0)
    just, worse = scored(np.arange(4) < 3), scored(np.arange(4) < 2)
    assert (judge.holds(just), judge.holds(worse)) == (True, False)
    assert (judge.bound(just), judge.text(just)) == (None, "loss 25.00%")
    assert judge.stated is judge.too_few() is judge.needed([just]) is judge.counted_text() is None
    assert judge.used is judge.counted is judge.evidence
    assert standing(judge, 1, []) == Standing(None, 4, 4.0, 4, None, None, 1, ())


def test_too_few_documents_are_said_and_counted_in_samples() -> None:
    """29 of 10 samples each, of which a promise takes 30; with another one it can be made."""
    few, many = np.repeat(np.arange(29), 10), np.repeat(np.arange(30), 10)
    worse = {len(each): scored(np.arange(len(each)) % 30 != 0) for each in (few, many)}
    short = judged(np.ones(290) > 0, Evidence(few, few))
    assert short.stated is None
    assert str(short.too_few()).startswith(
        "29 documents to judge plans by (worth 29 of one size) and 29 held-out ones are too few for a promise at 95%, "
        "which takes 30 (worth 15) and 6: "
    )
    assert short.used.count == short.counted.count == 290
    assert short.text(worse[290]).startswith("loss 3.45%, under ")
    assert short.text(worse[290]).endswith("% for more text of these documents")
    assert short.needed([worse[290]]) is None, "nothing is promised"
    enough = judged(np.ones(300) > 0, Evidence(many, many))
    assert (enough.stated, enough.too_few()) == (0.95, None)
    assert enough.used is enough.counted is enough.evidence
    assert enough.text(worse[300]).endswith("% at 95%")
    assert standing(enough, 3, ["a note"]) == Standing(0.95, 30, 30.0, 30, 30, 6, 3, ("a note",))


def test_what_a_promise_needs_is_told_where_it_has_less() -> None:
    documents = np.arange(400)
    plans = [scored(np.arange(400) % 40 != 0)]
    timid, easy = (
        Judge(cast("Measure", Scored(np.ones(400) > 0)), Evidence(documents, documents), target, 0.95, 0)
        for target in (0.03, 0.3)
    )
    needed = timid.needed(plans)
    assert needed is not None
    assert needed.have == 400 < (needed.acceptance or needed.both)
    assert easy.needed(plans) is None


def test_a_loss_comes_with_its_interval() -> None:
    measure = cast("Measure", Scored(np.ones(400) > 0))
    found = estimate(measure, scored(np.arange(400) % 40 != 0), np.arange(400), 0)
    assert (found.reference, found.value, found.loss, found.samples) == (1.0, 0.975, pytest.approx(0.025), 400)
    assert 0.01 < found.low < 0.025 < found.high < 0.045
    assert found.per_token() is None, "no perplexity"
    halves = estimate(measure, scored(np.arange(400) % 40 != 0), np.arange(400) // 40, 0)
    assert halves.high - halves.low < 0.001, "each document loses one of 40"


def test_with_no_harm_seen_the_mildest_other_plan_says_what_a_document_loses() -> None:
    """Where there is none, documents are lost whole."""
    rng, documents = np.random.default_rng(1), np.repeat(np.arange(60), 12)
    right = rng.random(720) < 0.5
    judge = judged(right, Evidence(documents, documents))
    whole = cast("float", judge.bound(scored(right)))
    assert 3.5 / 60 < whole < 6 / 60, "of 60 documents 4 may be lost: 0.5 ** 5 is under 5%"

    def without(rows: int, of_each: int) -> Evaluation:
        """This many rows of the first documents are wrong, in each of them as many."""
        some = np.concatenate([np.flatnonzero(right & (documents == at))[:of_each] for at in range(rows // of_each)])
        return scored(np.where(np.isin(np.arange(720), some), False, right))

    far, near = (cast("float", judge.bound(without(rows, each))) for rows, each in ((24, 4), (6, 2)))
    two = cast("float", judge.bound(scored(right)))
    judge.bound(without(1, 1))
    one = cast("float", judge.bound(scored(right)))
    assert 3 / 360 < one < 6 / 360
    assert two == pytest.approx(2 * one, rel=0.3)
    assert one < two <= near < far
    assert two < whole


@pytest.mark.parametrize("rate", [0.01, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.005, 0.02, 0.05))])
def test_bounds_hold_where_documents_are_lost_whole(rate: float) -> None:
    """60 documents of 12 rows, of which any may lose all that was right: many texts show none of that."""
    rng, documents, held = np.random.default_rng(5), np.repeat(np.arange(60), 12), []

    def text() -> tuple[np.ndarray, np.ndarray]:
        before = rng.random(720) < 0.5
        return before, before & np.repeat(rng.random(60) >= rate, 12)

    for _ in range(150):
        (right, kept), (later, later_kept) = text(), text()
        bound = cast("float", judged(right, Evidence(documents, documents)).bound(scored(kept)))
        held.append((later.sum() - later_kept.sum()) / later.sum() <= bound)
    assert np.mean(held) >= 0.95 - 2 * np.sqrt(0.05 * 0.95 / 150)


def test_of_rows_that_are_documents_of_their_own_a_plan_without_harm_promises_much() -> None:
    """By the estimate, or as the person says."""
    right = np.random.default_rng(6).random(2000) < 0.5
    runs, rows = np.repeat(np.arange(50), 40), np.arange(2000)
    for evidence in (Evidence(runs, runs, "runs", runs=True), Evidence(rows, rows)):
        judge = judged(right, evidence)
        assert cast("float", judge.bound(scored(right))) < 0.01
        assert judge.holds(scored(right))


def test_rows_that_prove_to_be_hardly_alike_are_counted_themselves() -> None:
    rng, runs = np.random.default_rng(2), np.repeat(np.arange(60), 12)
    right = rng.random(720) < 0.5
    scattered = right & (rng.random(720) < 0.9)
    lumped = right & ~np.repeat(rng.random(60) < 0.1, 12)
    judge = judged(right, Evidence(runs, runs, "runs", runs=True))
    judge.bound(scored(scattered))
    assert judge.counted.count == 720
    assert 400 < judge.counted.number < 720
    assert "720 rows count as" in str(judge.counted_text())
    assert "and not as 60 runs" in str(judge.counted_text())
    judge.bound(scored(lumped))
    assert judge.counted.count == 720, "one count for all plans of a conversion"
    for evidence, harmed in (
        (Evidence(runs, runs, "runs", runs=True), lumped),
        (Evidence(runs, runs, "as the field says"), scattered),
    ):
        other = judged(right, evidence)
        other.bound(scored(harmed))
        assert (other.counted.count, other.counted_text()) == (60, None)
    few = judged(right, Evidence(runs, runs, "runs", runs=True), 0.99)
    few.bound(scored(scattered))
    assert (few.stated, few.counted_text()) == (None, None)


@pytest.mark.parametrize(("shared", "low", "high"), [(0.0, 1.0, 1.6), (1.0, 9.0, 17.0)])
def test_how_alike_rows_are_is_seen_in_sums_of_runs(shared: float, low: float, high: float) -> None:
    rng, runs = np.random.default_rng(3), np.repeat(np.arange(60), 12)
    common = np.repeat(rng.standard_normal(60), 12)
    rows = np.sqrt(shared) * common + np.sqrt(1 - shared) * rng.standard_normal(720)
    assert low <= alike(rows, runs) <= high
    assert alike(rows, runs * 7) == alike(rows, runs)
    assert alike(rows * 0, runs) == alike(rows, runs * 0) == np.inf
    ones = np.tile([1.0, -1.0], 360)
    assert alike(ones, runs) == 1
    whole = alike(common, runs)
    assert whole == pytest.approx(12 * np.exp(np.sqrt(2 / 59)))


def test_looks_at_one_text_are_counted_once_each(tmp_path) -> None:
    root = tmp_path / "work"
    assert look(root, "seed 0", ["text"]) == 1
    assert look(root, "seed 0", ["text"]) == 1, "resumed"
    assert look(root, "seed 1", ["text", "other"]) == 2
    assert look(root, "seed 0", ["text"]) == 2
    assert look(root, "seed 2", ["other"]) == 2
    assert look(root, "seed 3", ["new"]) == 1
    assert len((root / LOOKS).read_text().splitlines()) == 5, "with the last, which counts the others"


def test_while_one_conversion_notes_its_look_others_wait(tmp_path: Path) -> None:
    other = os.open(tmp_path, os.O_RDONLY)
    with judging.locked(tmp_path, wait=True), pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_a_folder_that_can_not_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with one_line(ConversionError, r"can't use .*looks\.jsonl: File exists; free it or give another --work"):
        look(tmp_path / "file", "a", ["text"])


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[1:],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [lines[0], lines[0], *lines[1:]],
        lambda lines: [lines[0].replace(b"text", b"test"), *lines[1:]],
        lambda lines: lines[:3],
        lambda lines: lines[:1],
        lambda lines: [],
        lambda lines: [*lines[:2], *lines[3:]],
        lambda lines: [*lines[:3], lines[3][:-9]],
        lambda lines: [*lines, lines[3]],
        lambda lines: [*lines, b'{"conversion": "b", "te'],
        lambda lines: [*lines, b'{"conversion": "x", "texts": ["text"]}\n'],
        lambda lines: [*lines, b"3\n"],
    ],
)
def test_looks_that_were_changed_are_refused(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]]
) -> None:  # fmt: skip
    for name in "abc":
        look(tmp_path, name, ["text"])
    path = tmp_path / LOOKS
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    before = path.read_bytes()
    with one_line(ConversionError, r"looks\.jsonl:\d was changed since it was made.*delete the file"):
        look(tmp_path, "d", ["text"])
    assert path.read_bytes() == before
    path.unlink()
    assert look(tmp_path, "d", ["text"]) == 1


def test_what_is_said_is_one_true_line() -> None:
    assert looks_text(1, 0.95) is None
    assert "all 3 together at 85%" in str(looks_text(3, 0.95))
    assert "95%" not in str(looks_text(3, None))
    assert bound_doubt(None, -1.0) is bound_doubt(0.04, 0.0) is None
    assert "negative (95% interval up to -8.84%)" in str(bound_doubt(0.01, -0.0884))
    assert "no bound" in str(bound_doubt(np.inf, 0.1))
    assert "all 30 together at 0% or more" in str(looks_text(30, 0.95))
    assert bound_text(np.inf, 0.95) == "no bound can be told from so few samples"
    assert bound_text(0.05, 0.9) == "under 5.00% at 90%"
    assert bound_text(0.05, None) == "under 5.00% for more text of these documents"
    apart, grouped = Evidence(np.arange(40), np.arange(20)), Evidence(np.arange(40) // 2, np.arange(40) // 2)
    line = needed_text(Needed(100, 1250, 3000), apart, "5% at 95%", 0.5)
    assert line.startswith("100 calibration samples to judge plans by (50% of the text, at most --samples) and 20 held")
    assert "few to promise 5% at 95%: 1,250 of the former would do; " in line
    line = needed_text(Needed(100, None, 3000), grouped, "5% at 95%", 0.5)
    assert line.startswith("100 calibration documents ")
    assert "3,000 of each would do; " in line


@pytest.mark.parametrize(
    ("value", "sound"), [(0, False), (-1, False), (1e30, False), (np.nan, False), (1e-9, True), (9e29, True)]
)
def test_a_reference_that_nothing_can_be_measured_against_is_refused(value: float, sound: bool) -> None:
    if sound:
        check_reference("perplexity", value, "held-out text")
        return
    with one_line(SettingsError, "the unquantized model has perplexity .* on the held-out text, so no loss can be"):
        check_reference("perplexity", value, "held-out text")


def test_a_model_that_guesses_by_frequency_is_at_chance() -> None:
    entropy = entropy_of([0, 1, 2, 3] * 1000)
    assert entropy == pytest.approx(np.log(4), abs=1e-3)
    assert entropy_of([7]) == 0
    assert at_chance(evaluation(nats=1.2), entropy, "held-out") is None
    assert at_chance(evaluation(nats=1.5), 1.5, "held-out") is not None, "no better than guessing"
    found = at_chance(evaluation(nats=1.5), entropy, "held-out")
    assert "at chance on the held-out text: 1.50 nats a token" in str(found)


def evaluation(nats: float) -> Evaluation:
    """Two samples of ten tokens."""
    return Evaluation("unquantized", ((0.0, 1.0),) * 2, (10 * nats,) * 2, (10, 10), (0.0, 0.0), 0.0, 0)


def test_experts_that_hardly_a_token_reached_are_named() -> None:
    keys = [ExpertKey("decoder", 0, at) for at in range(20)]

    def table(*unseen: int) -> SensitivityTable:
        return SensitivityTable(
            4, Summary(1, 0, 0, 0), {}, {key: 9 * (at not in unseen) for at, key in enumerate(keys)}
        )

    assert unreached_text(table()) is None
    assert "2 of 20 experts saw fewer than 8 tokens" in str(unreached_text(table(3, 5)))
    assert "D00/E003, D00/E005;" in str(unreached_text(table(3, 5)))
    assert "D00/E007 and 4 more" in str(unreached_text(table(*range(12))))
    assert "D00/E007;" in str(unreached_text(table(*range(8)))), "all of them"


def test_an_infinite_bound_needs_more_text_and_divides_by_nothing() -> None:
    """Nothing is right, before and after: no draw gives a loss."""
    rows = np.array([[0.0, 1.0]] * 6)
    found = samples_needed(METRICS["exact_match"], rows, [rows], Terms(0.95, 6, 0), target=0.05)
    assert (found.have, found.acceptance, found.both, found.enough) == (6, None, None, False)
    line = needed_text(found, Evidence(np.arange(6), np.arange(6)), "5% at 95%")
    assert "6 calibration samples" in line
    assert "no bound can be told" in line
