"""What tests/sanitized.py starts: the engine on packs as they are, and on damaged ones whose checksums are right again.

It imports no torch: what stands in for memory's own functions slows it down, and it has nothing to do here.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from moeconv.quantizers.coding import Grid, PairCode, Pairs, code_inputs, code_pairs
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.errors import BudgetTooSmall, RunError
from moert.kernels import library, open_backend
from moert.kernels.backend import Floats
from moert.pack.errors import PackError
from moert.pack.manifest import BACKBONE
from moert.pack.reader import Pack
from tests.fuzz.mutate import mutated
from tests.random_packs import sealed

TELL = {
    "moert_abi", "moert_block", "moert_isa_count", "moert_isa_name", "moert_isa_runs", "moert_crc32_fast",
    "moert_reader_has_ring",
}  # fmt: skip
"""Functions that only say something of the library."""
FILES = ("moert_fence",)
"""What names of functions begin with that fence mapped files, which large experts have; tests/hostile breaks those."""
PROMPTS = ([3], [3, 4, 5, 6, 7, 8, 9, 3, 4], list(range(2, 10)) * 5)
SETTINGS = GenerationSettings(max_new_tokens=5)
CHOICES: tuple[dict[str, Any], ...] = (
    {"predict": "none"},
    {"cache": "30%", "io": "buffered,2", "threads": 2, "kv": 8},
    {"cache": "60%", "io": "direct,1", "eviction": "lru"},
)


def counted(functions: Any, calls: Counter[str]) -> None:
    """Every function of the library counts its calls from now on."""

    def counting(name: str, function: Any) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            calls[name] += 1
            return function(*given)

        return call

    for name in library._FUNCTIONS:
        setattr(functions, name, counting(name, getattr(functions, name)))


def choices(pack: Path) -> Iterator[dict[str, Any]]:
    yield from CHOICES
    if pack.name.startswith("neurons"):
        yield {"neurons": "predicted", "cache": "50%"}
    else:
        yield {"device": "sim:t4", "cache": "50%"}
    if pack.name.startswith("hash"):
        yield {"predict": "hash", "cache": "40%"}
        yield {"routing": "hash"}


def answer(pack: Path, kernels: str, chosen: dict[str, Any]) -> None:
    """Prompts one by one and together, in as much room as it takes. Raises what the engine does."""
    try:
        _answer(pack, kernels, chosen)
    except BudgetTooSmall as error:
        _answer(pack, kernels, {**chosen, "cache": error.smallest_bytes})


def _answer(pack: Path, kernels: str, chosen: dict[str, Any]) -> None:
    with Engine.open(pack, notify=lambda note: None, kernels=kernels, **chosen) as engine:
        vocabulary = engine.spec.vocab_size
        prompts = [[token % vocabulary for token in prompt] for prompt in PROMPTS]
        engine.generate(prompts[1], SETTINGS)
        list(engine.generate_many(prompts, SETTINGS))


def code() -> None:
    """What the converter asks of the library, of all numbers of inputs and columns about those that it treats apart."""
    coded, rng = code_inputs(), np.random.default_rng(18)
    assert coded is not None
    for inputs in (1, 7, 32):
        for columns in (1, 63, 64, 65, 200):
            values, codes, moved = (rng.standard_normal((inputs, columns)).astype(np.float32) for _ in range(3))
            scale, minimum = (rng.random((2, columns), np.float32) for _ in range(2))
            factor, group = rng.random((inputs, inputs), np.float32) + 0.5, np.arange(inputs, dtype=np.int32) % 2
            for improves in (False, True):
                coded(values, factor, Grid(scale, minimum, group, 7), codes, moved, improves)
    by_pairs = code_pairs()
    assert by_pairs is not None
    for step, (inputs, behind), columns, improves in product(
        (2, 3, 4, 5, 6, 8), ((2, 0), (4, 2)), (8, 24, 128), (False, True)
    ):
        size, first, second = inputs + behind, *rng.standard_normal((2, 4096)).astype(np.float32)
        values, made = rng.standard_normal((2, size, columns)).astype(np.float32)
        factor, scales = (
            rng.random((size, size), np.float32) + 2 * np.eye(size, dtype=np.float32),
            np.ones((2, columns)),
        )
        moved, states = np.empty((inputs, columns), np.float32), np.empty((inputs // 2, columns), np.uint16)
        pairs = Pairs(values, factor, *scales, made, moved, states, 16, improves)
        by_pairs(PairCode(step, first, second), pairs, by_pairs(PairCode(step, first, second), pairs, -1))


def interrupt(kernels: str) -> None:
    """Sends Ctrl-C into a product that takes long, and computes another with the same threads."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else, in the background, nothing happens
    backend = open_backend(kernels, 2)
    try:
        square, x = backend.matrix(Floats("F32", np.eye(512, dtype=np.float32))), np.ones((4096, 512), np.float32)
        threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        with suppress(KeyboardInterrupt):
            while True:
                backend.linear(x, square)
        assert np.array_equal(backend.linear(x[:2], square), x[:2])
    finally:
        backend.close()


def damage(pack: Path, rng: Random) -> None:
    """Of one file some bits or bytes of its numbers, or a field of the manifest; what seals them is made right."""
    manifest = pack / "manifest.json"
    document = json.loads(manifest.read_bytes())
    change = rng.randrange(4)
    if change == 0:
        document = _changed(document, rng)
    elif change == 1:
        _damage(pack / BACKBONE, document["files"][BACKBONE], 0, rng)
    else:
        entry = rng.choice(document["experts"])
        start = Pack.open(pack).layout(Pack.open(pack).manifest.experts[0].key).data_offset
        _damage(pack / entry["path"], entry, start, rng)
    manifest.write_text(sealed(document), encoding="utf-8")


def _changed(document: dict[str, Any], rng: Random) -> dict[str, Any]:
    """As it was where the changes leave no JSON object."""
    try:
        found = json.loads(mutated(json.dumps(document).encode(), rng))
    except (ValueError, RecursionError):
        return document
    return found if isinstance(found, dict) and found else document


def _damage(path: Path, entry: dict[str, Any], start: int, rng: Random) -> None:
    """Numbers of a file, behind its header, that what `entry` says is true of again."""
    body = bytearray(path.read_bytes())
    first = entry.get("offset", 0)
    end = first + entry["file_bytes"] if "file_bytes" in entry else len(body)
    start = first + (start or 8 + int.from_bytes(body[:8], "little"))
    for _ in range(rng.choice((1, 4, 30))):
        at = rng.randrange(start, end)
        noise = rng.choice(
            (rng.randbytes(1), rng.randbytes(32), b"\xff" * 8, b"\0\x7e", b"\0\x7c", b"\x80\x7f", b"\xc0\x7f")
        )
        body[at : min(at + len(noise), end)] = noise[: end - at]
    path.write_bytes(body)
    part = bytes(body[first:end])
    entry["crc32"], entry["sha256"] = zlib.crc32(part), sha256(part).hexdigest()


def damaged_runs(packs: list[Path], kernels: list[str], count: int) -> Counter[str]:
    """How they ended: "ran", or the name of an error."""
    ends, rng = Counter[str](), Random(18)
    for number in range(count):
        source = packs[number % len(packs)]
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copytree(source, Path(folder) / source.name))
            try:
                damage(copy, rng)
                answer(copy, kernels[number % len(kernels)], rng.choice(list(choices(copy))))
                ends["ran"] += 1
            except (PackError, RunError) as error:
                ends[type(error).__name__] += 1
    return ends


def main(arguments: list[str]) -> int:
    """The library, the folder with the packs, and how many damaged ones are run, or "broken"."""
    library.PATH = Path(arguments[0])
    found = library.load()
    if found is None:
        print(library.missing())
        return 1
    if arguments[2] == "broken":
        short = np.zeros(100, np.uint8)
        found.functions.moert_crc32(0, short.ctypes.data, 101)
        return 0
    calls = Counter[str]()
    counted(found.functions, calls)
    packs = sorted(path for path in Path(arguments[1]).iterdir() if (path / "manifest.json").is_file())
    kernels = [each.name for each in found.instruction_sets if each.runs]
    runs = 0
    for pack in packs:
        for chosen in choices(pack):
            for name in kernels:
                answer(pack, name, chosen)
                runs += 1
    code()
    for name in kernels:
        interrupt(name)
    if never := sorted(name for name in {*library._FUNCTIONS} - TELL - {*calls} if not name.startswith(FILES)):
        print(f"never called: {', '.join(never)}")
        return 1
    ends = damaged_runs(packs, kernels, int(arguments[2]))
    print(
        f"{runs} runs of {len(packs)} packs on {', '.join(kernels)}; {sum(ends.values())} of damaged ones: {dict(ends)}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
