from __future__ import annotations

import json
from contextlib import suppress
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from moeconv.packing import paths
from moeconv.packing.paths import bounded
from moeconv.routes import at_least, build
from moert.pack.errors import FormatTooNew, HeaderInvalid, PackError
from moert.pack.model_spec import LayerKey
from moert.pack.paths import ContextCounts, TransitionTable

EXPERTS = 5


def at(place: int) -> LayerKey:
    """Every other layer of the decoder has experts."""
    return LayerKey("decoder", 2 * place + 1)


def routed(**stacks: list[np.ndarray]) -> dict[LayerKey, np.ndarray]:
    """Routing of the layers with experts of each stack."""
    return {
        at(place)._replace(stack=stack): layer for stack, layers in stacks.items() for place, layer in enumerate(layers)
    }


@st.composite
def routes(draw) -> list[np.ndarray]:
    n_tokens, top_k, n_layers = draw(st.integers(1, 12)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    token = st.one_of(
        st.just([-1] * top_k),
        st.permutations(range(EXPERTS)).map(lambda order: order[:top_k]),
    )
    layer = st.lists(token, min_size=n_tokens, max_size=n_tokens).map(np.array)
    return draw(st.lists(layer, min_size=n_layers, max_size=n_layers))


def counted_by_hand(layers: list[np.ndarray], layer: int, one: list[int], two: list[int]) -> np.ndarray:
    """The same counts with loops."""

    def count(contexts: list[tuple[int, ...]], depth: int) -> np.ndarray:
        out = np.zeros(EXPERTS)
        for context in contexts:
            for token in range(len(layers[0])):
                before = [layers[layer - back][token] for back in range(depth, 0, -1)]
                if all(expert in row for expert, row in zip(context, before, strict=True)):
                    for expert in layers[layer][token]:
                        if expert >= 0:
                            out[expert] += 1
        return out

    tries = []
    if layer >= 2 and one and two:
        tries.append(count(list(product(two, one)), 2))
    if layer >= 1 and one:
        tries.append(count([(expert,) for expert in one], 1))
    tries.append(count([()], 0))
    return next((counts for counts in tries if counts.any()), tries[-1])


@settings(max_examples=80)
@given(routes(), st.sets(st.integers(0, EXPERTS - 1), max_size=2), st.sets(st.integers(0, EXPERTS - 1), max_size=2))
def test_counts_equal_plain_loops_at_every_layer_and_back_off(layers, one, two) -> None:
    table = build(EXPERTS, routed(decoder=layers))
    for layer in range(len(layers)):
        counts, _ = table.counts(at(layer), sorted(one), sorted(two))
        expected = counted_by_hand(layers, layer, sorted(one), sorted(two))
        assert counts.tolist() == expected.tolist()
        probabilities = table.probabilities(at(layer), sorted(one), sorted(two))
        assert probabilities.sum() == pytest.approx(1.0 if expected.any() else 0.0)


def test_backing_off_goes_two_one_none() -> None:
    first, second, third = np.array([[0], [0], [1]]), np.array([[1], [2], [1]]), np.array([[3], [4], [2]])
    table = build(EXPERTS, routed(decoder=[first, second, third]))
    assert table.counts(at(2), [1], [0])[1] == 2
    assert table.probabilities(at(2), [1], [0]).tolist() == [0, 0, 0, 1, 0]
    counts, back = table.counts(at(2), [1], [3])  # never seen together
    assert (back, counts.tolist()) == (1, [0, 0, 1, 1, 0])
    counts, back = table.counts(at(2), [4], [3])
    assert (back, counts.tolist()) == (0, [0, 0, 1, 1, 1])
    assert table.counts(at(2), [-1], [0])[1] == 0


def test_every_pair_counts_for_every_expert_with_top_k_above_one() -> None:
    layers = [np.array([[0, 1]]), np.array([[2, 3]]), np.array([[4, 0]])]
    table = build(EXPERTS, routed(decoder=layers))
    assert table.counts(at(2), [2], [0])[0].tolist() == [1, 0, 0, 0, 1]
    assert table.counts(at(2), [2, 3], [0, 1])[0].tolist() == [4, 0, 0, 0, 4]


def test_chunks_of_a_long_trace_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    layers = [np.stack([rng.permutation(EXPERTS)[:2] for _ in range(50)]) for _ in range(3)]
    whole = build(EXPERTS, routed(decoder=layers)).to_bytes()
    monkeypatch.setattr("moeconv.routes._CHUNK_TOKENS", 7)
    assert build(EXPERTS, routed(decoder=layers)).to_bytes() == whole


@settings(max_examples=30)
@given(routes(), routes())
def test_bytes_round_trip(encoder, decoder) -> None:
    table = build(EXPERTS, routed(encoder=encoder, decoder=decoder))
    body = table.to_bytes()
    again = TransitionTable.from_bytes(body)
    assert again.to_bytes() == body
    assert list(again.layers) == list(table.layers) == [*routed(encoder=encoder, decoder=decoder)]
    assert [len(again.of_stack(stack)) for stack in ("encoder", "decoder")] == [len(encoder), len(decoder)]
    last = len(decoder) - 1
    assert (again.probabilities(at(last), [1], [2]) == table.probabilities(at(last), [1], [2])).all()


def entries_of(table: ContextCounts) -> dict[tuple[int, int], int]:
    """(context, expert) → count"""
    lengths = np.diff(table.rows.astype(int))
    contexts = np.repeat(table.contexts, lengths).tolist()
    return dict(zip(zip(contexts, table.experts.tolist(), strict=True), table.counts.tolist(), strict=True))


@settings(max_examples=50)
@given(routes(), st.integers(1, 9))
def test_a_cut_table_has_what_was_counted_often_enough_and_can_be_read_again(layers, least) -> None:
    table = build(EXPERTS, routed(decoder=layers))
    cut = at_least(table, least)
    assert TransitionTable.from_bytes(cut.to_bytes()).to_bytes() == cut.to_bytes()
    for at, whole in table.layers.items():
        assert (cut.layers[at].frequency == whole.frequency).all()
        for before, after in (
            (whole.one_before, cut.layers[at].one_before),
            (whole.two_before, cut.layers[at].two_before),
        ):
            assert entries_of(after) == {entry: n for entry, n in entries_of(before).items() if n >= least}


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(0, 40_000))
def test_tables_take_no_more_of_a_pack_than_their_share(seed, top_k, pack_bytes) -> None:
    rng = np.random.default_rng(seed)
    tokens = [np.stack([rng.permutation(EXPERTS)[:top_k] for _ in range(40)]) for _ in range(4)]
    table = build(EXPERTS, routed(decoder=tokens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "MOST_SHARE", 0.5)
        patch.setattr(paths, "LEAST_BYTES", 100)
        kept = bounded(table, pack_bytes)
    nothing = at_least(table, 1 << 32)
    assert len(kept.table.to_bytes()) <= max(0.5 * pack_bytes, 100, len(nothing.to_bytes()))
    assert kept.table.to_bytes() == at_least(table, kept.least).to_bytes()
    counts = [n for part in paths._tables(table) for n in entries_of(part).values()]
    assert kept.left_out == pytest.approx(sum(n for n in counts if n < kept.least) / sum(counts))
    if kept.least > 1:
        slack = 9 * 2 * 10 * len(tokens)
        assert len(at_least(table, kept.least - 1).to_bytes()) + slack > max(0.5 * pack_bytes, 100)


def test_small_tables_stay_whole_and_counts_beyond_telling_apart_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    table = build(EXPERTS, routed(decoder=[np.array([[0]] * 9 + [[1]] * 3)] * 2))
    assert bounded(table, 0) == paths.Bounded(table, 1, 0.0)
    monkeypatch.setattr(paths, "LEAST_BYTES", 0)
    monkeypatch.setattr(paths, "_MOST_COUNT", 5)
    kept = bounded(table, 0)
    assert (kept.least, kept.left_out) == (6, 1.0)
    assert [len(part.counts) for part in paths._tables(kept.table)] == [0] * 4


def example() -> bytes:
    rng = np.random.default_rng(1)
    return build(EXPERTS, routed(decoder=[rng.integers(0, EXPERTS, (40, 1)) for _ in range(3)])).to_bytes()


def tampered(change) -> bytes:
    """The example with its tensors or metadata changed."""
    body = example()
    tensors, header = load(body), json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    metadata = header["__metadata__"]
    change(tensors, metadata)
    return save(tensors, metadata)


def first_context_too_large(tensors, metadata) -> None:
    tensors["decoder.3.one.contexts"][-1] = EXPERTS


def expert_too_large(tensors, metadata) -> None:
    tensors["decoder.5.two.experts"][0] = EXPERTS


def rows_run_past_the_end(tensors, metadata) -> None:
    tensors["decoder.5.two.rows"][-1] += 1


def rows_fall(tensors, metadata) -> None:
    tensors["decoder.5.two.rows"][1] = tensors["decoder.5.two.rows"][2]


def contexts_unsorted(tensors, metadata) -> None:
    tensors["decoder.3.one.contexts"][:2] = tensors["decoder.3.one.contexts"][1::-1].copy()


def tensor_missing(tensors, metadata) -> None:
    del tensors["decoder.3.one.counts"]


def dtype_changed(tensors, metadata) -> None:
    tensors["decoder.3.one.counts"] = tensors["decoder.3.one.counts"].astype(np.int64)


def frequency_short(tensors, metadata) -> None:
    tensors["decoder.1.frequency"] = tensors["decoder.1.frequency"][1:]


def layers_absurd(tensors, metadata) -> None:
    metadata["decoder_layers"] = "99999999999999999999"


def layers_fall(tensors, metadata) -> None:
    metadata["decoder_layers"] = "3,1,5"


def layers_unreadable(tensors, metadata) -> None:
    metadata["decoder_layers"] = "1,,5"


def no_size(tensors, metadata) -> None:
    del metadata["num_experts"]


@pytest.mark.parametrize(
    "change",
    [
        first_context_too_large, expert_too_large, rows_run_past_the_end, rows_fall, contexts_unsorted,
        tensor_missing, dtype_changed, frequency_short, layers_absurd, layers_fall,
        layers_unreadable, no_size,
    ],
)  # fmt: skip
def test_tables_that_contradict_themselves_are_refused(change) -> None:
    TransitionTable.from_bytes(tampered(lambda tensors, metadata: None))
    with pytest.raises(HeaderInvalid) as error:
        TransitionTable.from_bytes(tampered(change))
    assert "\n" not in str(error.value)


def test_a_later_version_is_refused() -> None:
    with pytest.raises(FormatTooNew):
        TransitionTable.from_bytes(tampered(lambda tensors, metadata: metadata.update(version="3")))


@settings(max_examples=60)
@given(st.integers(0, 400), st.integers(1, 255))
def test_a_flipped_or_cut_file_never_ends_in_another_error(at, flip) -> None:
    body = bytearray(example())
    for damaged in (
        bytes(body[: min(at, len(body) - 1)]),
        bytes(body[:at]) + bytes([body[at] ^ flip]) + body[at + 1 :],
    ):
        with suppress(PackError):
            TransitionTable.from_bytes(damaged)


def test_tables_of_another_model_are_refused() -> None:
    from tiny_packs import SWITCH

    with pytest.raises(HeaderInvalid, match="profile the paths"):
        build(EXPERTS, routed(decoder=[np.array([[0]])])).check(SWITCH)
