"""The packs that `make bench-stream` runs, and what they read; each is made where it is not there yet."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moert.engine.budget import Budget
from moert.pack.files import atomic_write, write_atomically
from moert.pack.manifest import Manifest
from moert.pack.model_spec import ExpertKey, ModelSpec
from moert.pack.reader import Pack, is_pack
from recipes.bench import routing
from recipes.bench.shaped import DENSE, OLMOE, write_pack
from recipes.bench.shaped import FOLDER as SHAPED
from recipes.bench.sized import sized

FOLDER = Path("build/bench/stream")
DEMO = Path("build/demo")
REFERENCES = {"g2p": 24, "wiki": 32}
"""Tokens written after each prompt, at most."""
HELDOUT_WINDOWS, CALIBRATION_WINDOWS = sized((8, 16), (2, 2))
PIECE = 64  # tokens of a request where no prompt says how many
_PROMPTS, _PROMPT_TOKENS, _TEXTS = 200, 16, 400


@dataclass(frozen=True)
class Packs:
    """One model as the engines of the comparison have it: mixed widths as a conversion chose them, four bits for all,
    sixteen for all. `routing` and `prompts`: see recipes.bench.streamed.Setting."""

    name: str
    mixed: Path
    int4: Path
    half: Path
    routing: Path | None
    prompts: Path | None
    new_tokens: int


def expert_bytes(pack: Path) -> int:
    return sum(entry.file_bytes for entry in Pack.open(pack).manifest.experts)


def layer_bytes(pack: Path) -> int:
    """The most that one token can demand of one layer."""
    return Budget.of(Pack.open(pack).manifest).layer_bytes


# The model of OLMoE's shape -------------------------------------------------------------------------------------------


def shaped(baselines: bool = True) -> Packs:
    """Several gigabytes of random weights, routed as the wiki model routes text; without `baselines` the mixed widths
    alone."""
    wiki, folder = DEMO / "wiki.pack", SHAPED
    FOLDER.mkdir(parents=True, exist_ok=True)
    routes = FOLDER / "routing.npz"
    if not routes.exists():
        heldout, guesses = routing.joined(wiki, "heldout", HELDOUT_WINDOWS)
        calibration, _ = routing.joined(wiki, "calibration", CALIBRATION_WINDOWS)
        with atomic_write(routes) as fresh, fresh.open("wb") as stream:
            np.savez(stream, heldout=heldout, guesses=guesses, calibration=calibration)
    packs = Packs("olmoe-shaped", folder / "mixed.pack", folder / "4bits.pack", folder / "16bits.pack", routes, None, 0)
    write_pack(packs.mixed, as_converted(Pack.open(wiki).manifest, OLMOE), DENSE)
    if baselines:
        write_pack(packs.int4, 4, DENSE)
        write_pack(packs.half, 16, DENSE)
    with np.load(routes) as recorded:
        add_paths(packs.mixed, recorded["calibration"])
    return packs


def texts(spec: ModelSpec) -> Path:
    """Returns a file of held-out texts, a line of PIECE + 1 token ids each, that any program can be made to write."""
    from tokenizers import Tokenizer

    out = FOLDER / f"texts-{spec.vocab_size}.jsonl"
    if not out.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        tokenizer = Tokenizer.from_file(str(DEMO / "wiki.pack/tokenizer.json"))
        ids = tokenizer.encode(routing.text_of("heldout")).ids
        lines = [ids[at : at + PIECE + 1] for at in range(0, len(ids) - PIECE, PIECE)][:_TEXTS]
        write_atomically(out, "".join(f"{[each % spec.vocab_size for each in line]}\n" for line in lines).encode())
    return out


def as_converted(source: Manifest, spec: ModelSpec) -> dict[ExpertKey, int]:
    """The widths that a conversion gave another model, for the experts whose routing comes from there: every so many
    experts once again. They are those of plain codes, which have whole bits and at least two."""
    widths = {entry.key: max(2, math.ceil(max(entry.bits.values()))) for entry in source.experts}
    return {key: widths[key._replace(expert=key.expert % source.model.moe.n)] for key in spec.expert_keys()}


def add_paths(pack: Path, calibration: routing.Routing) -> None:
    """What profiling adds: path tables and a trace, of the same model's routing of other text, window by window."""
    from moeconv.routes import SampleRoutes, build, record
    from moeconv.writer import add_to_pack
    from moert.pack.paths import PATHS, TRACE

    manifest = Pack.open(pack).manifest
    experts, windows = manifest.model.moe.n, len(calibration) // routing.WINDOW
    if PATHS not in manifest.files:
        routes = {at: calibration[:, place].astype(np.int64) for place, at in enumerate(manifest.model.moe_layers())}
        manifest = add_to_pack(pack, manifest, PATHS, build(experts, routes).to_bytes())
    if TRACE not in manifest.files:
        samples: list[SampleRoutes] = [{"decoder": part.astype(np.int64)} for part in np.split(calibration, windows)]
        add_to_pack(pack, manifest, TRACE, record(experts, samples).to_bytes())


# The reference models -------------------------------------------------------------------------------------------------


def reference(name: str) -> Packs:
    """The demo's pack of a model, and the same model quantized alike throughout."""
    int4, half = (uniform_pack(name, bits) for bits in (4, 16))
    return Packs(name, DEMO / f"{name}.pack", int4, half, None, prompts(DEMO / f"{name}.pack", name), REFERENCES[name])


def uniform_pack(name: str, bits: int) -> Path:
    """All experts at one width, rounded to nearest by channel; everything else as in the source."""
    from moeconv.artifacts import uniform
    from moeconv.packing.emit import Label, emit
    from moeconv.quantizers import QUANTIZERS
    from moeconv.quantizers.coder import ExpertCoder
    from moeconv.source.checkpoint import Checkpoint

    out = FOLDER / f"{name}-{bits}bits.pack"
    if not is_pack(out):
        coder = ExpertCoder(Checkpoint.open(Path("recipes/models") / name), QUANTIZERS["channel"](None), None)
        emit(coder, uniform(coder.checkpoint.spec, bits), out, seed=0, label=Label("recipes.bench.stream"))
    return out


def prompts(pack: Path, data: str) -> Path:
    """Held-out inputs, or beginnings of held-out texts, of a set in calib_data/, as token ids of a pack."""
    from tokenizers import Tokenizer

    out = FOLDER / f"{pack.stem}-prompts.jsonl"
    if not out.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        tokenizer = Tokenizer.from_file(str(pack / "tokenizer.json"))
        lines = Path(f"build/data/{data}/heldout.jsonl").read_text(encoding="utf-8").splitlines()[:_PROMPTS]
        rows = [json.loads(line) for line in lines]
        ids = [
            tokenizer.encode(row["input"]).ids
            if "input" in row
            else tokenizer.encode(row["text"].strip()).ids[:_PROMPT_TOKENS]
            for row in rows
        ]
        write_atomically(out, "".join(f"{json.dumps(each)}\n" for each in ids).encode())
    return out
