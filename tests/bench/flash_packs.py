"""What `make bench-flash` runs: reference models with ReLU, whole and by neurons, at four bits, and held-out text."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from moert.pack.files import write_atomically
from moert.pack.manifest import BACKBONE
from moert.pack.predictor import PREDICTOR
from moert.pack.reader import Pack, is_pack
from moert.pack.writer import add_to_pack
from tests.bench.devices import PROCESS_BYTES
from tests.bench.stream_packs import expert_bytes

FOLDER = Path("build/bench/flash")
MODELS = Path("recipes/models")
WHOLE, COLUMNS, BUNDLED = "expert", "columns", "neuron"
"""Layouts, as --layout calls them: each expert whole; in blocks of neurons whose columns lie apart from their rows, or
beside them."""
BITS = 4


@dataclass(frozen=True)
class Subject:
    """A reference model and held-out `inputs` of its `data`, of running text the first `prompt_tokens`, behind each of
    which at most `new_tokens` are written; `recorded` inputs for what is looked at without an engine. `sparse`: it was
    trained so that few neurons fire. `metric`: what a predictor's loss is judged by. `dense`: each token goes through
    all of it. `predicted`: a predictor is trained."""

    name: str
    data: str
    sparse: bool
    inputs: int
    recorded: int
    new_tokens: int
    metric: str
    prompt_tokens: int | None = None
    dense: bool = False
    predicted: bool = True

    @property
    def is_there(self) -> bool:
        return (MODELS / self.name).is_dir()


MARKED = "calib_data/marked_words.py"
SUBJECTS = {
    "opt": Subject("opt", "wiki", True, 24, 64, 64, "perplexity", prompt_tokens=16),
    "g2p": Subject("g2p", "g2p", False, 60, 400, 24, "rouge2"),
    "marks": Subject("marks", "marks", False, 6, 100, 160, MARKED, predicted=False),
    "marks_sparse": Subject("marks_sparse", "marks", True, 6, 100, 160, MARKED),
}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def pack_of(subject: Subject, layout: str) -> Path:
    """All experts at four bits in groups, all else as in the checkpoint; made anew where that is another one."""
    from moeconv.artifacts import uniform
    from moeconv.conversion.layouts import neurons_of
    from moeconv.packing.emit import Label, emit
    from moeconv.quantizers import QUANTIZERS
    from moeconv.quantizers.coder import ExpertCoder
    from moeconv.source.checkpoint import Checkpoint

    checkpoint, out = Checkpoint.open(MODELS / subject.name), FOLDER / f"{subject.name}-{layout}.pack"
    neurons = neurons_of(layout, checkpoint.spec, mxfp4=False)
    creator = f"tests.bench.flash {checkpoint.sha256} {neurons}"
    if is_pack(out) and Pack.open(out).manifest.creator == creator:
        return out
    say(f"{out} is written")
    shutil.rmtree(out, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    coder = ExpertCoder(checkpoint, QUANTIZERS["group"](None), None, neurons=neurons)
    emit(coder, uniform(checkpoint.spec, BITS), out, seed=0, label=Label(creator))
    return out


def predicting(subject: Subject, layout: str) -> Path:
    """The pack with a predictor, trained once by `moeconv train-neurons` as it is by default. Raises
    CalledProcessError."""
    bundled = pack_of(subject, BUNDLED)
    if PREDICTOR not in Pack.open(bundled).manifest.files:
        say(f"{subject.name}: a predictor is trained")
        command = [sys.executable, "-m", "moeconv", "train-neurons", str(bundled), "--calib", subject.data]
        command += ["--against", str(MODELS / subject.name), "--metric", subject.metric]
        subprocess.run(command, check=True, stdout=sys.stderr)
    out = pack_of(subject, layout)
    if PREDICTOR not in Pack.open(out).manifest.files:
        add_to_pack(out, Pack.open(out).manifest, PREDICTOR, Pack.open(bundled).read_file(PREDICTOR))
    return out


def inputs(subject: Subject, count: int | None = None) -> list[list[int]]:
    """Token ids of held-out inputs, the last of the text first, which no training chose its epochs by."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODELS / subject.name / "tokenizer.json"))
    lines = Path(f"build/data/{subject.data}/heldout.jsonl").read_text(encoding="utf-8").splitlines()
    found: list[list[int]] = []
    for line in reversed(lines):
        row = json.loads(line)
        ids = tokenizer.encode(row.get("input") or row["text"].strip()).ids[: subject.prompt_tokens]
        if len(ids) == subject.prompt_tokens or (subject.prompt_tokens is None and ids):
            found.append(ids)
        if len(found) == (count or subject.inputs):
            break
    return found


def prompts_file(subject: Subject) -> Path:
    """The same, as a session of tests/bench/streamed.py reads them."""
    out = FOLDER / f"{subject.name}-prompts.jsonl"
    write_atomically(out, "".join(f"{json.dumps(ids)}\n" for ids in inputs(subject)).encode())
    return out


def room_of(subject: Subject, share: float) -> int:
    """Bytes for experts, the same for all layouts: a share of those of the whole ones."""
    return int(share * expert_bytes(pack_of(subject, WHOLE)))


def memory_bytes(subject: Subject, share: float) -> int:
    """What a process may hold with such room."""
    backbone = Pack.open(pack_of(subject, WHOLE)).manifest.files[BACKBONE].nbytes
    return room_of(subject, share) + backbone + PROCESS_BYTES
