"""The writer of packs, which leaves no half pack after a crash."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import accumulate
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moeconv.matrices import Projection, columns_of, rows_of
from moert.machine import lock, open_folder
from moert.pack.codec import (
    F32,
    U8,
    Form16,
    QuantizedMatrix,
    TrellisMatrix,
    Width,
    power_of_halves,
    times_two,
    to_bfloat16,
    to_mxfp4,
)
from moert.pack.documents import parsed, plain, read
from moert.pack.errors import PackError, WriteFailed
from moert.pack.files import atomic_write, beside, fsync, placed, write_atomically, write_in_order
from moert.pack.layout import DOWN, NEURONS, U32, ExpertLayout, NeuronLayout
from moert.pack.manifest import (
    BACKBONE,
    FORMAT_NAME,
    MAJOR,
    NGRAMS,
    SEAL,
    ExpertEntry,
    FileEntry,
    Manifest,
    Preference,
    Quality,
    Quantization,
)
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec
from moert.pack.parts import GatedStreams
from moert.pack.reader import CHECKSUMS, MANIFEST, is_pack, pack_around, strangers

Array = npt.NDArray[Any]
Matrix = QuantizedMatrix | TrellisMatrix | F32
"""A matrix as it is stored; float32 stands for 16 bits."""


def expert_body(
    key: ExpertKey, layout: ExpertLayout, quantization: Quantization, projections: Mapping[str, Matrix],
    biases: Mapping[str, F32],
) -> bytearray:  # fmt: skip
    """Returns the bytes of an expert. `projections` [out, in], in blocks of neurons `down` as its transpose; biases
    [out]. Raises ValueError for a tensor that is missing, or does not fit the layout."""
    body = bytearray(layout.file_bytes)
    body[: layout.data_offset] = layout.header
    named = {name: _tensors(name, part, quantization) for name, part in projections.items()}
    if layout.neurons is not None:
        tensors = {name: tuple(parts.values()) for name, parts in named.items()}
        try:
            place(layout.neurons, np.frombuffer(body, np.uint8), tensors, biases)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
        return body
    plain = {f"{name}.{part}": values for name, parts in named.items() for part, values in parts.items()}
    plain |= {f"{name}.bias": values for name, values in biases.items()}
    if absent := [slot.name for slot in layout.slots if not slot.name.startswith("pad.") and slot.name not in plain]:
        raise ValueError(f"{key}: {absent[0]} is not given")
    for tensor, values in plain.items():
        slot = layout.slot(tensor)
        if values.nbytes != slot.stop - slot.start:
            raise ValueError(f"{key} {tensor}: {values.nbytes} bytes given, the layout has {slot}")
        at = layout.data_offset + slot.start
        body[at : at + values.nbytes] = values.tobytes()
    return body


def _tensors(name: str, part: Matrix, quantization: Quantization) -> dict[str, npt.NDArray[Any]]:
    if isinstance(part, QuantizedMatrix):
        return {"qweight": part.qweight, "scale": part.scale, "min": part.minimum}
    if isinstance(part, TrellisMatrix):
        return {"trellis": part.stream, "scale": part.scale}
    if quantization.mxfp4:
        if (exact := to_mxfp4(part)) is None:
            raise ValueError(f"{name}: weights that MXFP4 does not hold")
        return {"qweight": exact.qweight, "exponent": exact.exponent}
    if quantization.dtype16 == "BF16":
        return {"weight": to_bfloat16(part)}
    return {"weight": times_two(part, -power_of_halves(part)).astype(np.float16)}


def place(
    layout: NeuronLayout, buffer: U8, tensors: Mapping[str, tuple[Array, ...]], biases: Mapping[str, F32]
) -> None:
    """Puts matrices [d_ff, d_model] into their places in `buffer`, each as its codes, scales and minima or its weights;
    and biases. Raises ValueError where one is missing or has another size."""
    for name, matrix in layout.matrices:
        pieces = columns_of(layout, buffer) if name == DOWN else rows_of(layout, buffer)
        given = tensors.get(name, ())
        if len(given) != len(matrix.places):
            raise ValueError(f"{name} is not given, or of another width")
        for at, nbytes, array in zip(matrix.places, matrix.neuron_bytes(layout.d_model), given, strict=True):
            _put(layout, pieces, at, nbytes, array, name)
        if matrix.bias_place is not None:
            _put(layout, pieces, matrix.bias_place, 4, _given(biases, name)[:, None], f"{name}.bias")
    if layout.bias_at is not None:
        bias = _given(biases, DOWN)
        if bias.shape != (layout.d_model,):
            raise ValueError(f"{DOWN}.bias: {bias.shape} given, the layout has {layout.d_model}")
        buffer[layout.bias_at :][: bias.nbytes] = bias.view(np.uint8)


def _put(layout: NeuronLayout, pieces: U8, at: int, nbytes: int, array: Array, what: str) -> None:
    """Writes an array of all neurons [d_ff, ...], `nbytes` a neuron, into the pieces, from byte `at` of each on. Raises
    ValueError for another size."""
    if len(array) != layout.d_ff or array.nbytes != layout.d_ff * nbytes:
        raise ValueError(f"{what}: {array.nbytes} bytes in {len(array)} rows, the layout has {layout.d_ff} of {nbytes}")
    rows = np.zeros((layout.n_blocks * layout.per_block, nbytes), np.uint8)
    rows[: layout.d_ff] = np.ascontiguousarray(array).view(np.uint8).reshape(layout.d_ff, nbytes)
    pieces[:, at : at + layout.per_block * nbytes] = rows.reshape(layout.n_blocks, -1)


def _given(biases: Mapping[str, F32], name: str) -> F32:
    if name not in biases:
        raise ValueError(f"{name}.bias is not given")
    return np.ascontiguousarray(biases[name], np.float32)


def checksums(layout: NeuronLayout, buffer: U8, crc32: Callable[[memoryview], int] = zlib.crc32) -> U32:
    """Returns the CRC-32 of each rows piece, each columns piece, the biases of down (0 without), and rows that lie
    together: [n_checksums]."""
    pieces = [*rows_of(layout, buffer), *columns_of(layout, buffer)]
    found = [crc32(piece.data) for piece in pieces]
    found.append(0 if layout.bias_at is None else crc32(buffer[layout.bias_at :][: 4 * layout.d_model].data))
    if layout.together_bytes:
        found.append(crc32(buffer[layout.rows_at :][: layout.together_bytes].data))
    return np.array(found, np.uint32)


def powers_of(projections: Mapping[str, Matrix], quantization: Quantization) -> dict[str, int] | None:
    """Returns for each projection that is multiplied with a power of two this power; None if there are none."""
    found = {name: power_stored(part, quantization.form16) for name, part in projections.items()}
    return {name: power for name, power in found.items() if power} or None


def width_of(part: Matrix) -> Width:
    """Returns the width of a matrix as it is stored; a whole one as a whole number, as the manifest has it."""
    bits = part.bits if isinstance(part, QuantizedMatrix | TrellisMatrix) else 16
    return int(bits) if bits == int(bits) else bits


def power_stored(part: Matrix, form16: Form16) -> int:
    """Returns the power of two that a matrix is multiplied with where it is stored."""
    if isinstance(part, QuantizedMatrix | TrellisMatrix):
        return part.power
    return power_of_halves(part) if form16 == "F16" else 0


Files = Literal["expert", "layer"]
"""The unit that has a file of its own: each expert, or all experts of a layer."""


PLAIN_MINOR, PREFERRING_MINOR, JOINED_MINOR, NEURONS_MINOR, TOGETHER_MINOR, POWERS_MINOR, TRELLIS_MINOR = range(7)
MATRICES_MINOR, PARALLEL_MINOR, EXTENDED_MINOR, STREAMS_MINOR, POOLS_MINOR, NGRAMS_MINOR = range(7, 13)
ROWS_MINOR, CODED_MINOR = 13, 14
"""The minor version of a pack with none of these, with preferences, with several experts in a file, with experts in
blocks of neurons, with rows of neurons that lie together, with matrices that are multiplied with a power of two, with
trellis codes; of one whose dense matrices have widths of their own, with parallel layers, with fields of parts that
these name in LEFT_OUT, with several streams, with attention to pools, with streams that gates mix, with trellis codes
of the head or the embedding, of other dense matrices."""
_JOURNAL = "experts.jsonl"
_PIECE = 1 << 20  # bytes that are copied at once


class PackWriter:
    """A writer that collects a pack in OUT.partial and puts it in OUT's place at the end. `files`: whether each expert
    has a file of its own, or the experts of a layer share one, in which they are put at the end.

    `fingerprint` identifies the conversion (checkpoint, plan, quantizer): experts that an interrupted run with the same
    fingerprint finished are kept, any other leftovers are removed. One writer at a time. Raises WriteFailed.
    """

    def __init__(
        self, out: Path, spec: ModelSpec, quantization: Quantization, fingerprint: str, files: Files = "expert"
    ) -> None:  # fmt: skip
        self.out = placed(out)
        self.partial = partial_of(self.out)
        self.spec = spec
        self.quantization = quantization
        self.files = files
        self.page_bytes = choose_page_bytes(spec)
        self._files: dict[str, FileEntry] = {}
        self._checksums: dict[ExpertKey, U32] = {}  # of pieces, in blocks of neurons
        check_target(self.out)
        self._given_up = set(strangers(self.out))
        with _writing(self.partial):
            self.partial.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.partial, self.out)
            _restore(self.out)
            self._experts = self._resume(fingerprint if files == "expert" else f"{fingerprint} {files}")

    def has(self, key: ExpertKey) -> bool:
        """Returns whether an interrupted run with the same fingerprint has written this expert already."""
        return key in self._experts

    def write_expert(
        self, key: ExpertKey, projections: Mapping[str, Projection], importance: float | None = None,
        biases: Mapping[str, npt.NDArray[np.float32]] | None = None,
    ) -> ExpertEntry:  # fmt: skip
        """Writes one expert: matrices [out, in], in blocks of neurons `down` as its transpose. A float32 array is
        stored in 16 bits, biases [out] as they are. Raises WriteFailed."""
        bits = {name: width_of(part) for name, part in projections.items()}
        powers = powers_of(projections, self.quantization)
        layout = self.quantization.layout(self.spec, key, bits, powers, self.page_bytes)
        body = expert_body(key, layout, self.quantization, projections, biases or {})
        entry = ExpertEntry(
            key, expert_path(key), layout.file_bytes, layout.tensor_bytes, bits,
            hashlib.sha256(body).hexdigest(), zlib.crc32(body), importance, powers=powers,
        )  # fmt: skip
        self._write(entry.path, body)
        if layout.neurons is not None:
            self._checksums[key] = checksums(layout.neurons, np.frombuffer(body, np.uint8))
        self._note(entry)
        self._experts[key] = entry
        return entry

    def write_file(self, relative: str, body: bytes) -> None:
        """Writes any other file of the pack. Raises WriteFailed."""
        self._write(relative, body)
        self._files[relative] = file_entry(body)

    def add_file(self, relative: str) -> Path:
        """Returns the path for a file that a library writes itself; call seal_file when the file is there."""
        return self.partial / relative

    def seal_file(self, relative: str) -> None:
        path = self.partial / relative
        with _writing(path):
            shutil.copymode(self.partial / _JOURNAL, path)  # a library may have made it for its owner alone
            fsync(path)
            with path.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as body:
                self._files[relative] = file_entry(body)

    def has_weights_of(self, manifest: Manifest) -> bool:
        """Returns whether all experts and the backbone are written, and are those of a pack with this manifest."""
        mine, theirs = ([files.get(name) for name in (BACKBONE, NGRAMS)] for files in (self._files, manifest.files))
        experts = {entry.key: entry.sha256 for entry in manifest.experts}
        return (
            self.spec == manifest.model
            and experts == {key: entry.sha256 for key, entry in self._experts.items()}
            and mine[0] is not None
            and mine == theirs
        )

    def finish(
        self, creator: str, quality: Quality | None, preferences: tuple[Preference, ...] = ()
    ) -> Manifest:  # fmt: skip
        """Writes the manifest, then puts the finished pack in place of the pack or empty directory that stood at OUT
        before."""
        if self.files == "layer":
            self._join()
        if self.quantization.neurons is not None:
            self.write_file(NEURONS, checksums_to_bytes(self._checksums))
        manifest = Manifest(
            creator=creator,
            page_bytes=self.page_bytes,
            model=self.spec,
            quantization=self.quantization,
            quality=quality,
            files=self._files,
            experts=tuple(self._experts[key] for key in self.spec.expert_keys()),
            preferences=preferences,
            minor=self._minor(preferences),
        )
        with _writing(self.out):
            write_atomically(self.partial / MANIFEST, dump_manifest(manifest).encode())
            check_target(self.out)
            if new := sorted(set(strangers(self.out)) - self._given_up):
                raise WriteFailed(f"{self.out} got the file {new[0]} meanwhile, which would be lost: move it away")
            replaced = _replaced(self.out)
            _remove_pack(replaced)
            (self.partial / _JOURNAL).unlink(missing_ok=True)
            if self.out.exists():
                os.rename(self.out, replaced)
            os.rename(self.partial, self.out)
            _remove_pack(replaced)
            fsync(self.out.parent)
        self._lock.release()
        return manifest

    def _minor(self, preferences: tuple[Preference, ...]) -> int:
        dense, kinds = self.quantization.dense, [kind for stack in self.spec.stacks.values() for kind in stack.kinds]
        if dense is not None and dense.trellis:
            return ROWS_MINOR if {"head", "embed"}.issuperset(dense.trellis) else CODED_MINOR
        if any(isinstance(kind.streams, GatedStreams) or kind.ngrams is not None for kind in kinds):
            return NGRAMS_MINOR
        if any(kind.pools for kind in kinds):
            return POOLS_MINOR
        if any(kind.streams is not None for kind in kinds):
            return STREAMS_MINOR
        if any(kind.extended for kind in kinds):
            return EXTENDED_MINOR
        if any(kind.parallel for kind in kinds):
            return PARALLEL_MINOR
        if dense is not None and dense.matrices:
            return MATRICES_MINOR
        if self.quantization.codes == "trellis":
            return TRELLIS_MINOR
        if any(entry.powers for entry in self._experts.values()) or (dense is not None and dense.powers):
            return POWERS_MINOR
        if self.quantization.neurons is not None:
            return TOGETHER_MINOR if self.quantization.neurons.together else NEURONS_MINOR
        return JOINED_MINOR if self.files == "layer" else PREFERRING_MINOR if preferences else PLAIN_MINOR

    def _join(self) -> None:
        """Puts the experts of each layer into one file; a run that was killed here goes on with the next layer."""
        for at in self.spec.moe_layers():
            apart = [self._experts[at.expert(number)] for number in range(self.spec.moe.n)]
            path = self.partial / layer_path(at)
            if apart[0].path == layer_path(at):
                continue
            with _writing(path):
                with atomic_write(path) as fresh, fresh.open("xb") as stream:
                    for entry in apart:
                        with (self.partial / entry.path).open("rb") as body:
                            shutil.copyfileobj(body, stream, _PIECE)
                fsync(path.parent)
                for entry in apart:
                    (self.partial / entry.path).unlink()
                (self.partial / apart[0].path).parent.rmdir()
            self._experts |= {entry.key: entry for entry in _joined(at, apart)}

    def _write(self, relative: str, body: bytes | bytearray) -> None:
        path = self.partial / relative
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, body)

    def _note(self, entry: ExpertEntry) -> None:
        with _writing(self.partial), open(self.partial / _JOURNAL, "a", encoding="utf-8") as journal:
            # The line before may be one that a killed run left unfinished.
            journal.write(f"\n{json.dumps(plain(entry))}\n")

    def _resume(self, fingerprint: str) -> dict[ExpertKey, ExpertEntry]:
        """Returns the finished experts of a run with this fingerprint; removes every other file, also those that a
        killed run left."""
        journal = self.partial / _JOURNAL
        journal.touch()  # from here on the directory is known as ours
        lines = journal.read_text(encoding="utf-8", errors="replace").splitlines()
        same = bool(lines) and lines[0] == fingerprint
        done = self._finished(lines[1:]) if same else {}
        _prune(self.partial, keep={journal, *(self.partial / entry.path for entry in done.values())})
        if not same:
            journal.write_text(fingerprint + "\n", encoding="utf-8")
        return done

    def _finished(self, lines: list[str]) -> dict[ExpertKey, ExpertEntry]:
        noted = self._noted(lines)
        done = {key: entry for key, entry in noted.items() if self._are_there([entry])}
        for at in self.spec.moe_layers():
            keys = [at.expert(number) for number in range(self.spec.moe.n)]
            if (self.partial / layer_path(at)).is_file() and all(key in noted for key in keys):
                joined = _joined(at, [noted[key] for key in keys])
                if self._are_there(joined):
                    done |= {entry.key: entry for entry in joined}
        return done

    def _are_there(self, entries: Sequence[ExpertEntry]) -> bool:
        """Returns whether the file of these experts has them, one behind the other, and nothing else."""
        path = self.partial / entries[0].path
        if not path.is_file() or path.stat().st_size != sum(entry.file_bytes for entry in entries):
            return False
        with path.open("rb") as stream:
            return all(self._is_there(one, stream.read(one.file_bytes)) for one in entries)

    def _is_there(self, entry: ExpertEntry, body: bytes) -> bool:
        if hashlib.sha256(body).hexdigest() != entry.sha256:
            return False
        layout = self.quantization.layout(self.spec, entry.key, entry.bits, entry.powers, self.page_bytes)
        if (neurons := layout.neurons) is not None:
            self._checksums[entry.key] = checksums(neurons, np.frombuffer(body, np.uint8))
        return True

    def _noted(self, lines: list[str]) -> dict[ExpertKey, ExpertEntry]:
        """Returns the experts that the journal lists as written, each in a file of its own."""
        noted: dict[ExpertKey, ExpertEntry] = {}
        for line in lines:
            with suppress(ValueError, PackError):  # empty, or being written when the last run was killed
                entry = read(ExpertEntry, parsed(line.encode()), _JOURNAL)
                noted[entry.key] = entry
        return noted


def _joined(at: LayerKey, apart: Sequence[ExpertEntry]) -> list[ExpertEntry]:
    """Returns the entries of a layer's experts, one behind the other in the layer's file."""
    offsets = accumulate((entry.file_bytes for entry in apart), initial=0)
    return [replace(entry, path=layer_path(at), offset=offset) for entry, offset in zip(apart, offsets, strict=False)]


def add_to_pack(root: Path, manifest: Manifest, relative: str, body: bytes) -> Manifest:
    """Adds one file as `add_files` does."""
    return add_files(root, manifest, {relative: body})


def add_files(root: Path, manifest: Manifest, bodies: Mapping[str, bytes]) -> Manifest:
    """Adds (or replaces) files of a finished pack. Raises WriteFailed, and then the pack is as it was.

    A crash half way leaves the pack as it was, or whole without any of those files.
    """
    others = {name: entry for name, entry in manifest.files.items() if name not in bodies}
    changed = replace(manifest, files={**others, **{name: file_entry(body) for name, body in bodies.items()}})
    steps = [(root / name, body) for name, body in bodies.items()]
    steps.append((root / MANIFEST, dump_manifest(changed).encode()))
    if len(others) < len(manifest.files):
        steps.insert(0, (root / MANIFEST, dump_manifest(replace(manifest, files=others)).encode()))
    with _writing(root / next(iter(bodies))):
        for name in bodies:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_in_order(steps)
    return changed


def check_addable(root: Path, *names: str) -> None:
    """Raises WriteFailed if files of these names can't be added to the finished pack, or if one is there that is not
    the pack's. Writes nothing."""
    if taken := sorted(set(names).intersection(strangers(root))):
        raise WriteFailed(f"{root / taken[0]} is there and is not the pack's, and would be lost: move it away")
    if not os.access(root, os.W_OK | os.X_OK):
        raise WriteFailed(f"nothing can be added to {root}, which can't be written to: copy it to where it can")


def file_entry(body: bytes | mmap) -> FileEntry:
    """Returns the manifest's entry for a file with these bytes."""
    return FileEntry(len(body), hashlib.sha256(body).hexdigest(), zlib.crc32(body))


def check_target(out: Path) -> None:
    """Raises WriteFailed if a pack can't be put at `out` without losing files that are not ours. Writes nothing.

    Only a pack or an empty directory is ever replaced, and of the directories beside it that a conversion uses only
    those that a conversion has left.
    """
    out = placed(out)
    partial, replaced = partial_of(out), _replaced(out)
    with _writing(out):
        above = next(path for path in out.parents if path.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            what = "can't be written to" if above.is_dir() else "is not a directory"
            raise WriteFailed(f"can't write {out}: {above} {what}: choose another --out")
        if (pack := pack_around(out)) is not None:
            raise WriteFailed(f"can't write {out}: it lies in the pack {pack}: choose another --out")
        for path, ours in (
            (out, is_pack(out)),
            (partial, is_pack(partial) or (partial / _JOURNAL).is_file()),
            (replaced, is_pack(replaced)),
        ):
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise WriteFailed(f"{path} is there and is not a pack: it would be lost; choose another --out")
            if path.is_dir() and not ours and any(path.iterdir()):
                raise WriteFailed(f"{path} holds files that are not a pack: they would be lost; choose another --out")


def expert_path(key: ExpertKey) -> str:
    """Returns the path of an expert's own file in the pack: experts/D03/E005.safetensors."""
    return f"experts/{key}.safetensors"


def layer_path(at: LayerKey) -> str:
    """Returns the path of the file that all experts of a layer share, one behind the other: experts/D03.experts."""
    return f"experts/{at}.experts"


def dump_manifest(manifest: Manifest) -> str:
    """Returns the manifest as JSON text, one expert a line so that a diff can be read; its last field is its own
    checksum."""
    document = plain(manifest)
    minor, experts = document.pop("minor"), document.pop("experts")
    head = {"format": FORMAT_NAME, "major": MAJOR, "minor": minor, **document}
    lines = [json.dumps(expert, separators=(",", ":"), allow_nan=False) for expert in experts]
    text = json.dumps(head, indent=1, allow_nan=False)
    return seal(text[: text.rindex("\n}")] + ',\n "experts": [\n  ' + ",\n  ".join(lines) + "\n ]")


def seal(body: str) -> str:
    """Returns the text of a manifest (a JSON object without its closing brace), ended with the checksum of the text so
    far."""
    return f"{body}{SEAL}{zlib.crc32(body.encode())}\n}}\n"


SMALL_PAGE, LARGE_PAGE = 4096, 16384
_LARGE_EXPERT_BYTES = 1 << 20


def choose_page_bytes(spec: ModelSpec) -> int:
    """Returns the page size [bytes]: 16 KiB for experts of a MiB and more at 4 bits, 4 KiB below, where padding would
    outweigh the weights."""
    return LARGE_PAGE if spec.weights_per_expert() // 2 >= _LARGE_EXPERT_BYTES else SMALL_PAGE


def checksums_to_bytes(of: Mapping[ExpertKey, U32]) -> bytes:
    """Returns the file's content; equal checksums give equal bytes."""
    return CHECKSUMS.body({str(key): of[key] for key in sorted(of)})


class DirectoryLock:
    """A lock on a directory, held until `release` is called or the object is gone, at the latest when the process ends,
    killed or not.

    The lock follows the directory when it is renamed. Where the system or the file system knows no locks, every lock is
    granted.
    """

    def __init__(self, path: Path) -> None:
        """Takes the lock. Raises BlockingIOError if another holder has it, OSError if the directory does not exist."""
        descriptor = open_folder(path)
        self.release = weakref.finalize(self, os.close, descriptor)
        try:
            known = lock(descriptor)
        except BlockingIOError:
            self.release()
            raise
        except OSError:
            return
        if known and not (path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())):
            self.release()
            raise BlockingIOError(f"{path} was renamed by another process just now")


def partial_of(out: Path) -> Path:
    """Returns the place where a pack is collected that is to stand at `out`."""
    return beside(out, "partial")


def _replaced(out: Path) -> Path:
    return beside(out, "replaced")  # where the old pack goes between two renames


def _locked(partial: Path, out: Path) -> DirectoryLock:
    try:
        return DirectoryLock(partial)
    except BlockingIOError:
        raise WriteFailed(f"another conversion is writing {out}: wait for its end or choose another --out") from None


def _restore(out: Path) -> None:
    """Brings the old pack back if the last run was killed between taking it away and putting the new one there."""
    if not out.exists() and is_pack(_replaced(out)):
        os.rename(_replaced(out), out)


def _remove_pack(root: Path) -> None:
    """Removes a pack, its manifest last, so that a rest after an interruption is still known as a pack."""
    if root.is_dir():
        _prune(root, keep={root / MANIFEST})
        shutil.rmtree(root)


def _prune(root: Path, keep: Collection[Path]) -> None:
    """Removes all files below `root` but those to keep, and the directories that are empty then."""
    for parent, folders, names in os.walk(root, topdown=False):
        for path in [Path(parent, name) for name in (*folders, *names)]:
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path not in keep:
                path.unlink()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space or choose another place" if full else "choose another place"
        raise WriteFailed(f"can't write {path}: {error.strerror or error}; {advice}") from None
