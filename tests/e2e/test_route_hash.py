"""moeconv quantize --tune route=hash: widths and a hash function in the place of routers keep a loss together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversions import Done, check_parts, settings_for
from torch import Tensor

from moeconv.artifacts import Target, uniform
from moeconv.command.cli import _exit_code
from moeconv.command.present import conversion_table, next_steps
from moeconv.conversion.measuring import References
from moeconv.conversion.planning import plan
from moeconv.conversion.taught import check_route
from moeconv.errors import SettingsError, TargetMissed
from moeconv.foresight.network import Encoded, Following, HashRouting, Networks
from moeconv.measure.metrics import METRICS
from moeconv.quantizers.coder import ORIGINAL
from moeconv.report.page import result
from moeconv.report.writer import read_report
from moeconv.source.experts import Call
from moert.pack.learnt import HASH, HashFunction
from moert.pack.model_spec import LayerKey
from moert.pack.reader import Pack


@pytest.fixture(scope="module")
def converted(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    found = {}
    for family in ("switch", "olmoe"):
        root = tmp_path_factory.mktemp(family)
        found[family] = Done(settings_for(sources, family, root, bits=(4, 8), loss=0.9, route="hash"))
    return found


def function_of(done: Done) -> HashFunction:
    return HashFunction.from_bytes(Pack.open(done.settings.out).read_file(HASH))


@pytest.mark.parametrize("family", ["switch", "olmoe"])
def test_a_pack_has_its_function_and_what_it_loses_with_it(converted: dict[str, Done], family: str) -> None:
    done = converted[family]
    report, function = done.report, function_of(done)
    spec = done.manifest.model
    function.check(spec)
    assert report.heldout is not None
    assert report.route is not None
    assert function.routed is not None
    assert function.routed.top_k == report.route.top_k == spec.moe.router.top_k
    assert (function.routed.loss, function.routed.low, function.routed.high) == (
        report.heldout.loss, report.heldout.low, report.heldout.high,
    )  # fmt: skip
    assert "a hash function in the routers' place" in result(report, 8)
    assert "routed by a hash function, which by itself loses" in conversion_table(report, "x")
    assert read_report(Pack.open(done.settings.out)).route == report.route
    assert report.route.routers.loss != report.heldout.loss, "its own routers are another model"
    assert any(line.startswith("routing by the hash function, experts unquantized: loss ") for line in done.said)
    assert done.manifest.quality is not None
    assert done.manifest.quality.heldout == report.heldout


def test_nothing_that_judges_was_trained_on(converted: dict[str, Done]) -> None:
    check_parts(converted["olmoe"].bench.material)


def expected_calls(done: Done, function: HashFunction, reads: dict[str, Tensor]) -> dict[LayerKey, tuple[Any, Any]]:
    """Experts and weights by the plain arithmetic of a softmax router; `reads`: ids of one sample."""
    networks, spec = Networks.of(function), done.manifest.model
    embedding = done.bench.loaded.model.get_input_embeddings().weight.detach()
    encoded, found = None, {}
    for name in networks.names:
        ids = reads[name][None]
        real = torch.ones_like(ids, dtype=torch.bool)
        said, y, _ = networks.read(name, embedding[ids], real, encoded)
        encoded = Encoded(y, real)
        for place, at in enumerate(spec.moe_layers(name)):
            shares = said[0, :, place].softmax(-1)
            weights, experts = shares.topk(spec.moe.router.top_k, dim=-1)
            found[at] = experts, weights / (weights.sum(-1, keepdim=True) if spec.moe.router.renormalise else 1)
    return found


def test_a_decoder_is_routed_as_the_function_says(converted: dict[str, Done]) -> None:
    done = converted["olmoe"]
    function, loaded = function_of(done), done.bench.loaded
    ids = torch.tensor([[5, 9, 14, 3, 22, 7], [8, 8, 6, 30, 4, 11]])
    seen: dict[LayerKey, Call] = {}
    with (
        Following(loaded, loaded.checkpoint.description, function).routing(),
        loaded.calls.during(watch=seen.__setitem__),
        loaded.calls.during(active=torch.ones_like(ids, dtype=torch.bool)),
        torch.inference_mode(),
    ):
        loaded.family.tower(loaded.model, "decoder")(input_ids=ids, use_cache=False)
    for row in range(2):
        for at, (experts, weights) in expected_calls(done, function, {"decoder": ids[row]}).items():
            mine = slice(6 * row, 6 * row + 6)
            assert torch.equal(seen[at].chosen[mine], experts), at
            assert torch.allclose(seen[at].weights[mine], weights, atol=1e-6), at
    assert loaded.calls.now.rerouting is None


def test_both_stacks_are_routed_as_the_function_says_also_while_they_write(converted: dict[str, Done]) -> None:
    """Each output token by token, among others that end sooner, as if it were read at once by itself."""
    done = converted["switch"]
    function, loaded = function_of(done), done.bench.loaded
    material = done.bench.material
    scorer: Any = material.scorer(loaded, material.splits.heldout, None)
    written: dict[LayerKey, list[Tensor]] = {}

    def watch(at: LayerKey, call: Call) -> None:
        written.setdefault(at, []).append(call.chosen)

    with Following(loaded, loaded.checkpoint.description, function).routing(), torch.inference_mode():
        for bucket in scorer.buckets[:2]:
            with loaded.calls.recording() as read:
                encoded = scorer.encode(bucket)
            read = dict(read)
            written.clear()
            with loaded.calls.during(watch=watch):
                outputs = scorer.model.write(encoded, bucket.mask, [()] * len(bucket.rows), 6)
            for row in range(len(bucket.rows)):
                ids = bucket.inputs[row][bucket.mask[row].bool()]
                fed = torch.tensor([scorer.model.start_token, *outputs[row][:-1]])
                expected = expected_calls(done, function, {"encoder": ids, "decoder": fed})
                for at, (experts, _) in expected.items():
                    if at.stack == "encoder":
                        chosen = read[at].chosen.reshape(*bucket.inputs.shape, -1)[row, : len(ids)]
                        assert torch.equal(chosen, experts), (at, row)
                    elif len({len(one) for one in outputs}) == 1:
                        assert torch.equal(torch.cat([step[row] for step in written[at]])[:, None], experts), (at, row)
            inputs = {"input_ids": scorer.model.fed(torch.tensor([[4, 5, 6]] * 3))}
            rows = torch.tensor([1, 0, 1])
            with loaded.calls.during(attended=rows), loaded.calls.recording() as seen:
                scorer.model.decode(inputs, torch.ones((3, 3)).bool(), encoded[rows], bucket.mask[rows])
            for place, row in enumerate(rows.tolist()):
                ids = bucket.inputs[row][bucket.mask[row].bool()]
                fed = torch.tensor([scorer.model.start_token, 4, 5])
                for at, (experts, _) in expected_calls(done, function, {"encoder": ids, "decoder": fed}).items():
                    if at.stack == "decoder":
                        assert torch.equal(seen[at].chosen[3 * place : 3 * place + 3], experts), (at, row)


def test_full_experts_take_no_more(sources: dict[str, Path], converted: dict[str, Done], tmp_path: Path) -> None:
    from moeconv.foresight.network import _within

    chosen = torch.tensor([1, 1, 0, 1, 1, 1, 2, 1])[:, None]
    real = torch.tensor([[True] * 4, [True, True, True, False]])
    assert _within(2, chosen, real)[:, 0].tolist() == [1, 1, 0, -1, 1, 1, 2, -1]


def test_the_same_again_trains_nothing_and_another_target_neither(sources: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_for(sources, "olmoe", tmp_path, bits=(8,), loss=0.9, route="hash")
    first = Done(settings)
    assert any(line.startswith("epoch 1 of ") for line in first.said)
    assert not list(settings.work.glob("*/hash")), "examples are removed"
    again = Done(replace(settings, target=replace(settings.target, value=0.8)))
    assert not any(line.startswith("epoch ") for line in again.said)
    assert function_of(again).to_bytes() == function_of(first).to_bytes()
    points = plan(settings.work, settings.target, "knapsack", "kl", None).points
    assert any(point.loss is not None for point in points)


def test_plans_are_measured_with_the_function_and_the_reference_without(converted: dict[str, Done]) -> None:
    """Beside a plain evaluation of the same widths."""
    done = converted["olmoe"]
    bench, function = done.bench, function_of(done)
    bench.instead = HashRouting(replace(function, routed=None))
    measure = References.of(bench).judge.measure
    widths = uniform(bench.spec, ORIGINAL)
    known = len(bench.journal)
    evaluation = measure(widths, "known")
    assert len(bench.journal) == known, "it is what the conversion measured"
    own = measure.by_itself(widths, "with its routers")
    assert np.allclose(own.columns(), measure.reference.columns())
    assert not np.allclose(evaluation.columns(), own.columns())
    scorer = bench.material.scorer(bench.loaded, bench.material.acceptance, None)
    with Following(bench.loaded, bench.coding.checkpoint.description, function).routing():
        scores = scorer.score(as_reference=True).scores
    assert METRICS["perplexity"].value(scores) == pytest.approx(METRICS["perplexity"].value(evaluation.columns()))


def test_what_routing_alone_loses_may_be_too_much(converted: dict[str, Done], tmp_path: Path) -> None:
    """Of a random model it may even gain, so it is one that it loses on."""
    lost = {family: done.report.route.alone.loss for family, done in converted.items() if done.report.route}
    family = max(lost, key=lost.__getitem__)
    assert lost[family] > 0.001
    settings = converted[family].settings
    with pytest.raises(TargetMissed, match=r"routing by the hash function: loss [\d.]+%; the target of .*% is missed"):
        Done(replace(settings, target=Target("loss", lost[family] / 2), out=tmp_path / "m.pack"))
    assert not (tmp_path / "m.pack").exists()


def test_what_does_not_go_with_it_is_one_line(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], converted: dict[str, Done]
) -> None:
    words = ["quantize", str(sources["olmoe"]), "--out", str(tmp_path / "m.pack")]
    text = ["--calib", str(sources["text"])]
    for more, said in (
        (["--tune", "route=hash"], "--tune route has no effect without --calib"),
        ([*text, "--tune", "route=nonsense"], "--tune route=nonsense"),
        ([*text, "--tune", "route=hash", "--resident", "50%"], "--resident goes with routers"),
        (
            [*text, "--tune", "route=hash", "--tune", "signal=fisher"],
            "--tune signal=fisher does not go with --tune route=hash",
        ),
    ):
        assert _exit_code([*words, *(["--bits", "8"] if more[0] == "--tune" else []), *more]) == 2
        assert said in capsys.readouterr().err
    spec, settings = converted["olmoe"].manifest.model, converted["olmoe"].settings
    check_route(settings, spec)
    layer = spec.decoder.kinds[0]
    for change, said in (
        ({"score": "sigmoid"}, "choose by a softmax, and these choose by sigmoid"),
        ({"capacity": 3}, "experts that are full"),
    ):
        part = replace(layer.ffn, router=replace(layer.ffn.router, **change))  # type: ignore[type-var, union-attr]
        other = replace(spec, decoder=replace(spec.decoder, kinds=(replace(layer, ffn=part),)))
        with pytest.raises(SettingsError, match=said):
            check_route(settings, other)


def test_the_next_step_is_to_run_it_so(converted: dict[str, Done]) -> None:
    done = converted["olmoe"]
    assert '"some text" --tune routing=hash' in next_steps(done.report, done.settings.out, profiled=False)
