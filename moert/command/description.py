"""The texts of `moert info`: of a pack, and of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from moert.command.settings import CHAT_NEW_TOKENS
from moert.engine.budget import Budget, budget_of, share_text
from moert.engine.registry import hash_function, hash_memory, measured_devices
from moert.engine.regulator import TYPICAL
from moert.engine.text import Text
from moert.errors import RunError, TokenizerMissing
from moert.experts.probe import remembered
from moert.kernels import library
from moert.kernels.speed import MOST_BYTES, kernel_speeds
from moert.machine import (
    ROOT,
    affinity,
    held_bytes,
    huge_pages,
    machine_memory,
    processor_name,
    quota_of,
    thread_bytes,
    usable_cores,
)
from moert.models.footprint import Footprint, Load
from moert.pack.errors import FormatTooNew, HeaderInvalid, PackError
from moert.pack.learnt import HASH, ORDER, PREDICTOR, HashFunction, NeuronPredictor, load_predictor
from moert.pack.manifest import BACKBONE, Dense, LossEstimate, in_words, widths_by_role, widths_text
from moert.pack.model_spec import ModelSpec
from moert.pack.paths import PATHS, TRACE
from moert.pack.reader import Pack, bits_histogram
from moert.pack.text import load_chat
from moert.stats import size

T = TypeVar("T")
_ROOM = 4  # kernels are measured in at most a fourth of the free memory


def system_facts(root: Path = ROOT) -> dict[str, Any]:
    """Returns all facts about this machine as plain values; null where this system does not tell. `root` is where /proc
    and /sys are. It takes seconds to measure the kernels."""
    return {
        **machine_facts(root),
        "kernel_bytes_per_s": _kernel_speeds(root),
        "trellis_bytes_per_s": _kernel_speeds(root, trellis=True),
        "drive": _drive(root),
        "devices": {name: asdict(costs) for name, costs in measured_devices().items()},
    }


def machine_facts(root: Path = ROOT) -> dict[str, Any]:
    """Returns those of these facts that are read at once: nothing is measured."""
    return {
        "processor": processor_name(root),
        "cores": {
            "machine": os.cpu_count(),
            "affinity": affinity(),
            "quota": quota_of(root),
            "usable": usable_cores(root),
        },
        "threads": usable_cores(root),
        **process_facts(root),
        "instruction_sets": _instruction_sets(),
        "memory": asdict(machine_memory(root)),
        "transparent_huge_pages": huge_pages(root),
    }


def process_facts(root: Path = ROOT) -> dict[str, Any]:
    """Returns the facts that say how much memory is taken before a pack is opened. Measures nothing."""
    return {
        "process": {"held_bytes": _held_by_code(root), "thread_bytes": thread_bytes(usable_cores(root), root)},
        "native_kernels": {"path": str(library.PATH), "missing": library.missing()},
    }


def system_lines(facts: dict[str, Any]) -> list[str]:
    """Returns the same facts in lines for people."""
    cores, memory, missing = facts["cores"], facts["memory"], facts["native_kernels"]["missing"]
    quota = "no quota" if cores["quota"] is None else f"a quota of {cores['quota']:g}"
    limit = "" if memory["limit_bytes"] is None else f", limited to {size(memory['limit_bytes'])}"
    sets = facts["instruction_sets"]
    names = [f"  {each['name']:<14} {each['why']}" for each in sets]
    return [
        f"processor        {facts['processor']}",
        f"cores            {cores['usable']} usable: {cores['affinity']} by affinity, {quota}, "
        f"{_or_unknown(cores['machine'])} in the machine",
        f"threads          {facts['threads']} by default",
        f"kernels          {'native' if missing is None else library.missing_note()}",
        *names,
        f"memory           {_size(memory['total_bytes'])}, {_size(memory['available_bytes'])} of it available{limit}; "
        f"{_size(memory['free_bytes'])} free for this process",
        f"this process     {size(facts['process']['held_bytes'])} without a pack, "
        f"{size(facts['process']['thread_bytes'])} more for threads",
        f"huge pages       {_or_unknown(facts['transparent_huge_pages'])} (transparent)",
        f"weights          {_speeds(facts['kernel_bytes_per_s'])}",
        f"trellis codes    {_speeds(facts['trellis_bytes_per_s'])}",
        f"drive            {_drive_line(facts['drive'])}",
        *_device_lines(facts["devices"]),
    ]


def _instruction_sets() -> list[dict[str, Any]]:
    loaded, found = library.load(), list[dict[str, Any]]()
    chosen = None if loaded is None else loaded.choose()
    for each in () if loaded is None else loaded.instruction_sets:
        why = "available" if each.runs else "not on this processor"
        why = "chosen: the best that this processor has" if each.number == chosen else why
        found.append({"name": each.name, "runs": each.runs, "chosen": each.number == chosen, "why": why})
    return found


def _kernel_speeds(root: Path, trellis: bool = False) -> dict[str, float] | None:
    """Returns the speed of each width [bytes/s], of trellis codes or else of plain ones, measured now; null without
    native kernels, or without memory to measure in."""
    loaded, free = library.load(), machine_memory(root).free_bytes
    if loaded is None:
        return None
    room = MOST_BYTES if free is None else min(MOST_BYTES, free // _ROOM)
    try:
        speeds = kernel_speeds(loaded, usable_cores(root), room, trellis=trellis)
        return {str(bits): speed for bits, speed in speeds.items()}
    except (library.NativeFailed, MemoryError):
        return None


def _drive(root: Path) -> dict[str, Any] | None:
    """Returns the drive under the current directory, as it was measured when moert first read from it; null if it never
    did."""
    known = remembered(Path.cwd(), root=root)
    if known is None:
        return None
    alone = max((speed for way, speed in known.speeds.items() if way.threads == 1), default=None)
    best = known.speeds[known.settings]
    return {
        "io": str(known.settings),
        "bytes_per_s": best,
        "alone_bytes_per_s": best if alone is None else alone,
        "piece_bytes": known.piece_bytes,
    }


def _device_lines(devices: dict[str, Any]) -> list[str]:
    found = []
    for name, costs in devices.items():
        at_four, at_sixteen = costs["widths"][4], costs["widths"][16]
        found.append(
            f"device           {name}: {costs['copy_bytes_per_s'] / 1e9:.1f} GB/s to it, "
            f"{1e6 * (costs['launch_s'] + costs['pass_s']):.0f} µs to begin and fetch, "
            f"{1e-9 / at_four['weight_s']:.0f} billion weights a second at 4 bits, "
            f"{1e-9 / at_sixteen['weight_s']:.0f} at 16"
        )
    return found or ["device           none was measured; --device says which to use"]


def _speeds(speeds: dict[str, float] | None) -> str:
    if speeds is None:
        return "not measured"
    each = ", ".join(f"{speed / 1e9:.1f} GB/s at {bits} bits" for bits, speed in speeds.items())
    return f"multiplied with one token: {each}"


def _drive_line(drive: dict[str, Any] | None) -> str:
    if drive is None:
        return "not measured; moert measures it when it first reads experts there"
    best, alone = (f"{drive[name] / 1e6:,.0f} MB/s" for name in ("bytes_per_s", "alone_bytes_per_s"))
    pieces = f", in pieces of {size(drive['piece_bytes'])}" if drive["piece_bytes"] else ""
    return f"{best} here ({drive['io']}), {alone} where one thread reads{pieces}"


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else size(nbytes)


def _or_unknown(value: object) -> object:
    return "unknown" if value is None else value


def describe(pack: Pack) -> dict[str, Any]:
    """Returns all facts about a pack as plain values; bytes are bytes, losses fractions."""
    held = _held_by_code()
    manifest, spec = pack.manifest, pack.manifest.model
    budget = Budget.of(manifest)
    files = {name: entry.nbytes for name, entry in manifest.files.items()}
    known = (BACKBONE, PATHS, TRACE, HASH, PREDICTOR)
    function, predictor = _fitting(hash_function, pack), _fitting(load_predictor, pack)
    return {
        "pack": str(pack.root),
        "creator": manifest.creator,
        "family": spec.family,
        "layers": {
            name: {"all": len(stack), "with_experts": len(spec.moe_layers(name))} for name, stack in spec.stacks.items()
        },
        "experts": {
            "per_layer": spec.moe.n,
            "top_k": spec.moe.router.top_k,
            "identities": spec.moe.router.identities,
            "all": len(manifest.experts),
            "weights_each": spec.weights_per_expert(),
            "files": len({entry.path for entry in manifest.experts}),
        },
        "quantizer": manifest.quantization.quantizer,
        "group_size": manifest.quantization.group_size,
        "codes": manifest.quantization.codes,
        "dense": None if manifest.quantization.dense is None else asdict(manifest.quantization.dense),
        "mxfp4": manifest.quantization.mxfp4,
        "neurons": _neurons(pack),
        "bits_histogram": {str(bits): count for bits, count in bits_histogram(manifest.experts).items()},
        "effective_bits": manifest.effective_bits(),
        "bytes": {
            "backbone": files.get(BACKBONE, 0),
            "experts": budget.expert_bytes,
            "expert_tensors": manifest.expert_tensor_bytes(),
            "paths": files.get(PATHS, 0),
            "trace": files.get(TRACE, 0),
            "hash": files.get(HASH, 0),
            "predictor": files.get(PREDICTOR, 0),
            "other": sum(nbytes for name, nbytes in files.items() if name not in known),
        },
        "quality": None if manifest.quality is None else asdict(manifest.quality),
        "preferences": [asdict(one) for one in manifest.preferences],
        "has_paths": PATHS in files,
        "hash": None if function is None else _hash_facts(function),
        "predictor": None if predictor is None else _predictor_facts(predictor),
        "has_tokenizer": _tokenizer_fault(pack) is None,
        "has_chat": _chat_fault(pack) is None,
        "end_tokens": _end_tokens(pack),
        "smallest_memory": {
            "bytes": _smallest_of(pack, function, held, TYPICAL),
            "prompt_tokens": TYPICAL.prompt_tokens,
            "new_tokens": TYPICAL.max_new_tokens,
        },
        "smallest_chat_memory": smallest_chat_memory(pack, CHAT_NEW_TOKENS, held),
    }


def description_lines(pack: Pack) -> list[str]:
    """Returns the same facts in lines for people."""
    facts = describe(pack)
    layers = ", ".join(f"{name} {n['all']} ({n['with_experts']} with experts)" for name, n in facts["layers"].items())
    experts, nbytes = facts["experts"], facts["bytes"]
    smallest, chat = facts["smallest_memory"], facts["smallest_chat_memory"]
    group = f", groups of {facts['group_size']}" if facts["group_size"] else ", per output channel"
    called = {"16": "MXFP4"} if facts["mxfp4"] else {}
    codes = ", trellis codes" if facts["codes"] == "trellis" else ""
    widths = ", ".join(
        f"{called.get(bits, f'{bits} bits')}: {count}" for bits, count in facts["bits_histogram"].items()
    )
    files = "" if experts["files"] == experts["all"] else f" in {experts['files']} files"
    most = "up to " if experts["identities"] else ""
    return [
        f"pack             {facts['pack']} (by {facts['creator']})",
        f"model            {facts['family']}: {layers}",
        f"experts          {experts['all']}: {experts['per_layer']} a layer, {most}{experts['top_k']} for each token, "
        f"{experts['weights_each']} weights each",
        f"quantizer        {facts['quantizer']}{group}{codes}",
        f"widths           {widths} (projections)",
        f"effective bits   {facts['effective_bits']:.3f} per expert weight, scales included",
        *_neuron_lines(facts["neurons"]),
        f"dense matrices   {_dense_text(pack.manifest.model, pack.manifest.quantization.dense)}",
        f"bytes            backbone {size(nbytes['backbone'])}, experts {size(nbytes['experts'])} on disk{files} "
        f"({size(nbytes['expert_tensors'])} of tensors), paths {size(nbytes['paths'])}, "
        f"trace {size(nbytes['trace'])}, hash {size(nbytes['hash'])}, predictor {size(nbytes['predictor'])}, "
        f"other {size(nbytes['other'])}",
        *_quality_lines(pack),
        *_preference_lines(pack),
        *_hash_lines(facts["hash"], pack.manifest.model.moe.chooses),
        *(_predictor_lines(facts["predictor"]) if pack.has_neurons else []),
        f"paths            {'yes' if facts['has_paths'] else 'no: moeconv profile-paths adds them'}",
        f"tokenizer        {'yes' if facts['has_tokenizer'] else f'no: {_tokenizer_fault(pack)}'}",
        f"chat template    {'yes' if facts['has_chat'] else f'no: {_chat_fault(pack)}'}",
        *_end_lines(facts["end_tokens"]),
        f"smallest memory  {_smallest_text(smallest)}, for the whole process; longer texts and beams take more",
        *([] if chat is None else [f"  in chat        {_smallest_text(chat)}; longer conversations take more"]),
    ]


def _smallest_text(smallest: dict[str, int]) -> str:
    return (
        f"{smallest['bytes']} bytes ({size(smallest['bytes'])}) for {smallest['prompt_tokens']} prompt tokens and "
        f"{smallest['new_tokens']} new ones"
    )


def _end_tokens(pack: Pack) -> list[dict[str, Any]]:
    """Returns ids of tokens that end a text, the tokenizer's names for them, and whether they do so in chat alone."""
    ends, tokens = list(pack.manifest.model.tokens.eos), dict[int, str | None]()
    with suppress(TokenizerMissing, PackError):
        text = Text(pack)
        tokens = {number: text.tokenizer.id_to_token(number) for number in ends}
        chat = load_chat(pack)
        tokens |= {} if chat is None else dict(zip(text.numbers(chat.ends), chat.ends, strict=False))
    both = dict.fromkeys([*ends, *tokens])
    return [{"id": number, "token": tokens.get(number), "only_in_chat": number not in ends} for number in both]


def _end_lines(ends: list[dict[str, Any]]) -> list[str]:
    said = [
        f"{each['token'] or 'no token of the tokenizer'} ({each['id']})" + (" in chat" if each["only_in_chat"] else "")
        for each in ends
    ]
    return [f"end tokens       {', '.join(said) or 'none: a text ends at its longest'}"]


def _neurons(pack: Pack) -> dict[str, Any] | None:
    """Returns how experts lie in blocks of neurons: the number of blocks, and the bytes of a block's rows and columns,
    each on average over the experts; None where they don't. `ordered`: not as in the source."""
    how = pack.manifest.quantization.neurons
    if how is None:
        return None
    layouts = [pack.neurons(entry.key) for entry in pack.manifest.experts]
    means = {
        name: sum(getattr(one, field) for one in layouts) / len(layouts)
        for name, field in (
            ("blocks", "n_blocks"), ("rows_bytes", "rows_bytes"), ("columns_bytes", "columns_bytes")
        )
    }  # fmt: skip
    return {**asdict(how), "ordered": ORDER in pack.manifest.files, **means}


def _neuron_lines(facts: dict[str, Any] | None) -> list[str]:
    if facts is None:
        return []
    apart = "behind its rows" if facts["bundled"] else "apart from the rows"
    columns, rows = (size(round(facts[name])) for name in ("columns_bytes", "rows_bytes"))
    return [
        f"neurons          {facts['blocks']:.0f} blocks an expert: {columns} of columns each, {apart}, which take "
        f"{rows}; {'in the order in which they fire' if facts['ordered'] else 'in the order of the source'}",
    ]


def _held_by_code(root: Path = ROOT) -> int:
    """Returns the memory [bytes] that the process holds once all code is loaded."""
    from moert.engine import engine  # noqa: F401 - what it imports takes memory

    return held_bytes(root)


def smallest_chat_memory(pack: Pack, new_tokens: int, held: int | None = None) -> dict[str, int] | None:
    """Returns the smallest --memory of `moert chat`: for a first message as long as a usual prompt, in the pack's
    template, and a reply of `new_tokens` tokens. None where the pack can't chat, or its template renders no message.
    `held`: memory [bytes] of a process that has opened the pack."""
    from moert.chat.renderer import (
        Renderer,  # as the engine does it: what `held` counts has not loaded it
        chat_of,
    )

    try:
        text = Text(pack)
        renderer = Renderer(chat_of(pack, text))
        prompt, aside_bytes = renderer.first_message(text, TYPICAL.prompt_tokens)
    except (PackError, RunError):
        return None
    left = pack.manifest.model.room(prompt)
    if left is not None and left < 1:
        return None
    load, held = Load(prompt, new_tokens, marks=True), _held_by_code() if held is None else held
    return {
        "bytes": _smallest_of(pack, _fitting(hash_function, pack), held, load, aside_bytes),
        "prompt_tokens": prompt,
        "new_tokens": new_tokens if left is None else min(left, new_tokens),
    }


def _smallest_of(pack: Pack, function: HashFunction | None, held: int, load: Load, aside_bytes: int = 0) -> int:
    """Returns the smallest --memory [bytes] of a request, as an engine with the default settings has it."""
    widened = library.missing() is not None
    nbytes, foreseeing = hash_memory(pack, function)
    budget = budget_of(pack, widened, thread_bytes(usable_cores()), nbytes)
    prefers = bool(pack.manifest.preferences)
    footprint = Footprint(pack.manifest.model, widened, prefers=prefers, foreseeing=foreseeing)
    return budget.smallest_memory(held - budget.opened_bytes, footprint.request([load]), aside_bytes)


def _fitting(read: Callable[[Pack], T | None], pack: Pack) -> T | None:
    """Returns an optional part of the pack; None without one, or without one for this model."""
    with suppress(HeaderInvalid, FormatTooNew):
        return read(pack)
    return None


def _hash_facts(function: HashFunction) -> dict[str, Any]:
    """Returns the facts about a hash function. `hits` by stack, the mean over its layers: the share of held-out choices
    that are among the top_k, and among the 3 · top_k, experts that it names first."""
    return {
        "hits": {name: stack.hits.mean(axis=0).tolist() for name, stack in function.stacks.items()},
        "routed": None if function.routed is None else asdict(function.routed),
    }


def _hash_lines(facts: dict[str, Any] | None, chooses: bool) -> list[str]:
    if not chooses:
        return ["hash function    no: every token passes all experts of a layer"]
    if facts is None:
        return ["hash function    no: moeconv train-hash adds one"]
    routed = facts["routed"]
    loss = "not measured" if routed is None else f"loss {100 * routed['loss']:.2f}%"
    return [
        "hash function    names of held-out choices, and among three times as many experts:",
        *(f"  {name:<14} {100 * first:.0f}%, {100 * third:.0f}%" for name, (first, third) in facts["hits"].items()),
        f"  instead of the routers: {loss}",
    ]


def _predictor_facts(predictor: NeuronPredictor) -> dict[str, Any]:
    """Returns the facts about a predictor. `kept`: see moert.pack.learnt.Kept, the mean over layers."""
    return {
        "rank": predictor.rank,
        "missed": predictor.missed,
        "kept": predictor.kept._asdict(),
        "loss": None if predictor.loss is None else asdict(predictor.loss),
    }


def _predictor_lines(facts: dict[str, Any] | None) -> list[str]:
    if facts is None:
        return ["predictor        no: moeconv train-neurons adds one"]
    kept = {name: f"{100 * share:.1f}%" for name, share in facts["kept"].items()}
    measured, loss = facts["loss"], "loss not measured"
    if measured is not None:
        loss = f"loss {100 * measured['loss']:.2f}% [{100 * measured['low']:.2f}%, {100 * measured['high']:.2f}%]"
    return [
        f"predictor        names {kept['neurons']} of held-out neurons, {kept['firing']} of those that fire, and so "
        f"{kept['blocks']} of blocks; {loss}"
    ]


def _dense_text(spec: ModelSpec, dense: Dense | None) -> str:
    if dense is None:
        return "as in the source"
    widths = ", ".join(f"{role}: {widths_text(found)}" for role, found in widths_by_role(spec, dense).items())
    group = f"groups of {dense.group_size}" if dense.group_size else "per output channel"
    trellis = f", trellis codes of {', '.join(dense.trellis)}" if dense.trellis else ""
    return f"{widths}; quantizer {dense.quantizer}, {group}{trellis}"


def _tokenizer_fault(pack: Pack) -> str | None:
    """Returns why text can't be turned into tokens; None if it can."""
    try:
        _ = Text(pack).tokenizer
    except (TokenizerMissing, PackError) as error:
        return str(error)
    return None


def _chat_fault(pack: Pack) -> str | None:
    """Returns why the pack can't hold a conversation; None if it can."""
    try:
        return None if load_chat(pack) is not None else "the model came with none"
    except PackError as error:
        return str(error)


def _quality_lines(pack: Pack) -> list[str]:
    quality = pack.manifest.quality
    if quality is None:
        return ["quality          not measured"]
    aim = "" if quality.target_loss is None else f", target loss {100 * quality.target_loss:.2f}%"
    lines = [f"quality          {in_words(quality.metric)}{aim}"]
    for name, measured in (("calibration", quality.calibration), ("held-out", quality.heldout)):
        lines.append(f"  {name:<14} {_measured(measured)}")
    return lines


def _preference_lines(pack: Pack) -> list[str]:
    found = [f"  {share_text(one.share):>4} in memory {_measured(one.heldout)}" for one in pack.manifest.preferences]
    return ["routing          may prefer what was used lately, with room for so many experts:", *found] if found else []


def _measured(measured: LossEstimate | None) -> str:
    if measured is None:
        return "not measured"
    by_tokens = measured.per_token()
    token_text = "" if by_tokens is None else f"; per token {by_tokens[1]:.4f} (reference {by_tokens[0]:.4f})"
    return (
        f"{measured.value:.4f} (reference {measured.reference:.4f}), loss {100 * measured.loss:.2f}% "
        f"[{100 * measured.low:.2f}%, {100 * measured.high:.2f}%] on {measured.samples} samples{token_text}"
    )
