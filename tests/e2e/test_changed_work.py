"""A work directory that was changed between runs: one line that names the file, or that is made again what it held."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moeconv.conversion import room
from moeconv.errors import ConversionError
from moeconv.promise.judging import LOOKS
from moert.pack.reader import Pack
from tests.e2e.conversions import Done, settings_for

SMALL = {"loss": 0.3, "samples": 8, "sweep_samples": 4, "heldout_samples": 6, "bits": (2, 4), "quantizer": "gptq"}
CHANGED = "was changed since it was made: delete it, and it is made again"


@pytest.fixture(scope="module")
def in_memory(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pack and the work directory of a conversion."""
    place = tmp_path_factory.mktemp("memory")
    Done(settings_for(sources, "olmoe", place, **SMALL))
    return place


@pytest.fixture(scope="module")
def by_layers(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of one whose model does not fit memory."""
    place = tmp_path_factory.mktemp("layers")
    with pytest.MonkeyPatch.context() as patched:
        again(sources, place, tight(patched))
    return place


def tight(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(room, "LEAST_TOKENS", 32)
    return room.PROCESS_BYTES + (2 << 20)


def again(sources: dict[str, Path], place: Path, memory: int | None = None) -> dict[str, bytes]:
    """The bytes of the pack that the same command writes."""
    shutil.rmtree(place / "m.pack", ignore_errors=True)
    more = {} if memory is None else {"memory_bytes": memory}
    Done(settings_for(sources, "olmoe", place, **SMALL, **more))
    return bytes_of(place)


def bytes_of(place: Path) -> dict[str, bytes]:
    """Of the experts."""
    pack = Pack.open(place / "m.pack")
    return {entry.path: pack.file(entry.path).read_bytes() for entry in pack.manifest.experts}


def scaled(path: Path, value: float) -> None:
    """Numbers of a file become this one."""
    tensors = load_file(path)
    for name, array in tensors.items():
        if array.dtype.kind == "f":
            tensors[name] = np.full_like(array, value)
    save_file(tensors, path, {"format": "moeconv moments", "schema": "1", "wants": "products"})


@pytest.mark.parametrize("value", [1e30, np.nan, 1.0])
def test_changed_moments_are_refused_and_made_again(
    sources: dict[str, Path], in_memory: Path, tmp_path: Path, value: float
) -> None:
    place = shutil.copytree(in_memory, tmp_path / "place")
    (moments,) = place.glob("work/*/moments-products.safetensors")
    whole = moments.read_bytes()
    scaled(moments, value)
    with pytest.raises(ConversionError, match=rf"moments-products\.safetensors {CHANGED}") as caught:
        again(sources, place)
    assert "\n" not in str(caught.value)
    assert not (place / "m.pack").exists()
    moments.unlink()
    assert again(sources, place) == bytes_of(in_memory)
    assert moments.read_bytes() == whole


@pytest.mark.parametrize(
    "change",
    [
        lambda file: scaled(file, 1e3),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
    ],
)
def test_changed_codes_are_refused_and_made_again(
    sources: dict[str, Path], by_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], object],
) -> None:  # fmt: skip
    """Even where all was measured before."""
    place, memory = shutil.copytree(by_layers, tmp_path / "place"), tight(monkeypatch)
    files = sorted(place.glob("work/*/codes/*/*.safetensors"))
    assert len(files) > 1
    for file in files[:2]:
        change(file)
        with pytest.raises(ConversionError, match=rf"{file.name} {CHANGED}"):
            again(sources, place, memory)
        file.unlink()
    assert again(sources, place, memory) == bytes_of(by_layers)
    assert all(file.is_file() for file in files)


def test_codes_that_were_there_before_a_kill_are_made_again(
    sources: dict[str, Path], by_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal does not know them yet."""
    place, memory = shutil.copytree(by_layers, tmp_path / "place"), tight(monkeypatch)
    (journal,) = place.glob("work/*/journal.jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if '"codes/' not in line))
    for file in place.glob("work/*/codes/*/*.safetensors"):
        file.write_bytes(b"half of it")
    assert again(sources, place, memory) == bytes_of(by_layers)


@pytest.mark.parametrize("layer", [1, 2])
def test_changed_states_of_a_killed_run_are_refused_and_made_again(
    sources: dict[str, Path], by_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """Its journal has measured nothing yet."""
    place, memory = shutil.copytree(by_layers, tmp_path / "place"), tight(monkeypatch)
    (journal,) = place.glob("work/*/journal.jsonl")
    journal.unlink()
    kept = list(place.glob(f"work/*/passes/kept/*/{layer:03}.states"))
    for states in kept:
        numbers = np.fromfile(states, np.float32)
        numbers[:8] *= 2
        states.write_bytes(numbers.tobytes())
    refused = 0
    while True:
        try:
            assert again(sources, place, memory) == bytes_of(by_layers)
            break
        except ConversionError as error:
            (named,) = (states for states in kept if str(error).startswith(f"{states} {CHANGED}"))
            named.unlink()
            refused += 1
    assert 1 <= refused <= len(kept)


def test_changed_looks_are_refused_and_counted_anew(sources: dict[str, Path], in_memory: Path, tmp_path: Path) -> None:
    place = shutil.copytree(in_memory, tmp_path / "place")
    looks = place / "work" / LOOKS
    looks.write_text(looks.read_text().replace('"conversion": "', '"conversion": "0'))
    with pytest.raises(ConversionError, match=r"looks\.jsonl:1 was changed since it was made"):
        again(sources, place)
    whole = (in_memory / "work" / LOOKS).read_text().splitlines(keepends=True)
    for kept in range(len(whole)):
        looks.write_text("".join(whole[:kept]))
        with pytest.raises(ConversionError, match=rf"looks\.jsonl:{max(1, kept)} was changed since it was made"):
            again(sources, place)
    looks.unlink()
    assert again(sources, place) == bytes_of(in_memory)
    assert looks.read_bytes() == (in_memory / "work" / LOOKS).read_bytes()


def test_what_no_later_run_reads_changes_nothing(sources: dict[str, Path], in_memory: Path, tmp_path: Path) -> None:
    place = shutil.copytree(in_memory, tmp_path / "place")
    (subject,) = place.glob("work/*/subject.json")
    subject.write_text("{")
    assert again(sources, place) == bytes_of(in_memory)
    assert subject.read_text() != "{"
