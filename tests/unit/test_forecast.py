"""What is expected of packs that are not made yet: the arithmetic, and what it is told of other models."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import PUBLISHED
from tiny import TINY

from moeconv.dense import dense_of
from moeconv.plan.forecast import (
    BITS_PER_WEIGHT,
    RULES,
    Drive,
    Processor,
    Reference,
    Subject,
    Tools,
    Work,
    forecast,
    moments_bytes,
    nearest,
    outside_bytes,
    processor_of,
    prospect,
    references,
    stated,
    token_s,
    ways,
    with_text,
    without_text,
)
from moeconv.plan.outlook import Host, Mixture, effective_bits, mixture, outlooks, parameters, quantization_of, uniform
from moeconv.plan.problem import Storage
from moeconv.quantizers import moments
from moeconv.source.archs import FAMILIES
from moeconv.source.outline import Outline
from moert.pack.model_spec import ExpertKey, ModelSpec

HOST = Host(held_bytes=45_000_000, thread_bytes=1 << 20, widened=False)
PROCESSOR = Processor({2: 10e9, 3: 10e9, 4: 20e9, 8: 20e9, 16: 20e9}, {1.5: 5e9, 4: 8e9}, layer_s=1e-4, miss_s=1e-3)
WORK = Work(layers=3, expert_layers=2, top_k=2, outside={16: 2e6}, experts={4: 4e6}, file_bytes=5e6)
NEVER = Drive(1e15, 1e15)


def spec_of(name: str) -> ModelSpec:
    config = PUBLISHED[name]
    return FAMILIES[config["model_type"]].description(config, {}).spec


# Widths ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [Storage(), Storage(64)])
@given(bits=st.floats(2.6, 8.0))
def test_a_mixture_has_the_bits_that_were_asked_for(storage: Storage, bits: float) -> None:
    spec = spec_of("OLMoE-1B-7B")
    mixed = mixture(spec, storage, (2, 3, 4, 8), bits)
    low, high = (effective_bits(spec, storage, width) for width in (mixed.low, mixed.high))
    mean = low + mixed.share * (high - low)
    assert mean == pytest.approx(bits)
    wide = sum(mixed.width(key) == mixed.high for key in spec.expert_keys())
    assert mixed.low == mixed.high or wide == pytest.approx(1024 * mixed.share, abs=1)


def test_no_mixture_is_narrower_or_wider_than_all_widths() -> None:
    spec = spec_of("OLMoE-1B-7B")
    assert mixture(spec, Storage(), (2, 3), 1.5) is None
    assert mixture(spec, Storage(), (2, 3), 3.5) is None
    found = ways(spec_of("gpt-oss-20b"), Storage(mxfp4=True))
    assert [each.low for each in found if each.low == each.high] == [2, 3, 4, 16]
    found = ways(spec_of("gpt-oss-20b"), Storage(mxfp4=True, codes="trellis"))
    assert [each.low for each in found if each.low == each.high] == [1, 1.5, 2, 2.5, 3, 4, 16]
    assert [each.bits_per_weight for each in found if each.low != each.high] == [BITS_PER_WEIGHT[0]]


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "switch_transformers"])
def test_packs_of_one_width_are_those_of_check(family: str, tmp_path: Path) -> None:
    outline = Outline.read(TINY[family][0](tmp_path / "hf") / "config.json")
    spec, computed = outline.spec, outline.description.computed
    for bits in (2, 8):
        (said,) = (each for each in outlooks(spec, Storage(), [None], computed, HOST) if each.bits == bits)
        found = prospect(spec, Storage(), uniform(spec, Storage(), bits), None, computed, HOST)
        assert (found.fit.pack_bytes, found.fit.smallest_memory, found.fit.whole_memory) == (
            said.pack_bytes, said.smallest_memory, said.whole_memory,
        )  # fmt: skip
        assert found.work.file_bytes == pytest.approx(said.expert_bytes, abs=1)


def test_a_mixture_lies_between_its_widths() -> None:
    spec = spec_of("Qwen3-30B-A3B")
    two, some, three = (
        prospect(spec, Storage(), each, None, (), HOST).fit.pack_bytes
        for each in (uniform(spec, Storage(), 2), Mixture(2, 3, 0.5, 2.5, 128), uniform(spec, Storage(), 3))
    )
    assert some == pytest.approx((two + three) / 2, rel=1e-3)


# What a token takes ---------------------------------------------------------------------------------------------------


def test_a_token_meets_what_is_not_of_the_encoder_nor_an_embedding() -> None:
    spec = spec_of("OLMoE-1B-7B")
    matrices = 16 * (4 * 2048 * 2048 + 64 * 2048) + 50304 * 2048  # attention, routers, head
    assert outside_bytes(spec, quantization_of(Storage(), None)) == {16: 2.0 * matrices}
    switch = outside_bytes(spec_of("switch-base-8"), quantization_of(Storage(), None))[16]
    attention, network = 768 * 768, 2 * 768 * 3072
    decoder = 12 * (6 * attention) + 6 * network + 6 * 8 * 768 + 32128 * 768  # the other's keys: once a request
    assert switch == 2.0 * decoder


def test_quantized_matrices_count_at_their_width() -> None:
    spec = spec_of("OLMoE-1B-7B")
    eight = outside_bytes(spec, quantization_of(Storage(), dense_of(spec, 8)))
    whole = outside_bytes(spec, quantization_of(Storage(), None))[16]
    assert sum(eight.values()) == pytest.approx(whole / 2 * (1 + 4 / 64), rel=0.001)  # scales of groups of 64
    assert max(eight, key=lambda bits: eight[bits]) == 8


@pytest.mark.parametrize(
    ("work", "bytes_per_s", "hit_rate", "of_a_layer"),
    [
        (WORK, 1e15, 1.0, 2 * 4e6 / 20e9),  # all in memory: what is computed
        (WORK, 100e6, 0.0, 1e-3 + 2 * 5e6 / 100e6 + 4e6 / 20e9),  # nothing: it waits for all that it asks for
        (replace(WORK, experts={4: 400.0}, file_bytes=500.0), 1e9, 0.0, 2e-3),  # small ones cost what a miss costs
    ],
)
def test_a_token_takes_what_is_computed_and_what_it_waits_for(
    work: Work, bytes_per_s: float, hit_rate: float, of_a_layer: float
) -> None:
    expected = 2e6 / 20e9 + 3 * 1e-4 + 2 * of_a_layer
    assert token_s(work, PROCESSOR, Drive(bytes_per_s, bytes_per_s), hit_rate) == pytest.approx(expected, rel=1e-3)


def test_trellis_codes_take_the_time_of_their_own_kernels() -> None:
    work = replace(WORK, experts={1.5: 4e6, 8: 1e6})
    with pytest.raises(KeyError):
        token_s(work, PROCESSOR, NEVER, 1.0)
    found = token_s(replace(work, codes="trellis"), PROCESSOR, NEVER, 1.0)
    assert found == pytest.approx(2e6 / 20e9 + 3 * 1e-4 + 2 * 2 * (4e6 / 5e9 + 1e6 / 20e9))


def test_one_read_at_a_time_may_be_slower() -> None:
    both, alone = (token_s(WORK, PROCESSOR, Drive(1e9, alone), 0.0) for alone in (1e9, 0.5e9))
    assert both == alone, "two at once are as fast as the drive"
    one = replace(WORK, top_k=1)
    slower = token_s(one, PROCESSOR, Drive(1e9, 0.5e9), 0.0) - token_s(one, PROCESSOR, Drive(1e9, 1e9), 0.0)
    assert slower == pytest.approx(2 * 5e6 / 1e9)


@given(
    low=st.floats(0, 1), high=st.floats(0, 1), speed=st.floats(1e7, 1e10), faster=st.floats(1, 100),
    top_k=st.integers(1, 8),
)  # fmt: skip
def test_more_hits_and_faster_drives_never_cost_time(
    low: float, high: float, speed: float, faster: float, top_k: int
) -> None:
    low, high = sorted((low, high))
    work = replace(WORK, top_k=top_k)
    slow, fast = Drive(speed, speed), Drive(faster * speed, faster * speed)
    assert token_s(work, PROCESSOR, slow, high) <= token_s(work, PROCESSOR, slow, low) * (1 + 1e-9)
    assert token_s(work, PROCESSOR, fast, low) <= token_s(work, PROCESSOR, slow, low) * (1 + 1e-9)


def test_too_little_memory_has_no_speed() -> None:
    spec = spec_of("OLMoE-1B-7B")
    found = prospect(spec, Storage(), uniform(spec, Storage(), 4), None, (), HOST)
    like = nearest(spec, references())
    least = found.fit.smallest_memory
    nothing = forecast(found, like, PROCESSOR, NEVER, least // 2)
    assert (nothing.room_share, nothing.hit_rate, nothing.read_bytes, nothing.tokens_per_s) == (None,) * 4
    little = forecast(found, like, PROCESSOR, Drive(5e8, 5e8), least)
    whole = forecast(found, like, PROCESSOR, Drive(5e8, 5e8), found.fit.whole_memory)
    assert 0 < little.room_share < 0.1
    asked = 16 * 8 * 3 * 2048 * 1024 / 2
    assert little.read_bytes == pytest.approx((1 - like.hit_rate(little.room_share)) * asked, rel=0.02)
    assert (whole.room_share, whole.hit_rate, whole.read_bytes) == (1.0, 1.0, 0)
    assert little.tokens_per_s is not None
    assert whole.tokens_per_s > 5 * little.tokens_per_s
    assert forecast(found, like, None, NEVER, least).tokens_per_s is None, "no kernels, no speed"


# What is known of other models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "like"),
    [("Qwen3-30B-A3B", "wikids"), ("DeepSeek-V3", "wikids"), ("OLMoE-1B-7B", "wikids"), ("gpt-oss-20b", "wiki"),
     ("Mixtral-8x7B", "wiki"), ("switch-base-8", "g2p"), ("switch-base-128", "marks"), ("nllb-moe-54b", "marks")],
)  # fmt: skip
def test_the_nearest_is_of_the_same_kind(name: str, like: str) -> None:
    assert nearest(spec_of(name), references()).name == like


def test_hit_rates_are_measured_and_rise_with_room() -> None:
    assert {each.name for each in references()} == {"wiki", "wikids", "g2p", "marks"}
    for each in references():
        shares, rates = zip(*each.rates, strict=True)
        assert list(shares) == sorted(shares)
        assert all(late > early - 0.02 for early, late in pairwise(rates)), each.name


def test_between_two_measured_shares_a_straight_line() -> None:
    one = Reference("m", "decoder", 8, 2, 4, ((0.2, 0.4), (0.6, 0.8)))
    rates = [one.hit_rate(share) for share in (-1, 0, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2)]
    assert rates == pytest.approx([0, 0, 0.2, 0.4, 0.6, 0.8, 0.9, 1, 1])


def test_a_machine_without_kernels_is_none() -> None:
    assert processor_of({"kernel_bytes_per_s": None}) is None
    plain = {"2": 1.0, "3": 2.0, "4": 3.0, "8": 4.0, "16": 5.0}
    found = processor_of({"kernel_bytes_per_s": plain, "trellis_bytes_per_s": {"1.5": 6.0}})
    assert (found.kernel_bytes_per_s[16], found.trellis_bytes_per_s[1.5]) == (5.0, 6.0)
    assert found.layer_s == stated().processor.layer_s > 0


# What converting takes ------------------------------------------------------------------------------------------------


def subject(name: str, source_bytes: int = 1000, pack_bytes: int = 100) -> Subject:
    spec = spec_of(name)
    return Subject(spec, parameters(spec), source_bytes, pack_bytes)


TOOLS = Tools({"trellis": 1e6, "gptq": 1e4}, flops_per_s=1e9, drive_bytes_per_s=10.0, memory_bytes=10**15)


def test_without_text_reading_or_coding_is_the_longer() -> None:
    model = subject("OLMoE-1B-7B")
    coding_s = 16 * 64 * 3 * 2048 * 1024 / 1e6
    assert without_text(model, TOOLS, "trellis").seconds == pytest.approx(coding_s + 10)
    assert without_text(replace(model, source_bytes=10**6), TOOLS, "trellis").seconds == pytest.approx(10**5 + 10)
    assert without_text(model, TOOLS, "trellis").disk_bytes == 100


def test_with_text_the_sweep_counts_every_expert() -> None:
    model = subject("OLMoE-1B-7B")
    found = with_text(model, TOOLS, "gptq")
    token_s = 2 * model.parameters.active / 1e9
    sweep_s = 1024 * 2 * RULES.sweep_share * RULES.sweep_tokens * token_s
    assert found.sweep_s == pytest.approx(sweep_s)
    coding_s = RULES.codings * model.expert_weights / 1e4
    passes_s = (RULES.passes + RULES.training_passes) * RULES.judged_tokens * token_s
    assert found.seconds == pytest.approx(sweep_s + passes_s + coding_s + 100 + 10)
    assert found.read_bytes == 1000


def test_what_does_not_fit_is_read_in_every_pass() -> None:
    model = subject("OLMoE-1B-7B", source_bytes=10**9, pack_bytes=2 * RULES.kept_bytes)
    little = with_text(model, replace(TOOLS, memory_bytes=10**9), "gptq")
    assert little.read_bytes == RULES.passes * 10**9
    assert little.seconds > RULES.passes * 10**8 + RULES.codings * model.expert_weights / 1e4
    assert little.disk_bytes == model.pack_bytes * (1 + 2 / 4 + 3 / 4 + 1)


def test_many_experts_are_ranked_by_gradients() -> None:
    """A few dozen passes, however many experts there are."""
    model = subject("Qwen3-30B-A3B")
    found = with_text(model, replace(TOOLS, memory_bytes=10**12), "gptq")
    token_s = 2 * model.parameters.active / 1e9
    assert found.sweep_s == pytest.approx((36 * 1024 + 48 * 3 / 2 * 2048) * token_s)
    assert found.sweep_s < 6144 * 2 * RULES.sweep_share * RULES.sweep_tokens * token_s / 20


@pytest.mark.parametrize("name", ["OLMoE-1B-7B", "nllb-moe-54b", "Nemotron-3-Nano-30B-A3B"])
def test_moments_take_what_the_quantizers_say(name: str) -> None:
    spec = spec_of(name)
    wants = {"gptq": "products", "trellis": "products", "group": "squares", "channel": "nothing"}
    for quantizer, what in wants.items():
        assert moments_bytes(spec, quantizer) == moments.file_bytes(spec, what)  # type: ignore[arg-type]


def test_what_is_reckoned_with_is_what_conversions_do() -> None:
    from moeconv.conversion.measuring import EXACT_PROBES
    from moeconv.quantizers.coder import CACHE_BYTES
    from moeconv.sweep.fisher import DRAWS, WINDOWS

    assert RULES.kept_bytes == CACHE_BYTES
    assert RULES.exact_probes == EXACT_PROBES
    assert RULES.draws == DRAWS
    assert RULES.scale_tokens == WINDOWS * 256


def test_the_wider_ones_are_spread_over_all_layers() -> None:
    mixed = Mixture(2, 3, 0.5, 2.5, 3)
    found = [[mixed.width(ExpertKey("decoder", layer, at)) for at in range(3)] for layer in range(2)]
    assert found == [[2, 3, 2], [3, 2, 3]]
