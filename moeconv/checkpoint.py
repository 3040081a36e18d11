"""A Hugging Face checkpoint on disk, read lazily: one tensor or one expert at a time, never the whole model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moeconv.archs import ARCHS, Arch, UnsupportedModel
from moeconv.errors import ConversionError
from moert.pack.model_spec import ExpertKey, ModelSpec, contradictions

F32 = npt.NDArray[np.float32]

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "spiece.model", "chat_template.jinja",
)  # fmt: skip
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_CHUNK = 1 << 20


class CheckpointError(ConversionError):
    """The checkpoint can't be read. The message is one line that says what was found and what to do."""


@dataclass
class Checkpoint:
    """An open checkpoint. Make one with `Checkpoint.open`; its files are opened when they are first needed."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    arch: Arch
    spec: ModelSpec
    files: Mapping[str, Path]  # name of a tensor → the file that holds it
    _open: dict[Path, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path_or_hub_id: str | Path) -> Checkpoint:
        """Opens a local directory, or fetches (or finds in the cache) a model of that id. Raises CheckpointError."""
        path = _find(str(path_or_hub_id))
        config = _json_object(path / "config.json")
        if config is None:
            raise CheckpointError(f"{path} has no config.json: give a directory with a Hugging Face model")
        generation_config = _json_object(path / "generation_config.json") or {}
        arch = ARCHS.get(str(config.get("model_type")))
        if arch is None:
            raise CheckpointError(
                f"{path}: model_type {config.get('model_type')!r} is not supported; supported: {', '.join(ARCHS)}"
            )
        try:
            spec = arch.spec(config, generation_config)
        except UnsupportedModel as error:
            raise CheckpointError(f"{path}: {error}") from None
        except ModuleNotFoundError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{path / 'config.json'} is not a valid {arch.model_type} config: {_line(error)}"
            ) from None
        counts = (spec.vocab_size, spec.d_model, spec.n_heads, spec.n_kv_heads, spec.head_dim)
        if min(*counts, spec.moe.num_experts, spec.moe.top_k, spec.moe.d_ff) < 1:
            raise CheckpointError(f"{path / 'config.json'}: every size and count in it should be at least 1")
        if (contradiction := next(contradictions(spec), None)) is not None:
            raise CheckpointError(f"{path / 'config.json'} can't be converted: {contradiction}")
        if not spec.moe_layers():
            raise CheckpointError(f"{path}: the model has no layer with experts, so there is nothing to convert")
        checkpoint = cls(path, config, generation_config, arch, spec, _tensor_files(path))
        checkpoint._check_names()
        checkpoint._check_equal()
        return checkpoint

    @cached_property
    def source_dtype(self) -> str:
        """ "BF16", "F16" or "F32": how the experts are stored."""
        first = self.arch.expert_name(self.spec.expert_keys()[0], "up")
        dtype = self.raw_tensor(first).dtype
        if dtype not in _DTYPES:
            raise CheckpointError(f"{self.path}: {first} is stored as {dtype}; expected bfloat16, float16 or float32")
        return _DTYPES[dtype]

    @cached_property
    def tokenizer_files(self) -> list[str]:
        """Names of the tokenizer's files, relative to `path`."""
        return [name for name in TOKENIZER_FILES if (self.path / name).is_file()]

    def raw_tensor(self, name: str) -> torch.Tensor:
        """One tensor by its name in the checkpoint, in its own dtype. Raises CheckpointError."""
        file = self.files.get(name)
        if file is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}: the checkpoint is incomplete")
        try:
            return self._read(file, name)
        except Exception as error:
            if self._reads_well(file, name):  # Ctrl-C inside the library comes out as some error of its own
                raise KeyboardInterrupt from None
            raise CheckpointError(
                f"{file} is missing or damaged ({_line(error)}): fetch the checkpoint again"
            ) from None

    def _read(self, file: Path, name: str) -> torch.Tensor:
        if file not in self._open:
            from safetensors import safe_open

            self._open[file] = safe_open(file, framework="pt")
        tensor: torch.Tensor = self._open[file].get_tensor(name)
        return tensor

    def _reads_well(self, file: Path, name: str) -> bool:
        self._open.pop(file, None)
        with suppress(Exception):
            self._read(file, name)
            return True
        return False

    def tensor(self, name: str) -> F32:
        """One tensor by its name in the checkpoint, as float32. Raises CheckpointError."""
        return self.raw_tensor(name).float().numpy()

    def expert(self, key: ExpertKey) -> dict[str, F32]:
        """Projection → weights [out, in] of one expert."""
        weights = {}
        for projection in self.spec.moe.projections:
            name = self.arch.expert_name(key, projection)
            weights[projection] = self._shaped(name, self.spec.projection_shape(projection)).float().numpy()
        return weights

    def check_finite(self) -> None:
        """Reads every expert. Raises CheckpointError naming the first with a value that is not finite."""
        for key in self.spec.expert_keys():
            for projection, weight in self.expert(key).items():
                if not np.isfinite(weight).all():
                    raise CheckpointError(
                        f"expert {key}, {projection} holds values that are not finite: the checkpoint is damaged"
                    )

    def backbone_tensor(self, canonical: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor that stays unquantised, by its canonical name, in its own dtype."""
        return self._shaped(self._backbone_names[canonical], shape)

    @cached_property
    def sha256(self) -> str:
        """Hash of the configs and of every weight file, in order of name."""
        digest = hashlib.sha256()
        configs = [self.path / "config.json", self.path / "generation_config.json"]
        for file in [path for path in configs if path.is_file()] + sorted(set(self.files.values())):
            digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
            with open(file, "rb") as handle:
                while chunk := handle.read(_CHUNK):
                    digest.update(chunk)
        return digest.hexdigest()

    @cached_property
    def _backbone_names(self) -> dict[str, str]:
        return self.arch.backbone_names(self.spec)

    def _shaped(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self.raw_tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self.path}: {name} has the shape {tuple(tensor.shape)}, config.json implies {shape}"
            )
        return tensor

    def _check_names(self) -> None:
        wanted = list(self._backbone_names.values())
        for key in self.spec.expert_keys():
            wanted += [self.arch.expert_name(key, projection) for projection in self.spec.moe.projections]
        missing = [name for name in wanted if name not in self.files]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{self.path} has no tensor {missing[0]!r}{more}: the checkpoint is incomplete")

    def _check_equal(self) -> None:
        for one, other in self.arch.equal_tensors(self.spec):
            both = one in self.files and other in self.files
            if both and not torch.equal(self.raw_tensor(one), self.raw_tensor(other)):
                raise CheckpointError(f"{self.path}: {one} and {other} differ; a pack can hold only one of them")


def _find(path_or_hub_id: str) -> Path:
    path = Path(path_or_hub_id)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file: give the directory that holds config.json and the weights")
    if path_or_hub_id.count("/") > 1 or path_or_hub_id.startswith((".", "/", "~")) or not path_or_hub_id:
        raise CheckpointError(f"there is no directory {path_or_hub_id!r}: give a local model or a hub id")
    return _from_hub(path_or_hub_id)


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])
        )
    except Exception as error:
        raise CheckpointError(
            f"{hub_id!r} is neither a local directory nor a hub model that can be fetched now ({_line(error)})"
        ) from None


def _json_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read as JSON ({_line(error)}): fetch the checkpoint again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should hold a JSON object, found a {type(value).__name__}")
    return value


def _tensor_files(path: Path) -> dict[str, Path]:
    index = _json_object(path / _INDEX)
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{path / _INDEX} lacks its weight_map: fetch the checkpoint again")
        files = {name: path / file for name, file in weight_map.items()}
        for file in sorted(set(files.values())):
            if not file.is_file():
                raise CheckpointError(f"{file} is named in {_INDEX} but missing: fetch the checkpoint again")
        return files
    single = path / _SINGLE
    if not single.is_file():
        raise CheckpointError(f"{path} has neither {_SINGLE} nor {_INDEX}: only safetensors checkpoints can be read")
    try:
        from safetensors import safe_open

        with safe_open(single, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), single)
    except Exception as error:
        raise CheckpointError(f"{single} is damaged ({_line(error)}): fetch the checkpoint again") from None


def _line(error: BaseException) -> str:
    """The message of an error on one line of moderate length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "…"
