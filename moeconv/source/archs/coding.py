"""Codings of published checkpoints: the settings that name one, and the tensors that a coded matrix is made of.

The settings are those of quantization_config in config.json, or of hf_quant_config.json. Which matrices are coded
follows from the names of the tensors, since each coding has names of its own; matrices that a checkpoint leaves out of
its coding have plain names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from moeconv.source.archs.config import UnsupportedModel


class Kind(NamedTuple):
    """The tensors of a coded matrix. Its name is B + `plain`, and a tensor B + `mark` shows it; `parts`: the endings
    after B of all its tensors; `more`: endings of tensors that it may have. A part has the shape of the matrix if its
    ending is empty or `plain`."""

    name: str
    mark: str
    parts: tuple[str, ...]
    more: tuple[str, ...] = ()
    plain: str = ""


_NF4 = ("", ".absmax", ".quant_map")
_NESTED = (".nested_absmax", ".nested_quant_map")
_KINDS = {
    kind.name: kind
    for kind in (
        Kind("fp8 blocks", "_scale_inv", ("", "_scale_inv")),
        Kind("scaled", "_scale", ("", "_scale"), ("_zero_point",)),
        Kind("fp8 or fp4 of deepseek", ".scale", (".weight", ".scale"), (), ".weight"),
        Kind("packed", "_packed", ("_packed", "_scale", "_shape"), ("_zero_point", "_g_idx")),
        Kind("nvfp4", "_packed", ("_packed", "_scale", "_global_scale")),
        Kind("nvfp4 of modelopt", "_scale_2", ("", "_scale", "_scale_2")),
        Kind("mxfp4", "_blocks", ("_blocks", "_scales")),
        Kind("packed mxfp4", "_packed", ("_packed", "_scale")),
        Kind("gptq", ".qweight", (".qweight", ".qzeros", ".scales"), (".g_idx",), ".weight"),
        Kind("awq", ".qweight", (".qweight", ".qzeros", ".scales"), (), ".weight"),
        *(Kind(f"bitsandbytes {name}", mark, (*_NF4, mark), _NESTED)
          for name in ("nf4", "fp4") for mark in (f".quant_state.bitsandbytes__{name}",)),
        Kind("bitsandbytes int8", ".SCB", (".weight", ".SCB"), (".weight_format",), ".weight"),
    )
}  # fmt: skip
MXFP4 = ("mxfp4", "packed mxfp4")
"""Kinds whose numbers a pack can store as they are."""
OF_ACTIVATIONS = (
    ".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale", ".activation_scale", ".k_scale",
    ".v_scale",
)  # fmt: skip
"""Endings of tensors that say how to round activations, which a pack leaves to moert."""


class Scheme(NamedTuple):
    """The coding of a checkpoint. `name`: for messages; `kinds`: those that its matrices may have; `bits`: the widths
    of its whole numbers; `block`: rows and inputs with one scale; `plus`: the number by which zero points are larger
    than their codes; `group`: the inputs with one scale, where all numbers have four bits in groups without zero
    points; `fp4_experts`: experts have the four bits of MXFP4, whatever other matrices have."""

    name: str
    kinds: tuple[Kind, ...]
    bits: tuple[int, ...] = ()
    block: tuple[int, int] | None = None
    plus: int = 0
    group: int | None = None
    fp4_experts: bool = False

    @property
    def mxfp4(self) -> bool:
        """True if experts have the four bits that a pack can keep."""
        return self.fp4_experts or all(kind.name in MXFP4 for kind in self.kinds)

    def matrices(self, names: Collection[str]) -> Iterator[tuple[str, str, Kind]]:
        """Yields the name of each coded matrix among a checkpoint's tensors, the beginning of its tensors' names, and
        its kind: the first whose tensors are all there."""
        found: set[str] = set()
        for kind in self.kinds:
            for name in names:
                base = name.removesuffix(kind.mark)
                if base != name and base not in found and all(base + part in names for part in kind.parts):
                    found.add(base)
                    yield base + kind.plain, base, kind


def scheme_of(said: Any) -> Scheme | None:
    """Returns the scheme that quantization_config names; None for no coding. Raises UnsupportedModel."""
    if not said:
        return None
    if not isinstance(said, dict):
        raise _refused(said)
    maker = said.get("producer")
    own = "modelopt" if isinstance(maker, dict) and maker.get("name") == "modelopt" else "compressed-tensors"
    method = said.get("quant_method") or (own if "config_groups" in said else None)
    read = _METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise _refused(method, f"known are {', '.join(_METHODS)}")
    return read(said)


def _refused(method: Any, why: str = "quantization_config should be an object") -> UnsupportedModel:
    return UnsupportedModel(
        f"config.json says that its weights are coded by {method!r}, which can't be read ({why}): take a checkpoint in "
        "bf16, or another coding of it"
    )


def _kinds(*names: str) -> tuple[Kind, ...]:
    return tuple(_KINDS[name] for name in names)


def _fp8(said: Mapping[str, Any]) -> Scheme:
    block = said.get("weight_block_size")
    found = None if block is None else _pair(block, "fp8", "weight_block_size")
    experts = _one_of(said.get("expert_dtype") or "fp8", ("fp8", "fp4"), "fp8", "expert_dtype")
    kinds, name = _kinds("fp8 blocks", "scaled", "fp8 or fp4 of deepseek"), "fp8" if experts == "fp8" else "fp8 and fp4"
    return Scheme(name, kinds, block=found, fp4_experts=experts == "fp4")


def _fbgemm(_: Mapping[str, Any]) -> Scheme:
    return Scheme("fbgemm_fp8", _kinds("scaled"))


def _mxfp4(_: Mapping[str, Any]) -> Scheme:
    return Scheme("mxfp4", _kinds("mxfp4"))


def _gptq(said: Mapping[str, Any]) -> Scheme:
    layout = said.get("checkpoint_format") or said.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise _refused("gptq", f"its layout {layout!r} is not gptq or gptq_v2")
    return _of_gptq("gptq", said, plus=1 if layout == "gptq" else 0)


def _of_gptq(method: str, said: Mapping[str, Any], plus: int) -> Scheme:
    bits = _one_of(said.get("bits"), (2, 3, 4, 8), method, "bits")
    even = bits == 4 and said.get("sym") is True and not said.get("desc_act")
    return Scheme(f"{method} with {bits} bits", _kinds("gptq"), (bits,), plus=plus, group=_group(said, even))


def _awq(said: Mapping[str, Any]) -> Scheme:
    version = str(said.get("version", "gemm")).lower()
    if version != "gemm":
        raise _refused("awq", f"its version {version!r} is not gemm")
    bits = _one_of(said.get("bits", said.get("w_bit", 4)), (4,), "awq", "bits")
    even = said.get("zero_point") is False or said.get("sym") is True
    return Scheme(f"awq with {bits} bits", _kinds("awq"), (bits,), group=_group(said, even))


def _group(said: Mapping[str, Any], even: bool) -> int | None:
    """Returns the inputs with one scale where groups are even, that is without zero points and in the order of the
    inputs."""
    size = said.get("group_size")
    return size if even and isinstance(size, int) and size > 0 else None


def _auto_round(said: Mapping[str, Any]) -> Scheme:
    layout = str(said.get("packing_format", ""))
    if "awq" in layout:
        return _awq({**said, "version": "gemm"})
    if layout in ("auto_round:auto_gptq", "auto_round:gptq", "auto_gptq"):
        return _of_gptq("auto-round", said, plus=1)
    raise _refused(
        "auto-round", f"its packing_format {layout!r} is neither auto_round:auto_gptq nor auto_round:auto_awq"
    )


def _bitsandbytes(said: Mapping[str, Any]) -> Scheme:
    if said.get("load_in_8bit"):
        return Scheme("bitsandbytes with 8 bits", _kinds("bitsandbytes int8"))
    kind = _one_of(said.get("bnb_4bit_quant_type", "fp4"), ("nf4", "fp4"), "bitsandbytes", "bnb_4bit_quant_type")
    return Scheme(f"bitsandbytes {kind}", _kinds("bitsandbytes nf4", "bitsandbytes fp4"))


_OF_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "NVFP4", "W4A16_NVFP4")


def _modelopt(said: Mapping[str, Any]) -> Scheme:
    named = said.get("quant_algo")
    layers = said.get("quantized_layers") if named == "MIXED_PRECISION" else None
    algorithms = {each.get("quant_algo") for each in layers.values()} if isinstance(layers, dict) else {named}
    for algorithm in sorted(algorithms, key=str):
        _one_of(algorithm, _OF_MODELOPT, "modelopt", "quant_algo")
    return Scheme(f"modelopt {named}", _kinds("nvfp4 of modelopt", "scaled"))


_FORMATS: Mapping[str, tuple[str, ...]] = {
    "pack-quantized": ("packed",), "int-quantized": ("scaled",), "float-quantized": ("scaled",),
    "naive-quantized": ("scaled",), "nvfp4-pack-quantized": ("nvfp4",), "mxfp4-pack-quantized": ("packed mxfp4",),
}  # fmt: skip
"""Format of the library compressed-tensors → the kinds that its matrices have."""


def _compressed_tensors(said: Mapping[str, Any]) -> Scheme:
    method, mixed = "compressed-tensors", said.get("format") == "mixed-precision"
    for name in ("sparsity_config", "transform_config"):
        if said.get(name) and (said[name] if name == "transform_config" else said[name].get("format") != "dense"):
            raise _refused(method, f"{name} is set")
    groups = said.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise _refused(method, "its config_groups should be an object of objects")
    coded = [group for group in groups.values() if isinstance(group.get("weights"), dict)]
    if not coded:
        raise _refused(method, "none of its config_groups has weights")
    formats = {group.get("format") if mixed else said.get("format") for group in coded}
    kinds = [kind for name in formats for kind in _FORMATS[_one_of(name, tuple(_FORMATS), method, "format")]]
    blocks, bits, sizes = set(), set(), set()
    for group in coded:
        weights = group["weights"]
        even = weights.get("symmetric") is True and weights.get("actorder") in (None, False, "weight", "static")
        sizes.add(_group(weights, even and weights.get("num_bits") == 4))
        bits.add(_one_of(weights.get("num_bits"), (2, 4, 8), method, "num_bits"))
        if weights.get("strategy") == "block":
            blocks.add(_pair(weights.get("block_structure"), method, "block_structure"))
    if len(blocks) > 1:
        raise _refused(method, "its groups have blocks of several sizes")
    name = f"{method} {' and '.join(sorted(map(str, formats)))}"
    size = sizes.pop() if len(sizes) == 1 and set(kinds) == {"packed"} else None
    block = next(iter(blocks), None)
    return Scheme(name, _kinds(*dict.fromkeys(sorted(kinds))), tuple(sorted(bits)), block, group=size)


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "gptq": _gptq, "awq": _awq, "auto-round": _auto_round, "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt, "fp8": _fp8, "fbgemm_fp8": _fbgemm, "bitsandbytes": _bitsandbytes, "mxfp4": _mxfp4,
}  # fmt: skip


def _one_of(found: Any, allowed: Iterable[Any], method: str, name: str) -> Any:
    allowed = tuple(allowed)
    if isinstance(found, bool) or found not in allowed:
        raise _refused(method, f"its {name} {found!r} is not {' or '.join(map(str, allowed))}")
    return found


def _pair(found: Any, method: str, name: str) -> tuple[int, int]:
    whole = isinstance(found, (list, tuple)) and len(found) == 2
    if not whole or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in found):
        raise _refused(method, f"its {name} {found!r} should be two whole numbers from 1 on")
    return found[0], found[1]
