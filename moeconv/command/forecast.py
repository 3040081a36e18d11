"""`moeconv plan MODEL`: sizes, speeds and effort to expect before a model is converted. Reads no weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeconv.command.check import DENSE_BITS, absent_notes, located, opened, width_text
from moeconv.command.options import bytes_of
from moeconv.conversion.host import Timing, facts, host_of, timing
from moeconv.conversion.settings import DEFAULT_QUANTIZER
from moeconv.dense import dense_of
from moeconv.errors import SettingsError
from moeconv.plan.forecast import (
    DEFAULT_DRIVE,
    Drive,
    Effort,
    Forecast,
    Processor,
    Reference,
    Subject,
    Tools,
    forecast,
    nearest,
    processor_of,
    prospect,
    references,
    ways,
    with_text,
    without_text,
)
from moeconv.plan.outlook import NEW_TOKENS, PROMPT_TOKENS, Parameters, parameters
from moeconv.plan.problem import Storage
from moeconv.quantizers import codes_of, group_size_of
from moeconv.report.page import duration, many, size
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.gguf.tensors import GgufTensors
from moeconv.source.outline import CONFIG, GGUF, Outline, json_object
from moeconv.tuned import said
from moert.pack.documents import MAX_BYTES
from moert.pack.messages import NotASize, parse_size
from moert.pack.model_spec import ModelSpec

OF_WORK = {"loss", "size", "bits_per_weight", "purpose", "allocation", "signal", "bits", "whole_curve"}
"""Arguments of `moeconv plan` on the measurements of a conversion."""
OF_MODEL = {"memory", "drive"}
"""Arguments of `moeconv plan` on a pack that is not made yet."""
_OPTIONS = {"whole_curve": "--curve", "purpose": "--for"}
_INDEX = "model.safetensors.index.json"
_ABOUT = 4  # bits of a weight that converting is reckoned for
_MXFP4_BITS = 4.25  # a weight, its share of a scale counted
_SLOWEST = 1e6  # bytes a second; a smaller number is of another unit
_LARGE_BYTES = 1 << 20  # of a piece: measured with smaller pieces, a drive seems slower than it is
_HEADING = (
    ("experts", "bits a", "the", "pack", "smallest", "memory", "experts", "found", "a token", "tokens/s"),
    ("", "weight", "rest", "", "--memory", "for all", "in memory", "there", "reads", "expected"),
)


@dataclass(frozen=True)
class Where:
    """The machine that a pack would run on. `drive_from`: in words, the source of the drive's speed."""

    memory_bytes: int
    drive: Drive
    drive_from: str
    processor: Processor | None


@dataclass(frozen=True)
class Expected:
    """The expectations of a model. `like`: the model that the hit rates are from; `notes`: on missing files."""

    model: str
    spec: ModelSpec
    parameters: Parameters
    source_bytes: int
    where: Where
    like: Reference
    forecasts: Sequence[Forecast]
    efforts: Mapping[str, Effort]
    notes: Sequence[str]


def is_model(what: str, given: Collection[str]) -> bool:
    """Returns whether `what` is a model and not the work directory of a conversion; `given` are the other arguments. A
    path that does not exist is a hub id if it looks like one and no argument needs a conversion. Raises SettingsError
    for arguments that do not go with it."""
    path = Path(what)
    there = path.is_file() or (path / CONFIG).is_file()
    found = there or (not path.exists() and (what.count("/") == 1 or what.endswith(GGUF)) and not OF_WORK & set(given))
    for name in given:
        if name in (OF_WORK if found else OF_MODEL):
            option = _OPTIONS.get(name, said(name))
            raise SettingsError(_REFUSED[found].format(option=option, what=what))
    return found


_REFUSED = {
    True: "{option} asks what a conversion has measured, and {what} is a model: give the --work directory of a "
    "`moeconv quantize`, or only --memory and --drive",
    False: "{option} asks what a pack of a model would be, and {what} is not one: give a directory with config.json, a "
    "GGUF file, a config.json, or a hub id",
}  # fmt: skip


def where(machine: Mapping[str, Any], memory: int | None, drive: str | None) -> Where:
    """Returns the machine that a pack would run on. `machine`: the output of `moert info --system`. Without `memory` it
    has the free memory. Raises SettingsError."""
    free, known = machine["memory"]["free_bytes"], machine["drive"]
    if memory is None and free is None:
        raise SettingsError("the free memory of this system is unknown: give --memory, such as 4GB")
    if drive is not None:
        speed = parse_speed(drive)
        found, told = Drive(speed, speed), "as --drive says"
    elif known is not None and known["piece_bytes"] >= _LARGE_BYTES:
        found, told = Drive(known["bytes_per_s"], known["alone_bytes_per_s"]), "as moert measured it here"
    else:
        found, told = Drive(DEFAULT_DRIVE, DEFAULT_DRIVE), "a guess: say --drive, such as 3GB/s"
    return Where(free if memory is None else memory, found, told, processor_of(dict(machine)))


def parse_speed(text: str) -> float:
    """Returns bytes a second from '500MB/s' or '3GB/s'. Raises SettingsError, also for speeds that no drive is as slow
    as."""
    try:
        speed = float(parse_size(text.strip().removesuffix("/s")))
    except NotASize:
        speed = 0.0
    if speed < _SLOWEST:
        raise SettingsError(f"--drive {text!r} is not the speed of a drive: expected one like 500MB/s or 3GB/s")
    return speed


def asked(model: str, memory: str | None, drive: str | None) -> Expected:
    """Returns the expectations of a model on this machine, which is measured now; `memory` and `drive` are the texts of
    --memory and --drive. Raises SettingsError, CheckpointError."""
    if drive is not None:
        parse_speed(drive)
    memory_bytes = bytes_of(memory)
    opened(located(model))
    machine = facts()
    return expect(model, machine, where(machine, memory_bytes, drive), timing())


def expect(model: str, machine: Mapping[str, Any], place: Where, timed: Timing) -> Expected:
    """Returns the expectations of a model. `model`: a directory, a GGUF file, a config.json, or a hub id. Raises
    CheckpointError for a model that can't be converted."""
    path = located(model)
    outline, _ = opened(path)
    spec, wide = outline.spec, outline.description.wide
    numbers, like = parameters(spec, outline.description.computed), nearest(spec, references())
    group_size, codes = group_size_of(DEFAULT_QUANTIZER, None), codes_of(DEFAULT_QUANTIZER)
    storage, host = Storage(group_size, outline.description.mxfp4, codes=codes), host_of(dict(machine))
    prospects = (
        prospect(spec, storage, mixed, dense_of(spec, bits), wide, host)
        for bits in DENSE_BITS
        for mixed in ways(spec, storage)
    )
    found = [forecast(each, like, place.processor, place.drive, place.memory_bytes) for each in prospects]
    source = source_bytes(path, outline, numbers)
    room = machine["memory"]["free_bytes"] or place.memory_bytes  # of this machine, which converts
    tools = Tools(timed.weights_per_s, timed.flops_per_s, place.drive.bytes_per_s, room)
    subject = Subject(spec, numbers, source, _four_bits(found))
    efforts = {
        "without_text": without_text(subject, tools, DEFAULT_QUANTIZER),
        "with_text": with_text(subject, tools, DEFAULT_QUANTIZER),
    }
    return Expected(model, spec, numbers, source, place, like, found, efforts, absent_notes(outline))


def _four_bits(found: Sequence[Forecast]) -> int:
    """Returns the bytes of the pack with experts at about four bits and all else as in the source."""
    return min(
        (each for each in found if each.dense_bits == 16), key=lambda each: abs(each.bits_per_weight - _ABOUT)
    ).pack_bytes


def source_bytes(path: Path, outline: Checkpoint | Outline, numbers: Parameters) -> int:
    """Returns the bytes of the checkpoint's weights: of its files, by its index, or as config.json makes likely."""
    if isinstance(outline, Checkpoint) and isinstance(outline.tensors, GgufTensors):
        return outline.tensors.nbytes
    if path.is_dir():
        lying = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        about = (json_object(path / _INDEX) or {}).get("metadata")
        stated = about.get("total_size") if isinstance(about, dict) else None
        known = stated if type(stated) is int and 0 <= stated <= MAX_BYTES else 0
        if known or (lying and not absent_notes(outline)):
            return max(lying, known)
    spec = outline.spec
    experts = len(spec.expert_keys()) * spec.weights_per_expert()
    config = json_object(path / CONFIG if path.is_dir() else path) or {}
    coded = config.get("quantization_config")
    if isinstance(coded, dict) and coded.get("quant_method") == "fp8":
        return numbers.total
    each = _MXFP4_BITS if outline.description.mxfp4 else 16
    return 2 * (numbers.total - experts) + int(experts * each / 8)


def as_json(found: Expected) -> dict[str, Any]:
    """Returns the expectations as plain values of JSON, in bytes and seconds."""
    place, like = found.where, found.like
    return {
        "model": found.model,
        "family": found.spec.family,
        "parameters": asdict(found.parameters),
        "source_bytes": found.source_bytes,
        "memory_bytes": place.memory_bytes,
        "drive": {**asdict(place.drive), "from": place.drive_from},
        "processor": None if place.processor is None else asdict(place.processor),
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "hit_rates_of": {"model": like.name, "kind": like.kind, "experts": like.experts, "top_k": like.top_k},
        "packs": [asdict(each) for each in found.forecasts],
        "notes": list(found.notes),
        "converting": {name: asdict(effort) for name, effort in found.efforts.items()},
    }


def lines(found: Expected) -> Iterator[str]:
    """Yields the expectations as lines for a person."""
    place, like, numbers = found.where, found.like, found.parameters
    yield (
        f"{found.model}: {found.spec.family}, {many(numbers.total)} parameters, "
        f"{many(numbers.active)} of them for each token"
    )
    yield f"  memory      {size(place.memory_bytes)}, a prompt of {PROMPT_TOKENS} tokens and {NEW_TOKENS} more"
    yield f"  drive       {size(place.drive.bytes_per_s)}/s, {place.drive_from}"
    yield f"  kernels     {_kernels(place.processor)}"
    yield from (f"  note        {note}" for note in found.notes)
    if like.rates:
        yield (
            f"  like        {like.name}, whose routing was recorded: {like.kind}, {like.experts} experts a layer, "
            f"{like.top_k} for each token"
        )
    else:
        yield "  like        no other: every token takes all experts of a layer, and finds those that have room"
    yield ""
    yield from (f"  {' '.join(name.rjust(9) for name in names)}".rstrip() for names in _HEADING)
    yield from map(_row, found.forecasts)
    yield ""
    yield from _converting(found)


def _row(each: Forecast) -> str:
    name = "mixed" if each.bits is None else width_text(each.bits)
    known = ["too little", "", "", "-"]
    if each.room_share is not None and each.hit_rate is not None and each.read_bytes is not None:
        speed = "-" if each.tokens_per_s is None else f"{each.tokens_per_s:.3g}"
        known = [f"{each.room_share:.0%}", f"{each.hit_rate:.0%}", size(each.read_bytes), speed]
    cells = (
        name, f"{each.bits_per_weight:.2f}", f"{each.dense_bits} bits", size(each.pack_bytes),
        size(each.smallest_memory), size(each.whole_memory), *known,
    )  # fmt: skip
    return "  " + " ".join(cell.rjust(9) for cell in cells).rstrip()


def _kernels(processor: Processor | None) -> str:
    if processor is None:
        return "no native kernels, so no speed can be expected: install a C compiler, then moert again"
    plain, trellis = processor.kernel_bytes_per_s, processor.trellis_bytes_per_s
    codes = f"trellis codes {size(trellis[2])}/s at 2 bits, {size(trellis[4])}/s at 4"
    return f"{codes}; others {size(plain[8])}/s at 8, {size(plain[16])}/s at 16; just measured"


def _converting(found: Expected) -> Iterator[str]:
    names = {"without_text": "without text", "with_text": "with text"}
    yield f"  converting {size(found.source_bytes)} to about 4 bits a weight, on this machine:"
    for name, effort in found.efforts.items():
        sweep = f", {duration(effort.sweep_s)} of it for the exact sweep" if effort.sweep_s else ""
        yield f"  {names[name]:<12} {effort.quantizer}: {duration(effort.seconds)}{sweep}"
        yield (
            f"  {'':<12} reads {size(effort.read_bytes)}, and needs {size(effort.disk_bytes)} of disk beside the source"
        )
    yield f"  with text, the model itself takes {size(found.efforts['with_text'].memory_bytes)} of memory, in 32 bits"
