"""Costs by gradients in encoder-decoder models: beside finite differences and exact divergences, and interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_nllb_moe
from torch import Tensor
from trials import pairs, questions, scorers, trial_of

from moeconv.artifacts import uniform
from moeconv.measure.trial import Trial
from moeconv.measure.workdir import Journal
from moeconv.quantizers.coder import ORIGINAL
from moeconv.source.experts import Call
from moeconv.sweep.fisher import Costs, LayerCosts, PairGradients, PairScales, Part, chance_of, narrower, scaled_as_one
from moert.pack.model_spec import ExpertKey, LayerKey

TinyModel = Callable[[str, str], Path]
BAR = SimpleNamespace(update=lambda n: None)
CASES = {
    "switch": ("switch_transformers", "all layers sparse"),
    "switch, dense layers between": ("switch_transformers", "every second layer sparse"),
    "switch, small capacity": ("switch_transformers", "small capacity"),
    "switch, deeper encoder": ("switch_transformers", "deeper encoder"),
    "nllb-moe": ("nllb-moe", "all layers sparse"),
    "nllb-moe, a first token": ("nllb-moe", "a first token"),
}
SMALL = 0.003  # of a change: no router decides otherwise
LARGE = 1 << 30  # bytes


def gradients_of(trial: Trial, samples: Any = None, **changes: Any) -> PairGradients:
    """The base has the 16 bits of these checkpoints, which change nothing."""
    [scorer] = scorers(trial, samples or pairs(6), "token_perplexity")
    n = len(trial.spec.moe.ffn.projections)
    settings = {"draws": 3, "seed": 5, "batch_bytes": LARGE, **changes}
    return PairGradients(trial, scorer, [(16,) * n, (2,) * n], **settings)


def run(of: PairGradients, path: Path) -> Costs:
    return of.run(Journal(path, "s"), "text", BAR)


def log_p(of: PairGradients, part: Part, at: LayerKey | None = None, change: Any = None) -> Tensor:
    """Of all that may be written [rows, tokens, vocab_size], with something added to what a layer's experts give."""
    calls, model = of.trial.calls, of.model

    def answer(place: LayerKey, call: Call) -> Tensor | None:
        return calls.given(place, call) + change(call) if place == at else None

    with torch.inference_mode(), calls.during(answer=answer):
        encoded = model.encode({"input_ids": part.inputs}, part.mask)
        final = model.decode({"input_ids": model.fed(part.targets)}, part.real, encoded, part.mask)
        return model.head.log_probabilities(final.flatten(0, 1)).unflatten(0, final.shape[:2]).double()


def changing(trial: Trial, key: ExpertKey, times: float) -> Callable[[Call], Tensor]:
    def change(call: Call) -> Tensor:
        token, place = (call.chosen == key.expert).nonzero(as_tuple=True)
        x, share = call.x[token], call.weights[token, place][:, None]
        before, after = (trial.calls.ffn(key, x, trial.weights(key, (bits, bits))) for bits in (ORIGINAL, 2))
        return torch.zeros_like(call.x).index_add_(0, token, times * share * (after - before))

    return change


@pytest.mark.parametrize("case", CASES)
def test_costs_are_those_of_finite_differences(case: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """What the drawn texts' log-likelihood changes by where a little of an expert's change is made."""
    trial = trial_of(tiny_model(*CASES[case]))
    of = gradients_of(trial)
    found = run(of, tmp_path / "journal").layers
    assert set(found) == set(trial.spec.moe_layers())
    assert {at.stack for at in found} == {"encoder", "decoder"}
    for at, costs in found.items():
        expected = torch.zeros(trial.spec.moe.n)
        for part in of.parts:
            drawn = [
                torch.multinomial(before[real].exp().float(), of.draws, True, generator=chance_of(of.seed, item))
                for before, real, item in zip(log_p(of, part), part.real, part.items, strict=True)
            ]
            for number in range(trial.spec.moe.n):
                more, less = (
                    log_p(of, part, at, changing(trial, at.expert(number), times)) for times in (SMALL, -SMALL)
                )
                for row, chosen in enumerate(drawn):
                    slope = ((more - less)[row][part.real[row]] / (2 * SMALL)).gather(1, chosen).sum(0)  # [draws]
                    expected[number] += float(0.5 * slope.square().mean())
        assert costs.costs[0] == (0.0,) * trial.spec.moe.n
        got = torch.tensor(costs.costs[1])
        assert torch.allclose(got, expected, rtol=0.03, atol=0.002 * float(expected.max())), at
        assert got.count_nonzero() > 1


def test_costs_are_exact_divergences_of_small_changes(tmp_path: Path) -> None:
    """Where routers have nothing to decide: every token goes to both experts."""
    trial = trial_of(tiny_nllb_moe(tmp_path, num_experts=2, encoder_sparse_step=1, decoder_sparse_step=1))
    of, part_of_it = gradients_of(trial, pairs(4), draws=600), 0.05
    for at, costs in run(of, tmp_path / "journal").layers.items():
        exact = 0.0
        for part in of.parts:
            before = log_p(of, part)
            for number in range(trial.spec.moe.n):
                after = log_p(of, part, at, changing(trial, at.expert(number), part_of_it))
                kl = (before.exp() * (before - after)).sum(-1)[part.real].sum()
                exact += float(kl) / part_of_it**2
        assert sum(costs.costs[1]) == pytest.approx(exact, rel=0.2), at


def test_a_killed_run_goes_on_with_what_it_lacks(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, measured = trial_of(tiny_model("switch_transformers", "all layers sparse")), PairGradients._measured
    expected = run(gradients_of(trial, batch_bytes=0), tmp_path / "whole")
    done: list[list[int]] = []

    class Killed(Exception):
        pass

    def killed(self: PairGradients, part: Part) -> dict[str, Any]:
        if len(done) == 4:
            raise Killed
        done.append(part.items)
        return measured(self, part)

    monkeypatch.setattr(PairGradients, "_measured", killed)
    with pytest.raises(Killed):
        run(gradients_of(trial, batch_bytes=0), tmp_path / "stopped")
    again: list[list[int]] = []
    monkeypatch.setattr(PairGradients, "_measured", lambda self, part: again.append(part.items) or measured(self, part))
    found = run(gradients_of(trial, batch_bytes=0), tmp_path / "stopped")
    assert found.layers == expected.layers
    assert found.flops == expected.flops
    assert sorted(done + again) == [[item] for item in range(6)]


def test_the_seed_decides_and_no_batch_does(tiny_model: TinyModel, tmp_path: Path) -> None:
    trial = trial_of(tiny_model("nllb-moe", "all layers sparse"))
    one, same, alone, other = (
        run(gradients_of(trial, **changes), tmp_path / str(place)).layers
        for place, changes in enumerate(({}, {}, {"batch_bytes": 0}, {"seed": 6}))
    )
    assert one == same
    assert one != other
    for at, costs in one.items():
        assert alone[at].rows == costs.rows
        assert alone[at].costs[1] == pytest.approx(costs.costs[1], rel=1e-3)


def test_of_choices_only_the_right_one_counts(tiny_model: TinyModel, tmp_path: Path) -> None:
    trial = trial_of(tiny_model("switch_transformers", "all layers sparse"))
    asked = questions(5)
    right = [type(one)(one.source, one.choices[one.label]) for one in asked]
    found = [run(gradients_of(trial, of, draws=1), tmp_path / str(len(of[0].choices))) for of in (asked, right)]
    assert [one.rows for one in found[0].layers.values()] == [one.rows for one in found[1].layers.values()]


def test_layers_are_measured_with_all_of_their_experts(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside plans in which only one layer has widths, and each only once."""
    trial = trial_of(tiny_model("switch_transformers", "every second layer sparse"), 4)
    [scorer] = scorers(trial, pairs(5), "token_perplexity")
    path = tmp_path / "journal"
    found = PairScales(trial, scorer, [(4, 4), (2, 2)]).run(Journal(path, "s"), "text", BAR)
    trial.assign(uniform(trial.spec, ORIGINAL))
    scorer.score(as_reference=True)
    for at in trial.spec.moe_layers():
        trial.assign(uniform(trial.spec, ORIGINAL) | {at.expert(number): (2, 2) for number in range(4)})
        assert found.nats[at][1] == pytest.approx(float(scorer.score().kls.sum()), rel=1e-5)
        assert found.nats[at][1] > found.nats[at][0] > 0
    monkeypatch.setattr(PairScales, "_measured", lambda self, at: pytest.fail("it was measured before"))
    assert PairScales(trial, scorer, [(4, 4), (2, 2)]).run(Journal(path, "s"), "text", BAR) == found


def test_a_layer_is_scaled_by_what_it_costs_at_all_narrower_widths() -> None:
    patterns, costs = [(4, 4), (2, 2), (3, 4), (8, 8)], ((0.0, 0.0), (3.0, 5.0), (1.0, 1.0), (-0.5, -0.5))
    assert narrower(patterns) == [(2, 2), (3, 4)]
    scaled = scaled_as_one(LayerCosts((7, 7), costs), patterns, [6.0, 4.0], 0.5)
    assert scaled == [[0, 0], [6, 10], [2, 2], [-1, -1]]
    assert narrower([(4, 4), (8, 8)]) == [(4, 4)]
    assert scaled_as_one(LayerCosts((7, 7), costs[::3]), patterns[::3], [3.0], 1.0) == [[0, 0], [-1.5, -1.5]]
    nothing = LayerCosts((0, 0), ((0.0, 0.0),) * 4)
    assert scaled_as_one(nothing, patterns, [0.0, 0.0], 1.0) == [[0, 0]] * 4
    assert scaled_as_one(LayerCosts((7, 7), costs[:1]), patterns[:1], [1.0], 1.0) == [[0, 0]]
