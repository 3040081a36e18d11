"""The packs that `make bench-hash` runs: those of the reference models, each with a trained hash function; and the text
that they are asked about. Each is made where it is not there yet."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moert.pack.hash import HASH, HashFunction
from moert.pack.reader import MANIFEST, Pack, is_pack
from recipes.bench.sized import TRAINING, sized
from recipes.bench.stream_packs import DEMO

FOLDER = Path("build/bench/hash")
REFERENCES = DEMO.with_name("references")
LENGTHS = ("short", "middle", "long")


@dataclass(frozen=True)
class Subject:
    """A reference model, held-out `inputs` of its `data`, `new_tokens` that are written behind each at most, and what
    its answers are judged by. `edges`: tokens up to which an input is short, and middle; of running text, as many of
    its first tokens as are read for each of LENGTHS."""

    name: str
    data: str
    edges: tuple[int, ...]
    inputs: int
    new_tokens: int
    metric: str

    @property
    def pack(self) -> Path:
        return FOLDER / f"{self.name}.pack"

    @property
    def is_text(self) -> bool:
        """Whether it goes on with running text."""
        return len(self.edges) == len(LENGTHS)


SUBJECTS = {
    "g2p": Subject("g2p", "g2p", (7, 10), sized(150, 4), sized(24, 8), "rouge2"),
    "marks": Subject("marks", "marks", (42, 68), 12, 160, "calib_data/marked_words.py"),
    "wiki": Subject("wiki", "wiki", (16, 64, 256), 3, 32, "perplexity"),
    "wikids": Subject("wikids", "wiki", (16, 64, 256), 3, 32, "perplexity"),
}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def with_function(subject: Subject) -> Path:
    """The pack with a hash function, trained by `moeconv train-hash` as it is by default."""
    if not is_pack(subject.pack):
        source = _source(subject)
        FOLDER.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(subject.pack, ignore_errors=True)
        shutil.copytree(source, subject.pack, copy_function=os.link, ignore=shutil.ignore_patterns(MANIFEST))
        shutil.copy(source / MANIFEST, subject.pack)
    if HASH not in Pack.open(subject.pack).manifest.files:
        say(f"{subject.name}: a hash function is trained")
        command = [sys.executable, "-m", "moeconv", "train-hash", str(subject.pack)]
        command += ["--metric", subject.metric, *TRAINING]
        subprocess.run(command, check=True)
    return subject.pack


def _source(subject: Subject) -> Path:
    """The pack of `make demo` or `make report`; where there is none, one made by the same recipe."""
    name = f"{subject.name}.pack"
    for folder in (DEMO, REFERENCES, FOLDER / "converted"):
        if is_pack(folder / name):
            return folder / name
    return _converted(subject)


def _converted(subject: Subject) -> Path:
    from moeconv.command.recipe import Recipe
    from moeconv.conversion.additions import profile_paths
    from moeconv.conversion.conversion import Conversion
    from moeconv.progress import bar

    say(f"{subject.name}: converted by its recipe")
    (FOLDER / "converted").mkdir(parents=True, exist_ok=True)
    settings = Recipe.load(Path(f"recipes/{subject.name}.toml"), FOLDER / "converted").settings
    Conversion(settings, say, bar, profiled_next=True).run()
    profile_paths(
        Pack.open(settings.out), calib=None, heldout=None, seed=None, samples=settings.samples, context=None, say=say,
    )  # fmt: skip
    return settings.out


def function_of(pack: Path) -> HashFunction:
    return HashFunction.from_bytes(Pack.open(pack).read_file(HASH))


def heldout(subject: Subject) -> list[dict[str, str]]:
    """Samples, the last one first: training a function judges its epochs by the first ones."""
    path = Path(f"build/data/{subject.data}/heldout.jsonl")
    return [json.loads(line) for line in reversed(path.read_text(encoding="utf-8").splitlines())]


def inputs(subject: Subject, length: str | None = None, count: int | None = None) -> list[list[int]]:
    """Token ids of held-out inputs of this length; None: as they come, and of running text the longest."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(subject.pack / "tokenizer.json"))
    found: list[list[int]] = []
    for row in heldout(subject):
        ids = tokenizer.encode(row.get("input") or row["text"].strip()).ids
        if subject.is_text:
            most = subject.edges[LENGTHS.index(length or "long")]
            ids = ids[:most] if len(ids) >= most else []
        elif length is not None and _length(len(ids), subject.edges) != length:
            continue
        if ids:
            found.append(ids)
        if len(found) == (count or subject.inputs):
            break
    return found


def _length(tokens: int, edges: Sequence[int]) -> str:
    return LENGTHS[sum(tokens > edge for edge in edges)]
