"""A GGUF file opened as a checkpoint: its tensors, and a folder of small files for its config and tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from weakref import finalize

from moeconv.source.gguf.container import read_container
from moeconv.source.gguf.facts import Facts
from moeconv.source.gguf.names import ARCHS, REFUSED
from moeconv.source.gguf.settings import EMBED
from moeconv.source.gguf.tensors import GgufTensors
from moeconv.source.gguf.tokenizer import KEY, Vocabulary, begins, special, tokenizer_of, vocabulary
from moeconv.source.outline import CONFIG, GENERATION_CONFIG, GGUF, CheckpointError
from moert.pack.messages import nearest
from moert.pack.tensors import TOKENIZER

_TOKENIZER_CONFIG = "tokenizer_config.json"
_ENDS = ("eos", "eot", "eom")  # of a text, of a turn, of a message


def is_gguf(path: Path) -> bool:
    """Returns whether a path is called as GGUF files are, and is no folder."""
    return path.name.lower().endswith(GGUF) and not path.is_dir()


def opened(file: Path) -> tuple[Path, GgufTensors]:
    """Returns a folder with the config and the tokenizer of a GGUF file, and the file's tensors, with which the folder
    goes. Raises CheckpointError."""
    if not file.is_file():
        raise CheckpointError(f"there is no file {str(file)!r}: give a local model or a hub id")
    tensors = GgufTensors(read_container(file))
    bodies = files_of(tensors)
    around = Path(mkdtemp(prefix="moeconv-gguf-"))
    finalize(tensors, _remove, around, os.getpid())
    folder = around / file.name
    folder.mkdir()
    for name, body in bodies.items():
        (folder / name).write_text(body, encoding="utf-8")
    return folder, tensors


def _remove(folder: Path, owner: int) -> None:
    """Removes a folder, in the process that made it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def files_of(tensors: GgufTensors) -> Mapping[str, str]:
    """Returns name → text of the files of a model's folder. Raises CheckpointError."""
    metadata = tensors.container.metadata
    facts = Facts(tensors.container, tensors.numbers)
    arch = ARCHS.get(facts.arch)
    if arch is None:
        why = REFUSED.get(facts.arch) or nearest(facts.arch, ARCHS)
        raise CheckpointError(f"{tensors.path}: the architecture {facts.arch[:60]!r} is not supported: {why}")
    try:
        config = arch.config(facts)
    except (ArithmeticError, ValueError) as error:  # of sizes that fit nothing
        raise CheckpointError(f"{tensors.path}: its metadata fit no model ({error})") from None
    found = vocabulary(metadata, tensors.shapes[EMBED][0])
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # no class's own
    if found is None:
        return {CONFIG: json.dumps({**none, **config}) + "\n"}
    ends = dict.fromkeys(each for name in _ENDS if (each := special(metadata, name, found.tokens)) is not None)
    ids = {"bos": special(metadata, "bos", found.tokens), "pad": special(metadata, "padding", found.tokens)}
    named: dict[str, Any] = {f"{name}_token_id": each for name, each in ids.items() if each is not None}
    if ends:
        named["eos_token_id"] = [*ends]
    files: dict[str, Any] = {
        CONFIG: {**none, **named, **config}, GENERATION_CONFIG: named,
        _TOKENIZER_CONFIG: _tokenizer_config(tensors, found, ids),
    }  # fmt: skip
    texts = {name: json.dumps(value) + "\n" for name, value in files.items()}
    return {**texts, TOKENIZER: tokenizer_of(metadata, found)}


def _tokenizer_config(tensors: GgufTensors, found: Vocabulary, ids: Mapping[str, int | None]) -> dict[str, Any]:
    metadata = tensors.container.metadata
    all_ids = {**ids, "eos": special(metadata, "eos", found.tokens), "unk": special(metadata, "unknown", found.tokens)}
    chat = metadata.get("tokenizer.chat_template", str)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": begins(metadata),
        "add_eos_token": bool(metadata.get(KEY + "add_eos_token", bool, False)),
        **{f"{name}_token": found.tokens[number] for name, number in all_ids.items() if number is not None},
        **({} if chat is None else {"chat_template": chat}),
    }  # fmt: skip
