from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from moert.experts.ahead import Switch, Worth, rank_test

EXPERTS, TOP_K, LAYERS, NBYTES = 32, 4, 6, [1000] * 32
READ_S = 0.002
Predict = Callable[[random.Random, list[int]], list[tuple[int, float]]]
"""What is said of a layer that will demand these experts."""


def test_a_rank_test_says_how_sure_it_is() -> None:
    assert rank_test([5, 6, 7, 8], [1, 2, 3, 4]) == pytest.approx(2.309, abs=1e-3)
    assert rank_test([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(-2.309, abs=1e-3)
    assert rank_test([1, 4], [2, 3]) == 0.0
    assert rank_test([2, 2, 2], [2, 2]) == 0.0
    assert rank_test([1e9, 1, 1, 1], [2, 2, 2, 2]) < 0  # one outlier does not decide


def switched(n_tokens: int, seconds: Callable[[bool, int], float]) -> list[bool]:
    """Which tokens ran with reading ahead if `seconds` is what token number n takes with and without."""
    switch, ran = Switch(), []
    for number in range(n_tokens):
        ran.append(switch.on)
        switch.token(seconds(switch.on, number))
    return ran


def noisy(gain: float, spread: float, seed: int) -> Callable[[bool, int], float]:
    """Tokens with reading ahead take `gain` times as long, all vary, and one in 50 takes 30 times as long."""
    rng = random.Random(seed)
    return lambda on, number: (gain if on else 1.0) * rng.lognormvariate(0, spread) * rng.choice([30] + [1] * 49)


def test_clear_losses_end_and_clear_gains_are_found_after_48_tokens_of_the_worse_way() -> None:
    warm = 32
    assert switched(1000, lambda on, number: 1.2 if on else 1.0).count(True) == warm + 48
    assert switched(1000, lambda on, number: 0.8 if on else 1.0).count(False) == 48


def test_a_cache_that_fills_while_the_first_tokens_run_decides_nothing() -> None:
    for gain in (0.95, 1.05):
        ran = switched(20_000, lambda on, n, gain=gain: (gain if on else 1.0) * (1 + 4 * 0.98**n))
        assert ran.count(gain > 1) < 500


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gain", [0.6, 0.8, 1.25, 1.7])
def test_what_matters_is_found_in_noise_and_the_losing_side_gets_few_tokens_in_the_long_run(gain, seed) -> None:
    ran = switched(30_000, noisy(gain, 0.3, seed))
    assert ran.count(gain > 1) / len(ran) < 0.03
    assert ran[:1000].count(gain > 1) <= 32 + 240


def test_no_difference_ends_without_reading_ahead() -> None:
    ran = switched(600, lambda on, number: 1.0)
    assert ran.count(True) == 32 + 240
    assert not any(ran[512:])


def test_a_drift_that_both_sides_share_decides_nothing_wrongly() -> None:
    for gain in (0.9, 1.1):
        ran = switched(20_000, lambda on, number, gain=gain: (gain if on else 1.0) * (1 + number / 5000))
        assert ran.count(gain > 1) / len(ran) < 0.04


def test_a_change_of_mind_comes_within_a_pause_and_the_pauses_grow() -> None:
    ran = switched(60_000, lambda on, number: 1.0 if not on else (1.5 if number < 3000 else 0.5))
    assert ran[:3000].count(True) < 150
    assert ran[10_000:].count(False) / 30_000 < 0.02
    trials = [at for at in range(1, len(ran)) if ran[at] is False and ran[at - 1] is True and at > 10_000]
    pauses = [after - before for before, after in pairwise(trials) if after - before > 500]  # shorter: the same trial
    assert len(pauses) > 1
    assert all(later > 1.8 * sooner for sooner, later in pairwise(pauses))


def of_a_drive(seconds_per_expert: float) -> Worth:
    """After the first reads from a drive that takes so long for one expert."""
    worth = Worth()
    worth.drive(NBYTES[0], seconds_per_expert)
    return worth


def simulated(predict: Predict, n_tokens: int, window_s: float, seed: int = 0) -> tuple[list[float], Worth]:
    """Seconds of each token of a small model: half of the experts are in memory, the drive reads one after the other,
    a read under way is not given up, one in four that were wrong pushes out what is read again later."""
    rng, worth, times = random.Random(seed), of_a_drive(READ_S), []
    for _ in range(n_tokens):
        token_s = 0.0
        for _ in range(LAYERS):
            demanded = rng.sample(range(EXPERTS), TOP_K)
            absent = {expert for expert in range(EXPERTS) if rng.random() < 0.5}
            wanted: list[int] = []
            if worth.asks():
                wanted = worth.wanted([each for each in predict(rng, demanded) if each[0] in absent], NBYTES)
            begun = wanted[: -int(-window_s // READ_S)]  # one begins at 0, READ_S, ... before the window ends
            busy_s = len(begun) * READ_S
            missing = absent.intersection(demanded)
            left = len(missing - set(begun))
            late = left > 0 or (bool(begun) and begun[-1] in missing)
            token_s += max(window_s, busy_s if late else 0.0) + left * READ_S
            token_s += len(set(begun) - set(demanded)) / 4 * READ_S
            worth.observe(demanded, begun, left, window_s)
        worth.drive(NBYTES[0], READ_S)
        worth.token(token_s)
        times.append(token_s)
    return times, worth


def skilled(rng: random.Random, demanded: list[int]) -> list[tuple[int, float]]:
    """Right three times in four, and says so."""
    guesses = [expert if rng.random() < 0.75 else rng.randrange(EXPERTS) for expert in demanded]
    return [(expert, 0.75) for expert in dict.fromkeys(guesses)]


def boastful(rng: random.Random, demanded: list[int]) -> list[tuple[int, float]]:
    """As skilled as chance, and as sure as can be."""
    return [(expert, 0.95) for expert in rng.sample(range(EXPERTS), TOP_K)]


def silent(rng: random.Random, demanded: list[int]) -> list[tuple[int, float]]:
    return []


@pytest.mark.parametrize("window_s", [0.0045, 0.0065])
def test_a_useful_predictor_stays_on_and_saves_time(window_s) -> None:
    times, worth = simulated(skilled, 3000, window_s)
    without, _ = simulated(silent, 3000, window_s)
    assert worth.asks()
    assert worth.figures.tokens_off < 0.05 * 3000
    assert sum(times) < 0.9 * sum(without)
    assert 0.7 < worth.figures.precision < 0.85
    assert worth.figures.recall > 0.6


@pytest.mark.parametrize("window_s", [0.0005, 0.0045, 0.0065])
def test_a_control_that_is_sure_and_wrong_is_found_out_and_costs_little(window_s) -> None:
    times, worth = simulated(boastful, 3000, window_s)
    without, _ = simulated(silent, 3000, window_s)
    assert not worth.asks()
    assert worth.figures.tokens_on <= 32 + 240
    assert sum(times) < 1.01 * sum(without)
    assert sum(times[:200]) < 1.1 * sum(without[:200])
    assert worth.figures.precision < 0.3


def test_the_calibration_alone_stops_a_control_within_the_first_period() -> None:
    reads = [simulated(boastful, n_tokens, 0.0045)[1].figures.read for n_tokens in (2, 12, 16)]
    assert 0 < reads[0] < reads[1] == reads[2]


def window(worth: Worth, seconds: float) -> Worth:
    """After a layer in which the drive had so long for reading ahead, and something was missing."""
    worth.wanted([], NBYTES)
    worth.observe([], [], 1, seconds)
    return worth


def test_short_windows_ask_for_surer_predictions_than_long_ones() -> None:
    def least(seconds: float) -> float:
        worth = window(of_a_drive(READ_S), seconds)
        return min(claim for claim in (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)
                   if worth.wanted([(0, claim)], NBYTES))  # fmt: skip

    needed = [least(share * READ_S) for share in (1.0, 0.6, 0.3, 0.0)]
    assert needed == sorted(needed)
    assert needed[0] < 0.3 < 0.8 < needed[-1]


def test_the_first_reads_tell_how_fast_the_drive_is_and_later_ones_only_a_little() -> None:
    ranked = [(expert, 0.45) for expert in range(8)]

    def reads(*seconds_per_expert: float) -> int:
        worth = window(Worth(), 0.01)
        for seconds in seconds_per_expert:
            worth.drive(NBYTES[0], seconds)
        return len(worth.wanted(ranked, NBYTES))

    slow, quick = 0.05, 0.0001
    assert reads(quick) == 8
    assert reads(slow) == reads(slow, quick) < 8


def test_reads_queue_up_in_the_window_by_their_bytes() -> None:
    small, large = [500] * EXPERTS, [4000] * EXPERTS
    ranked = [(expert, 0.55) for expert in range(8)]
    worth = window(of_a_drive(READ_S), 2 * READ_S)
    assert len(worth.wanted(ranked, small)) > len(worth.wanted(ranked, NBYTES)) > len(worth.wanted(ranked, large))
    assert worth.wanted(ranked, small) == sorted(worth.wanted(ranked, small))


def test_figures_are_those_of_the_layer_that_was_read_for() -> None:
    worth = of_a_drive(READ_S)
    for _ in range(2):
        worth.wanted([(3, 1.0), (5, 1.0), (7, 1.0)], NBYTES)
        worth.observe([3, 4, 9], [3, 5], missed=1, window_s=0.01)
    worth.observe([3, 4, 9], [3, 5], missed=1, window_s=0.01)  # nothing was asked
    figures = worth.figures
    assert (figures.read, figures.used, figures.missed) == (4, 2, 2)
    assert (figures.precision, figures.recall) == (0.5, 0.5)


def test_without_any_reads_there_are_no_figures_and_no_division_by_zero() -> None:
    worth = Worth()
    worth.drive(0, 0.0)
    assert (worth.figures.precision, worth.figures.recall) == (0.0, 0.0)


def test_nothing_is_asked_where_asking_takes_longer_than_what_could_be_saved() -> None:
    worth = Worth()
    worth.drive(10**6, 1e-3)  # a kilobyte takes a microsecond
    assert worth.asks()
    for _ in range(50):
        worth.asked(100e-6)
        worth.lacked(50_000)
    assert not worth.asks()
    for _ in range(50):
        worth.lacked(150_000)
    assert worth.asks()
