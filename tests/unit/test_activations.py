"""What a long prompt takes beside keys and values stays below what is set aside for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_packs import SWITCH_SHAPE, with_shortcut

from moert.kernels import library
from moert.models.footprint import activation_bytes
from moert.models.kv import state_bytes
from moert.pack.mixers import FixedState, GatedDelta, Indexer, Mamba, Mamba2, Pooled, Pools, ShortConv
from moert.pack.model_spec import Join, Layer, ModelSpec, stack_of
from moert.pack.parts import Attention, Experts, GatedStreams, Narrow, Norm, Router, Streams
from recipes.bench.shaped import OLMOE_SHAPE, write_pack
from tests.pairs import Case, each, thinned
from tests.shapes import every

MEASURE = """
import json, re, sys
from moert.engine.engine import Engine
from moert.machine import return_early, return_freed
def status(name): return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
return_early()
with Engine.open(sys.argv[1], predict="none", kernels=sys.argv[2]) as engine:
    peaks = []
    for tokens in json.loads(sys.argv[3]):
        engine.reserve(tokens, 1)
        for asked in (64, tokens):  # the first reads the experts
            held = None
            return_freed()
            before = status("VmRSS")
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # the peak starts anew
            held = engine.model.prefill([*((7 * i) % 63 for i in range(asked - 1)), 63])
        peaks.append(status("VmHWM") - before)
print(json.dumps(peaks))
"""


def shapes(d_model: int, d_ff: int) -> dict[str, ModelSpec]:
    """Both kinds of model, of one layer in each stack, wide enough for activations to outweigh everything else."""
    decoder = OLMOE_SHAPE.but(
        vocab_size=64, d_model=d_model, n_heads=d_model // 64, n_kv_heads=d_model // 128, head_dim=64, decoder=every(1),
        num_experts=4, top_k=2, d_ff=d_ff, scale=0.125,
    )  # fmt: skip
    switch = SWITCH_SHAPE.but(
        d_model=d_model, n_heads=d_model // 64, n_kv_heads=d_model // 64, head_dim=64, encoder=every(1),
        decoder=every(1), num_experts=4, d_ff=d_ff, capacity=None,
    )  # fmt: skip
    norm, wide, heads = Norm(1e-5), 2 * d_model, d_model // 32
    parts: dict[str, FixedState] = {
        "conv": ShortConv(3), "delta": GatedDelta(heads, heads // 2, 32, 32, 4, norm),
        "kda": GatedDelta(heads, heads, 32, 32, 4, norm, by_feature=True, rank=64, gate="sigmoid"),
        "mamba2": Mamba2(heads, 64, heads // 4, 64, 4, norm), "mamba": Mamba(wide, 16, 64, 4, norm),
    }  # fmt: skip
    fixed = {name: decoder.but(mixers=((0, part),)).spec for name, part in parts.items()}
    narrow = decoder.but(narrow=Narrow(d_model // 2)).spec
    parallel = replace(decoder.spec, decoder=stack_of([replace(decoder.spec.decoder[0], parallel=True)], norm))
    layer = replace(decoder.spec.decoder[0], streams=Streams(4, 20, 1e-6))
    streams = replace(decoder.spec, decoder=stack_of([layer], norm))
    pools = Pools(4, True, Indexer(8, 64, 200))
    pooled = Pooled(d_model // 32, 64, 64, d_model // 2, 128, 0.125, norm, 0, 4, d_model // 4, pools)
    fixed["pools"] = replace(decoder.spec, decoder=stack_of([replace(decoder.spec.decoder[0], mixer=pooled)], norm))
    gates = replace(layer, norm=None, streams=GatedStreams(4, d_model // 8, norm))
    gated = replace(decoder.spec, decoder=stack_of([gates], None))
    shortcut = with_shortcut(decoder.but(decoder=(True, True)).spec, 0, 3)
    return {
        "decoder": decoder.spec, "switch": switch.spec, "narrow": narrow, "late": _late(decoder.spec),
        "parallel": parallel, "streams": streams, "gated": gated, "shortcut": shortcut, **fixed,
    }  # fmt: skip


def _late(spec: ModelSpec) -> ModelSpec:
    """Norms behind each half, and prompts up to token 63 whose tokens see each other."""
    [kind], after = spec.decoder.kinds, Join(Norm(1e-5))
    assert isinstance(kind.mixer, Attention)
    assert isinstance(kind.ffn, Experts)
    experts = replace(kind.ffn, bypass=True, router=Router(2, False, 100, overflow="itself"))
    layer = Layer(None, replace(kind.mixer, qk_norm=None), None, experts, after, after)
    head = replace(spec.head, projected=True)
    return replace(spec, decoder=stack_of([layer], None), head=head, tokens=replace(spec.tokens, prefix_end=63))


def few(case: Case) -> Iterator[Hashable]:
    """Each value, with the reference two kinds of model; what takes it long is left to the slow suite."""
    kernels, name, d_model, _ = case
    if kernels != "reference" or d_model == 768:
        yield from each(case)
        yield (kernels, name) if name in ("decoder", "mamba2") else ()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak can't be started anew")
@thinned(
    "kernels, name, d_model, lengths",
    ["auto", "reference"],
    [
        "decoder",
        "switch",
        "narrow",
        "late",
        "parallel",
        "streams",
        "gated",
        "shortcut",
        "conv",
        "delta",
        "kda",
        "mamba2",
        "mamba",
        "pools",
    ],
    [(768, [300, 1500]), (256, [5000])],
    facts=few,
)
def test_the_bound_is_above_the_peak_and_not_far(
    tmp_path: Path, name: str, kernels: str, d_model: int, lengths: list[int]
) -> None:
    spec = shapes(d_model, 512)[name]
    write_pack(tmp_path / "wide.pack", 4, {"mixer" if "mixer" in spec.roles() else "attention": 8}, spec)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "wide.pack"), kernels, json.dumps(lengths)]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    widened = kernels == "reference" or library.load() is None
    for tokens, peak in zip(lengths, json.loads(done.stdout), strict=True):
        bound = activation_bytes(spec, tokens, widened) + state_bytes(spec, tokens, 1)
        print(name, kernels, tokens, "peak", peak, "bound", bound)
        unpacked = 6 * spec.weights_per_expert() if widened else 0
        assert peak < bound + unpacked + 2_000_000
        assert bound < 5 * (peak + 300_000)  # what the process holds from before changes by that
