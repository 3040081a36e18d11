"""Scorers: the model run in parts, its experts grouped, is the model as transformers runs it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny import TINY, VARIANTS, VOCAB, each_family, kinds, transformers_model, variant_id
from tokenizers import Tokenizer as Library
from tokenizers import processors
from trials import pairs, questions, running, scorers, trial_of, words

from moeconv.calibration import Sample
from moeconv.errors import CalibrationError
from moeconv.measure import scoring
from moeconv.measure.scorers import Head, documents_of
from moeconv.measure.scoring import (
    REST,
    Extent,
    Seq2Seq,
    choices_of,
    dealt,
    load_tokenizer,
    spread,
    targets_of,
    volume,
    windows_of,
)
from moeconv.measure.trial import Trial
from moeconv.source import experts
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.experts import Call, Substitute, expert_ffn
from moert.kernels.reference import Plain, ffn
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.pack.parts import Act, Ffn
from tests.gptsan import token_types
from tests.pairs import thinned

TinyModel = Callable[[str, str], Path]
DEEP = [
    ("switch_transformers", "deeper encoder"),
    ("switch_transformers", "every second layer sparse"),
    ("switch_transformers", "small capacity"),
    *((family, name) for family, name in VARIANTS if family != "switch_transformers"),
]


def inputs_of(trial: Trial) -> dict[str, torch.Tensor]:
    """Three rows of which two are filled up on the right; a decoder's inputs beside them."""
    ids = torch.randint(2, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) < torch.tensor([9, 7, 4])[:, None]).long()
    if (end := trial.spec.tokens.prefix_end) is not None:
        ids[:2, 4] = end
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": token_types(ids, end)}
    if trial.spec.encoder is None:
        return {"input_ids": ids, "attention_mask": mask}
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :5].flip(0)}


# Experts --------------------------------------------------------------------------------------------------------------


@thinned("family, variant", VARIANTS, facts=each_family, ids=variant_id)
@torch.inference_mode()
def test_experts_give_the_logits_of_transformers(family: str, variant: str, tiny_model: TinyModel) -> None:
    trial = trial_of(tiny_model(family, variant))
    theirs = transformers_model(trial.checkpoint.path)
    inputs, spec = inputs_of(trial), trial.spec
    expected = theirs(**inputs).logits
    assert torch.allclose(trial.model(**inputs).logits, expected, atol=1e-5 * float(expected.abs().max()))
    if spec.moe.router.capacity is None or spec.moe.router.capacity >= 9:
        n_encoder, encoded = len(spec.moe_layers("encoder")), 20 if family == "nllb-moe" else 27  # no padding there
        decoder_tokens = 3 * (9 if spec.encoder is None else 5)
        rows = spec.moe.router.top_k * (n_encoder * encoded + len(spec.moe_layers("decoder")) * decoder_tokens)
        assert rows * (spec.moe.router.identities == 0) <= trial.calls.rows <= rows
    assert trial.calls.flops(3) == 3 * 2 * spec.weights_per_expert()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("limit", [None, 0.5, 7.0])
@pytest.mark.parametrize("biased", [False, True])
def test_an_expert_computes_what_the_runtime_does(gated: bool, limit: float | None, biased: bool) -> None:
    spec = Ffn(10, Act("silu", limit, slope=1.7 if biased else 1.0, plus=float(gated and biased)), gated, biased)
    shapes = [(10, 6)] * (1 + gated) + [(6, 10)]
    chance = torch.Generator().manual_seed(0)
    weights = tuple(3 * torch.randn(*shape, generator=chance) for shape in shapes)
    x = torch.randn(8, 6, generator=chance)
    biases = tuple(torch.randn(shape[0], generator=chance) for shape in shapes) if biased else ()
    matrices = {
        name: Plain(weight.numpy(), biases[place].numpy() if biased else None)
        for place, (name, weight) in enumerate(zip(spec.projections, weights, strict=True))
    }
    expected = torch.from_numpy(ffn(matrices, x.numpy(), spec))
    found = expert_ffn(x, weights, spec, biases)
    size = float(expected.abs().max())
    assert torch.allclose(found, expected, rtol=0, atol=1e-5 * size)
    unlimited = expert_ffn(x, weights, replace(spec, act=replace(spec.act, limit=None)), biases)
    near = torch.allclose(unlimited, expected, rtol=0, atol=1e-2 * size)
    assert near == (limit is None), "the limit was never reached: nothing was tested"


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(70, 24), (3, 7, 24), (0, 24)])
def test_large_products_are_those_of_torch(
    shape: tuple[int, ...], biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products by oneDNN, where the processor has AVX-512, and by torch where gradients are on."""
    chance = torch.Generator().manual_seed(2)
    x, weight = torch.randn(shape, generator=chance), torch.randn(40, 24, generator=chance)
    bias = torch.randn(40, generator=chance) if biased else None
    expected = x @ weight.T + (0 if bias is None else bias)
    monkeypatch.setattr(experts, "_MUCH", 0)
    with torch.inference_mode():
        assert torch.allclose(experts.linear(x, weight, bias), expected, rtol=1e-5, atol=1e-5)
    experts.linear(x.requires_grad_(), weight, bias).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, weight.sum(0).expand_as(x), rtol=1e-5, atol=1e-5)


def test_a_model_that_multiplies_otherwise_scores_alike(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def scores() -> Any:
        [scorer] = scorers(trial_of(tiny_model("olmoe", "plain")), running(5), "token_perplexity")
        return scorer.score(as_reference=True).nats

    expected = scores()
    monkeypatch.setattr(experts, "_MUCH", 0)
    assert np.allclose(scores(), expected, rtol=1e-5)


@torch.inference_mode()
def test_experts_run_only_for_the_tokens_that_are_wanted(tiny_model: TinyModel) -> None:
    trial = trial_of(tiny_model("olmoe", "plain"))
    inputs = inputs_of(trial)
    expected, mask = trial.model(**inputs).logits, inputs["attention_mask"].bool()
    rows = trial.calls.rows
    with trial.calls.during(active=mask), trial.calls.recording() as seen:
        found = trial.model(**inputs).logits
    assert trial.calls.rows - rows == int(mask.sum()) * 2 * 2  # layers, experts of a token
    assert torch.allclose(found[mask], expected[mask], atol=1e-5)
    assert set(seen) == set(trial.spec.moe_layers())
    for call in seen.values():
        assert (call.chosen[~mask.flatten()] == -1).all()
        assert int(call.rows(6).sum()) == int(mask.sum()) * 2
    before = dict(seen)
    trial.model(**inputs)
    assert seen == before, "what comes after the block is not recorded"
    assert torch.equal(trial.model(**inputs).logits, expected), "the restriction outlived its block"


@pytest.mark.parametrize("family", ["switch_transformers", "olmoe", "gpt_oss"])
@torch.inference_mode()
def test_what_is_watched_explains_the_output(family: str, tiny_model: TinyModel) -> None:
    trial = trial_of(tiny_model(family, "small capacity" if family == "switch_transformers" else "plain"))
    seen: list[tuple[LayerKey, Call]] = []
    outputs: list[torch.Tensor] = []
    for place in trial.spec.moe_layers():
        module = trial.family.experts_module(trial.model, place)
        module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    with trial.calls.during(watch=lambda place, call: seen.append((place, call))):
        trial.model(**inputs_of(trial))
    assert [place for place, _ in seen] == trial.spec.moe_layers()
    assert any((call.chosen < 0).any() for _, call in seen) == (family == "switch_transformers")
    for (place, call), output in zip(seen, outputs, strict=True):
        expected = torch.zeros_like(output)
        for token, slot in (call.chosen >= 0).nonzero().tolist():
            key = ExpertKey(*place, int(call.chosen[token, slot]))
            made = trial.calls.ffn(key, call.x[token][None], trial.calls.weights(key))[0]
            expected[token] += call.weights[token, slot] * made
        assert torch.allclose(output.reshape(expected.shape), expected, atol=1e-5)


@torch.inference_mode()
def test_a_substitute_stands_in_for_its_rows_alone(tiny_model: TinyModel) -> None:
    trial = trial_of(tiny_model("olmoe", "plain"))
    inputs = inputs_of(trial)
    keys = [ExpertKey("decoder", 1, expert) for expert in (0, 3)]
    expected = []
    for key in keys:
        trial.assign({key: (2, 2, 2)})
        expected.append(trial.model(**inputs).logits)
        trial.restore()
    twice = {name: torch.cat([value, value]) for name, value in inputs.items()}
    probe_of_row = torch.tensor([0, 0, 0, 1, 1, 1])
    weights = [trial.weights(key, (2, 2, 2)) for key in keys]
    substitute = Substitute(LayerKey("decoder", 1), probe_of_row, torch.tensor([0, 3]), weights)
    with trial.calls.during(substitute=substitute):
        found = trial.model(**twice).logits
    assert torch.allclose(found, torch.cat(expected), atol=1e-5)
    assert not torch.allclose(found[:3], found[3:], atol=1e-2), "the substitutes made no difference"


# Stacks and head ------------------------------------------------------------------------------------------------------


@thinned("family, variant", DEEP, facts=kinds, ids=variant_id)
@torch.inference_mode()
def test_a_stack_goes_on_from_any_layer(family: str, variant: str, tiny_model: TinyModel) -> None:
    trial = trial_of(tiny_model(family, variant))
    samples, metric = (running(3), "perplexity") if trial.spec.encoder is None else (pairs(6), "rouge1")
    [scorer] = scorers(trial, samples, metric)
    if trial.spec.encoder is None:
        resumed_equals_whole(scorer.stack, {"input_ids": scorer.texts.ids})
        return
    bucket, model = scorer.buckets[-1], scorer.model
    encoded = model.encode({"input_ids": bucket.inputs}, bucket.mask)
    resumed_equals_whole(model.encoder, {"input_ids": bucket.inputs}, attention_mask=bucket.mask)
    resumed_equals_whole(
        model.decoder, {"input_ids": model.fed(bucket.targets)}, encoder_hidden_states=encoded[bucket.of_row],
        encoder_attention_mask=bucket.mask[bucket.of_row],
    )  # fmt: skip


def resumed_equals_whole(stack: Any, inputs: dict[str, Any], **fixed: Any) -> None:
    left: list[torch.Tensor] = []
    whole = stack.run({**inputs, **fixed}, after=lambda _layer, hidden: left.append(hidden))
    assert len(left) == stack.n_layers > 1
    for layer, hidden in enumerate(left):
        assert torch.allclose(stack.run({"inputs_embeds": hidden, **fixed}, layer + 1), whole, atol=1e-6), layer
    replaced = stack.run({**inputs, **fixed}, after=lambda layer, _hidden: left[0] * 2 if layer == 0 else None)
    assert torch.allclose(replaced, stack.run({"inputs_embeds": left[0] * 2, **fixed}, 1), atol=1e-6)
    assert not torch.allclose(replaced, whole, atol=1e-2)
    assert torch.equal(stack.run({**inputs, **fixed}), whole), "the stack was left shorter than it was"


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("switch_transformers", "untied head"),
        ("switch_transformers", "all layers sparse"),
        ("olmoe", "plain"),
        ("granitemoe", "plain"),
        ("phimoe", "biases"),
        ("gemma4_text", "plain"),
    ],
)
@pytest.mark.parametrize("size", [1.0, 300.0])
@torch.inference_mode()
def test_the_head_judges_as_full_distributions_do(
    family: str, variant: str, size: float, tiny_model: TinyModel
) -> None:
    trial = trial_of(tiny_model(family, variant))
    head = Head(trial.model, trial.spec)
    head.chunk = 16  # so that 50 rows are several
    generator = torch.Generator().manual_seed(2)
    if trial.spec.head.softcap is not None:
        size = min(size, 2.0)  # logits that all reach their bound are equal
    before, after = size * torch.randn(2, 50, trial.spec.d_model, generator=generator)
    targets = torch.randint(VOCAB, (50,), generator=generator)
    bias, cap = 0 if head.bias is None else head.bias.double(), trial.spec.head.softcap
    logits = [(hidden.double() * trial.spec.head.scale) @ head.weight.double().T + bias for hidden in (before, after)]
    p, q = (torch.log_softmax(each if cap is None else cap * torch.tanh(each / cap), dim=1) for each in logits)
    reference = head.reference(before)
    nats, kls, best, lead = head.judge_with_best(after, targets, reference)
    tolerance = 1e-5 * max(1.0, float(q.abs().max()) / 10)
    assert torch.allclose(nats.double(), -q[torch.arange(50), targets], atol=tolerance)
    assert torch.allclose(kls.double(), (p.exp() * (p - q)).sum(dim=1), atol=tolerance)
    assert torch.equal(best, q.argmax(dim=1))
    two = q.topk(2, dim=1).values
    assert torch.allclose(lead.double(), two[:, 0] - two[:, 1], atol=tolerance)
    assert torch.equal(head.best(after), best)
    for mine, theirs in zip(head.judge(after, targets, reference), (nats, kls), strict=True):
        assert torch.equal(mine, theirs)
    own = head.judge(before, targets, reference)[1]
    assert float(own.abs().max()) < tolerance
    assert torch.equal(head.judge(after, targets, None)[1], torch.zeros(50))


@torch.inference_mode()
def test_the_head_takes_no_rows_at_all(tiny_model: TinyModel) -> None:
    """As when a probe moves nothing but places that are not scored."""
    trial = trial_of(tiny_model("olmoe", "plain"))
    head = Head(trial.model, trial.spec)
    none, targets = torch.zeros(0, trial.spec.d_model), torch.zeros(0, dtype=torch.long)
    assert [len(found) for found in head.judge_with_best(none, targets, None)] == [0, 0, 0, 0]
    assert [len(found) for found in head.judge(none, targets, None)] == [0, 0]


# Writing --------------------------------------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[
        ("switch_transformers", "many end marks"),
        ("switch_transformers", "many end marks, a first token"),
        ("nllb-moe", "many end marks"),
        ("nllb-moe", "many end marks, a first token"),
    ],
    ids=": ".join,
)
def writer(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Trial:
    return trial_of(tiny_model(*request.param))


@torch.inference_mode()
def test_what_is_written_is_what_transformers_generates(writer: Trial) -> None:
    trial = writer
    [scorer] = scorers(trial, pairs(24), "rouge1", max_new_tokens=10)
    model, lengths = scorer.model, []
    for bucket in scorer.buckets:
        encoded = scorer.encode(bucket)
        written = model.write(encoded, bucket.mask, [()] * len(bucket.rows), 10)
        for row, ids in enumerate(written):
            assert ids == generated(trial, bucket.inputs[row][bucket.mask[row].bool()], [], 10)
            lengths.append(len(ids))
        for cut in (1, 2, 4):
            # a row that stopped before the cut would not be asked to go on
            rows = [row for row, ids in enumerate(written) if len(ids) > cut]
            prefixes = [written[row][: cut if row % 2 else cut - 1] for row in rows]
            if rows:
                again = model.write(encoded[rows], bucket.mask[rows], prefixes, 10)
                assert again == [written[row] for row in rows]
    assert len(set(lengths)) > 3
    assert max(lengths) == 10


@torch.inference_mode()
def test_writing_goes_on_from_prefixes_of_its_own_and_of_other_lengths(writer: Trial) -> None:
    [scorer] = scorers(writer, pairs(12, 5), "rouge1")
    bucket = max(scorer.buckets, key=lambda bucket: len(bucket.rows))
    rng = random.Random(3)
    usual = [token for token in range(2, VOCAB) if token not in writer.spec.tokens.eos]
    prefixes = [rng.choices(usual, k=row % 4) for row in range(len(bucket.rows))]
    found = scorer.model.write(scorer.encode(bucket), bucket.mask, prefixes, 8)
    assert len(prefixes) > 3
    for row, (prefix, ids) in enumerate(zip(prefixes, found, strict=True)):
        assert ids == generated(writer, bucket.inputs[row][bucket.mask[row].bool()], prefix, 8)


def generated(trial: Trial, source: torch.Tensor, prefix: list[int], most: int) -> list[int]:
    start = torch.tensor([[trial.spec.tokens.start, *prefix]])
    found = trial.model.generate(
        source[None], decoder_input_ids=start, do_sample=False, num_beams=1, max_new_tokens=most - len(prefix)
    )
    ids: list[int] = found[0, 1:].tolist()
    return ids


def test_text_that_capacity_would_cut_is_written_from_the_start(tiny_model: TinyModel) -> None:
    assert not Seq2Seq(trial_of(tiny_model("switch_transformers", "small capacity"))).resumable(8)
    model = Seq2Seq(trial_of(tiny_model("switch_transformers", "all layers sparse")))
    assert model.resumable(64)
    assert not model.resumable(65)


# Scores ---------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_scores_of_targets_are_their_cross_entropy(tiny_model: TinyModel) -> None:
    trial = trial_of(tiny_model("switch_transformers", "all layers sparse"))
    samples = pairs(9, 4)
    [scorer] = scorers(trial, samples, "perplexity")
    reference = scorer.score(as_reference=True)
    assert np.abs(reference.kls / reference.tokens).max() < 1e-5
    trial.assign(dict.fromkeys(trial.spec.expert_keys()[:3], (2, 2)))
    scores = scorer.score()
    tokenizer = load_tokenizer(trial.checkpoint.path / "tokenizer.json")
    for at, sample in enumerate(samples):
        source, target = (torch.tensor([tokenizer.encode(text).ids]) for text in (sample.source, sample.target))
        assert scores.nats[at] == pytest.approx(
            float(trial.model(source, labels=target).loss) * target.numel(), abs=1e-4
        )
        assert (scores.tokens[at], scores.scores[at, 1]) == (target.numel(), len(sample.target.split()))
    assert scores.nll == pytest.approx(scores.nats.sum() / scores.tokens.sum())
    assert scores.kl > 1e-3


def test_a_reference_is_taken_without_writing_texts_again(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = trial_of(tiny_model("switch_transformers", "all layers sparse"))
    [scorer] = scorers(trial, pairs(9, 4), "rouge1")
    scorer.score(as_reference=True)
    trial.assign(dict.fromkeys(trial.spec.expert_keys()[:3], (2, 2)))
    expected = scorer.score()
    trial.restore()
    scorer.reference = scorer.original = None
    with monkeypatch.context() as patch:
        patch.setattr(scorer.model, "write", lambda *given: pytest.fail("texts are written"))
        scorer.refer()
    trial.assign(dict.fromkeys(trial.spec.expert_keys()[:3], (2, 2)))
    again = scorer.score()
    assert np.array_equal(again.kls, expected.kls)
    assert np.array_equal(again.nats, expected.nats)


@pytest.mark.parametrize("kept_bytes", [scoring.KEPT_BYTES, 0])
@pytest.mark.parametrize("family", ["switch_transformers", "olmoe"])
def test_a_reference_is_taken_again_without_running_a_layer(
    family: str, kept_bytes: int, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference for another head needs the same final states: for the same head it is the same reference, also
    where there is no room to keep them."""
    monkeypatch.setattr(scoring, "KEPT_BYTES", kept_bytes)
    trial = trial_of(tiny_model(family, "all layers sparse" if family == "switch_transformers" else "plain"))
    [scorer] = scorers(trial, pairs(9, 4) if family == "switch_transformers" else running(5), "token_perplexity")
    scorer.score(as_reference=True)
    first = scorer.reference
    trial.assign(dict.fromkeys(trial.spec.expert_keys(), (2,) * len(trial.spec.moe.ffn.projections)))
    scorer.score()
    trial.restore()
    rows = trial.calls.rows
    scorer.refer()
    assert (trial.calls.rows == rows) == (kept_bytes > 0)
    assert first is not None
    assert scorer.reference is not None
    assert torch.equal(scorer.reference.mean_row, first.mean_row)
    assert torch.equal(scorer.reference.negentropy, first.negentropy)


@torch.inference_mode()
def test_scores_of_windows_are_their_cross_entropy(tiny_model: TinyModel) -> None:
    trial = trial_of(tiny_model("olmoe", "plain"))
    [scorer] = scorers(trial, running(5), "token_perplexity")
    scores = scorer.score(as_reference=True)
    for ids, nats in zip(scorer.texts.ids, scores.nats, strict=True):
        assert nats == pytest.approx(float(trial.model(ids[None], labels=ids[None]).loss) * 15, abs=1e-4)
    assert scorer.n_samples == len(scorer.texts.ids) > 5


@pytest.mark.parametrize("family", ["switch_transformers", "olmoe"])
@torch.inference_mode()
def test_the_likeliest_choice_is_taken(family: str, tiny_model: TinyModel) -> None:
    trial = trial_of(tiny_model(family, "all layers sparse" if family == "switch_transformers" else "plain"))
    samples = questions(8)
    [scorer] = scorers(trial, samples, "accuracy", context=64)
    scores = scorer.score()
    tokenizer = load_tokenizer(trial.checkpoint.path / "tokenizer.json")
    right = []
    for at, sample in enumerate(samples):
        nats = [choice_nats(trial, tokenizer, sample.source, choice) for choice in sample.choices]
        right.append(float(int(np.argmin(nats)) == sample.label))
        assert scores.nats[at] == pytest.approx(nats[sample.label], abs=1e-4)
    assert scores.scores.tolist() == [[one, 1.0] for one in right]
    assert 0 < sum(right) < len(right)


def choice_nats(trial: Trial, tokenizer: Library, source: str, choice: str) -> float:
    if trial.spec.encoder is not None:
        ids, labels = (torch.tensor([tokenizer.encode(text).ids]) for text in (source, choice))
        return float(trial.model(ids, labels=labels).loss) * labels.numel()
    begin = len(tokenizer.encode(source + " ").ids) - 1  # the space is the choice's
    ids = torch.tensor([tokenizer.encode(f"{source} {choice}").ids])
    log_p = torch.log_softmax(trial.model(ids).logits[0, :-1].double(), dim=1)
    return -float(log_p[torch.arange(begin - 1, ids.shape[1] - 1), ids[0, begin:]].sum())


@pytest.mark.parametrize(
    ("family", "metric"),
    [
        ("switch_transformers", "rouge1"),
        ("switch_transformers", "accuracy"),
        ("olmoe", "perplexity"),
        ("olmoe", "accuracy"),
    ],
)
def test_blocks_hold_every_sample_once(family: str, metric: str, tiny_model: TinyModel) -> None:
    trial = trial_of(tiny_model(family, "all layers sparse" if family == "switch_transformers" else "plain"))
    samples = questions(7) if metric == "accuracy" else pairs(7) if family == "switch_transformers" else running(7)
    [whole] = scorers(trial, samples, metric)
    parts = scorers(trial, samples, metric, blocks=3)
    expected, found = whole.score(), [part.score() for part in parts]
    count = whole.n_samples
    assert [part.n_samples for part in parts] == [len(range(block, count, 3)) for block in range(3)]
    for block, scores in enumerate(found):
        assert np.allclose(scores.nats, expected.nats[block::3], atol=1e-4)
        assert np.allclose(scores.scores, expected.scores[block::3], atol=1e-4)
        assert scores.outputs == expected.outputs[block::3]


def test_routes_are_those_of_inputs_and_outputs(tiny_model: TinyModel) -> None:
    trial = trial_of(tiny_model("switch_transformers", "all layers sparse"))
    [scorer] = scorers(trial, pairs(5), "rouge1")
    found = list(scorer.routes())
    assert len(found) == len(scorer.buckets)
    written = scorer.score().outputs
    assert len(written) == 5
    assert sorted(place for routed in found for place in routed.samples) == list(range(5))
    for routed, bucket in zip(found, scorer.buckets, strict=True):
        assert list(routed.experts) == trial.spec.moe_layers()
        assert routed.lengths["encoder"] == bucket.mask.sum(dim=1).tolist()
        assert all(len(chosen) == sum(routed.lengths[stack]) for (stack, _), chosen in routed.experts.items())
        assert all(((chosen >= 0) & (chosen < 4)).all() for chosen in routed.experts.values())


# Laying out -----------------------------------------------------------------------------------------------------------


def library_of(model: Path) -> Library:
    """The library's own, which also reads what was written."""
    return Library.from_file(str(model / "tokenizer.json"))


def test_windows_count_the_words_that_end_in_them(tiny_model: TinyModel) -> None:
    tokenizer = load_tokenizer(tiny_model("olmoe", "plain") / "tokenizer.json")
    samples = [Sample(words(random.Random(seed), 40)) for seed in range(2)]
    texts = windows_of(samples, tokenizer, 16)
    assert texts.ids.shape[1] == 16
    total = sum(len(sample.source.split()) for sample in samples)
    assert total - len(texts.ids) - 2 <= texts.items.words.sum() <= total
    assert not texts.scored[:, -1].any()
    assert texts.scored[:, :-1].all()
    assert texts.groups.tolist() == list(range(len(texts.ids))), "untold, few windows: each is a document"
    with pytest.raises(CalibrationError, match="too few"):
        windows_of(samples, tokenizer, 400)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=6), st.integers(4, 20))
def test_no_window_lies_across_two_documents(tiny_model: TinyModel, lengths: list[int], context: int) -> None:
    """And each token but the first of a window is scored once at most; what is left out is shorter than a window."""
    tokenizer = load_tokenizer(tiny_model("olmoe", "plain") / "tokenizer.json")
    samples = [Sample("abcdefg"[at % 7] * length, document=f"part {at}") for at, length in enumerate(lengths)]
    assume(sum(lengths) + len(lengths) >= 2 * context)
    try:
        texts = windows_of(samples, tokenizer, context)
    except CalibrationError:
        assume(False)
    library = library_of(tiny_model("olmoe", "plain"))
    letters = [set(library.decode(row.tolist()).replace("\n", "").replace(" ", "")) for row in texts.ids]
    owners: dict[str, int] = {}
    for seen, group in zip(letters, texts.groups.tolist(), strict=True):
        for letter in seen:
            assert owners.setdefault(letter, group) == group, "a document has one group"
    assert texts.items.tokens.tolist() == texts.scored.sum(dim=1).tolist()
    total = sum(len(tokenizer.encode(sample.source + "\n").ids) for sample in samples)
    documents = len(set(texts.groups.tolist()))
    assert total - len(texts.ids) - documents * REST * context <= texts.scored.sum() <= total - documents


def test_the_rest_of_a_document_is_scored_in_a_window_that_reaches_back(tiny_model: TinyModel) -> None:
    tokenizer = load_tokenizer(tiny_model("olmoe", "plain") / "tokenizer.json")
    samples = [Sample("a" * 22, document="a"), Sample("b" * 31, document="b"), Sample("c" * 17, document="c")]
    texts = windows_of(samples, tokenizer, 8)
    found = texts.scored.sum(dim=1).tolist()
    lengths = [len(tokenizer.encode(sample.source + "\n").ids) for sample in samples]
    expected = [scored for length in lengths for scored in [7] * (length // 8) + [length % 8] * (length % 8 >= 2)]
    assert found == expected
    whole = texts.scored.sum(dim=1) == 7
    assert texts.scored[whole][:, :-1].all()
    for row, count in zip(texts.scored[~whole], texts.scored[~whole].sum(dim=1), strict=True):
        assert row.tolist() == [False] * (7 - int(count)) + [True] * int(count) + [False]


def test_samples_of_one_document_have_one_number() -> None:
    samples = [
        Sample("a", document="x"),
        Sample("b"),
        Sample("c", document="x"),
        Sample("d"),
        Sample("e", document="y"),
    ]
    assert documents_of(samples).tolist() == [0, 1, 0, 2, 3]


def test_a_choice_is_scored_alone_and_a_long_text_loses_its_beginning(tiny_model: TinyModel) -> None:
    tokenizer = load_tokenizer(tiny_model("olmoe", "plain") / "tokenizer.json")
    texts = choices_of([Sample("abc def", "xy", ("xy", "xyz"), 0)], tokenizer, 6)
    library = library_of(tiny_model("olmoe", "plain"))
    decoded = [library.decode(row.tolist()) for row in texts.ids]
    assert decoded == ["def xy"[-6:], "ef xyz"]
    assert texts.scored.sum(dim=1).tolist() == [3, 4]  # with the space before it
    assert texts.items.right.tolist() == [True, False]
    cut = choices_of([Sample("a", "xyzxyz", ("xyzxyz", "b"), 0)], tokenizer, 4)
    assert cut.scored[0].tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("source", "choice", "joined"),
    [
        ("Answer:", "B", "Answer: B"), ("Answer: ", "B", "Answer: B"), ("日本の首都は", "東京", "日本の首都は東京"),
        ("答案：", "B", "答案：B"), ("这是「", "好", "这是「好"), ("เมืองหลวงคือ", "กรุงเทพ", "เมืองหลวงคือกรุงเทพ"),
        ("수도는", "서울", "수도는 서울"), ("Столица:", "Москва", "Столица: Москва"), ("so 🙂", "fine", "so 🙂 fine"),
        ("राजधानी", "दिल्ली", "राजधानी दिल्ली"),
    ],
)  # fmt: skip
def test_a_choice_follows_a_space_where_its_script_has_spaces(source: str, choice: str, joined: str) -> None:
    asked: list[str] = []

    class Letters:
        def encode(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
            asked.append(text)
            return SimpleNamespace(ids=[*range(len(text))], offsets=[(at, at + 1) for at in range(len(text))])

    texts = choices_of([Sample(source, choice, (choice,), 0)], Letters(), 64)  # type: ignore[arg-type]
    assert asked == [joined]
    assert int(texts.scored.sum()) == len(joined) - len(source)


def test_parts_and_volumes(tiny_model: TinyModel) -> None:
    assert spread(10, 5) == [0, 2, 4, 6, 8]
    assert spread(3, None) == spread(3, 7) == [0, 1, 2]
    assert dealt("abcde", 2) == [["a", "c", "e"], ["b", "d"]]
    with pytest.raises(CalibrationError, match="2 samples can't be divided into 3 blocks"):
        dealt("ab", 3)
    for family, variant, samples in (
        ("switch_transformers", "all layers sparse", pairs(7)),
        ("switch_transformers", "all layers sparse", questions(7)),
        ("olmoe", "plain", running(7)),
        ("olmoe", "plain", questions(7)),
    ):
        trial = trial_of(tiny_model(family, variant))
        metric = "accuracy" if samples[0].choices else "perplexity"
        [scorer] = scorers(trial, samples, metric, limit=5)
        tokenizer = load_tokenizer(trial.checkpoint.path / "tokenizer.json")
        found = volume(trial.spec, tokenizer, samples, Extent(5, 16, None))
        assert found.samples == scorer.n_samples == 5
        if family == "switch_transformers":
            assert found.encoder_tokens >= sum(bucket.mask.numel() for bucket in scorer.buckets)
            assert found.decoder_tokens >= sum(bucket.targets.numel() for bucket in scorer.buckets)
        else:
            assert found.decoder_tokens >= scorer.texts.ids.numel()


def test_a_tokenizer_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    from moeconv.errors import SettingsError

    with pytest.raises(SettingsError, match="is not there"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SettingsError, match="can't be used"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_trial_gives_back_what_it_changed(tiny_model: TinyModel) -> None:
    trial = trial_of(tiny_model("olmoe", "plain"))
    checkpoint, key = Checkpoint.open(trial.checkpoint.path), ExpertKey("decoder", 1, 2)
    trial.assign({key: (2, 4, 16)})
    gate, _, down = trial.calls.weights(key)
    assert len(gate[0].unique()) <= 4
    assert np.array_equal(down.detach().numpy(), checkpoint.expert(key)["down"])
    trial.restore()
    for mine, name in zip(trial.calls.weights(key), trial.spec.moe.ffn.projections, strict=True):
        assert np.array_equal(mine.detach().numpy(), checkpoint.expert(key)[name])


def test_what_is_to_be_written_begins_with_the_models_first_token(tiny_model: TinyModel) -> None:
    """In place of what the tokenizer puts before inputs, as of NLLB the language that they are in."""
    trial = trial_of(tiny_model("nllb-moe", "a first token"))
    tokenizer = load_tokenizer(trial.checkpoint.path / "tokenizer.json")
    letters, end = {letter: tokenizer.get_vocab()[letter] for letter in "abc"}, trial.spec.tokens.eos[0]
    assert targets_of(["ab", "c", ""], tokenizer, trial.spec) == [[7, letters["a"], letters["b"], end],
                                                                  [7, letters["c"], end], [7, end]]  # fmt: skip
    tokenizer._made.post_processor = processors.TemplateProcessing(
        single="<unk> $A </s>", special_tokens=[("<unk>", 2), ("</s>", end)]
    )
    assert tokenizer.encode("c").ids == [2, letters["c"], end]
    assert targets_of(["c", ""], tokenizer, trial.spec) == [[7, letters["c"], end], [7, end]]
    [scorer] = scorers(trial, pairs(3), "rouge1")
    assert {int(first) for bucket in scorer.buckets for first in bucket.targets[:, 0]} == {7}


def test_text_longer_than_there_are_positions_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(TINY["nllb-moe"][0](tmp_path, max_position_embeddings=12))
    tokenizer = load_tokenizer(checkpoint.path / "tokenizer.json")
    extent, short = Extent(limit=None, context=16, max_new_tokens=None), Sample("a b c d", "c d e")
    assert volume(checkpoint.spec, tokenizer, [short], extent).samples == 1
    for sample in (Sample("a b c d e f g", "c d e"), Sample("a b", "c d e f g h i")):
        with pytest.raises(CalibrationError, match="a text has 14 tokens, the model takes at most 12"):
            volume(checkpoint.spec, tokenizer, [short, sample], extent)
    scorer = scorers(trial_of(checkpoint.path), [short], "rouge1", max_new_tokens=None)[0]
    assert scorer.max_new_tokens == 12
