"""GGUF files: the header, a config and a tokenizer made of the metadata, and some tensors read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from moeconv.errors import ConversionError
from moeconv.source.gguf.container import read_container
from moeconv.source.gguf.folder import files_of
from moeconv.source.gguf.tensors import GgufTensors
from tests.fuzz.target import Target
from tests.fuzz.targets.packs import folder

TOKENS = ["<unk>", "<s>", "</s>", "<0x61>", "a", "b", "ab", "Ġ"]
_COUNTS = {
    "block_count": 2, "context_length": 64, "embedding_length": 8, "feed_forward_length": 6, "expert_count": 2,
    "expert_used_count": 1, "expert_feed_forward_length": 6, "expert_shared_feed_forward_length": 6,
    "attention.head_count": 2, "attention.head_count_kv": 1, "ssm.conv_kernel": 2, "ssm.inner_size": 8,
    "ssm.state_size": 4, "ssm.time_step_rank": 2, "ssm.group_count": 1, "rope.dimension_count": 4,
    "attention.kv_lora_rank": 4, "attention.key_length": 4, "attention.value_length": 4,
    "attention.key_length_swa": 4,
}  # fmt: skip


def read(body: bytes) -> None:
    file = folder() / "model.gguf"
    file.write_bytes(body)
    tensors = GgufTensors(read_container(file))
    for name in sorted(tensors.names)[:4]:
        tensors.fetch(name)
        if len(tensors.shapes.get(name, ())) > 1:
            tensors.fetch(name, 0)
    files_of(tensors)


def _seed(arch: str, kind: str, tensors: dict[str, Any]) -> bytes:
    file = folder() / "seed.gguf"
    writer, key = gguf.GGUFWriter(file, arch), "tokenizer.ggml."
    for name, count in _COUNTS.items():
        writer.add_uint32(f"{arch}.{name}", count)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string(f"{key}model", kind)
    writer.add_string(f"{key}pre", "qwen2")
    writer.add_array(f"{key}tokens", TOKENS)
    writer.add_array(f"{key}token_type", [2, 3, 3, 6, 1, 1, 1, 1])
    writer.add_array(f"{key}scores", [0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -0.5, -3.0])
    writer.add_array(f"{key}merges", ["a b"])
    writer.add_uint32(f"{key}eos_token_id", 2)
    writer.add_bool(f"{key}add_bos_token", True)
    for name, tensor in {"token_embd.weight": np.ones((8, 8), np.float16), **tensors}.items():
        coded = len(tensor) == 1
        writer.add_tensor(name, tensor, raw_dtype=gguf.GGMLQuantizationType.Q4_0 if coded else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(file).read_bytes()


def seeds() -> list[bytes]:
    """Some architectures and both kinds of tokenizers."""
    coded = gguf.quants.quantize(np.ones((1, 32), np.float32), gguf.GGMLQuantizationType.Q4_0)
    return [
        _seed("llama", "gpt2", {"rope_freqs.weight": np.ones(2, np.float32), "blk.0.ffn_up_exps.weight": coded}),
        _seed(
            "jamba",
            "llama",
            {
                "blk.0.ssm_a": np.ones((2, 2), np.float32),
                "blk.1.attn_q.weight": np.ones((2, 2), np.float32),
                "blk.1.ffn_gate_inp.weight": np.ones((2, 2), np.float32),
            },
        ),
        _seed("deepseek2", "gemma4", {"blk.0.exp_probs_b.bias": np.ones(2, np.float32)}),
        _seed("gemma4", "t5", {"blk.0.attn_v.weight": np.ones((4, 8), np.float16)}),
    ]


TARGET = Target(read, (ConversionError,), seeds, longest=8192)
