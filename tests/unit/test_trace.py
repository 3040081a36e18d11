from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save
from tiny_packs import SWITCH

from moeconv import routes as paths_module
from moeconv.measure.scorers import Routed
from moeconv.packing.paths import trace_of
from moeconv.routes import record
from moert.pack.errors import FormatTooNew, HeaderInvalid, PackError
from moert.pack.paths import DROPPED, MOST_ENTRIES, Trace

EXPERTS = 5


@st.composite
def sample_lists(draw) -> list[dict[str, np.ndarray]]:
    top_k, layers = draw(st.integers(1, 3)), {"encoder": draw(st.integers(1, 3)), "decoder": draw(st.integers(1, 3))}
    stacks = ["decoder"] if draw(st.booleans()) else ["encoder", "decoder"]
    seed, lengths = draw(st.integers(0, 99)), draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    rng = np.random.default_rng(seed)
    return [{name: rng.integers(-1, EXPERTS, (n, layers[name], top_k)) for name in stacks} for n in lengths]


@settings(max_examples=60)
@given(sample_lists())
def test_samples_come_back_in_order_and_bytes_round_trip(samples) -> None:
    trace = record(EXPERTS, samples)
    body = trace.to_bytes()
    again = Trace.from_bytes(body)
    assert again.to_bytes() == body
    assert again.n_samples == len(samples)
    for index, sample in enumerate(samples):
        found = again.sample(index)
        assert list(found) == list(sample)
        for name, routes in sample.items():
            assert np.array_equal(np.where(found[name] == DROPPED, -1, found[name].astype(int)), routes)


def test_only_whole_samples_are_kept_and_the_first_is_cut_to_fit(monkeypatch) -> None:
    assert MOST_ENTRIES * 2 <= 256 << 10
    monkeypatch.setattr(paths_module, "MOST_ENTRIES", 20)
    sample = {"encoder": np.zeros((3, 1, 2), int), "decoder": np.zeros((2, 2, 2), int)}  # 14 entries
    assert record(EXPERTS, [sample] * 3).n_samples == 1
    monkeypatch.setattr(paths_module, "MOST_ENTRIES", 28)
    assert record(EXPERTS, [sample] * 3).n_samples == 2
    monkeypatch.setattr(paths_module, "MOST_ENTRIES", 10)
    short = record(EXPERTS, [sample] * 3)
    assert {name: len(stack.experts) for name, stack in short.stacks.items()} == {"encoder": 2, "decoder": 1}
    assert Trace.from_bytes(short.to_bytes()).n_samples == 1


def test_the_policy_of_the_nearest_share_is_taken() -> None:
    plain = record(EXPERTS, [{"decoder": np.zeros((1, 1, 1), int)}])
    assert plain.eviction_at(0.5) is None
    trace = replace(plain, eviction={12: "lru", 25: "expected", 50: "paper", 75: "lfu"})
    shares = {0.0: "lru", 0.18: "lru", 0.185: "lru", 0.19: "expected", 0.2499: "expected", 0.5: "paper", 0.99: "lfu"}
    assert {share: trace.eviction_at(share) for share in shares} == shares
    assert Trace.from_bytes(trace.to_bytes()).eviction == trace.eviction
    assert b"eviction" not in plain.to_bytes(), "files without a choice are as they were"


@pytest.mark.parametrize(
    "text",
    ["", "12", "12=", "=lru", "12=LRU", "012=lru", "0=lru", "101=lru", "25=lru,12=lru", "12=lru,12=lfu", "12=lru,",
     "12=lru;25=lfu", "12=" + 33 * "a", "\u0661=lru"],
)  # fmt: skip
def test_a_choice_of_policies_in_another_form_is_refused(text: str) -> None:
    Trace.from_bytes(tampered(lambda tensors, metadata: metadata.update(eviction="12=lru,100=a-policy-of-tomorrow")))
    with pytest.raises(HeaderInvalid, match="eviction should be policies by rising percent"):
        Trace.from_bytes(tampered(lambda tensors, metadata: metadata.update(eviction=text)))


@pytest.mark.parametrize("expert", [EXPERTS, -2])
def test_experts_that_are_not_there_are_not_recorded(expert: int) -> None:
    with pytest.raises(ValueError, match="there are 5"):
        record(EXPERTS, [{"decoder": np.array([[[expert]]])}])


def example() -> bytes:
    rng = np.random.default_rng(1)
    samples = [
        {"encoder": rng.integers(0, EXPERTS, (4, 2, 1)), "decoder": rng.integers(0, EXPERTS, (7, 3, 1))}
        for _ in range(3)
    ]
    return record(EXPERTS, samples).to_bytes()


def tampered(change) -> bytes:
    """The example with its tensors or metadata changed."""
    body = example()
    tensors, header = load(body), json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    metadata = header["__metadata__"]
    change(tensors, metadata)
    return save(tensors, metadata)


def expert_too_large(tensors, metadata) -> None:
    tensors["decoder.experts"][0, 0, 0] = EXPERTS


def starts_late(tensors, metadata) -> None:
    tensors["decoder.samples"][0] = 1


def ends_early(tensors, metadata) -> None:
    tensors["decoder.samples"][-1] -= 1


def runs_past_the_end(tensors, metadata) -> None:
    tensors["decoder.samples"][-1] = 2**32 - 1


def samples_fall(tensors, metadata) -> None:
    tensors["encoder.samples"][1] = 9


def no_samples(tensors, metadata) -> None:
    tensors["encoder.samples"] = tensors["encoder.samples"][:0]


def other_samples(tensors, metadata) -> None:
    tensors["encoder.samples"] = np.array([0, 12], dtype=np.uint32)


def flat(tensors, metadata) -> None:
    tensors["encoder.experts"] = tensors["encoder.experts"].ravel()


def dtype_changed(tensors, metadata) -> None:
    tensors["decoder.experts"] = tensors["decoder.experts"].astype(np.int16)


def tensor_missing(tensors, metadata) -> None:
    del tensors["decoder.samples"]


def no_stack(tensors, metadata) -> None:
    tensors.clear()


def no_size(tensors, metadata) -> None:
    del metadata["num_experts"]


def size_absurd(tensors, metadata) -> None:
    metadata["num_experts"] = "²\n"


def no_metadata(tensors, metadata) -> None:
    metadata.clear()


@pytest.mark.parametrize(
    "change",
    [
        expert_too_large, starts_late, ends_early, runs_past_the_end, samples_fall, no_samples, other_samples, flat,
        dtype_changed, tensor_missing, no_stack, no_size, size_absurd, no_metadata,
    ],
)  # fmt: skip
def test_a_trace_that_contradicts_itself_is_refused(change) -> None:
    Trace.from_bytes(tampered(lambda tensors, metadata: None))
    with pytest.raises(HeaderInvalid) as error:
        Trace.from_bytes(tampered(change))
    assert "\n" not in str(error.value)
    assert "trace.safetensors" in str(error.value)


def test_a_later_version_is_refused() -> None:
    with pytest.raises(FormatTooNew):
        Trace.from_bytes(tampered(lambda tensors, metadata: metadata.update(version="2")))


@settings(max_examples=100)
@given(st.integers(0, 600), st.integers(1, 255), st.binary(max_size=9), st.integers(0, 9))
def test_a_damaged_file_is_read_or_refused_with_one_line(at, flip, put, lost) -> None:
    body = example()
    at = min(at, len(body) - 1)
    for damaged in (
        body[:at], body[:at] + bytes([body[at] ^ flip]) + body[at + 1 :], body[:at] + put + body[at + lost :],
    ):  # fmt: skip
        with suppress(PackError):
            Trace.from_bytes(damaged).check(SWITCH)


@given(st.dictionaries(st.sampled_from(["decoder.experts", "decoder.samples", "__metadata__", "x"]), st.one_of(
    st.integers(), st.text(max_size=5), st.none(),
    st.fixed_dictionaries({
        "dtype": st.sampled_from(["U16", "U32", "BF16", "?"]),
        "shape": st.lists(st.integers(-1, 2**62), max_size=3),
        "data_offsets": st.lists(st.integers(-1, 2**62), max_size=3),
    }),
)), st.binary(max_size=20))  # fmt: skip
def test_headers_that_lie_are_refused_with_one_line(header, data) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(PackError) as error:
        Trace.from_bytes(len(text).to_bytes(8, "little") + text + data)
    assert "\n" not in str(error.value)


def test_a_trace_of_another_model_is_refused() -> None:
    top_k, shapes = SWITCH.moe.router.top_k, {name: len(SWITCH.moe_layers(name)) for name in SWITCH.stacks}
    fitting = {name: np.zeros((2, layers, top_k), int) for name, layers in shapes.items()}
    record(SWITCH.moe.n, [fitting]).check(SWITCH)
    others = [
        (SWITCH.moe.n + 1, fitting),
        (SWITCH.moe.n, {"decoder": fitting["decoder"]}),
        (SWITCH.moe.n, fitting | {"decoder": np.zeros((2, shapes["decoder"] + 1, top_k), int)}),
        (SWITCH.moe.n, fitting | {"encoder": np.zeros((2, shapes["encoder"], top_k + 1), int)}),
    ]
    for num_experts, sample in others:
        with pytest.raises(HeaderInvalid, match="profile the paths of this pack again"):
            record(num_experts, [sample]).check(SWITCH)


def test_routing_of_batches_is_recorded_in_the_order_of_the_samples() -> None:
    """Two batches of a model with two decoder layers (and one of the encoder); samples 2 and 0, then 1."""
    first = {
        ("encoder", 1): torch.tensor([[1], [2], [3]]),
        ("decoder", 0): torch.tensor([[0], [1], [2], [3]]), ("decoder", 2): torch.tensor([[4], [-1], [0], [1]]),
    }  # fmt: skip
    second = {
        ("encoder", 1): torch.tensor([[4], [4]]),
        ("decoder", 0): torch.tensor([[3]]), ("decoder", 2): torch.tensor([[2]]),
    }  # fmt: skip
    trace = trace_of(
        [
            Routed(first, [2, 0], {"encoder": [1, 2], "decoder": [3, 1]}),
            Routed(second, [1], {"encoder": [2], "decoder": [1]}),
        ],
        EXPERTS,
    )
    found = [{name: routes[..., 0].tolist() for name, routes in trace.sample(index).items()} for index in range(3)]
    assert found == [
        {"encoder": [[2], [3]], "decoder": [[3, 1]]},
        {"encoder": [[4], [4]], "decoder": [[3, 2]]},
        {"encoder": [[1]], "decoder": [[0, 4], [1, DROPPED], [2, 0]]},
    ]
