"""Probes: their answers are those of a full evaluation of the changed model, for a fraction of the work."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_olmoe, tiny_switch
from tiny_families import FAMILIES
from trials import pairs, questions, running, scorers, trial_of

from moeconv.artifacts import Probe, uniform
from moeconv.calibration import Sample
from moeconv.measure import scoring
from moeconv.measure.scorers import Scorer, Scores
from moeconv.measure.scoring import TextScorer
from moeconv.measure.trial import Trial
from moeconv.sweep import probes as probes_module
from moeconv.sweep.probes import Found, Prober, Seq2SeqProber, TextProber
from tests.pairs import OTHERS

TinyModel = Callable[[str, str], Path]
AT_ONCE = 5  # of one layer, so that a batch mixes experts and widths

INSTEAD = {"granitemoehybrid": "small chunks", "cohere2_moe": "sigmoid"}
"""Variants in the place of the plain one: need not be filled up to 256 tokens; averages its shared experts."""

CASES: dict[str, tuple[str, str, Sequence[Sample], str]] = {
    "switch writes": ("switch_transformers", "all layers sparse", pairs(6), "rouge1"),
    "switch, outputs end early": ("switch_transformers", "many end marks", pairs(12, 6), "rouge1"),
    "switch, dense layers between": ("switch_transformers", "every second layer sparse", pairs(6, 1), "rouge1"),
    "switch, small capacity": ("switch_transformers", "small capacity", pairs(4, 2), "rouge1"),
    "switch, small capacity, likelihood": ("switch_transformers", "small capacity", pairs(8, 2), "perplexity"),
    "switch, untied head": ("switch_transformers", "untied head", pairs(8, 3), "token_perplexity"),
    "switch, choices": ("switch_transformers", "deeper encoder", questions(8), "accuracy"),
    "switch, gates": ("switch_transformers", "gates", pairs(6, 4), "rouge1"),
    "switch, a first token": ("switch_transformers", "a first token", pairs(6, 5), "rouge1"),
    "nllb-moe writes": ("nllb-moe", "all layers sparse", pairs(6), "rouge1"),
    "nllb-moe, outputs end early": ("nllb-moe", "many end marks", pairs(12, 6), "rouge1"),
    "nllb-moe, a first token": ("nllb-moe", "a first token", pairs(8, 7), "rouge1"),
    "nllb-moe, likelihood": ("nllb-moe", "routers with biases", pairs(8, 2), "perplexity"),
    "nllb-moe, a first token, likelihood": ("nllb-moe", "a first token", pairs(8, 3), "token_perplexity"),
    "nllb-moe, choices": ("nllb-moe", "untied head", questions(8), "accuracy"),
    "olmoe": ("olmoe", "plain", running(6), "perplexity"),
    "olmoe, tied head": ("olmoe", "tied head", running(6, 1), "token_perplexity"),
    "olmoe, one expert a token": ("olmoe", "top-1", running(6, 2), "perplexity"),
    "olmoe, choices": ("olmoe", "normed top-k", questions(8), "accuracy"),
    "qwen3_moe": ("qwen3_moe", "plain", running(6, 3), "perplexity"),
    "qwen3_moe, dense layers between": ("qwen3_moe", "some layers dense", running(6, 4), "token_perplexity"),
    "qwen3_moe, window": ("qwen3_moe", "window", running(6, 5), "perplexity"),
    "mixtral": ("mixtral", "plain", running(6, 6), "perplexity"),
    "mixtral, window": ("mixtral", "window", questions(8), "accuracy"),
    **{family: (family, INSTEAD.get(family, "plain"), running(6, 7), "perplexity") for family in FAMILIES},
    "gptsan-japanese": ("gptsan-japanese", "causal", running(6, 7), "perplexity"),
    "gptsan-japanese, small capacity": ("gptsan-japanese", "small capacity", running(6, 8), "token_perplexity"),
    "gptsan-japanese, choices": ("gptsan-japanese", "all of it", questions(8), "accuracy"),
    "deepseek_v2, groups": ("deepseek_v2", "groups", running(6, 8), "perplexity"),
    "granitemoeshared, choices": ("granitemoeshared", "plain", questions(8), "accuracy"),
    "nemotron_h, choices": ("nemotron_h", "experts as wide as the stream", questions(8), "accuracy"),
    "phimoe, biases": ("phimoe", "biases", running(6, 9), "token_perplexity"),
    "qwen2_moe, windows": ("qwen2_moe", "windows", running(6, 10), "perplexity"),
}


def prober_of(trial: Trial, scorer: Any) -> Prober:
    return TextProber(trial, scorer) if isinstance(scorer, TextScorer) else Seq2SeqProber(trial, scorer)


def patterns(trial: Trial) -> list[tuple[int, ...]]:
    """All projections at each width, and one projection alone."""
    count = len(trial.spec.moe.ffn.projections)
    return [(2,) * count, (3,) * count, (8,) * count, (2, *(4,) * (count - 1)), (*(4,) * (count - 1), 3)]


def answers(prober: Prober, probes: Sequence[Probe]) -> list[Found]:
    found = []
    for _, layer in groupby(probes, lambda probe: probe.key[:2]):
        together = list(layer)
        for start in range(0, len(together), AT_ONCE):
            found += prober.probe(together[start : start + AT_ONCE])
    return found


def naive(trial: Trial, scorer: Scorer, probe: Probe) -> tuple[Scores, int]:
    """Scores with that expert changed in the model, and the operations that it took."""
    trial.assign({probe.key: probe.bits})
    rows = trial.calls.rows
    scores = scorer.score()
    trial.assign({probe.key: (4,) * len(probe.bits)})
    return scores, trial.calls.flops(trial.calls.rows - rows)


def assert_equal(found: Scores, expected: Scores, near_ties: int, what: object) -> None:
    for mine, theirs in ((found.nats, expected.nats), (found.kls, expected.kls)):
        assert np.abs(mine - theirs).max() < 1e-5 * expected.tokens.min(), what
    flipped = sum(mine != theirs for mine, theirs in zip(found.outputs, expected.outputs, strict=True))
    assert flipped <= near_ties, what
    if not flipped:
        assert np.allclose(found.scores, expected.scores, atol=1e-4), what


@pytest.mark.parametrize(
    ("case", "dense_bits"),
    [(case, None) for case in CASES] + [("switch writes", 4), ("switch, untied head", 3), ("olmoe", 3)],
)
@pytest.mark.parametrize("every", [7, pytest.param(3, marks=OTHERS)])
def test_probes_equal_full_evaluations_of_every_expert(
    case: str, dense_bits: int | None, every: int, tiny_model: TinyModel
) -> None:
    """Of most experts at one of the patterns; the slow test has a third of all of them."""
    family, variant, samples, metric = CASES[case]
    trial = trial_of(tiny_model(family, variant), dense_bits)
    [scorer] = scorers(trial, samples, metric, max_new_tokens=6)
    scorer.score(as_reference=True)
    trial.assign(uniform(trial.spec, 4))
    prober = prober_of(trial, scorer)
    base = prober.prepare()
    assert_equal(base, scorer.score(), 0, "base")
    probes = [Probe(key, bits) for key in trial.spec.expert_keys() for bits in patterns(trial)][::every]
    found = answers(prober, probes)
    assert [one.probe for one in found] == probes
    naive_flops, moved, rewritten = 0, 0, 0
    for one in found:
        expected, flops = naive(trial, scorer, one.probe)
        assert_equal(one.scores, expected, one.near_ties, one.probe)
        naive_flops += flops
        moved += bool(np.abs(expected.kls - base.kls).max() > 1e-4)
        rewritten += expected.outputs != base.outputs
    assert moved > len(probes) / 4, "hardly any probe changed anything: little was tested"
    assert rewritten > 5 / every or not scorer.metric.generates, "hardly any output changed: little was tested"
    spare = 1.3  # few probes share a pass
    if not trial.spec.moe.chooses and not trial.spec.decoder[0].adds_experts:
        spare *= 1.5  # every row is computed again, and with the norm behind its network
    assert sum(one.flops for one in found) < spare * naive_flops


def test_an_expert_that_only_writing_uses_counts(tmp_path: Path) -> None:
    """A pass over a whole output drops tokens beyond the capacity, and so may give an expert none of a row's tokens
    that it gets when the row is written token by token."""
    layers = {"num_decoder_layers": 3, "num_sparse_decoder_layers": 3}
    trial = trial_of(tiny_switch(tmp_path, seed=10, expert_capacity=1, **layers))
    [scorer] = scorers(trial, pairs(3, 10), "rouge1", max_new_tokens=5)
    scorer.score(as_reference=True)
    trial.assign(uniform(trial.spec, 4))
    prober = prober_of(trial, scorer)
    prober.prepare()
    for one in answers(prober, [Probe(key, (2, 2)) for key in trial.spec.expert_keys() if key.layer == 2]):
        expected, _ = naive(trial, scorer, one.probe)
        assert one.scores.outputs == expected.outputs, one.probe


@pytest.mark.parametrize("family", ["switch_transformers", "olmoe"])
def test_an_expert_without_tokens_is_free_and_changes_nothing(family: str, tiny_model: TinyModel) -> None:
    trial = trial_of(tiny_model(family, "all layers sparse" if family == "switch_transformers" else "plain"))
    if family == "switch_transformers":
        samples, metric = [Sample("ab", "c"), Sample("a", "b")], "rouge1"
    else:
        samples, metric = [Sample("abcd")], "perplexity"
    [scorer] = scorers(trial, samples, metric, context=2, max_new_tokens=2)
    scorer.score(as_reference=True)
    trial.assign(uniform(trial.spec, 4))
    prober = prober_of(trial, scorer)
    base, rows = prober.prepare(), prober.rows_of()
    keys = trial.spec.expert_keys()
    unseen = [key for key in keys if rows[key.stack, key.layer][key.expert] == 0]
    assert 0 < len(unseen) < len(keys)
    for one in answers(prober, [Probe(key, (2,) * len(trial.spec.moe.ffn.projections)) for key in unseen]):
        assert one.flops == 0
        assert np.array_equal(one.scores.nats, base.nats)
        assert np.array_equal(one.scores.kls, base.kls)
        assert one.scores.outputs == base.outputs


def test_rows_are_those_of_every_token_and_choice(tiny_model: TinyModel) -> None:
    trial = trial_of(tiny_model("olmoe", "plain"))
    [scorer] = scorers(trial, questions(5), "accuracy")
    prober = TextProber(trial, scorer)
    prober.prepare()
    for found in prober.rows_of().values():
        assert sum(found) == int(scorer.texts.real.sum()) * trial.spec.moe.router.top_k
    trial = trial_of(tiny_model("switch_transformers", "all layers sparse"))
    [scorer] = scorers(trial, pairs(5), "perplexity")
    prober = Seq2SeqProber(trial, scorer)
    prober.prepare()
    for (stack, _), found in prober.rows_of().items():
        tokens = scorer.items.tokens.sum() if stack == "decoder" else sum(b.mask.sum() for b in scorer.buckets)
        assert sum(found) == tokens


@torch.inference_mode()
def test_what_changes_at_unscored_places_alone_changes_no_score(tiny_model: TinyModel) -> None:
    """The last token of a window predicts nothing."""
    trial = trial_of(tiny_model("olmoe", "plain"))
    [scorer] = scorers(trial, running(1), "perplexity", context=3)
    scorer.score(as_reference=True)
    trial.assign(uniform(trial.spec, 4))
    prober = TextProber(trial, scorer)
    base = prober.prepare()
    call = prober.calls["decoder", 1]
    at_the_end = torch.arange(len(call.x)) % 3 == 2
    call.chosen.masked_fill_(~at_the_end[:, None], -1)
    for one in prober.probe([Probe(key, (2, 2, 2)) for key in trial.spec.expert_keys() if key.layer == 1]):
        assert np.array_equal(one.scores.nats, base.nats)


def test_a_base_run_is_never_in_memory_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trial_of(tiny_olmoe(tmp_path, num_hidden_layers=8))
    monkeypatch.setattr(scoring, "BATCH_TOKENS", 64)
    [scorer] = scorers(trial, running(40), "perplexity", context=32)
    assert len(list(scorer.batches())) > 10
    gc.freeze()  # what is there already is not looked at again
    alive: list[int] = []
    join = torch.cat

    def measured() -> int:
        mine = [one for one in gc.get_objects() if type(one) is torch.Tensor]
        return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in mine}.values())

    def joined(parts: Any, dim: int = 0) -> torch.Tensor:
        result = join(parts, dim)
        if len(result) == len(scorer.texts.ids) or len(result) == scorer.texts.ids.numel():
            alive.append(measured())
        return result

    monkeypatch.setattr(torch, "cat", joined)
    prober = TextProber(trial, scorer)
    try:
        prober.prepare()
        assert len(alive) >= 4 * 8
        assert max(alive) < 1.3 * measured()
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("layer", [("encoder", 0), ("decoder", 0)])
def test_small_batches_give_the_same_answers(
    layer: tuple[str, int], tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = trial_of(tiny_model("switch_transformers", "all layers sparse"))
    [scorer] = scorers(trial, pairs(8), "rouge1")
    scorer.score(as_reference=True)
    trial.assign(uniform(trial.spec, 4))
    prober = Seq2SeqProber(trial, scorer)
    prober.prepare()
    probes = [Probe(key, (2, 2)) for key in trial.spec.expert_keys() if key[:2] == layer]
    expected = prober.probe(probes)
    for name, value in (("BATCH_TOKENS", 40), ("WAITING_TOKENS", 60), ("WRITTEN_TOKENS", 40), ("WRITTEN_ROWS", 3)):
        monkeypatch.setattr(probes_module, name, value)
    for one, same in zip(prober.probe(probes), expected, strict=True):
        assert_equal(one.scores, same.scores, one.near_ties + same.near_ties, one.probe)
    assert len({one.scores.outputs for one in expected}) > 2
