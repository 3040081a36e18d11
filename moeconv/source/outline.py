"""A model as its config.json says it is, without its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeconv.errors import ConversionError
from moeconv.source.archs import FAMILIES, Description, Family, UnsupportedModel
from moeconv.source.archs.errors import ConfigInvalid
from moeconv.source.places import is_plain, stray
from moeconv.strict_json import NotJson, bounded, parse
from moert.pack.documents import brief, plain, read
from moert.pack.errors import ManifestInvalid
from moert.pack.model_spec import ModelSpec

CONFIG, GENERATION_CONFIG, CODED = "config.json", "generation_config.json", "hf_quant_config.json"
MAX_JSON_BYTES = 1 << 27  # of any JSON file; the index of the largest model published has an eighth of it
MOST_EXPERTS = 1 << 20  # of a model: no manifest could list more
_LONGEST = 600
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_SETTINGS = (CONFIG, GENERATION_CONFIG, CODED)
_OF_TEXT = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja", "tokenization_*.py")
_COPIES = ("original/*", "consolidated*", "metal/*", "onnx/*", "openvino/*")
"""Of weights in other forms, beside those that transformers reads."""


class CheckpointError(ConversionError):
    """The checkpoint can't be read. The message is one line that says what was found and what to do."""


@dataclass(frozen=True)
class Outline:
    """`config` and `generation_config` as JSON objects, and what its family makes of them."""

    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    family: Family
    description: Description

    @classmethod
    def read(cls, file: Path) -> Outline:
        """Of a config.json, and the generation_config.json beside it, if there is one. Raises CheckpointError."""
        config = json_object(file)
        if config is None:
            raise CheckpointError(f"{file.parent} has no {file.name}: give a directory with a Hugging Face model")
        found = cls.of(config, json_object(file.parent / GENERATION_CONFIG) or {}, file)
        said = (json_object(file.parent / CODED) or {}).get("quantization")
        if isinstance(said, dict) and said.get("quant_algo"):
            raise CheckpointError(
                f"{file.parent / CODED} says that the weights are coded by {brief(said['quant_algo'])}, which can't be "
                "read: take a checkpoint in bf16"
            )
        return found

    @classmethod
    def of(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any], file: Path) -> Outline:
        """`file`: what messages say of where it lies. Raises CheckpointError."""
        family = FAMILIES.get(str(config.get("model_type")))
        if family is None:
            raise CheckpointError(
                f"{file.parent}: model_type {brief(config.get('model_type'))} is not supported; "
                f"supported: {', '.join(FAMILIES)}"
            )
        try:
            description = family.description(config, generation_config)
        except UnsupportedModel as error:
            raise CheckpointError(f"{file.parent}: {line(error, _LONGEST)}") from None
        except ConfigInvalid as error:
            raise CheckpointError(f"{file} is not a valid {family.model_type} config: {line(error)}") from None
        except (ConversionError, ImportError):
            raise
        except Exception as error:  # of arithmetic with what config.json says, here and in transformers
            raise CheckpointError(
                f"{file} is not a valid {family.model_type} config ({type(error).__name__}: {line(error)})"
            ) from error
        _check(description.spec, file)
        return cls(config, generation_config, family, description)

    @property
    def spec(self) -> ModelSpec:
        return self.description.spec


def _check(spec: ModelSpec, file: Path) -> None:
    """Raises CheckpointError for what no pack could say."""
    try:
        read(ModelSpec, plain(spec), f"{file} can't be converted: the model", closed=True)
    except ManifestInvalid as error:
        raise CheckpointError(str(error)) from None
    if (contradiction := next(spec.contradictions(), None)) is not None:
        raise CheckpointError(f"{file} can't be converted: {contradiction}")
    if (count := len(spec.experts) * spec.moe.n) > MOST_EXPERTS:
        raise CheckpointError(f"{file} can't be converted: it has {count} experts, a pack at most {MOST_EXPERTS}")


def find(path_or_hub_id: str, weights: bool = True) -> Path:
    """A local directory, or that of a hub model, which is fetched (or found in the cache); of it only
    settings and index, if not its `weights` too. Raises CheckpointError."""
    path = Path(path_or_hub_id)
    if path.is_dir():
        if (link := stray(path)) is not None:
            raise CheckpointError(f"{link} is a link that leads out of {path}: put the file itself there")
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file: give the directory that holds config.json and the weights")
    if path_or_hub_id.count("/") > 1 or path_or_hub_id.startswith((".", "/", "~")) or not path_or_hub_id:
        raise CheckpointError(f"there is no directory {path_or_hub_id!r}: give a local model or a hub id")
    return _from_hub(path_or_hub_id, weights)


def _from_hub(hub_id: str, weights: bool) -> Path:
    """The folder of its files in the hub's cache: of several copies of its weights only those that are read."""
    from huggingface_hub import snapshot_download

    def fetched(patterns: Sequence[str], revision: str | None = None) -> Path:
        return Path(
            snapshot_download(hub_id, revision=revision, allow_patterns=[*patterns], ignore_patterns=[*_COPIES])
        )

    try:
        path = fetched([*_SETTINGS, INDEX, *(_OF_TEXT if weights else ())])
        if weights:
            index = json_object(path / INDEX)
            fetched([SINGLE] if index is None else sorted(set(indexed_files(path, index).values())), path.name)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{hub_id!r} is neither a local directory nor a hub model that can be fetched now ({line(error)})"
        ) from None
    return path


def indexed_files(path: Path, index: Mapping[str, Any]) -> Mapping[str, str]:
    """Name of each tensor → the file that holds it, inside the folder `path`, as its index says. Raises
    CheckpointError."""
    found = index.get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise CheckpointError(f"{path / INDEX} lacks its weight_map: fetch the checkpoint again")
    if (strange := next((file for file in found.values() if not is_plain(file)), None)) is not None:
        raise CheckpointError(f"{path / INDEX} names the file {strange[:80]!r}, which does not lie inside {path}")
    return found


def json_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file. Raises CheckpointError."""
    try:
        value = parse(bounded(path, MAX_JSON_BYTES), finite=False)
    except FileNotFoundError:
        return None
    except (OSError, NotJson) as error:
        raise CheckpointError(f"{path} can't be read as JSON ({line(error)}): fetch the checkpoint again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should hold a JSON object, found a {type(value).__name__}")
    return value


def line(error: BaseException, longest: int = 200) -> str:
    """The message of an error on one line of moderate length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= longest else text[:longest] + "…"
