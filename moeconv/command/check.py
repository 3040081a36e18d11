"""`moeconv check`: whether a model can be converted, and the size of its pack. Reads names and settings, no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeconv.conversion.settings import (
    DEFAULT_LAYOUT,
    DEFAULT_QUANTIZER,
    LAYOUTS,
    PLAIN_QUANTIZER,
    check_choice,
    neurons_of,
)
from moeconv.dense import dense_of
from moeconv.plan.outlook import NEW_TOKENS, PROMPT_TOKENS, Host, Outlook, Parameters, outlooks, parameters
from moeconv.plan.problem import Storage
from moeconv.quantizers import codes_of, group_size_of
from moeconv.report.page import many, size
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.gguf.folder import is_gguf
from moeconv.source.hub import find
from moeconv.source.outline import CONFIG, Outline, features
from moeconv.source.tensors import FileTensors, has_weights
from moert.pack.codec import Width
from moert.pack.model_spec import ModelSpec

DENSE_BITS = (None, 8)
"""Widths of the matrices outside the experts that are compared; None: as in the source."""

_NAMED = 3  # files at most that are not here
_HEADING = (
    ("experts", "the rest", "pack", "an expert", "a token", "smallest", "for all"),
    ("", "", "", "", "reads", "--memory", "experts"),
)


@dataclass(frozen=True)
class Checked:
    """The result of a check. `notes`: on config.json and the tokenizer; `left_out`: on parts of the checkpoint that the
    pack will not have; `certain` where the names of its tensors could be read."""

    model: str
    spec: ModelSpec
    parameters: Parameters
    quantizer: str
    layout: str
    outlooks: Sequence[Outlook]
    notes: Sequence[str]
    left_out: Sequence[str]
    certain: bool


def check(model: str, host: Host, layout: str = DEFAULT_LAYOUT) -> Checked:
    """Checks a model without its weights. `model`: a directory, a GGUF file, a config.json, or a hub id; `layout`: how
    its experts would lie in a pack. Raises CheckpointError for a model that can't be converted, SettingsError
    for experts that can't have this layout."""
    check_choice("layout", layout, LAYOUTS)
    outline, left = opened(located(model))
    spec, described = outline.spec, outline.description
    mxfp4 = described.mxfp4
    neurons = neurons_of(layout, spec, mxfp4)
    quantizer = DEFAULT_QUANTIZER if neurons is None else PLAIN_QUANTIZER
    storage = Storage(group_size_of(quantizer, None), mxfp4, neurons, codes_of(quantizer))
    denses = [dense_of(spec, bits) for bits in DENSE_BITS]
    unmade = outline.tokenizer_notes if isinstance(outline, Checkpoint) else []
    left_out = [*dict.fromkeys(described.left_out.values())] if left is None else left
    return Checked(
        model, spec, parameters(spec, described.computed), quantizer, layout,
        outlooks(spec, storage, denses, described.wide, host),
        [*described.notes, *unmade, *absent_notes(outline), *dense_notes(spec)],
        left_out, left is not None,
    )  # fmt: skip


def located(model: str) -> Path:
    """Returns the path of a given config.json, else the directory of a model, fetched if necessary. Raises
    CheckpointError."""
    return Path(model) if Path(model).is_file() else find(model, weights=False)


def opened(path: Path) -> tuple[Checkpoint | Outline, list[str] | None]:
    """Returns the outline of a model, and the notes on left out tensors; None for these if the names of tensors can't
    be read."""
    if is_gguf(path):
        checkpoint = Checkpoint.open(path, names_only=True)
        return checkpoint, checkpoint.left_out
    if path.is_file():
        return Outline.read(path), None
    if not has_weights(path):
        return Outline.read(path / CONFIG), None
    checkpoint = Checkpoint.open(path, names_only=True)
    return checkpoint, checkpoint.left_out


def absent_notes(outline: Checkpoint | Outline) -> list[str]:
    """Returns a note on files of weights that are missing, so that only the names of their tensors were checked; empty
    without any."""
    tensors = outline.files if isinstance(outline, Checkpoint) else None
    if not isinstance(tensors, FileTensors) or not (absent := tensors.absent):
        return []
    more = f" and {len(absent) - _NAMED} more" if len(absent) > _NAMED else ""
    count = f"{len(absent)} of {len(set(tensors.files.values()))}"
    return [
        f"{count} files of weights are not here ({', '.join(absent[:_NAMED])}{more}): of their tensors the names were "
        "checked, by the index"
    ]


def dense_notes(spec: ModelSpec) -> list[str]:
    """Returns a note on a model without routers; empty for others."""
    if spec.moe.chooses:
        return []
    return [
        "a dense model: each token reads all of it, so that with a --memory below the last column each token streams "
        "what does not fit"
    ]


def as_json(found: Checked) -> dict[str, Any]:
    """Returns the result as plain values of JSON; sizes are in bytes."""
    spec, experts = found.spec, found.spec.moe
    return {
        "model": found.model,
        "supported": True,
        "family": spec.family,
        "features": features(spec),
        "layers": {
            name: {"all": len(stack), "with_experts": len(spec.moe_layers(name))} for name, stack in spec.stacks.items()
        },
        "experts": {
            "per_layer": experts.n,
            "top_k": experts.router.top_k,
            "identities": experts.router.identities,
            "all": len(spec.expert_keys()),
            "weights_each": spec.weights_per_expert(),
            "shared": experts.shared is not None,
        },
        "parameters": asdict(found.parameters),
        "quantizer": found.quantizer,
        "layout": found.layout,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "outlooks": [asdict(each) for each in found.outlooks],
        "notes": list(found.notes),
        "left_out": list(found.left_out),
        "left_out_is_certain": found.certain,
    }


def lines(found: Checked) -> list[str]:
    """Returns the result as lines for a person."""
    spec, experts, numbers = found.spec, found.spec.moe, found.parameters
    layers = ", ".join(
        f"{name} of {len(stack)} layers ({len(spec.moe_layers(name))} with experts)"
        for name, stack in spec.stacks.items()
    )
    sure = "" if found.certain else ", if the checkpoint has them"
    shared = "" if experts.shared is None else ", and a shared one"
    most = "up to " if experts.router.identities else ""
    coded = found.quantizer + ("" if found.layout == DEFAULT_LAYOUT else f" and --layout {found.layout}")
    return [
        f"{found.model}: {spec.family}, supported",
        f"  layers      {layers}",
        f"  experts     {len(spec.expert_keys()):,}: {experts.n} a layer, {most}{experts.router.top_k} for each token"
        f"{shared}; {spec.weights_per_expert():,} weights each",
        f"  parameters  {many(numbers.total)}, of them {many(numbers.active)} for each token",
        *_wrapped("features", features(spec)),
        *(f"  note        {note}" for note in found.notes),
        *(f"  note        {note}{sure}" for note in found.left_out),
        "",
        f"  with the quantizer {coded}; memory for a prompt of {PROMPT_TOKENS} tokens and {NEW_TOKENS} more",
        *(f"  {' '.join(name.rjust(10) for name in names)}" for names in _HEADING),
        *map(_row, found.outlooks),
    ]


def _row(each: Outlook) -> str:
    sizes = map(size, (each.pack_bytes, each.expert_bytes, each.token_bytes))
    memory = (f"{nbytes / 1e6:,.0f} MB" for nbytes in (each.smallest_memory, each.whole_memory))
    cells = (width_text(each.bits), f"{each.dense_bits} bits", *sizes, *memory)
    return "  " + " ".join(cell.rjust(10) for cell in cells)


def width_text(bits: Width) -> str:
    """Returns the width of all experts in words; 16 is MXFP4, which a source has."""
    return "MXFP4" if bits == 16 else "1 bit" if bits == 1 else f"{bits} bits"


def _wrapped(name: str, phrases: Sequence[str], width: int = 100) -> list[str]:
    """Returns phrases with commas between them, in lines under each other."""
    rows = [""]
    for place, phrase in enumerate(phrases):
        text = phrase + ("" if place == len(phrases) - 1 else ",")
        if rows[-1] and len(rows[-1]) + 1 + len(text) > width:
            rows.append("")
        rows[-1] += (" " if rows[-1] else "") + text
    return [f"  {name if place == 0 else '':<11} {row}" for place, row in enumerate(rows)]
