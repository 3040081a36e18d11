"""What `make bench-flash` runs: reference models with ReLU, whole and by neurons, at four bits, and held-out text."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moert.pack.files import write_atomically
from moert.pack.manifest import BACKBONE
from moert.pack.neurons import PREDICTOR
from moert.pack.reader import Pack, is_pack
from moert.pack.writer import add_to_pack
from recipes.bench.devices import PROCESS_BYTES
from recipes.bench.sized import TRAINING, sized
from recipes.bench.stream_packs import expert_bytes

if TYPE_CHECKING:
    from moeconv.source.checkpoint import Checkpoint
    from moert.pack.neurons import NeuronOrder

FOLDER = Path("build/bench/flash")
MODELS = Path("recipes/models")
WHOLE, COLUMNS, BUNDLED = "expert", "columns", "neuron"
"""Layouts, as --layout calls them: each expert whole; in blocks of neurons whose columns lie apart from their rows, or
beside them."""
BITS = 4
ORDER_INPUTS, ORDER_WINDOWS, CONTEXT = sized(2000, 50), sized(100, 2), 256
"""Of calibration text, that say in which order neurons lie: inputs, or windows of so many tokens."""


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
    "g2p": Subject("g2p", "g2p", False, sized(60, 4), sized(400, 20), 24, "rouge2"),
    "marks": Subject("marks", "marks", False, 6, 100, 160, MARKED, predicted=False),
    "marks_sparse": Subject("marks_sparse", "marks", True, 6, 100, 160, MARKED),
}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def pack_of(subject: Subject, layout: str, ordered: bool = True) -> Path:
    """All experts at four bits in groups, all else as in the checkpoint; made anew where that is another one. By
    neurons, if `ordered` those that fire most often on calibration text come first; else they lie as in the checkpoint.
    """
    from moeconv.artifacts import uniform
    from moeconv.conversion.settings import neurons_of
    from moeconv.packing.emit import Label, emit
    from moeconv.quantizers import QUANTIZERS
    from moeconv.quantizers.coder import ExpertCoder
    from moeconv.source.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(MODELS / subject.name)
    neurons = neurons_of(layout, checkpoint.spec, mxfp4=False)
    ordered = ordered and neurons is not None
    out = FOLDER / f"{subject.name}-{layout}{'-ordered' if ordered else ''}.pack"
    creator = f"recipes.bench.flash {checkpoint.sha256} {neurons}{' ordered' if ordered else ''}"
    if is_pack(out) and Pack.open(out).manifest.creator == creator:
        return out
    say(f"{out} is written")
    shutil.rmtree(out, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    coder = ExpertCoder(checkpoint, QUANTIZERS["group"](None), None, neurons=neurons)
    order = order_of(subject, checkpoint) if ordered else None
    emit(coder, uniform(checkpoint.spec, BITS), out, seed=0, label=Label(creator), order=order)
    return out


def order_of(subject: Subject, checkpoint: Checkpoint) -> NeuronOrder:
    """By how often neurons of the unquantised model fire on calibration text."""
    from moeconv.calibration import Sample
    from moeconv.measure.firing import by_frequency, firing_counts
    from moeconv.measure.metrics import METRICS
    from moeconv.measure.scoring import Extent, build_scorer, load_tokenizer
    from moeconv.measure.trial import LoadedModel
    from moeconv.progress import unseen

    say(f"{subject.name}: neurons that fire are counted")
    lines = Path(f"build/data/{subject.data}/calibration.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    samples = [Sample(row.get("text", row.get("input", "")), row.get("target", "")) for row in rows]
    loaded, tokenizer = LoadedModel(checkpoint), load_tokenizer(MODELS / subject.name / "tokenizer.json")
    extent = Extent(ORDER_INPUTS if subject.prompt_tokens is None else ORDER_WINDOWS, CONTEXT, None)
    scorer = build_scorer(loaded, tokenizer, samples, METRICS["perplexity"], extent)
    return by_frequency(firing_counts(loaded, scorer, unseen))


def predicting(subject: Subject, layout: str) -> Path:
    """The pack with a predictor, trained once by `moeconv train-neurons` as it is by default. Raises
    CalledProcessError."""
    bundled = pack_of(subject, BUNDLED)
    if PREDICTOR not in Pack.open(bundled).manifest.files:
        say(f"{subject.name}: a predictor is trained")
        command = [sys.executable, "-m", "moeconv", "train-neurons", str(bundled), "--calib", subject.data]
        command += ["--against", str(MODELS / subject.name), "--metric", subject.metric, *TRAINING]
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
    """The same, as a session of recipes/bench/streamed.py reads them."""
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
