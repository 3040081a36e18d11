"""The network of a hash function beside a plain definition of it, its training, and what goes to and from a pack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moeconv.errors import ConversionError
from moeconv.foresight.examples import (
    Examples,
    Part,
    StackBatch,
    StackExamples,
    filled,
    half,
    load_checkpoint,
    plan,
    save_checkpoint,
)
from moeconv.foresight.network import Encoded, Networks, Shape, sparsemax
from moeconv.foresight.neurons import LayerNetwork
from moeconv.foresight.training import Course, Lesson, distillation, foretell, hits_of, trained
from moeconv.progress import unseen
from moert.pack.codec import F32
from moert.pack.learnt import HashFunction
from moert.pack.model_spec import ModelSpec, StackName
from tests.plain_hash import plain, plain_sparsemax
from tests.refusing import one_line
from tests.tiny_packs import DECODER, SWITCH


def networks_of(spec: ModelSpec, width: int = 6, scale: float = 1.0) -> Networks:
    torch.manual_seed(1)
    found = Networks({name: Shape.of(spec, name, width) for name in spec.stacks}, scale)
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape) * 0.6)
    return found


def hits_in(spec: ModelSpec, value: float = 0.5) -> dict[StackName, F32]:
    return {name: np.full((len(spec.moe_layers(name)), 2), value, np.float32) for name in spec.stacks}


@pytest.mark.parametrize("n", [1, 2, 7, 33])
def test_sparsemax_is_its_definition_and_so_is_its_gradient(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    scores = torch.randn((5, n), generator=generator, dtype=torch.float64, requires_grad=True)
    found = sparsemax(scores * 2)
    expected = np.stack([plain_sparsemax(row) for row in (2 * scores).detach().numpy()])
    assert np.allclose(found.detach().numpy(), expected)
    assert torch.allclose(found.sum(-1), torch.ones(5, dtype=torch.float64))
    assert torch.autograd.gradcheck(sparsemax, (scores,))


def test_sparsemax_gives_nothing_to_what_is_left_out() -> None:
    scores = torch.tensor([[0.1, -torch.inf, 0.3], [-torch.inf, 5.0, -torch.inf]], requires_grad=True)
    found = sparsemax(scores)
    assert torch.allclose(found, torch.tensor([[0.4, 0.0, 0.6], [0.0, 1.0, 0.0]]))
    (gradient,) = torch.autograd.grad((found * torch.tensor([[1.0, 2.0, 3.0]])).sum(), scores)
    assert torch.allclose(gradient, torch.tensor([[-1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("spec", [DECODER, SWITCH], ids=["decoder", "switch"])
def test_the_network_is_what_the_format_says(spec: ModelSpec) -> None:
    """From its file, on rows of several lengths at once."""
    stored = networks_of(spec, scale=3.0).function(hits_in(spec))
    function = HashFunction.from_bytes(stored.to_bytes())
    function.check(spec)
    networks = Networks.of(function)
    lengths, rng = (5, 2, 7), np.random.default_rng(0)
    real = torch.arange(7) < torch.tensor(lengths)[:, None]
    encoded: Encoded | None = None
    before: list[F32 | None] = [None] * len(lengths)
    for name in networks.names:
        rows = rng.normal(size=(3, 7, spec.d_model)).astype(np.float32)
        said, y, _ = networks.read(name, torch.from_numpy(rows), real, encoded)
        for row, length in enumerate(lengths):
            expected, its_y = plain(function.stacks[name], rows[row, :length], before[row])
            assert np.allclose(said[row, :length].numpy(), expected, atol=1e-4), (name, row)
            assert np.allclose(y[row, :length].numpy(), its_y, atol=1e-4), (name, row)
            before[row] = its_y
        encoded = Encoded(y, real)


def test_scale_becomes_part_of_the_file() -> None:
    networks = networks_of(DECODER, scale=3.0)
    rows, real = torch.randn((1, 4, DECODER.d_model)), torch.ones((1, 4), dtype=torch.bool)
    again = Networks.of(networks.function(hits_in(DECODER)))
    assert torch.allclose(networks.read("decoder", rows, real)[0], again.read("decoder", rows, real)[0], atol=0.2)
    assert again.function(hits_in(DECODER)).to_bytes() == networks.function(hits_in(DECODER)).to_bytes()


@pytest.mark.parametrize("spec", [DECODER, SWITCH], ids=["decoder", "switch"])
def test_a_decoder_steps_as_it_reads_at_once(spec: ModelSpec) -> None:
    networks = networks_of(spec).requires_grad_(False)
    rows, real = torch.randn((2, 6, spec.d_model)), torch.ones((2, 6), dtype=torch.bool)
    encoded = None if spec is DECODER else Encoded(torch.randn((2, 3, 6)), torch.ones((2, 3), dtype=torch.bool))
    whole, _, _ = networks.read("decoder", rows, real, encoded)
    _, _, past = networks.read("decoder", rows[:, :2], real[:, :2], encoded)
    past = past.keep(torch.tensor([False, True]))
    kept = None if encoded is None else Encoded(encoded.y[1:], encoded.real[1:])
    for place in range(2, 6):
        said, _, past = networks.read("decoder", rows[1:, place : place + 1], real[1:, :1], kept, past)
        assert torch.allclose(said[:, 0], whole[1:, place], atol=1e-5)


@pytest.mark.parametrize("spec", [DECODER, SWITCH], ids=["decoder", "switch"])
def test_its_size_is_known_beforehand(spec: ModelSpec) -> None:
    for name, stack in networks_of(spec, 10).function(hits_in(spec)).stacks.items():
        numbers = sum(array.size for part, array in stack.tensors() if part != "hits")
        assert numbers == Shape.of(spec, name, 10).numbers


def lesson_of_a_rule(folder: Path, samples: int = 24) -> Lesson:
    """Each token goes where the token before it says, in every layer of a decoder of 8 experts, top-2."""
    rng = np.random.default_rng(0)
    layers, experts = len(DECODER.moe_layers()), DECODER.moe.n

    def examples(count: int) -> Examples:
        lengths = rng.integers(5, 12, count)
        tokens = rng.integers(0, experts, int(lengths.sum())).astype(np.int32)
        numbers = np.zeros((len(tokens), layers, experts), np.float32)
        at = 0
        for length in lengths:
            for place in range(length):
                said = int(tokens[at + place - 1]) if place else 0
                numbers[at + place, :, said] += 6
                numbers[at + place, :, (said + 1) % experts] += 3
            at += length
        order = np.argsort(-numbers, axis=-1, kind="stable")
        largest = np.take_along_axis(numbers, order, -1).astype(np.float16)
        part = Part(tokens, largest, order.astype(np.uint16), order[..., :2].astype(np.int16))
        return Examples({"decoder": StackExamples(lengths, np.cumsum(lengths) - lengths, part)})

    embedding = torch.randn((experts, DECODER.d_model), generator=torch.Generator().manual_seed(0)) * 0.02
    return Lesson(DECODER, embedding, examples(samples), examples(16), "a rule", folder / "checkpoint.pt")


def test_it_learns_a_rule_and_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    course, said = Course(width=24, epochs=60, rate=1e-2), list[str]()
    lesson = lesson_of_a_rule(tmp_path, samples=96)
    function = trained(lesson, course, said.append, unseen)
    hits = function.stacks["decoder"].hits
    assert hits[:, 0].min() > 0.8, hits
    assert hits[:, 1].min() > 0.95, hits
    assert (hits[:, 1] >= hits[:, 0]).all()
    measured = hits_of(function, lesson.embedding, lesson.heldout)["decoder"]
    assert np.array_equal(measured, hits), "those of the function as it is stored"
    assert said[0].startswith("epoch 1 of 60: of held-out choices it names ")


def test_an_interrupted_training_goes_on_to_the_same_function(tmp_path: Path) -> None:
    course = Course(width=8, epochs=4, rate=1e-2, seed=3)
    whole = trained(lesson_of_a_rule(tmp_path), course, lambda line: None, unseen).to_bytes()
    (tmp_path / "checkpoint.pt").unlink()

    def stop(line: str) -> None:
        if line.startswith("epoch 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(lesson_of_a_rule(tmp_path), course, stop, unseen)
    said: list[str] = []
    assert trained(lesson_of_a_rule(tmp_path), course, said.append, unseen).to_bytes() == whole
    assert [line.split(":")[0] for line in said] == ["epoch 3 of 4", "epoch 4 of 4"]
    other = Course(width=8, epochs=4, rate=1e-2, seed=4)
    (tmp_path / "checkpoint.pt").unlink()
    assert trained(lesson_of_a_rule(tmp_path), other, said.append, unseen).to_bytes() != whole


def test_a_damaged_checkpoint_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"not one")
    with one_line(ConversionError, "delete it, and training begins anew"):
        trained(lesson_of_a_rule(tmp_path), Course(width=8, epochs=1), print, unseen)


def test_the_loss_is_its_definition() -> None:
    """A dropped token has no choice."""
    torch.manual_seed(0)
    said, numbers = torch.randn((3, 2, 8)), torch.randn((3, 2, 4)).sort(-1, descending=True).values
    experts = torch.stack([torch.randperm(8)[:4] for _ in range(6)]).reshape(3, 2, 4)
    chosen = experts[..., :2].clone()
    chosen[1] = -1
    divergence, surprise = list[Tensor](), list[Tensor]()
    for token in range(3):
        for layer in range(2):
            p = numbers[token, layer].softmax(-1)
            q = said[token, layer, experts[token, layer]].softmax(-1)
            divergence.append((p * (p / q).log()).sum())
            whole = said[token, layer].softmax(-1)
            surprise += [-whole[expert].log() for expert in chosen[token, layer] if expert >= 0]
    expected = torch.stack(divergence).mean() + 0.005 * torch.stack(surprise).mean()
    batch = StackBatch(torch.zeros(1), torch.zeros(1), numbers, experts, chosen)
    assert torch.allclose(distillation(said, batch), expected)


def test_batches_hold_every_sample_once(tmp_path: Path) -> None:
    lesson = lesson_of_a_rule(tmp_path, samples=150)
    for seed in (None, 0, 1):
        assert sorted(place for batch in plan(lesson.train, seed) for place in batch) == list(range(150))
    assert plan(lesson.train, 0) == plan(lesson.train, 0) != plan(lesson.train, 1)


def test_what_is_missing_at_the_right_of_a_row_changes_nothing(tmp_path: Path) -> None:
    """Samples alone, and beside longer ones."""
    lesson = lesson_of_a_rule(tmp_path)
    networks = networks_of(DECODER).requires_grad_(False)
    part = lesson.train.stacks["decoder"]
    ids, real = torch.zeros((1, 20), dtype=torch.long), torch.zeros((1, 20), dtype=torch.bool)
    tokens = torch.from_numpy(part.sample(0).tokens.astype(np.int64))
    ids[0, : len(tokens)], real[0, : len(tokens)] = tokens, True
    batch = StackBatch(ids, real, ids, ids, ids)
    alone = StackBatch(tokens[None], torch.ones_like(tokens[None]).bool(), ids, ids, ids)
    filled = foretell(networks, lesson.embedding, {"decoder": batch})["decoder"]
    assert torch.allclose(filled, foretell(networks, lesson.embedding, {"decoder": alone})["decoder"], atol=1e-6)


# What a training keeps

WHOLE = b"0123456789"


def filling(folder: Path, about: str = "a") -> tuple[dict[str, Any], bool]:
    """What was found, and whether it was made for that."""
    made = []

    def fill() -> dict[str, Any]:
        made.append(True)
        (folder / "x").write_bytes(WHOLE)
        (folder / "y").write_bytes(b"")
        return {"lengths": {"decoder": 5}}

    return filled(folder, about, fill), bool(made)


def test_they_are_taken_again_if_they_are_about_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "to-learn"
    first = filling(folder)
    assert first[1]
    assert first[0]["lengths"] == {"decoder": 5}
    assert filling(folder) == (first[0], False)
    assert filling(folder, "b")[1]
    assert not filling(folder, "b")[1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "x").write_bytes(WHOLE[:-1]),
        lambda folder: (folder / "x").write_bytes(b""),
        lambda folder: (folder / "x").write_bytes(b"1" + WHOLE[1:]),
        lambda folder: (folder / "z").write_bytes(b""),
        lambda folder: (folder / "examples.json").write_text(
            (folder / "examples.json").read_text().replace('"decoder": 5', '"decoder": 4')
        ),
        lambda folder: (folder / "y").unlink(),
        lambda folder: (folder / "examples.json").unlink(),
        *(lambda folder, text=text: (folder / "examples.json").write_text(text) for text in ("", "[]", "{}", "{", "3")),
    ],
)
def test_damaged_ones_are_made_anew(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    whole = filling(tmp_path / "to-learn")
    damage(tmp_path / "to-learn")
    assert filling(tmp_path / "to-learn") == whole
    assert (tmp_path / "to-learn" / "x").read_bytes() == WHOLE


def test_a_checkpoint_that_was_changed_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    state = {"weights": torch.arange(1000.0)}
    save_checkpoint(path, "a", state)
    found = load_checkpoint(path, "a")
    assert torch.equal(found["weights"], state["weights"])
    assert load_checkpoint(path, "b") is None
    whole = path.read_bytes()
    for at in range(0, len(whole), len(whole) // 50):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with one_line(ConversionError, r"it was changed since it was made\): delete it, and training"):
            load_checkpoint(path, "a")


def test_a_folder_that_can_not_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConversionError, match=r"can't use .*to-learn: .*; free it or give another --work"):
        filling(tmp_path / "file" / "to-learn")


MATRIX = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("by", [1.0, 2.0**12, 2.0**-12, 0.0])
def test_what_float16_holds_is_stored(by: float) -> None:
    """Of a bias also what vanishes beside all else."""
    assert not half(MATRIX[0] * 2.0**-30).any()
    numbers = MATRIX * by
    made = half(numbers)
    assert made.dtype == np.float16
    np.testing.assert_allclose(made, numbers.numpy(), rtol=2**-10, atol=2.0**-24)


@pytest.mark.parametrize("numbers", [MATRIX * 2.0**20, MATRIX * 2.0**-20, MATRIX[0] * 2.0**20, MATRIX / 0])
def test_what_it_does_not_hold_is_refused(numbers: torch.Tensor) -> None:
    with pytest.raises(ConversionError, match=r"float16 cannot hold the numbers of the training \(the largest is "):
        half(numbers)


def test_a_predictor_of_large_numbers_is_refused() -> None:
    with pytest.raises(ConversionError, match="too large or too small"):
        LayerNetwork(MATRIX, MATRIX.T * 1e6, torch.zeros(30)).stored()
