"""The training code's own arithmetic against plain formulas, at small and uneven shapes."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

pytest.importorskip("transformers")

import transformers

from recipes.train import attention, deepseek, grouped, loop, muon, olmoe, opt, switch, vocabulary
from recipes.train.cross import ChunkedCross
from recipes.train.decoder import DecoderTask, Text
from recipes.train.kneser_ney import KneserNey


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((found - expected).detach().norm() / expected.detach().norm())


def plain_experts(x, scores, index, up, down, gated):
    """Every expert on every token, then the chosen ones."""
    wide = torch.einsum("td,eud->teu", x, up)
    hidden = F.silu(wide.chunk(2, -1)[0]) * wide.chunk(2, -1)[1] if gated else F.relu(wide)
    out = torch.einsum("teh,edh->ted", hidden, down)
    return (out.gather(1, index[..., None].expand(-1, -1, x.shape[1])) * scores[..., None]).sum(1)


@pytest.mark.parametrize(("k", "gated"), [(1, False), (3, True)])
def test_grouped_experts_equal_all_experts_with_gradients(k: int, gated: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(37, 24, requires_grad=True)
    up = torch.randn(5, 32 if gated else 16, 24, requires_grad=True)
    down = torch.randn(5, 24, 16, requires_grad=True)
    scores = torch.rand(37, k, requires_grad=True)
    index = torch.rand(37, 4).topk(k, -1).indices  # the last expert gets no token
    inputs, weight = (x, scores, up, down), torch.randn(37, 24)
    found = grouped.GroupedExperts.apply(x, scores, index, up, down, gated)
    expected = plain_experts(x, scores, index, up, down, gated)
    assert relative(found, expected) < 0.02
    pairs = zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    )
    assert all(relative(one, other) < 0.02 for one, other in pairs)


def test_places_are_distinct_and_within_their_experts_slice() -> None:
    flat = torch.tensor([2, 0, 2, 2, 4, 0])
    places, bounds = grouped.layout(flat, 5)
    assert len(set(places.tolist())) == len(flat)
    assert all(bounds[e] <= p < bounds[e + 1] for e, p in zip(flat.tolist(), places.tolist(), strict=True))
    assert bounds[1] - bounds[0] == grouped.ROUND_ROWS
    assert bounds[2] == bounds[1]


def test_balance_loss_is_one_when_even_and_ignores_masked_tokens() -> None:
    even = torch.full((8, 4), 0.25)
    index = torch.arange(8).remainder(4)[:, None]
    assert float(grouped.balance_loss(even, index, None)[0]) == pytest.approx(1.0)
    mask = torch.arange(8) < 4
    index[4:] = 0
    assert grouped.balance_loss(even, index, mask)[1].tolist() == [0.25] * 4


def test_sliced_attention_equals_softmax_attention_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "PIECE", 100)  # several pieces
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, n, width, requires_grad=True) for n, width in ((5, 8), (7, 8), (7, 6)))
    bias = torch.randn(1, 2, 5, 7, requires_grad=True)
    mask = torch.zeros(3, 1, 1, 7)
    mask[1, ..., 4:] = torch.finfo(torch.float32).min
    found = attention.SlicedAttention.apply(q, k, v, bias, mask, 0.5)
    expected = (q @ k.mT * 0.5 + bias + mask).softmax(-1) @ v
    assert relative(found, expected) < 0.02
    weight = torch.randn_like(expected)
    pairs = zip(
        torch.autograd.grad((found * weight).sum(), (q, k, v, bias)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v, bias)),
        strict=True,
    )
    assert all(relative(one, other) < 0.03 for one, other in pairs)


def letters(eos: bool) -> Tokenizer:
    """A tokenizer of single bytes."""
    return vocabulary.byte_pairs([], 258, eos)


def tiny_text() -> Text:
    tokenizer = letters(eos=False)
    ids = torch.tensor(tokenizer.encode("the quick brown fox jumps over the lazy dog " * 20).ids, dtype=torch.int16)
    return Text(tokenizer, [(ids, 1)], "a lazy dog jumps over a quick fox " * 8)


def tiny_deepseek() -> DecoderTask:
    settings = deepseek.DeepseekSettings(
        d_model=24, d_expert=16, d_dense=40, layers=3, dense_layers=1, heads=2, query_rank=12, latent=20, d_head=8,
        d_turn=6, experts=8, top_k=3, context=12, batch=4,
    )  # fmt: skip
    return deepseek.task("tiny", settings, tiny_text(), 0)


def tiny_olmoe() -> DecoderTask:
    settings = olmoe.OlmoeSettings(d_model=24, d_expert=16, layers=2, heads=2, experts=8, top_k=3, context=12, batch=4)
    return olmoe.task("tiny", settings, tiny_text(), 0)


def tiny_opt() -> DecoderTask:
    settings = opt.OptSettings(d_model=24, d_ff=40, layers=2, heads=2, context=12, batch=4)
    return opt.OptTask("tiny", settings, tiny_text(), 0)


DECODERS = {tiny_deepseek: "DeepseekV3ForCausalLM", tiny_olmoe: "OlmoeForCausalLM", tiny_opt: "OPTForCausalLM"}


@pytest.mark.parametrize("make", DECODERS)
def test_decoders_compute_what_transformers_computes_from_their_exports(make: object, tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = make()
    for block in task.blocks:  # as after some training: scores apart, and biases that change the choice
        torch.nn.init.normal_(block.gate.weight, std=0.5)
        if hasattr(block.gate, "e_score_correction_bias"):
            block.gate.e_score_correction_bias.normal_(0, 0.3)
    for name, parameter in task.model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    task.export(tmp_path)
    plain = getattr(transformers, DECODERS[make]).from_pretrained(tmp_path, dtype=torch.float32).eval()
    window = task.windows.at(0)
    labels = window[:, 1:].flatten()
    with torch.no_grad():
        expected = F.cross_entropy(plain(window[:, :-1]).logits.flatten(0, 1), labels)
        task.model.eval()
        assert float(task._cross(window)) == pytest.approx(float(expected), rel=0.01)
    biases = [n for n, _ in plain.named_buffers() if n.endswith("e_score_correction_bias")]
    for name in biases:  # sums of small steps: 16 bits would change who is chosen
        assert torch.equal(plain.get_buffer(name), task.model.get_buffer(name))
    assert len(biases) == (2 if make is tiny_deepseek else 0)


def test_gradients_of_a_layer_with_a_shared_expert_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    task = tiny_deepseek()
    block, x = task.blocks[0].eval(), torch.randn(2, 30, 24, requires_grad=True)
    plain = type(task.model)(task.model.config).model.layers[1].mlp.eval()
    for module in (block, plain):
        torch.manual_seed(1)
        for name in ("gate.weight", "gate.e_score_correction_bias", "experts.gate_up_proj", "experts.down_proj"):
            module.state_dict()[name].normal_(0, 0.3)
        for _, parameter in sorted(module.shared_experts.named_parameters()):
            torch.nn.init.normal_(parameter, std=0.3)
    assert dict(plain.named_parameters()).keys() == dict(block.named_parameters()).keys()
    weight, gradients = torch.randn(2, 30, 24), []
    for module in (block, plain):
        parameters = [p for _, p in sorted(module.named_parameters())]
        gradients.append(torch.autograd.grad((module(x) * weight).sum(), [x, *parameters]))
    assert relative(block(x), plain(x)) < 0.02
    assert all(relative(one, other) < 0.03 for one, other in zip(*gradients, strict=True))


def test_biases_rise_for_idle_experts_and_even_the_load_out() -> None:
    torch.manual_seed(0)
    task = tiny_deepseek()
    block, x = task.blocks[0], torch.randn(4, 64, 24) + 1
    torch.nn.init.normal_(block.gate.weight, std=0.3)
    block.train()
    with torch.no_grad():
        block(x)
        first = block.share.clone()
        assert torch.equal(block.gate.e_score_correction_bias, 1e-3 * (first.mean() - first).sign())
        for _ in range(400):
            block(x)
        assert float(first.max()) > 0.2
        assert float(block.share.max()) < 0.15  # even: 0.125
        kept = block.gate.e_score_correction_bias.clone()
        block.eval()
        block(x)
    assert torch.equal(block.gate.e_score_correction_bias, kept)


@pytest.mark.parametrize("sparse_every", [1, 2])
def test_switch_computes_what_transformers_computes_from_its_export(sparse_every: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = switch.SwitchSettings(
        d_model=24, d_ff=16, d_kv=8, layers=4, heads=3, experts=6, batch=3, max_input=20, max_target=24,
        sparse_every=sparse_every,
    )  # fmt: skip
    rows = [{"input": "one two", "target": "One, two."}, {"input": "three", "target": "Three."}]
    task = switch.SwitchTask("tiny", settings, letters(eos=True), rows, rows, 0)
    assert len(task.encoder_blocks) == len(task.decoder_blocks) == 4 // sparse_every
    task.export(tmp_path)
    plain = transformers.SwitchTransformersForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    source, target = task.batches.at(0)
    shifted = F.pad(target[:, :-1], (1, 0), value=switch.PAD_ID)
    with torch.no_grad():
        logits = plain.eval()(source, attention_mask=(source != 0).long(), decoder_input_ids=shifted).logits
    expected = F.cross_entropy(logits[target != 0], target[target != 0])
    task.model.eval()
    with torch.no_grad():
        assert float(task._cross(source, target, 0.0)) == pytest.approx(float(expected), rel=0.01)


def test_short_examples_come_first_and_then_all() -> None:
    pairs = [(array("H", [2] * n), array("H", [3] * (n + 1))) for n in range(10, 60)]
    batches = switch.ShortFirst(pairs, 10, 0, steps=5)
    widths = [[side.shape[1] for side in batches.at(step)] for step in range(10)]
    assert max(max(pair) for pair in widths[:5]) <= switch.SHORT
    lengths = [n for step in range(5, 10) for n in (batches.at(step)[0] != 0).sum(1).tolist()]
    assert sorted(lengths) == list(range(10, 60))


def test_a_stopped_training_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TRAIN_DIR", tmp_path / "train")
    monkeypatch.setattr(loop, "MODEL_DIR", tmp_path / "models")
    settings = loop.Settings(minutes=0.02, threads=1, rate=1e-3, embedding_rate=1e-3, muon=True, log_seconds=0.1)
    task = tiny_deepseek()
    loop.run(task, settings, ["embed_tokens", "lm_head"])
    fresh = tiny_deepseek()
    optimizers = loop.make_optimizers(fresh.model, settings, ["embed_tokens", "lm_head"])
    step, seconds = loop.load_checkpoint(tmp_path / "train" / "tiny" / "checkpoint.pt", fresh, optimizers)
    assert step > 0
    assert seconds >= 1.2
    state = task.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in fresh.model.state_dict().items())
    assert any(value.abs().sum() > 0 for name, value in state.items() if name.endswith("e_score_correction_bias"))
    assert (tmp_path / "models" / "tiny" / "model.safetensors").is_file()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_chunked_cross_has_the_gradient_of_cross_entropy(smoothing: float) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(19, 12, requires_grad=True), torch.randn(31, 12, requires_grad=True)
    labels = torch.randint(31, (19,))
    found = ChunkedCross.apply(hidden, weight, labels, smoothing)
    logits = hidden @ weight.T
    assert float(found.detach()) == pytest.approx(float(F.cross_entropy(logits, labels).detach()), rel=0.02)
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    for one, other in zip(
        torch.autograd.grad(found, (hidden, weight)),
        torch.autograd.grad(expected, (hidden, weight)),
        strict=True,
    ):
        assert relative(one, other) < 0.02


@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 20, 8)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(muon.orthogonalise(torch.randn(shape)))
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.4


def test_kneser_ney_sums_to_one_and_prefers_what_it_saw() -> None:
    stream = np.tile(np.arange(6), 40)
    model = KneserNey(stream, 3)
    base = np.full(3, 1 / 9)
    for context in ([1, 2], [8, 3], [3, 3]):
        chances = [model.probabilities(np.array([*context, symbol]), base)[-1] for symbol in range(9)]
        assert sum(chances) == pytest.approx(1.0)
    assert model.probabilities(np.array([1, 2, 3]), base)[-1] > 0.9
