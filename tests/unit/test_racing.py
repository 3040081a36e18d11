"""Racing: places stay within the span as often as stated, and samples are saved."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from moeconv.measure.metrics import F64
from moeconv.sweep.racing import MIN_CHANGED, Race

Rng = np.random.Generator
DELTA, SPAN = 0.05, 0.1


def signals(rng: Rng, kind: str, probes: int, samples: int) -> F64:
    """Per-sample signals [probes, samples] with heavy-tailed means: divergences (positive, skewed), nats (either
    sign, heavy tails), or a divergence that is zero wherever the expert is not reached."""
    means = rng.lognormal(0, 1.5, probes)[:, None]
    if kind == "nats":
        return rng.standard_t(4, (probes, samples)) * 2 * np.sqrt(means * np.median(means)) + means
    skewed = rng.gamma(0.7, 1 / 0.7, (probes, samples)) * means
    if kind == "divergence":
        return skewed
    reached = rng.beta(0.6, 2, (probes, 1)) * 0.9 + 0.05
    return np.where(rng.random(skewed.shape) < reached, skewed / reached, 0.0)


def run(values: F64, blocks: list[int], delta: float = DELTA, span: float = SPAN) -> Race:
    race, start = Race(len(values), blocks, delta=delta, span=span), 0
    for size in blocks:
        probes = race.open()
        if not probes:
            break
        race.add({probe: values[probe, start : start + size] for probe in probes})
        start += size
    return race


def places(values: F64) -> npt.NDArray[np.int64]:
    return np.argsort(np.argsort(values))


def furthest_off(race: Race, values: F64) -> float:
    """As a share of all places, against all probes measured on all samples."""
    return float(np.abs(places(race.means()) - places(values.mean(axis=1))).max()) / len(values)


@pytest.mark.parametrize(("kind", "share"), [("divergence", 0.5), ("nats", 0.75), ("unreached", 0.97)])
def test_no_place_is_off_by_more_than_the_span_and_samples_are_saved(kind: str, share: float) -> None:
    """256 probes, 12 blocks of 50 samples; `share` is the most of all measurements that may be taken."""
    rng, runs, off, measured = np.random.default_rng(1), 40, [], []
    for _ in range(runs):
        values = signals(rng, kind, 256, 600)
        race = run(values, [50] * 12)
        off.append(furthest_off(race, values))
        measured.append(race.measured_share())
    assert sum(places_off > SPAN for places_off in off) <= DELTA * runs
    assert max(off) > 0.2 * SPAN  # or it would be measuring far too much
    assert np.mean(measured) < share


def test_a_wider_span_saves_more() -> None:
    values = signals(np.random.default_rng(2), "divergence", 128, 600)
    shares = [run(values, [50] * 12, span=span).measured_share() for span in (0.05, 0.1, 0.2)]
    assert shares == sorted(shares, reverse=True)
    assert shares[2] < 0.6 * shares[0]


def test_blocks_of_unequal_size_and_equal_probes() -> None:
    """Probes that don't differ can't be told apart: all are measured to the end, and the ranking is exact."""
    values = np.random.default_rng(3).normal(1.0, 1.0, (64, 240))
    race = run(values, [40, 10, 70, 60, 30, 30])
    assert race.measured_share() > 0.95
    assert furthest_off(race, values) <= SPAN


def test_well_separated_probes_settle_after_the_first_block() -> None:
    rng = np.random.default_rng(4)
    values = np.arange(50)[:, None] * 10.0 + rng.normal(0, 1.0, (50, 300))
    race = run(values, [30] * 10)
    assert race.measured_share() == pytest.approx(0.1)
    assert (places(race.means()) == np.arange(50)).all()


def test_a_probe_that_changed_few_samples_stays_open() -> None:
    """Its first block shows nothing at all; later ones make it the worst."""
    rng = np.random.default_rng(5)
    values = np.arange(30)[:, None] + rng.normal(0, 0.1, (30, 400))
    values[0] = np.where(np.arange(400) >= 100, 100.0, 0.0)
    race = run(values, [50] * 8)
    assert places(race.means())[0] == 29
    assert MIN_CHANGED < 50


def test_one_block_measures_everything() -> None:
    values = signals(np.random.default_rng(6), "nats", 16, 40)
    race = run(values, [40])
    assert race.open() == []
    assert race.measured_share() == 1.0
    np.testing.assert_allclose(race.means(), values.mean(axis=1))


def test_add_takes_every_open_probe_and_no_other() -> None:
    race = Race(3, [4, 4], delta=DELTA, span=SPAN)
    assert race.open() == [0, 1, 2]
    with pytest.raises(AssertionError, match="every open probe"):
        race.add({0: np.zeros(4)})
