"""Dense matrices at other widths: what is tried is what is written, and what is restored is the original."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from dense_packs import widened
from safetensors.torch import load_file
from tiny import rewrite, tiny_olmoe, tiny_switch
from torch import Tensor
from trials import pairs, running, scorers, trial_of

from moeconv.artifacts import DenseUnit, uniform
from moeconv.dense import dense_of, dense_units, width_text
from moeconv.errors import SettingsError, VerifyFailed, WeightsUnusable
from moeconv.measure.scorers import Head
from moeconv.measure.trial import Trial
from moeconv.packing.emit import Label, emit
from moeconv.packing.packed import PackedModel, verify
from moeconv.quantizers.coder import ORIGINAL, DenseCoder, Form
from moeconv.quantizers.moments import Moments, collect
from moeconv.source.archs.weights import fill_backbone, linears_of
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import CheckpointError
from moert.models.backbone import load_backbone
from moert.pack.codec import TrellisMatrix
from moert.pack.manifest import Dense
from moert.pack.reader import Pack
from tests.refusing import one_line
from tests.shapes import shapes_of

TinyModel = Callable[[str, str], Path]
MIXED = {"attention": 3, "router": 8, "ffn": 2, "head": 4, "embed": 16}
MODELS = [
    ("switch_transformers", "all layers sparse"),
    ("switch_transformers", "every second layer sparse"),
    ("switch_transformers", "untied head"),
    ("olmoe", "plain"),
    ("olmoe", "tied head"),
    ("qwen3_moe", "some layers dense"),
    ("mixtral", "plain"),
]


def mixed(model: Path) -> dict[str, int]:
    return {role: MIXED[role] for role in Checkpoint.open(model).spec.roles()}


def state(trial: Trial) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in trial.model.named_parameters()}


@pytest.mark.parametrize(("family", "variant"), MODELS)
def test_what_is_tried_is_what_the_pack_gives_back(
    family: str, variant: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = tiny_model(family, variant)
    trial = trial_of(model, mixed(model))
    before = state(trial)
    trial.assign(uniform(trial.spec, 4))
    emit(trial.coder, uniform(trial.spec, 4), tmp_path / "p", seed=0, label=Label("tests"), dense=trial.dense)
    pack = Pack.open(tmp_path / "p")
    stored = load_backbone(pack)
    names = trial.checkpoint.description.parameters
    for name, weight in widened(stored).items():
        if name not in names:
            continue  # the model computes it by itself
        assert torch.equal(trial.model.get_parameter(names[name].name), torch.from_numpy(weight)), name
        role = trial.spec.tensors[name].role
        width = None if role is None else MIXED[role]
        if width is not None and width < 16:
            mine = stored[name]
            assert mine.bits == width
            assert not torch.equal(before[names[name].name], torch.from_numpy(weight)), name
        else:
            assert torch.equal(before[names[name].name], torch.from_numpy(weight)), f"{name}: the source is bfloat16"
    packed = PackedModel.open(pack)
    for name, weight in trial.model.named_parameters():
        assert torch.equal(packed.model.get_parameter(name), weight), name
    found = verify(pack, trial.checkpoint)
    assert found.worst <= 1
    trial.restore()
    assert all(torch.equal(weight, before[name]) for name, weight in state(trial).items())


def test_what_no_role_names_stays_as_it_is(tiny_model: TinyModel, tmp_path: Path) -> None:
    trial = trial_of(tiny_model("olmoe", "plain"), {"head": 8})
    emit(trial.coder, uniform(trial.spec, 16), tmp_path / "p", seed=0, label=Label("tests"), dense=trial.dense)
    tensors = load_file(tmp_path / "p" / "backbone.safetensors")
    kept = {name for name in shapes_of(trial.spec) if name != "head.weight"}
    assert set(tensors) == {*kept, "head.qweight", "head.scale", "head.min"}
    assert all(torch.equal(tensors[name], trial.dense.source(name)) for name in kept)
    stored, source = trial.dense.backbone_bytes()
    assert stored == sum(tensor.nbytes for tensor in tensors.values())
    assert source == 2 * sum(int(np.prod(shape)) for name, shape in shapes_of(trial.spec).items() if "rope" not in name)


def test_verify_finds_a_matrix_of_another_model(tmp_path: Path) -> None:
    for seed in (1, 2):
        trial = trial_of(tiny_olmoe(tmp_path / str(seed), seed), 8)
        emit(trial.coder, uniform(trial.spec, 16), tmp_path / f"{seed}.pack", seed=0, label=Label("tests"),
             dense=trial.dense)  # fmt: skip
    with pytest.raises(VerifyFailed, match=r"embed\.weight: its error is .* made from other weights"):
        verify(Pack.open(tmp_path / "2.pack"), Checkpoint.open(tmp_path / "1"))


@pytest.mark.parametrize(("family", "variant"), MODELS)
def test_the_divergence_is_that_of_the_stored_head(family: str, variant: str, tiny_model: TinyModel) -> None:
    """It is computed from one row of the head for each position: against the whole distributions."""
    trial = trial_of(tiny_model(family, variant), {"head": 2})
    samples, metric = (pairs(6), "token_perplexity") if family == "switch_transformers" else (running(6), "perplexity")
    [scorer] = scorers(trial, samples, metric)
    seen: list[tuple[Head, Tensor]] = []
    trial.restore()
    head = scorer.model.head if family == "switch_transformers" else scorer.head
    judge = head.judge
    head.judge = lambda hidden, *more: (seen.append(hidden.clone()), judge(hidden, *more))[1]
    reference = scorer.score(as_reference=True)
    assert not reference.kls.any()
    p = torch.log_softmax(head._logits(seen[0]).double(), dim=1)
    trial.assign(uniform(trial.spec, ORIGINAL))
    found = scorer.score()
    q = torch.log_softmax(head._logits(seen[1]).double(), dim=1)
    expected = float((p.exp() * (p - q)).sum().detach())
    assert expected > 0.01
    assert found.kls.sum() == pytest.approx(expected, rel=1e-4)


def test_a_scorer_shows_the_inputs_of_the_head(tmp_path: Path) -> None:
    trial = trial_of(tiny_olmoe(tmp_path / "model"), 8)
    trial.restore()
    [scorer] = scorers(trial, running(6), "perplexity")
    seen: list[Tensor] = []
    judge = scorer.head.judge
    scorer.head.judge = lambda hidden, *more: (seen.append(hidden.clone()), judge(hidden, *more))[1]
    linears = linears_of(trial.model, trial.checkpoint.description, ["head.weight"])
    found = collect(trial.calls, scorer.score, "products", linears).beside("head.weight")
    assert found is not None
    assert found.rows.tolist() == [len(seen[0])]
    np.testing.assert_allclose(found.moment[0], (seen[0].T @ seen[0] / len(seen[0])).numpy(), rtol=1e-4, atol=1e-6)


def test_16_bits_of_a_float32_source_are_rounded_as_the_pack_rounds_them(tmp_path: Path) -> None:
    source = tiny_switch(tmp_path / "model")
    rewrite(source, lambda stored: {name: value.float() + 1e-5 for name, value in stored.items()})
    trial = trial_of(source, 16)
    trial.assign(uniform(trial.spec, 16))
    emit(trial.coder, uniform(trial.spec, 16), tmp_path / "p", seed=0, label=Label("tests"), dense=trial.dense)
    pack = Pack.open(tmp_path / "p")
    stored = load_backbone(pack)["decoder.0.attn.q.weight"]
    assert stored.dtype == "F16"
    weight = trial.model.get_parameter(trial.checkpoint.description.parameters["decoder.0.attn.q.weight"].name)
    assert torch.equal(weight, torch.from_numpy(stored.widened()))
    assert not torch.equal(weight, trial.dense.source("decoder.0.attn.q.weight"))
    verify(pack, trial.checkpoint)


@pytest.mark.parametrize(("value", "width", "error"), [
    (float("-inf"), 4, WeightsUnusable), (float("nan"), 8, WeightsUnusable),
    (float("inf"), 16, CheckpointError), (float("nan"), 16, CheckpointError),
])  # fmt: skip
def test_values_that_a_width_can_not_hold_are_named(
    tmp_path: Path, value: float, width: int, error: type[Exception]
) -> None:
    source = tiny_olmoe(tmp_path / "model")
    rewrite(source, lambda stored: {name: weight.float() for name, weight in stored.items()})
    rewrite(source, lambda stored: stored["model.layers.1.self_attn.k_proj.weight"][2, 3:4].fill_(value))
    checkpoint = Checkpoint.open(source)
    coder = DenseCoder(checkpoint, dense_of(checkpoint.spec, width))
    with one_line(error, r"decoder\.1\.attn\.k\.weight"):
        coder.code("decoder.1.attn.k.weight")


@pytest.mark.parametrize("bits", [-2, -4])
def test_a_coder_makes_trellis_codes_of_widths_below_0(tmp_path: Path, bits: int) -> None:
    """The model gets them also where it had plain codes of as many bits."""
    trial = trial_of(tiny_olmoe(tmp_path / "model"), None)
    coder, units = trial.dense, dict.fromkeys(dense_units(trial.spec), 16)
    coder.chooses = True
    name = trial.checkpoint.description.parameters["embed.weight"].name
    for width in (-bits, bits):
        coder.choose({**units, DenseUnit("embed"): width})
        trial.assign(uniform(trial.spec, ORIGINAL))
        assert torch.equal(trial.model.get_parameter(name), coder.stored_weight("embed.weight"))
        assert isinstance(coder.code("embed.weight"), TrellisMatrix) == (width < 0)
        assert (coder.form("embed.weight"), coder.form("head.weight")) == (Form(abs(bits), width < 0), Form(16, False))


def test_errors_are_weighed_by_inputs_where_a_conversion_chooses_the_widths(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_olmoe(tmp_path / "model"))
    name, other = "decoder.0.attn.q.weight", "decoder.0.attn.o.weight"
    size = checkpoint.spec.tensors[name].shape[1]
    x = np.random.default_rng(0).standard_normal((400, size)) @ np.random.default_rng(1).standard_normal((size, size))
    products = (x.T @ x / len(x)).astype(np.float32)[None]
    file = tmp_path / "moments.safetensors"
    Moments("products", {f"beside.{name}": products, f"beside.{name}.rows": np.array([len(x)])}).save(file)
    units = dict.fromkeys(dense_units(checkpoint.spec), 3)
    blind = DenseCoder(checkpoint, None, chooses=True)
    seeing = blind.weighing(file)
    for coder in (blind, seeing):
        coder.choose(units)
    assert (blind.recorded() or Dense("", 0, {})).quantizer == "group"
    assert (seeing.recorded() or Dense("", 0, {})).quantizer == "gptq"
    weight = checkpoint.backbone_tensor(name, checkpoint.spec.tensors[name].shape).float()

    def error(coder: DenseCoder) -> float:
        wrong = coder.stored_weight(name) - weight
        return float((wrong @ torch.from_numpy(products[0]) * wrong).sum())

    assert error(seeing) < 0.6 * error(blind)
    assert torch.equal(seeing.stored_weight(other), blind.stored_weight(other)), "no text has shown its inputs"
    given = DenseCoder(checkpoint, dense_of(checkpoint.spec, 3))
    assert torch.equal(given.weighing(file).stored_weight(name), given.stored_weight(name))


def test_roles_that_the_model_has_not_are_refused(tiny_model: TinyModel) -> None:
    spec = Checkpoint.open(tiny_model("olmoe", "plain")).spec
    with pytest.raises(SettingsError, match="no ffn matrices of its own, only attention, router, head, embed"):
        dense_of(spec, {"head": 8, "ffn": 4})
    with pytest.raises(SettingsError, match="no embed matrices"):
        dense_of(Checkpoint.open(tiny_model("olmoe", "tied head")).spec, {"embed": 8})
    every = dense_of(spec, 8)
    assert every.bits == dict.fromkeys(("attention", "router", "head", "embed"), 8)
    assert dense_of(spec, None) is None
    assert width_text({"attention": 4, "head": 8}) == "attention 4, head 8 bits"


def test_copies_of_a_tensor_follow_it(tmp_path: Path) -> None:
    """An untied model of this family keeps three embeddings."""
    trial = trial_of(tiny_switch(tmp_path / "m", tie_word_embeddings=False), {"head": 8})
    weight = torch.ones(trial.spec.vocab_size, trial.spec.d_model)
    fill_backbone(trial.model, trial.checkpoint.description, [("embed.weight", weight)])
    ids = torch.tensor([[3, 5]])
    for stack in ("encoder", "decoder"):
        assert torch.equal(trial.model.get_submodule(stack).get_input_embeddings()(ids), torch.ones(1, 2, 24))
