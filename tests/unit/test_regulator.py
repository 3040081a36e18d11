"""The expert cache gives way to keys and values, and to whatever else the process turns out to hold."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import cast

import pytest
from tiny_packs import SWITCH

from moert.engine.budget import BARE_BYTES, FIRST_BYTES, Budget
from moert.engine.regulator import Admission, Bounds, Regulator
from moert.errors import BudgetTooSmall
from moert.experts.ahead import Lookahead
from moert.experts.streaming import Streaming
from moert.models.footprint import Footprint, Load, activation_bytes
from moert.models.kv import BLOCK_TOKENS
from recipes.bench.shaped import OLMOE

MB = 10**6
BUDGET = Budget(backbone_bytes=50 * MB, scratch_bytes=0, layer_bytes=8 * MB, token_bytes=30 * MB, expert_bytes=200 * MB)


class Process:
    """What it holds beside the cache, and a cache that is always full."""

    def __init__(self, others_bytes: int) -> None:
        self.others_bytes, self.held_bytes = others_bytes, 0

    def resize(self, capacity_bytes: int) -> None:
        self.held_bytes = capacity_bytes

    def measure(self) -> int:
        return self.others_bytes + self.held_bytes


def regulator(process: Process, limit_bytes: int | None = None, cache_bytes: int | None = None) -> Regulator:
    """Of a process that has loaded its weights since."""
    process.others_bytes -= BUDGET.loaded_bytes
    made = opening(process, limit_bytes, cache_bytes)
    process.others_bytes += BUDGET.loaded_bytes
    return made


def opening(process: Process, limit_bytes: int | None = None, cache_bytes: int | None = None) -> Regulator:
    return Regulator(Footprint(OLMOE, False), BUDGET, process, Bounds(limit_bytes, cache_bytes), process.measure)


def loads(*prompts: int, most: int = 900, written: int = 0) -> list[Load]:
    return [Load(tokens, most, written) for tokens in prompts]


def test_the_cache_shrinks_as_the_context_grows_and_grows_for_the_next_request() -> None:
    process = Process(250 * MB)
    limit, rooms = 450 * MB, list[int]()
    asked = regulator(process, limit)
    assert asked.before(loads(100, most=900))[1] is None
    before_prompt = process.held_bytes
    per_token = len(OLMOE.decoder) * 2 * OLMOE.decoder[0].attention.kv_features * 2
    process.others_bytes += per_token * 100
    for new in range(1, 901):
        process.others_bytes += per_token
        asked.after(loads(100, written=new))
        rooms.append(process.held_bytes)
        assert process.measure() < limit
    assert rooms == sorted(rooms, reverse=True)
    assert len(set(rooms)) == 1 + 900 // BLOCK_TOKENS
    assert before_prompt + FIRST_BYTES > rooms[-1] + 550 * per_token
    process.others_bytes = 250 * MB
    asked.before(loads(100, most=900))
    assert process.held_bytes == before_prompt


def test_an_estimate_that_was_too_low_is_made_up_for() -> None:
    process = Process(250 * MB)
    asked = regulator(process, 450 * MB)
    asked.before(loads(128, most=900))
    asked.after(loads(128, written=1))
    before = process.held_bytes
    process.others_bytes += 60 * MB
    asked.after(loads(128, written=2))
    assert process.held_bytes == before  # until the next block
    asked.after(loads(128, written=BLOCK_TOKENS + 1))
    assert before - 80 * MB < process.held_bytes <= before - 60 * MB
    process.others_bytes += 500 * MB
    asked.after(loads(128, written=2 * BLOCK_TOKENS + 1))
    assert process.held_bytes == BUDGET.layer_bytes  # what a token needs at least


def test_a_request_that_will_not_fit_at_its_end_is_refused_at_its_start() -> None:
    process = Process(250 * MB)
    asked = regulator(process, 400 * MB)
    asked.before(loads(100, most=100))
    with pytest.raises(BudgetTooSmall, match="this request needs memory=") as error:
        asked.before(loads(100, most=3000))
    enough = error.value.smallest_bytes
    assert enough == asked.smallest_memory(loads(100, most=3000))
    regulator(process, enough).before(loads(100, most=3000))
    fewer = re.search(r"spare; max_new_tokens=(\d+) would fit$", str(error.value))
    assert fewer
    asked.check(loads(100, most=int(fewer[1])))
    with pytest.raises(BudgetTooSmall, match=rf"spare; max_new_tokens={fewer[1]} would fit$"):
        asked.check(loads(100, most=int(fewer[1]) + 1))
    with pytest.raises(BudgetTooSmall, match=rf"spare; max_new_tokens={fewer[1]} would fit$"):
        asked.check(loads(100, most=1 << 70))
    with pytest.raises(BudgetTooSmall, match=r"spare$"):  # no prompt so long
        asked.check(loads(20_000, most=1 << 70))
    with pytest.raises(BudgetTooSmall):
        regulator(process, enough).check(loads(100, 100, most=3000))


def test_a_request_that_has_run_is_not_refused_the_next_time() -> None:
    """Though some of the margin is used up by then; but not for more than there is of it."""
    process = Process(250 * MB)
    enough = regulator(process, 900 * MB).smallest_memory(loads(100, most=100))
    asked = regulator(process, enough)
    asked.before(loads(100, most=100))
    process.others_bytes += 5 * MB
    asked.before(loads(100, most=100))
    assert asked.smallest_memory(loads(100, most=100)) == enough
    process.others_bytes += 25 * MB
    with pytest.raises(BudgetTooSmall):
        asked.before(loads(100, most=100))


def test_what_a_first_request_brings_has_room_until_it_is_there() -> None:
    """Library code that runs for the first time: before the prompt it is to come, after it, it is measured."""
    process = Process(250 * MB)
    asked = regulator(process, 420 * MB)
    asked.before(loads(100, most=900))
    first = process.held_bytes
    process.others_bytes += FIRST_BYTES
    asked.before(loads(100, most=900))
    assert process.held_bytes == first
    process.others_bytes += 10 * MB
    asked.before(loads(100, most=900))
    assert process.held_bytes == first - 10 * MB


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded() -> None:
    process = Process(250 * MB)
    with pytest.raises(BudgetTooSmall, match=r"128 prompt tokens, 128 new ones\) needs .* 54\.19 MB for all weights"):
        opening(process, 320 * MB).check_open()
    opening(process, 390 * MB).check_open()
    with pytest.raises(BudgetTooSmall, match="cache=8000000"):
        opening(process, cache_bytes=8 * MB - 1).check_open()


def test_a_small_cache_is_warned_of_with_what_would_do() -> None:
    process = Process(250 * MB)
    room, warning = regulator(process, 330 * MB).before(loads(100, most=100))
    assert room < BUDGET.token_bytes
    assert warning is not None
    enough = int(warning.split("memory=")[1].split()[0])
    assert regulator(process, enough).before(loads(100, most=100))[1] is None
    assert regulator(process, enough - 6 * MB).before(loads(100, most=100))[1] is not None
    assert regulator(process, cache_bytes=30 * MB).before(loads(100, most=100)) == (30 * MB, None)
    assert "cache=30000000 avoids" in (regulator(process, cache_bytes=29 * MB).before(loads(100, most=100))[1] or "")


def test_without_a_limit_the_cache_is_as_large_as_asked_for() -> None:
    process = Process(10**12)
    regulator(process).before(loads(10**6, most=10**6))
    assert process.held_bytes == BUDGET.expert_bytes
    regulator(process, cache_bytes=40 * MB).before(loads(10**6, most=10**6))
    assert process.held_bytes == 40 * MB
    regulator(process, cache_bytes=40 * MB).after(loads(10**6, written=1))
    assert process.held_bytes == 40 * MB


@pytest.mark.parametrize("spec", [OLMOE, SWITCH])
@pytest.mark.parametrize("widened", [False, True])
def test_longer_requests_need_more(spec, widened) -> None:
    footprint = Footprint(spec, widened)
    needs = [footprint.request(loads(tokens, most=new)) for tokens, new in ((1, 1), (100, 1), (1000, 1), (1000, 10**6))]
    assert needs == sorted(set(needs))
    assert footprint.request(loads(100, 100, most=50)) > footprint.request(loads(100, most=50))
    wide = replace(spec, vocab_size=spec.vocab_size + 10**6)
    assert (
        Footprint(wide, widened).request(loads(*[1] * 8, most=5))
        > footprint.request(loads(*[1] * 8, most=5)) + 8 * 2 * 4 * 10**6
    )
    deep = replace(spec, decoder=replace(spec.decoder, layers=(0,) * 100))
    assert Footprint(deep, widened).request(loads(100, most=50)) > footprint.request(loads(100, most=50))
    assert Footprint(spec, widened, 8).request(loads(100, most=10**5)) < 0.7 * footprint.request(loads(100, most=10**5))
    assert activation_bytes(spec, 2000, widened) > 2000 * 2 * 4 * spec.d_model


def test_only_where_memory_is_tight_it_is_returned_early(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr("moert.machine.return_early", lambda: calls.append(True))
    for limit, expected in ((620 * MB, []), (None, []), (400 * MB, [True])):
        opening(Process(250 * MB), limit)
        assert calls == expected


def test_plenty_is_not_tight() -> None:
    process = Process(250 * MB)
    assert opening(process, 400 * MB).tight
    assert opening(process, 545 * MB).tight  # once the weights are loaded
    assert not opening(process, 620 * MB).tight
    assert not opening(process).tight
    assert not opening(process, cache_bytes=8 * MB).tight


def test_what_the_process_takes_beside_the_pack_counts_and_what_was_foreseen_does_not_twice() -> None:
    process = Process(30 * MB)
    foreseen, asked = opening(process).smallest_memory(loads(100)), opening(process)
    process.others_bytes += BUDGET.loaded_bytes + 10 * MB
    assert asked.smallest_memory(loads(100)) == foreseen  # no more than BARE_BYTES
    process = Process(30 * MB)
    asked = opening(process)
    process.others_bytes += BUDGET.loaded_bytes + 100 * MB
    more = asked.smallest_memory(loads(100)) - foreseen
    assert 0 <= more - (130 * MB - BARE_BYTES) <= 6 * MB
    process.others_bytes = 200 * MB
    asked = opening(process)
    process.others_bytes = 40 * MB  # what was there before was freed
    assert asked.smallest_memory(loads(100)) == foreseen


def test_work_beside_the_model_takes_the_room_of_experts_down_to_those_of_a_layer() -> None:
    process = Process(250 * MB)
    asked = regulator(process, 450 * MB)
    asked.before(loads(100))
    most = BUDGET.left_bytes(450 * MB, 250 * MB, 0) - BUDGET.layer_bytes
    asked.aside(most - 5 * MB, "render")
    assert process.held_bytes == BUDGET.layer_bytes + 5 * MB
    asked.aside(most, "render")
    assert process.held_bytes == BUDGET.layer_bytes
    with pytest.raises(BudgetTooSmall, match="is too small to render beside the model: give memory=") as error:
        asked.aside(most + 1, "render")
    assert error.value.smallest_bytes == BUDGET.smallest_bytes(250 * MB, most + 1)
    regulator(process, error.value.smallest_bytes).aside(most + 1, "render")
    free = Process(250 * MB)
    regulator(free).aside(10**12, "render")
    assert free.held_bytes == 0, "without a limit nothing is resized"


@pytest.mark.parametrize("limit", [360 * MB, 450 * MB, 530 * MB, 10**10])
@pytest.mark.parametrize("running", [0, 1, 3])
def test_requests_begin_together_while_experts_keep_half_of_their_room(limit: int, running: int) -> None:
    asked, every = regulator(Process(250 * MB), limit), loads(*[200] * 40)
    rooms = [
        BUDGET.left_bytes(limit, 250 * MB, Footprint(OLMOE, False).request(every[:count]) + FIRST_BYTES)
        for count in range(1, 41)
    ]
    enough = BUDGET.expert_bytes if rooms[0] >= BUDGET.expert_bytes else max(BUDGET.layer_bytes, rooms[0] // 2)
    expected = max(1, sum(room >= enough for room in rooms))
    assert asked.together(every[:running], every[running:]) == max(0, expected - running)
    assert asked.together(every[:running], []) == 0
    assert (expected == 40) == (limit == 10**10)


class Noted:
    """The streaming of an engine and its lookahead, and the calls of them."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.capacity_bytes = 70 * MB
        self.holding = self.whole = self.cache = self
        self.has_mapped = False

    def expects(self) -> None:
        self.calls.append("expects")

    def begins(self) -> None:
        self.calls.append("begins")

    def check(self) -> None:
        self.calls.append("check")

    def settle(self) -> None:
        self.calls.append("settle")

    def forget(self) -> None:
        self.calls.append("forget")

    def adapt(self, room_bytes: int, notify: object) -> None:
        self.calls.append(room_bytes)


def test_admission_says_each_thing_once_and_passes_the_room_on() -> None:
    process = Process(250 * MB)
    noted, notes, room = Noted(), list[str](), regulator(process, 330 * MB)
    gate = Admission(room, cast("Streaming", noted), cast("Lookahead", noted))
    gate.notify = notes.append
    gate.notes += ["first", "second"]
    small = room.before(loads(100, most=100))[0]
    for _ in range(2):
        gate.before(loads(100, most=100))
        assert notes[:2] == ["first", "second"]
        assert "holds less than one token demands" in notes[2]
        assert (len(notes), gate.notes) == (3, [])
    assert noted.calls == ["expects", small, "begins"] * 2
    assert gate.smallest_room_bytes == 70 * MB
    noted.calls.clear()
    before = process.held_bytes
    for noted.capacity_bytes, least in ((60 * MB, 60 * MB), (90 * MB, 60 * MB)):
        gate.after(loads(100, most=100, written=1))
        assert gate.smallest_room_bytes == least
        assert process.held_bytes > before, "experts get the room of prompts"
    gate.after(loads(100, most=100, written=2))  # in the same room
    gate.passed()
    assert noted.calls == [60 * MB, 90 * MB]
    noted.has_mapped = True
    gate.passed()
    gate.after(loads(100, most=100, written=3))
    assert noted.calls == [60 * MB, 90 * MB, "check", "settle"]
    gate.idle()
    assert noted.calls[-1] == "forget"
    Admission(room, cast("Streaming", noted), None).idle()
    assert noted.calls.count("forget") == 1


def test_requests_that_wait_for_others_are_told_of_once() -> None:
    room, every = regulator(Process(250 * MB), 450 * MB), loads(*[200] * 40)
    gate, most = Admission(room, cast("Streaming", Noted()), None), room.together([], every)
    assert gate.together([], every[:most]) == most
    assert gate.notes == [], "all begin"
    for _ in range(2):
        assert gate.together(every[:1], every[1:]) == most - 1
        assert gate.notes == [f"40 prompts at once would take the experts' memory: they run {most} at a time"]
