"""Layers that mix tokens through a state of fixed size: beside transformers' own modules, and in any pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from native_problems import all_natives
from torch import Tensor, nn
from transformers import (
    BailingHybridConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2MoeConfig,
    NemotronHConfig,
    Qwen3NextConfig,
)
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeShortConv
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from moert.kernels import library
from moert.kernels.backend import ROWS, Backend, Floats, opaque
from moert.kernels.reference import ReferenceBackend
from moert.models.kv import Fixed
from moert.models.mixers import MIXES
from moert.models.model import Builder
from moert.pack.codec import F32
from moert.pack.mixers import FixedState, GatedDelta, Mamba, Mamba2, ShortConv
from moert.pack.model_spec import Join, Layer
from moert.pack.parts import Norm

D_MODEL, TOKENS = 24, 21
_NORM = Norm(1e-5)
Named = dict[str, Tensor]


class Case(NamedTuple):
    """A module of transformers, the part that it is, and its tensors by the names that a pack has."""

    module: nn.Module
    part: FixedState
    named: Callable[[Named], Named]


def _renamed(**names: str) -> Callable[[Named], Named]:
    """Names of ours → those of the module, where they differ."""

    def named(found: Named) -> Named:
        known = {"in": "in_proj", "out": "out_proj", "conv": "conv1d", "d": "D", "a_log": "A_log", **names}
        back = {theirs: ours for ours, theirs in known.items()}
        return {".".join(back.get(word, word) for word in name.split(".")): tensor for name, tensor in found.items()}

    return named


def _short(bias: bool) -> Case:
    config = Lfm2MoeConfig(
        hidden_size=D_MODEL, conv_L_cache=4, conv_bias=bias, layer_types=["conv"], num_hidden_layers=1
    )
    return Case(Lfm2MoeShortConv(config, 0), ShortConv(4, bias), _renamed(conv="conv"))


def _delta() -> Case:
    keys, shared, dim, v = 2, 3, 8, 5
    config = Qwen3NextConfig(
        hidden_size=D_MODEL, linear_num_key_heads=keys, linear_num_value_heads=keys * shared, linear_key_head_dim=dim,
        linear_value_head_dim=v, linear_conv_kernel_dim=4, rms_norm_eps=_NORM.eps, layer_types=["linear_attention"],
        num_hidden_layers=1,
    )  # fmt: skip

    def named(found: Named) -> Named:
        """Of each head of keys stand q, k, v and z, and b and a, beside each other."""
        both = found.pop("in_proj_qkvz.weight").reshape(keys, -1, D_MODEL).split([dim, dim, shared * v, shared * v], 1)
        rates = found.pop("in_proj_ba.weight").reshape(keys, -1, D_MODEL).split([shared, shared], 1)
        parts = zip((*"qkvz", "b", "a"), (*both, *rates), strict=True)
        return {**{f"{name}.weight": part.reshape(-1, D_MODEL) for name, part in parts}, **_renamed()(found)}

    return Case(Qwen3NextGatedDeltaNet(config, 0), GatedDelta(keys * shared, keys, dim, v, 4, _NORM), named)


def _delta_by_feature() -> Case:
    heads, dim = 3, 8
    config = KimiLinearConfig(
        hidden_size=D_MODEL, linear_num_heads=heads, linear_head_dim=dim, linear_conv_kernel_dim=4,
        rms_norm_eps=_NORM.eps, layer_types=["linear_attention"], num_hidden_layers=1,
    )  # fmt: skip
    gates = {"z_narrow": "g_a_proj", "z": "g_b_proj", "a_narrow": "f_a_proj", "a": "f_b_proj"}
    part = GatedDelta(heads, heads, dim, dim, 4, _NORM, by_feature=True, rank=dim, gate="sigmoid")
    return Case(KimiLinearDeltaAttention(config, 0), part, _forgetting(**gates))


def _forgetting(**gates: str) -> Callable[[Named], Named]:
    """Of modules with a forget gate of their own."""
    known = {"norm": "o_norm", "out": "o_proj", **{name: f"{name}_proj" for name in "qkvb"}}
    return lambda found: _renamed(**known, **gates)(
        {name.removeprefix("forget_gate."): each for name, each in found.items()}
    )


def _delta_bounded(bound: float | None) -> Case:
    heads, dim = 3, 8
    config = BailingHybridConfig(
        hidden_size=D_MODEL, num_attention_heads=heads, head_dim=dim, short_conv_kernel_size=4, rms_norm_eps=_NORM.eps,
        kda_safe_gate=bound is not None, kda_lower_bound=-(bound or 5.0), layer_types=["linear_attention"],
        num_hidden_layers=1, mlp_layer_types=["dense"],
    )  # fmt: skip
    part = GatedDelta(heads, heads, dim, dim, 4, _NORM, by_feature=True, gate="sigmoid", bound=bound)
    return Case(BailingHybridDeltaAttention(config, 0), part, _forgetting(z="g_proj", a="f_proj"))


def _split_steps(heads: int) -> Callable[[Named], Named]:
    """The last rows of the module's `in` are those that steps are made of."""

    def named(found: Named) -> Named:
        ours = _renamed()(found)
        for kind in ("weight", "bias"):
            if (whole := ours.pop(f"in.{kind}", None)) is not None:
                ours[f"in.{kind}"], ours[f"dt.{kind}"] = whole[:-heads], whole[-heads:]
        return ours

    return named


def _mamba2(bias: bool, conv_bias: bool) -> Case:
    config = GraniteMoeHybridConfig(
        hidden_size=D_MODEL, mamba_n_heads=6, mamba_n_groups=2, mamba_d_state=5, mamba_d_head=8, mamba_d_conv=4,
        mamba_expand=2, mamba_chunk_size=8, mamba_conv_bias=conv_bias, mamba_proj_bias=bias, rms_norm_eps=_NORM.eps,
        layer_types=["linear_attention"], num_hidden_layers=1,
    )  # fmt: skip
    part = Mamba2(6, 8, 2, 5, 4, _NORM, conv_bias, bias)
    return Case(GraniteMoeHybridMambaLayer(config, 0, initialize_mixer_weights=False), part, _split_steps(6))


def _mamba2_nemotron() -> Case:
    config = NemotronHConfig(
        hidden_size=D_MODEL, mamba_num_heads=4, mamba_head_dim=7, n_groups=4, ssm_state_size=6, conv_kernel=3,
        chunk_size=8, layer_norm_epsilon=_NORM.eps, time_step_min=0.0, layers_block_type=["linear_attention"],
    )  # fmt: skip
    part = Mamba2(4, 7, 4, 6, 3, _NORM)
    return Case(NemotronHMamba2Mixer(config, 0, initialize_mixer_weights=False), part, _split_steps(4))


def _mamba(bias: bool, normed: bool) -> Case:
    config = JambaConfig(
        hidden_size=D_MODEL, mamba_d_state=5, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=6, mamba_conv_bias=not bias,
        mamba_proj_bias=bias, rms_norm_eps=_NORM.eps,
    )  # fmt: skip
    module = JambaMambaMixer(config, 0)
    norms = {f"{name}_norm": f"{name}_layernorm" for name in ("dt", "b", "c")}
    if not normed:
        module.dt_layernorm, module.b_layernorm, module.c_layernorm = (nn.Identity() for _ in range(3))

    def named(found: Named) -> Named:
        found = _renamed(inner="x_proj", steps="dt_proj", **norms)(found)
        return {"dt_bias": found.pop("steps.bias"), **found}

    return Case(module, Mamba(48, 5, 6, 4, _NORM if normed else None, not bias, bias), named)


CASES: dict[str, Callable[[], Case]] = {
    "short convolution": lambda: _short(bias=False),
    "short convolution, biases": lambda: _short(bias=True),
    "gated delta rule": _delta,
    "gated delta rule by feature": _delta_by_feature,
    "gated delta rule by feature, bounded": lambda: _delta_bounded(3.0),
    "gated delta rule by feature, whole gates": lambda: _delta_bounded(None),
    "Mamba-2": lambda: _mamba2(bias=False, conv_bias=True),
    "Mamba-2, other biases": lambda: _mamba2(bias=True, conv_bias=False),
    "Mamba-2 of Nemotron-H": _mamba2_nemotron,
    "Mamba": lambda: _mamba(bias=False, normed=True),
    "Mamba, other biases, no norms": lambda: _mamba(bias=True, normed=False),
}


def filled(case: Case, seed: int = 0) -> Named:
    """Random weights, which are the module's then; by the names of a pack."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in case.module.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        plain = weight.dim() == 1 or "A_log" in name
        weight.data.copy_(0.5 * noise + ("norm" in name) if plain else noise * weight[0].numel() ** -0.5)
    return case.named({name: weight.detach().clone() for name, weight in case.module.named_parameters()})


def builder(backend: Backend, named: Named, part: FixedState, at: str = "m") -> Builder:
    """Of exactly the tensors that the part has."""
    shapes = {tensor.name: tensor.shape for tensor in part.tensors(at, D_MODEL)}
    assert {f"{at}.{name}": tensor.numel() for name, tensor in named.items()} == {
        name: int(np.prod(shape)) for name, shape in shapes.items()
    }
    stored = {f"{at}.{name}": tensor.numpy().reshape(shapes[f"{at}.{name}"]).copy() for name, tensor in named.items()}
    return Builder({name: Floats("F32", data) for name, data in stored.items()}, (), backend)


def mixed(mix: Any, part: FixedState, hidden: F32, pieces: list[int]) -> tuple[F32, list[F32]]:
    """From no tokens on, piece by piece; what is made, and the state behind it."""
    state, ends = Fixed(part, D_MODEL).arrays, np.cumsum(pieces)
    parts = [mix(hidden[end - count : end], state) for end, count in zip(ends, pieces, strict=True)]
    return np.concatenate(parts), state


@pytest.fixture(scope="module")
def natives() -> Iterator[list[Backend]]:
    if library.load() is None:
        yield []
        return
    with all_natives() as opened:
        yield [opaque(each) for each in opened.values()]


@pytest.mark.parametrize("name", CASES)
def test_a_mixer_is_that_of_transformers(name: str, natives: list[Backend]) -> None:
    case = CASES[name]()
    named = filled(case)
    hidden = np.random.default_rng(1).normal(size=(TOKENS, D_MODEL)).astype(np.float32)
    with torch.inference_mode():
        expected = case.module(torch.from_numpy(hidden)[None])[0].numpy()
    assert np.abs(expected).mean() > 0.01
    for backend in (opaque(ReferenceBackend()), *natives):
        mix = MIXES[type(case.part)](case.part, "m", builder(backend, named, case.part))
        whole, state = mixed(mix, case.part, hidden, [TOKENS])
        close = 1e-4 if backend.widens else 0.03 * np.abs(expected).max()  # these round what a matrix gets
        np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=close)
        for pieces in ([1] * TOKENS, [5, 1, 15]):
            found, left = mixed(mix, case.part, hidden, pieces)
            if backend.widens:
                np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-4)
                continue
            assert np.array_equal(found, whole), backend.name
            assert all(np.array_equal(mine, other) for mine, other in zip(left, state, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_states_have_the_shapes_that_the_part_says(name: str) -> None:
    case = CASES[name]()
    fixed = Fixed(case.part, D_MODEL)
    assert next(case.part.contradictions(), None) is None
    assert fixed.nbytes == 4 * sum(array.size for array in fixed.arrays)
    mix = MIXES[type(case.part)](case.part, "m", builder(opaque(ReferenceBackend()), filled(case), case.part))
    mix(np.ones((3, D_MODEL), np.float32), fixed.arrays)
    assert all(array.any() for array in fixed.arrays)


@pytest.mark.parametrize("add", [1.0, 0.5])
@pytest.mark.parametrize("after", [None, Norm(1e-6)])
def test_what_a_mixer_makes_joins_the_stream(add: float, after: Norm | None) -> None:
    case = CASES["Mamba-2"]()
    named, backend = filled(case), opaque(ReferenceBackend())
    mix = MIXES[Mamba2](case.part, "m", builder(backend, named, case.part))
    made = builder(backend, named, case.part, "0.mixer")
    rng = np.random.default_rng(3)
    weights = {"mixer_norm": rng.normal(size=D_MODEL), "mixer_after": rng.normal(size=D_MODEL)}
    for name, weight in weights.items():
        made._weights[f"0.{name}.weight"] = Floats("F32", weight.astype(np.float32))
    layer = Layer(_NORM, case.part, None, None, Join(after, add))
    fixed, x = Fixed(case.part, D_MODEL), rng.normal(size=(2 * ROWS + 3, D_MODEL)).astype(np.float32)
    before = x.copy()
    made.fixed(case.part, layer, "0").read(x, fixed)
    assert fixed.length == len(x)

    def normed(rows: F32, name: str, eps: float) -> F32:
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps) * weights[name].astype(np.float32)

    joins, _ = mixed(mix, case.part, normed(before, "mixer_norm", _NORM.eps), [len(x)])
    joins = joins if after is None else normed(joins, "mixer_after", after.eps)
    np.testing.assert_allclose(x, before + np.float32(add) * joins, rtol=1e-4, atol=1e-4)


def test_a_state_is_cut_only_to_where_it_was_marked() -> None:
    fixed = Fixed(ShortConv(3), D_MODEL)
    fixed.extend(7)
    fixed.arrays[0][:] = 5
    twin = fixed.copy()
    twin.extend(2)
    twin.arrays[0][:] = 6
    assert (fixed.length, twin.length) == (7, 9)
    assert (fixed.arrays[0] == 5).all()
    assert not fixed.cut(6, 100)
    assert not fixed.cut(8, 100)
    assert fixed.cut(7, 100)
    fixed.mark()
    assert (fixed.nbytes, twin.nbytes) == (2 * twin.nbytes, 4 * 2 * D_MODEL)
    fixed.extend(3)
    fixed.arrays[0][:] = 8
    assert not fixed.cut(9, 100)
    assert fixed.reaches() == {7, 10}
    for _ in range(2):
        assert fixed.cut(7, 100)
        assert (fixed.arrays[0] == 5).all()
        fixed.extend(1)
        fixed.arrays[0][:] = 9
    nothing = Fixed(None, D_MODEL)
    nothing.extend(7)
    assert nothing.cut(3, 100)
    assert (nothing.length, nothing.nbytes) == (3, 0)
