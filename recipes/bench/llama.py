"""llama.cpp as a peer, run by the Python of build/peers/llama: writes the OLMoE-shaped GGUF files and times them.

`python -m recipes.bench.llama make` writes the files, `python -m recipes.bench.llama like PACK KIND OUT` one of the
model of a pack, `python -m recipes.bench.llama built` says with what it was compiled, and `python -m
recipes.bench.llama FILE [--no-repack] [--no-mmap] [--long]` runs one as a session of recipes/bench/runner.py. A file
that is mapped comes into memory page by page as it is used; without, all of it is read at the start. Room for the keys
and values of a context is taken at the start as well, of a `--long` one more.
"""

from __future__ import annotations

import ctypes
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moert.pack.codec import F32, U8
from moert.pack.files import atomic_write
from moert.pack.model_spec import ExpertKey, ModelSpec
from recipes.bench.program import as_program
from recipes.bench.runner import serve
from recipes.bench.shaped import FOLDER, OLMOE, SEED, THREADS, projection, weight
from tests.shapes import THETA, shapes_of

if TYPE_CHECKING:
    from gguf import GGUFWriter

MODELS = {"Q4_K": 12, "Q2_K": 10}
"""The type of the experts → its number in ggml; all other matrices are Q4_K. llama.cpp's own mixtures (Q4_K_M, Q2_K)
would give some of the experts' matrices more bits, and the comparison is at equal bits."""
_MOSTLY_Q4_K = 15  # llama.cpp's number of the file type
ARCHITECTURES = {"olmoe": "olmoe", "qwen3_moe": "qwen3moe"}
"""The family → its name in GGUF."""
CONTEXT, LONG_CONTEXT = 1024, 8448
BATCH = 512

_BLOCK_NAMES = {
    "mixer_norm": "attn_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "router": "ffn_gate_inp",
}
_TOP_NAMES = {"embed": "token_embd", "head": "output", "decoder.norm": "output_norm"}


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor of the backbone."""
    stem = name.removesuffix(".weight")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.weight"
    _, layer, part = stem.split(".", 2)
    return f"blk.{layer}.{_BLOCK_NAMES[part]}.weight"


def write(path: Path, spec: ModelSpec, experts: str, alike: bool = False) -> None:
    """The model with its experts in one of MODELS, all other matrices as Q4_K, and norms and routers in 32 bits, as
    llama.cpp's own converter and quantizer would write it. `alike`: see recipes.bench.shaped.write_pack."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, ARCHITECTURES[spec.family])
    _describe(writer, spec)
    for name, shape, kind in _listed(spec, experts):
        writer.add_tensor_info(name, _stored_shape(shape, kind), *_stored(shape, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    code = _Quantizer()
    for name, shape in _kept(spec):
        kind = _kind(name)
        writer.write_tensor_data(weight(name, shape) if kind is None else code(weight(name, shape), kind))
    coded: dict[str, U8] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        for at, layer in spec.moe_layers():
            for part in spec.moe.ffn.projections:
                if part not in coded or not alike:
                    keys = [ExpertKey(at, layer, expert) for expert in range(spec.moe.n)]
                    weights = (partial(projection, spec, key, part) for key in keys)
                    coded[part] = np.stack(list(pool.map(partial(_coded, code, experts), weights)))
                writer.write_tensor_data(coded[part])
    writer.close()


def _coded(code: _Quantizer, kind: str, weights: Callable[[], F32]) -> U8:
    return code(weights(), kind)


def _describe(writer: GGUFWriter, spec: ModelSpec) -> None:
    attention = spec.decoder[0].attention
    assert attention is not None
    writer.add_vocab_size(spec.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_context_length(spec.max_positions or 0)
    writer.add_embedding_length(spec.d_model)
    writer.add_block_count(len(spec.decoder))
    writer.add_feed_forward_length(spec.moe.ffn.d_ff)
    writer.add_expert_feed_forward_length(spec.moe.ffn.d_ff)
    writer.add_head_count(attention.n)
    writer.add_head_count_kv(attention.kv)
    writer.add_key_length(attention.dim)
    writer.add_value_length(attention.dim)
    writer.add_layer_norm_rms_eps(spec.decoder.norm.eps)
    writer.add_rope_freq_base(THETA)
    writer.add_expert_count(spec.moe.n)
    writer.add_expert_used_count(spec.moe.router.top_k)
    writer.add_file_type(_MOSTLY_Q4_K)


def _kind(name: str) -> str | None:
    """Of a tensor that is in no expert; None for 32 bits."""
    return None if "norm" in name or "router" in name else "Q4_K"


def _kept(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What is no expert, without the frequencies: llama.cpp makes them from their base."""
    return ((name, shape) for name, shape in shapes_of(spec).items() if not name.startswith("rope."))


def _listed(spec: ModelSpec, experts: str) -> Iterator[tuple[str, tuple[int, ...], str | None]]:
    """In the order in which they are written; the experts of a layer are one tensor for each projection."""
    for name, shape in _kept(spec):
        yield gguf_name(name), shape, _kind(name)
    for _, layer in spec.moe_layers():
        for part in spec.moe.ffn.projections:
            yield f"blk.{layer}.ffn_{part}_exps.weight", (spec.moe.n, *spec.projection_shape(part)), experts


def _stored_shape(shape: tuple[int, ...], kind: str | None) -> tuple[int, ...]:
    """Rows count in bytes where they are coded."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind is None:
        return shape
    weights, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return (*shape[:-1], shape[-1] // weights * nbytes)


def _stored(shape: tuple[int, ...], kind: str | None) -> tuple[np.dtype[Any], int, Any]:
    """The type of a tensor's array, its bytes, and its type in the file where that is another."""
    from gguf import GGMLQuantizationType

    dtype = np.dtype(np.float32 if kind is None else np.uint8)
    nbytes = prod(_stored_shape(shape, kind)) * dtype.itemsize
    return dtype, nbytes, None if kind is None else GGMLQuantizationType[kind]


class _Quantizer:
    """llama.cpp's own, of the library that it runs with."""

    def __init__(self) -> None:
        import llama_cpp

        (path,) = Path(llama_cpp.__file__).parent.glob("lib/libggml-base.so")
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._function = ctypes.CDLL(str(path)).ggml_quantize_chunk
        self._function.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
        self._function.restype = ctypes.c_size_t

    def __call__(self, weights: F32, kind: str) -> U8:
        """weights [rows, in] → their blocks [rows, bytes]. Raises SystemExit if they come out of another size."""
        out = np.empty(_stored_shape(weights.shape, kind), np.uint8)
        values = np.ascontiguousarray(weights)
        if self._function(MODELS[kind], values.ctypes.data, out.ctypes.data, 0, *weights.shape, None) != out.nbytes:
            raise SystemExit(f"llama.cpp could not make {kind}")
        return out


def make(folder: Path = FOLDER, spec: ModelSpec = OLMOE) -> None:
    """Writes the file of each of MODELS, where it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        if not file_of(name, folder).exists():
            with atomic_write(file_of(name, folder)) as fresh:
                write(fresh, spec, name)


def make_like(pack: Path, kind: str, out: Path) -> None:
    """The model of a pack that recipes.bench.shaped.write_pack wrote with experts `alike`, where it is not there."""
    from moert.pack.reader import Pack

    if not out.exists():
        with atomic_write(out) as fresh:
            write(fresh, Pack.open(pack).manifest.model, kind, alike=True)


def file_of(name: str, folder: Path = FOLDER) -> Path:
    """The file of one model; its name has the seed, so that another seed makes another file."""
    return folder / f"{name}-equal-{SEED}.gguf"


def bytes_per_token(path: Path, spec: ModelSpec = OLMOE) -> int:
    """What one token reads of the weights: all but the embeddings, and top_k experts of each layer."""
    from gguf import GGUFReader

    total = 0.0
    for tensor in GGUFReader(path).tensors:
        if "_exps" in tensor.name:
            total += int(tensor.n_bytes) * spec.moe.router.top_k / spec.moe.n
        elif tensor.name != "token_embd.weight":
            total += int(tensor.n_bytes)
    return round(total)


def expert_bits(path: Path) -> float:
    """Bits of an expert's weight, scales counted."""
    from gguf import GGUFReader

    experts = [tensor for tensor in GGUFReader(path).tensors if "_exps" in tensor.name]
    return 8 * sum(int(tensor.n_bytes) for tensor in experts) / sum(int(tensor.n_elements) for tensor in experts)


def built() -> str:
    """Returns the processor's extensions that the library was compiled with and finds here, in its own words."""
    import llama_cpp

    found = re.findall(r"(\w+) = 1", llama_cpp.llama_print_system_info().decode())
    return ", ".join(name for name in found if name not in ("OPENMP", "LLAMAFILE", "REPACK"))


class Llama:
    """A session (see recipes/bench/runner.py) of llama.cpp's own C functions, without the package's Python loop."""

    def __init__(self, path: Path, repack: bool, mmap: bool, context: int) -> None:
        import llama_cpp

        self._c = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        loading = llama_cpp.llama_model_default_params()
        loading.use_extra_bufts = repack
        loading.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if mmap else llama_cpp.LLAMA_LOAD_MODE_NONE
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), loading)
        if not self._model:
            raise SystemExit(f"llama.cpp can't load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context, BATCH, BATCH
        settings.n_threads = settings.n_threads_batch = THREADS
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise SystemExit(f"llama.cpp has no memory to run {path}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._path, self._mmap, self._most, self._latest = path, mmap, context, 0

    def generate(
        self, ids: list[int], new_tokens: int, written: Sequence[int] = ()
    ) -> tuple[list[int], float, float]:  # fmt: skip
        """`written`: the tokens to be written, whichever the model likes best, as far as there are any."""
        started = time.perf_counter()
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), False)
        best = [int(self._forward(ids).argmax())]
        first_s = time.perf_counter() - started
        while len(best) < new_tokens:
            at = len(best) - 1
            best.append(int(self._forward([written[at] if at < len(written) else best[-1]]).argmax()))
        return best, first_s, time.perf_counter() - started

    def read(self, ids: list[int], room: int) -> None:
        assert len(ids) + room <= self._most
        self._latest = self.generate(ids, 1)[0][0]

    def go_on(self, new_tokens: int) -> float:
        started = time.perf_counter()
        for _ in range(new_tokens):
            self._latest = int(self._forward([self._latest]).argmax())
        return time.perf_counter() - started

    def forget(self) -> None:
        """What is asked next clears its memory."""

    def logits(self, ids: list[int]) -> list[float]:
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), False)
        return [float(value) for value in self._forward(ids)]

    def fill(self) -> None:
        """Nothing is left to be read, if the file is not mapped."""
        if self._mmap:
            raise SystemExit("a file that is mapped comes into memory as it is used: load it with --no-mmap")

    def expert_bits(self) -> float:
        return expert_bits(self._path)

    def bytes_per_token(self) -> int:
        return bytes_per_token(self._path)

    def _forward(self, ids: list[int]) -> F32:
        """Appends the tokens → logits [vocab] after the last."""
        for piece in (ids[start : start + BATCH] for start in range(0, len(ids), BATCH)):
            array = (ctypes.c_int32 * len(piece))(*piece)
            if self._c.llama_decode(self._context, self._c.llama_batch_get_one(array, len(piece))):
                raise SystemExit("llama.cpp could not run a batch")
        return np.ctypeslib.as_array(self._c.llama_get_logits_ith(self._context, -1), (self._vocab,))


def main() -> None:
    if sys.argv[1:] == ["make"]:
        make()
    elif sys.argv[1:] == ["built"]:
        print(built())
    elif sys.argv[1:2] == ["like"]:
        pack, kind, out = sys.argv[2:]
        make_like(Path(pack), kind, Path(out))
    else:
        path, options = Path(sys.argv[1]), sys.argv[2:]
        context = LONG_CONTEXT if "--long" in options else CONTEXT
        serve(lambda: Llama(path, "--no-repack" not in options, "--no-mmap" not in options, context))


if __name__ == "__main__":
    as_program(main, __doc__, "make | built | like PACK KIND OUT | FILE [--long] [--no-repack] [--no-mmap]")
