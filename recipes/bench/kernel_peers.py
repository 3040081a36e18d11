"""The same products by torch and onnxruntime, for `make bench-kernels`: each with many matrices of one shape."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from recipes.bench.kernel_cases import Case, vector
from recipes.bench.kernel_weights import Shape
from recipes.bench.sized import sized

SITE = Path("build/peers/kernels")
GROUPS = (32, 64)
SOME = sized(320 << 20, 16 << 20)  # bytes: far more than any cache holds


class PeerMissing(Exception):
    """A peer that can't run here; the message says why."""


def count_of(nbytes: float, most: int | None) -> int:
    """How many matrices of `nbytes` are enough."""
    enough = max(2, int(SOME // nbytes))
    return enough if most is None else min(enough, most)


def torch_float(dtype: torch.dtype, shape: Shape, tokens: int, most: int | None) -> Case:
    """F.linear."""
    rows, cols = shape
    count = count_of(rows * cols * dtype.itemsize, most)
    weights = torch.from_numpy(vector(rows, cols)).to(dtype).repeat(count, 1, 1)
    x = torch.from_numpy(vector(tokens, cols)).to(dtype)
    name = f"torch {str(dtype).removeprefix('torch.')}"
    return Case(
        name, lambda: [F.linear(x, weight) for weight in weights], count, weights.nbytes, tokens * weights.numel()
    )


def torch_int8(shape: Shape, tokens: int, most: int | None) -> Case:
    """One scale a row, activations in bfloat16. Raises PeerMissing."""
    product = _operator("_weight_int8pack_mm")
    rows, cols = shape
    count = count_of(rows * cols, most)
    weights = torch.randint(-128, 128, (rows, cols), dtype=torch.int8).repeat(count, 1, 1)
    scales, x = torch.full((rows,), 0.01, dtype=torch.bfloat16), torch.from_numpy(vector(tokens, cols)).bfloat16()
    return Case(
        "torch int8",
        lambda: [product(x, weight, scales) for weight in weights],
        count,
        weights.nbytes,
        tokens * weights.numel(),
    )


def torch_int4(group: int, shape: Shape, tokens: int, most: int | None) -> Case:
    """Groups with scale and zero point, activations in bfloat16. Raises PeerMissing."""
    product, convert = _operator("_weight_int4pack_mm_for_cpu"), _operator("_convert_weight_to_int4pack_for_cpu")
    rows, cols = shape
    count = count_of(rows * cols * (0.5 + 4 / group), most)
    packed = convert(torch.randint(0, 16, (rows, cols), dtype=torch.int32), 1).repeat(count, 1, 1)
    scales = torch.full((count, cols // group, rows, 2), 0.01, dtype=torch.bfloat16)
    x = torch.from_numpy(vector(tokens, cols)).bfloat16()
    return Case(
        f"torch int4, groups of {group}",
        lambda: [product(x, codes, group, scale) for codes, scale in zip(packed, scales, strict=True)],
        count,
        packed.nbytes + scales.nbytes,
        tokens * count * rows * cols,
    )


def onnxruntime(bits: int, group: int, shape: Shape, tokens: int, most: int | None, threads: int) -> Case:
    """One graph of many MatMulNBits with 8-bit activations, groups without zero point. Raises PeerMissing."""
    ort, onnx = _onnxruntime()
    rows, cols = shape
    nbytes = rows * cols * (bits / 8 + 4 / group)
    count = count_of(nbytes, most)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.add_session_config_entry("session.force_spinning_stop", "1")  # or it takes a core from who runs next
    try:
        session = ort.InferenceSession(
            _graph(onnx, bits, group, shape, count), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # the package has many kinds of its own
        raise PeerMissing(
            f"onnxruntime at {bits} bits, groups of {group}: {str(error).splitlines()[0][:200]}"
        ) from error
    x = {"x": vector(tokens, cols)}
    name = f"onnxruntime {bits} bits, groups of {group}"
    return Case(name, lambda: session.run(None, x), count, int(nbytes * count), tokens * count * rows * cols)


def peers(bits: int, shape: Shape, tokens: int, most: int | None, threads: int) -> Iterator[Case]:
    """All that there are for a width; a line for each that is missing."""
    makers: dict[int, list[Any]] = {
        4: [lambda group=group: torch_int4(group, shape, tokens, most) for group in GROUPS],
        8: [lambda: torch_int8(shape, tokens, most)],
        16: [lambda: torch_float(torch.bfloat16, shape, tokens, most)],
        32: [lambda: torch_float(torch.float32, shape, tokens, most)],
    }
    of_onnx = [lambda group=group: onnxruntime(bits, group, shape, tokens, most, threads) for group in GROUPS]
    for make in makers.get(bits, []) + (of_onnx if bits in (2, 4, 8) else []):
        try:
            yield make()
        except PeerMissing as missing:
            print(f"left out: {missing}", file=sys.stderr, flush=True)


def _operator(name: str) -> Any:
    if not hasattr(torch.ops.aten, name):
        raise PeerMissing(f"torch {torch.__version__} has no {name}")
    return getattr(torch.ops.aten, name)


def _onnxruntime() -> tuple[Any, Any]:
    """The packages of SITE, after all others. Raises PeerMissing."""
    if str(SITE) not in sys.path:
        sys.path.append(str(SITE))
    try:
        import onnx
        import onnxruntime as ort
    except ImportError as error:
        raise PeerMissing(f"onnxruntime: {error} (`make bench-kernels` installs it)") from error
    return ort, onnx


def _graph(onnx: Any, bits: int, group: int, shape: Shape, count: int) -> bytes:
    """x [tokens, cols] → y0, y1, ... [tokens, rows]. No two matrices are equal: onnxruntime would keep one of them."""
    (rows, cols), helper, floats = shape, onnx.helper, onnx.TensorProto.FLOAT
    random, packed = np.random.default_rng(0), (rows, cols // group, group * bits // 8)
    scales = np.full(rows * cols // group, 0.01, np.float32)
    nodes, tensors, outputs = [], [], []
    for i in range(count):
        codes = random.integers(0, 256, packed, np.uint8)
        tensors += [onnx.numpy_helper.from_array(codes, f"w{i}"), onnx.numpy_helper.from_array(scales, f"s{i}")]
        outputs.append(helper.make_tensor_value_info(f"y{i}", floats, ["tokens", rows]))
        nodes.append(
            helper.make_node(
                "MatMulNBits", ["x", f"w{i}", f"s{i}"], [f"y{i}"], domain="com.microsoft", K=cols, N=rows, bits=bits,
                block_size=group, accuracy_level=4,
            )
        )  # fmt: skip
    x = helper.make_tensor_value_info("x", floats, ["tokens", cols])
    graph = helper.make_graph(nodes, "products", [x], outputs, tensors)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model
