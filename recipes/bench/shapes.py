"""Writes a checkpoint of a published shape: `python -m recipes.bench.shapes olmoe --layers 16 --out DIR`.

Numbers are those of recipes/bench/shape_numbers.py. They are made and written some rows at a time, so memory does not
grow with the model. The tokenizer is the wiki model's, whose ids every vocabulary here has. `--virtual` writes all but
the weights, for a process that makes them when they are read (recipes/bench/virtual.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from tqdm import tqdm

from moeconv.source.outline import CONFIG, GENERATION_CONFIG
from moeconv.source.tensors import INDEX
from moert.pack.files import write_atomically
from recipes.bench.program import as_program
from recipes.bench.shape_numbers import MODELS, Stored, config_of
from recipes.bench.virtual import SEED, VirtualTensors, mark

TOKENIZER = Path("recipes/models/wiki")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
SHARD_BYTES = 5_000_000_000
AT_ONCE_BYTES = 32 << 20
_ALIGNED = 8
_NAMES = {
    torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip


def depth_of(model: str) -> int:
    """Layers as published."""
    return int(config_of(model)["num_hidden_layers"])


def shards(tensors: Sequence[Stored], shard_bytes: int) -> list[list[Stored]]:
    """In their order, each shard with as many as fit into so many bytes, and at least one."""
    found: list[list[Stored]] = [[]]
    size = 0
    for each in tensors:
        if found[-1] and size + each.nbytes > shard_bytes:
            found.append([])
            size = 0
        found[-1].append(each)
        size += each.nbytes
    return found


def write_outline(model: str, layers: int | None, out: Path) -> None:
    """config.json, generation_config.json and the tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / CONFIG, _json(config_of(model, layers)))
    write_atomically(out / GENERATION_CONFIG, _json({"eos_token_id": config_of(model, layers)["eos_token_id"]}))
    for name in TOKENIZER_FILES:
        shutil.copyfile(TOKENIZER / name, out / name)


def write_weights(tensors: VirtualTensors, out: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """All shards, and behind them the index, without which nothing reads them. Raises OSError."""
    parts = shards(list(tensors.stored.values()), shard_bytes)
    weight_map = {}
    with tqdm(total=tensors.nbytes, unit="B", unit_scale=True, mininterval=1.0, desc=out.name) as bar:
        for at, part in enumerate(parts, 1):
            name = f"model-{at:05}-of-{len(parts):05}.safetensors"
            weight_map.update(dict.fromkeys((each.name for each in part), name))
            with open(out / name, "wb") as file:
                file.write(header(part))
                for each in part:
                    _write(tensors, each, file, bar)
    found = {"metadata": {"total_size": tensors.nbytes}, "weight_map": weight_map}
    write_atomically(out / INDEX, _json(found))


def header(tensors: Sequence[Stored]) -> bytes:
    """Of a safetensors file that has these, one behind the other."""
    entries, at = {}, 0
    for each in tensors:
        place = [at, at + each.nbytes]
        entries[each.name] = {"dtype": _NAMES[each.dtype], "shape": list(each.shape), "data_offsets": place}
        at += each.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def some_rows(of: Stored) -> Iterator[tuple[int, int]]:
    """All of its first dimension, about AT_ONCE_BYTES at once."""
    step = max(1, AT_ONCE_BYTES * of.shape[0] // of.nbytes)
    for start in range(0, of.shape[0], step):
        yield start, min(start + step, of.shape[0])


def _write(tensors: VirtualTensors, of: Stored, file: BinaryIO, bar: tqdm[None]) -> None:
    for start, stop in some_rows(of):
        rows = tensors.numbers.rows(of, start, stop)
        file.write(rows.contiguous().view(torch.uint8).numpy().data)
        bar.update(rows.nbytes)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write a checkpoint of a published shape with random numbers.")
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--layers", type=int, help="how many of its layers; all by default")
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet, or is empty")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--virtual", action="store_true", help="only config and tokenizer, no weights")
    return parser.parse_args()


def main() -> int:
    asked = _asked()
    try:
        config = config_of(asked.model, asked.layers)
    except ValueError as error:
        return _refused(str(error))
    if asked.out.exists() and (not asked.out.is_dir() or any(asked.out.iterdir())):
        return _refused(f"{asked.out} is there already: name another folder with --out, or remove it")
    if asked.virtual:
        write_outline(asked.model, asked.layers, asked.out)
        mark(asked.out, depth_of(asked.model), asked.seed)
        return 0
    tensors = VirtualTensors(config, depth_of(asked.model), asked.seed)
    if (lacks := _room(tensors.nbytes, asked.out)) is not None:
        return _refused(lacks)
    torch.set_num_threads(1)  # what one core makes is more than a disk takes, and two wait for each other
    write_outline(asked.model, asked.layers, asked.out)
    try:
        write_weights(tensors, asked.out)
    except OSError as error:
        return _refused(f"{asked.out} can't be written ({error.strerror}): remove it, make room and begin again")
    print(f"{asked.out}: {tensors.nbytes / 1e9:.1f} GB in {len(tensors.names)} tensors, seed {asked.seed}")
    return 0


def _room(nbytes: int, out: Path) -> str | None:
    """What is wrong if the disk has too little left; None if it has enough."""
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free > nbytes:
        return None
    return f"{out} needs {nbytes / 1e9:.1f} GB, and the disk has {free / 1e9:.1f} GB left: make room or name another"


def _refused(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


if __name__ == "__main__":
    as_program(main)
