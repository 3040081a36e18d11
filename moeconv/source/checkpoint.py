"""A Hugging Face checkpoint on disk, read lazily: one tensor or one expert at a time, never the whole model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moeconv.sentencepiece import TokenizerDamaged
from moeconv.source.archs import Description, Family
from moeconv.source.archs.config import ShapeDiffers
from moeconv.source.archs.description import Source
from moeconv.source.decoded import DecodedTensors
from moeconv.source.gguf.folder import is_gguf, opened
from moeconv.source.gguf.tensors import GgufTensors
from moeconv.source.hub import find
from moeconv.source.outline import CONFIG, GENERATION_CONFIG, CheckpointError, Outline
from moeconv.source.tensors import FileTensors, Tensors, add_file
from moeconv.tokenizers import made
from moert.pack.errors import SizeOverflow
from moert.pack.model_spec import ExpertKey, ModelSpec
from moert.pack.tensors import TOKENIZER, check_size
from moert.pack.text import TokenizerUnfit

if TYPE_CHECKING:
    import torch

F32 = npt.NDArray[np.float32]

_PAGE = 4096  # bytes that come into memory together
TOKENIZER_FILES = (
    TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "spiece.model", "chat_template.jinja",
)  # fmt: skip
_COMPUTED = (".rotary_emb.inv_freq",)  # tensors that old versions of transformers stored, and new ones compute
_DTYPES = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}


@dataclass
class Checkpoint:
    """An open checkpoint. `Checkpoint.open` makes one of files on disk, `Checkpoint.of` one of other tensors. `path`:
    the folder of its config and its tokenizer."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    family: Family
    description: Description
    tensors: Tensors

    @classmethod
    def open(cls, path_or_hub_id: str | Path, names_only: bool = False) -> Checkpoint:
        """Opens a local directory, or fetches (or finds in the cache) a model of the hub. `names_only`: no tensor is
        read, and files that an index names may be missing. Raises CheckpointError."""
        path = find(str(path_or_hub_id))
        if is_gguf(path):
            return cls.of(*opened(path), names_only)
        return cls.of(path, FileTensors(path, names_only), names_only)

    @classmethod
    def of(cls, path: Path, tensors: Tensors, names_only: bool = False) -> Checkpoint:
        """Returns the checkpoint of some tensors; `path` has its config and its tokenizer. Raises CheckpointError."""
        _check_sizes(path)
        outline = Outline.read(path / CONFIG, tensors.path if isinstance(tensors, GgufTensors) else None)
        description = outline.description
        if isinstance(tensors, GgufTensors):
            description = tensors.described(description)
        elif description.scheme is not None:
            tensors = DecodedTensors.of(tensors, description.scheme, path)
        description = description.as_stored(tensors.names)
        checkpoint = cls(path, outline.config, outline.generation_config, outline.family, description, tensors)
        checkpoint._check_names()
        if isinstance(checkpoint.files, FileTensors):
            checkpoint._check_shapes(checkpoint.files.shapes)
        if not names_only:
            checkpoint._check_equal()
        return checkpoint

    @property
    def spec(self) -> ModelSpec:
        return self.description.spec

    @property
    def files(self) -> Tensors:
        """The tensors as they are stored."""
        return self.tensors.stored if isinstance(self.tensors, DecodedTensors) else self.tensors

    @property
    def given(self) -> Path:
        """The path by which the checkpoint is opened again: a folder, or a GGUF file."""
        return self.tensors.path if isinstance(self.tensors, GgufTensors) else self.path

    @property
    def coded_as(self) -> str | None:
        """The types of a GGUF file's matrices, as words; None for a folder."""
        return self.tensors.types if isinstance(self.tensors, GgufTensors) else None

    @property
    def notes(self) -> list[str]:
        """The notes for a person before the conversion, a line each."""
        return [*self.description.notes, *self.coding_notes, *self.left_out, *self.tokenizer_notes]

    @property
    def coding_notes(self) -> list[str]:
        """The note on tensors of a coded checkpoint that a pack has no use for."""
        note = "scales for the rounding of activations are left out: moert rounds them in its own way"
        return [note] if self.tensors.of_activations else []

    @property
    def tokenizer_notes(self) -> list[str]:
        """The reason if the tokenizer's files make no tokenizer.json. Raises CheckpointError for a damaged file."""
        return [self._made[1]] if self.spelled is None and self._made[1] else []

    @property
    def left_out(self) -> list[str]:
        """The parts of the checkpoint that the pack will leave out, a line each."""
        left_out = [
            what
            for pattern, what in self.description.left_out.items()
            if any(re.match(pattern, name) for name in self.tensors.names)
        ]
        ids = f"there is no {TOKENIZER}: text is token ids, as numbers with spaces between"
        return (
            [*left_out, ids] if self.family.spelled(self.spec) and not (self.path / TOKENIZER).is_file() else left_out
        )

    @cached_property
    def spelled(self) -> str | None:
        """The text in place of tokenizer.json; None if the file is there, or no text can replace it."""
        return None if (self.path / TOKENIZER).is_file() else self.family.spelled(self.spec) or self._made[0]

    @cached_property
    def _made(self) -> tuple[str | None, str]:
        """A tokenizer.json made of the tokenizer's other files, and the reason if none can be made. Raises
        CheckpointError for a damaged file."""
        try:
            return made(self.path), ""
        except TokenizerDamaged as error:
            raise CheckpointError(f"{self.given}: {error}") from None
        except TokenizerUnfit as error:
            return None, f"{TOKENIZER} {error}"

    @property
    def tokenizer_sha256(self) -> str:
        body = (self.path / TOKENIZER).read_bytes() if self.spelled is None else self.spelled.encode()
        return hashlib.sha256(body).hexdigest()

    @cached_property
    def source_dtype(self) -> str:
        """The type of the stored experts: "BF16", "F16" or "F32"; if their numbers are coded, the one of their scales,
        or "BF16" for scales in more or fewer bits."""
        first = self.description.experts(self.spec.expert_keys()[0], "up")
        if self.tensors.is_coded(first.name):
            dtype = str(self.tensors.dtype16(first.name))
        else:
            dtype = str(self.tensors.fetch(first.name, first.index).dtype)
        if dtype not in _DTYPES:
            raise CheckpointError(
                f"{self.given}: {first.name} is stored as {dtype}; expected bfloat16, float16 or float32"
            )
        return _DTYPES[dtype]

    @cached_property
    def tokenizer_files(self) -> list[str]:
        """The names of the tokenizer's files, relative to `path`."""
        return [name for name in TOKENIZER_FILES if (self.path / name).is_file()]

    def expert(self, key: ExpertKey) -> dict[str, F32]:
        """Returns projection → weights [out, in] of one expert. Raises CheckpointError."""
        weights = {}
        for projection in self.spec.moe.ffn.projections:
            source = self.description.experts(key, projection)
            found = self._shaped(source, self.spec.projection_shape(projection)).float()
            weights[projection] = found.contiguous().numpy()
        return weights

    def touch(self, key: ExpertKey) -> None:
        """Reads one expert and drops it: the system keeps its pages in memory if it can. Raises CheckpointError."""
        import torch

        for projection in self.spec.moe.ffn.projections:
            source = self.description.experts(key, projection)
            for name in self.tensors.parts(source.name):
                self.files.fetch(name, source.index).contiguous().view(torch.uint8).flatten()[::_PAGE].sum()

    def biases(self, key: ExpertKey) -> dict[str, F32]:
        """Returns projection → bias [out] of one expert; empty if experts have none. Raises CheckpointError."""
        biases, of_bias = {}, self.description.biases
        for projection in self.spec.moe.ffn.projections if of_bias is not None else ():
            assert of_bias is not None
            found = self._shaped(of_bias(key, projection), self.spec.projection_shape(projection)[:1]).float()
            if not found.isfinite().all():
                raise CheckpointError(
                    f"expert {key}, the bias of {projection} is not finite: the checkpoint is damaged"
                )
            biases[projection] = found.contiguous().numpy()
        return biases

    def model(self, dtype: torch.dtype) -> torch.nn.Module:
        """Returns the model as transformers runs it, in eval mode. Raises CheckpointError."""
        import torch

        from moeconv.source.archs.weights import fill_backbone, put_tables

        if self.family.loads_by_names and self.tensors.as_saved:
            return self.family.load(self.path, dtype)
        model = self.family.empty(self.path).to(dtype)
        put_tables(model, self.description, self.rows)
        tensors = self.spec.tensors
        fill_backbone(
            model, self.description, ((name, self.backbone_tensor(name, tensors[name].shape)) for name in tensors)
        )
        for key in self.spec.expert_keys():
            for name, weight in self.expert(key).items():
                self.family.expert_weight(model, key, name).copy_(torch.from_numpy(weight))
            for name, bias in self.biases(key).items():
                self.family.expert_bias(model, key, name).copy_(torch.from_numpy(bias))
        return model

    def check_finite(self) -> None:
        """Reads every expert. Raises CheckpointError naming the first one with a value that is not finite."""
        for key in self.spec.expert_keys():
            for projection, weight in self.expert(key).items():
                if not np.isfinite(weight).all():
                    raise CheckpointError(
                        f"expert {key}, {projection} holds values that are not finite: the checkpoint is damaged"
                    )

    def backbone_tensor(self, canonical: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a tensor of the backbone, by its canonical name, in its own dtype. Raises CheckpointError."""
        import torch

        if canonical in self.description.computed:
            return torch.from_numpy(self.description.computed[canonical])
        return self._shaped(self.description.backbone[canonical], shape)

    def stored_tensor(self, canonical: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a tensor of the backbone as a pack stores it without a width: in its own dtype, or in 16 bits if its
        numbers are coded in the checkpoint."""
        tensor, source = self.backbone_tensor(canonical, shape), self.description.backbone.get(canonical)
        if source is None or not self.tensors.is_coded(source.name):
            return tensor
        return tensor.to(self.tensors.dtype16(source.name))

    def rows(self, canonical: str, numbers: torch.Tensor) -> torch.Tensor:
        """Returns rows of a table that stays on the drive, [numbers, dim]. Raises CheckpointError."""
        import torch

        pieces = self.description.tables[canonical]
        each = (pieces[0].shape or (1,))[0]
        return torch.stack([self.tensors.fetch(pieces[at // each].name, at % each) for at in numbers.tolist()])

    def table(self, canonical: str) -> Iterator[torch.Tensor]:
        """Yields the rows of a table that stays on the drive, in pieces [rows, dim], in their own dtype. Raises
        CheckpointError."""
        for source in self.description.tables[canonical]:
            shape, rows = source.shape or (), 0
            for piece in self.tensors.pieces(source.name):
                rows += len(piece)
                yield piece
            if (found := (rows, *piece.shape[1:])) != shape:
                raise CheckpointError(f"{self.given}: {source.name} has the shape {found}, config.json implies {shape}")

    @cached_property
    def sha256(self) -> str:
        """The hash of the configs and of every weight file, in order of name."""
        digest = hashlib.sha256()
        configs = [self.path / CONFIG, self.path / GENERATION_CONFIG]
        for file in (path for path in configs if path.is_file()):
            add_file(digest, file)
        self.tensors.digest(digest)
        return digest.hexdigest()

    def _shaped(self, source: Source, shape: tuple[int, ...]) -> torch.Tensor:
        try:
            return source.read(self.tensors.fetch, shape)
        except ShapeDiffers as error:
            raise CheckpointError(f"{self.given}: {error}") from None

    def _sources(self) -> Iterator[Source]:
        described = self.description
        yield from described.backbone.values()
        yield from chain.from_iterable(described.tables.values())
        for key in self.spec.expert_keys():
            for projection in self.spec.moe.ffn.projections:
                yield described.experts(key, projection)
                if described.biases is not None:
                    yield described.biases(key, projection)

    def _check_names(self) -> None:
        described, spec = self.description, self.spec
        first = described.experts(spec.expert_keys()[0], "up")
        matrices = len(spec.experts) * spec.moe.n * len(spec.moe.ffn.projections)
        if first.index is None and matrices > len(self.tensors.names):
            raise CheckpointError(
                f"{self.given}: config.json implies {matrices} matrices of experts, there are "
                f"{len(self.tensors.names)} tensors in all: the checkpoint is incomplete, or config.json is another's"
            )
        wanted = dict.fromkeys(name for source in self._sources() for name in source.names)
        missing = [name for name in wanted if name not in self.tensors.names]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{self.given} has no tensor {missing[0]!r}{more}: the checkpoint is incomplete")
        known = {*wanted, *described.stated, *(copy for _, copy in described.copies)}
        left_out = [re.compile(pattern) for pattern in described.left_out]
        unknown = [
            name
            for name in self.tensors.names
            if name not in known and not name.endswith(_COMPUTED) and not any(each.match(name) for each in left_out)
        ]
        if unknown:
            raise CheckpointError(
                f"{self.given} holds the tensor {unknown[0]!r}, which a {self.family.model_type} model of this "
                "config.json has no place for: what it is for would be left out of the pack"
            )

    def _check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises CheckpointError if a tensor's shape differs from config.json's. It reads headers alone, so that no
        memory is taken for sizes that config.json claims."""
        for name, source, shape in self._placed():
            found = shapes.get(name)
            if found is None or self.tensors.is_coded(name):
                continue
            if source.index is not None:
                if not found or not 0 <= source.index < found[0]:
                    raise CheckpointError(f"{self.path}: {name} has the shape {found} and no part {source.index}")
                found = found[1:]
            expected = source.shape or shape
            if found != expected and not (source.either and found == expected[::-1]):
                raise CheckpointError(f"{self.path}: {name} has the shape {found}, config.json implies {expected}")

    def _placed(self) -> Iterator[tuple[str, Source, tuple[int, ...]]]:
        """Yields each tensor's name, the source that it belongs to, and the shape of that in the pack."""
        described, spec = self.description, self.spec
        for canonical, source in described.backbone.items():
            for name in source.names:
                yield name, source, spec.tensors[canonical].shape
        for source in chain.from_iterable(described.tables.values()):
            yield source.name, source, source.shape or ()
        for key in spec.expert_keys():
            for projection in spec.moe.ffn.projections:
                shape, source = spec.projection_shape(projection), described.experts(key, projection)
                yield source.name, source, shape
                if described.biases is not None:
                    source = described.biases(key, projection)
                    yield source.name, source, shape[:1]

    def _check_equal(self) -> None:
        for one, other in self.description.copies:
            both = one in self.tensors.names and other in self.tensors.names
            if both and not self.tensors.fetch(one).equal(self.tensors.fetch(other)):
                raise CheckpointError(f"{self.path}: {one} and {other} differ; a pack can hold only one of them")
        for name, numbers in self.description.stated.items():
            if name in self.tensors.names and self.tensors.fetch(name).tolist() != [*numbers]:
                raise CheckpointError(f"{self.path}: {name} has other numbers than follow from config.json")


def _check_sizes(path: Path) -> None:
    """Raises CheckpointError if a file that a pack takes as it is exceeds the pack's limit."""
    for name in (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES):
        if (path / name).is_file():
            try:
                check_size(name, (path / name).stat().st_size)
            except SizeOverflow as error:
                raise CheckpointError(f"{path}: {error}") from None
