"""llama.cpp as a peer, run by the Python of build/peers/llama: writes the OLMoE-shaped GGUF files and times them.

`python -m tests.bench.llama make` writes the files, `python -m tests.bench.llama FILE [--no-repack] [--no-mmap]` runs
one as a session of tests/bench/runner.py. A file that is mapped comes into memory page by page as it is used; without,
all of it is read at the start.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moert.pack.codec import F16, F32
from moert.pack.files import atomic_write
from moert.pack.model_spec import ExpertKey, ModelSpec
from tests.bench.runner import serve
from tests.bench.shaped import FOLDER, OLMOE, SEED, THREADS, projection, weight
from tests.shapes import THETA, shapes_of

MODELS = {"Q4_K": 12, "Q2_K": 10}
"""The type of the experts → its number in ggml; all other matrices are Q4_K. llama.cpp's own mixtures (Q4_K_M, Q2_K)
would give some of the experts' matrices more bits, and the comparison is at equal bits."""
_MOSTLY_Q4_K = 15  # llama.cpp's number of the file type
CONTEXT = 8448
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


def write_half(path: Path, spec: ModelSpec = OLMOE) -> None:
    """The model with 16-bit matrices, one tensor in memory at a time."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, spec.family)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_context_length(spec.max_positions or 0)
    writer.add_embedding_length(spec.d_model)
    writer.add_block_count(len(spec.decoder))
    writer.add_feed_forward_length(spec.moe.ffn.d_ff)
    attention = spec.decoder[0].attention
    assert attention is not None
    writer.add_head_count(attention.n)
    writer.add_head_count_kv(attention.kv)
    writer.add_layer_norm_rms_eps(spec.decoder.norm.eps)
    writer.add_rope_freq_base(THETA)
    writer.add_expert_count(spec.moe.n)
    writer.add_expert_used_count(spec.moe.router.top_k)
    writer.add_file_type(1)  # mostly 16 bits
    for name, shape in _shapes(spec):
        dtype = np.dtype(_dtype(name))
        writer.add_tensor_info(name, shape, dtype, int(np.prod(shape)) * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for (name, _), values in zip(_shapes(spec), _tensors(spec), strict=True):
        writer.write_tensor_data(values.astype(_dtype(name), copy=False))
    writer.close()


def _dtype(name: str) -> type[np.floating[Any]]:
    """As llama.cpp's own converter chooses: norms and routers keep 32 bits."""
    return np.float32 if "norm" in name or "ffn_gate_inp" in name else np.float16


def _kept(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What is no expert, without the frequencies: llama.cpp makes them from their base."""
    return ((name, shape) for name, shape in shapes_of(spec).items() if not name.startswith("rope."))


def _shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in _kept(spec):
        yield gguf_name(name), shape
    for _, layer in spec.moe_layers():
        for part in spec.moe.ffn.projections:
            yield f"blk.{layer}.ffn_{part}_exps.weight", (spec.moe.n, *spec.projection_shape(part))


def _tensors(spec: ModelSpec) -> Iterator[F16 | F32]:
    """In the order of `_shapes`; the experts of a layer are one tensor for each projection."""
    for name, shape in _kept(spec):
        yield weight(name, shape)
    for _, layer in spec.moe_layers():
        for part in spec.moe.ffn.projections:
            joined = np.empty((spec.moe.n, *spec.projection_shape(part)), np.float16)
            for expert in range(spec.moe.n):
                joined[expert] = projection(spec, ExpertKey("decoder", layer, expert), part)
            yield joined


def make(folder: Path = FOLDER, spec: ModelSpec = OLMOE) -> None:
    """Writes the file of each of MODELS by llama.cpp's own quantiser, where it is not there."""
    import llama_cpp

    folder.mkdir(parents=True, exist_ok=True)
    missing = {name: kind for name, kind in MODELS.items() if not file_of(name, folder).exists()}
    if not missing:
        return
    half = folder / "half.gguf"
    write_half(half, spec)
    for name, kind in missing.items():
        settings = llama_cpp.llama_model_quantize_default_params()
        experts = (llama_cpp.llama_model_tensor_override * 2)()  # the last is empty and ends the list
        experts[0].pattern, experts[0].type = b"ffn_(gate|up|down)_exps", kind
        settings.ftype, settings.pure, settings.nthread = _MOSTLY_Q4_K, True, THREADS
        settings.tt_overrides = experts
        with atomic_write(file_of(name, folder)) as fresh:
            if llama_cpp.llama_model_quantize(str(half).encode(), str(fresh).encode(), ctypes.byref(settings)):
                raise SystemExit(f"llama.cpp could not make {name}")
    half.unlink()


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


class Llama:
    """A session (see tests/bench/runner.py) of llama.cpp's own C functions, without the package's Python loop."""

    def __init__(self, path: Path, repack: bool, mmap: bool) -> None:
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
        settings.n_ctx, settings.n_batch, settings.n_ubatch = CONTEXT, BATCH, BATCH
        settings.n_threads = settings.n_threads_batch = THREADS
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise SystemExit(f"llama.cpp has no memory to run {path}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._path, self._mmap, self._latest = path, mmap, 0

    def generate(self, ids: list[int], new_tokens: int) -> tuple[list[int], float, float]:
        started = time.perf_counter()
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), False)
        tokens = [int(self._forward(ids).argmax())]
        first_s = time.perf_counter() - started
        while len(tokens) < new_tokens:
            tokens.append(int(self._forward(tokens[-1:]).argmax()))
        return tokens, first_s, time.perf_counter() - started

    def read(self, ids: list[int], room: int) -> None:
        assert len(ids) + room <= CONTEXT
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
    else:
        path, options = Path(sys.argv[1]), sys.argv[2:]
        serve(lambda: Llama(path, repack="--no-repack" not in options, mmap="--no-mmap" not in options))


if __name__ == "__main__":
    main()
