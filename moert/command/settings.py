"""The settings of moert's commands, each described once; options that commands share, and the objects made of them."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moert.command.tuning import Asked, command_class, with_settings
from moert.described import Setting
from moert.errors import RunError, SettingInvalid, said

if TYPE_CHECKING:
    from moert.engine.generation import GenerationSettings
    from moert.engine.settings import EngineSettings

_ALL, _RUN = ("run", "chat", "serve", "score", "bench"), ("run",)
_WRITING, _CHOOSING = ("run", "chat"), ("run", "chat", "serve")
PROMPTS = "Prompts"
_ROOM, _TEXT = "Memory and device", "Answers"
_EXPERTS, _MACHINE, _SECOND, _NEURONS = "Experts", "Processor and drive", "Device", "Neurons"
_SAMPLING, _BEAMS, _CHAT, _SHOWN = "Sampling", "Beam search", "Chat", "What is printed"

SETTINGS = (
    Setting(
        "memory", _ROOM, _ALL,
        "Memory limit of the whole process: 1.5GB, 800MB, 512MiB; 50% of the free memory; auto (the default without "
        "a cache setting): the free memory less a margin, and no more than a control group allows.",
        usual=True,
    ),
    Setting(
        "device", _ROOM, _ALL,
        "A second place for experts, and for other weights if they fit: none, auto (a GPU if the machine has one), "
        "cuda:0, or a simulated card (sim:rtx3060, sim:t4, sim:rtx3080-mobile, sim:a100), which gives the same "
        "answers and the times of that card in a usual machine. A GPU rounds differently than the processor.",
        default="none", usual=True, values="DEVICE",
    ),
    Setting(
        "max_new_tokens", _TEXT, _CHOOSING,
        "The largest number of tokens to write.",
        int, 256, usual=True,
    ),
    Setting(
        "temperature", _TEXT, _CHOOSING,
        "Temperature of sampling; 0 always takes the likeliest token.",
        float, 0.0, usual=True,
    ),
    Setting(
        "seed", _TEXT, _WRITING,
        "Seed of sampling at a temperature above 0.",
        int, 0, usual=True,
    ),
    Setting(
        "stop", _TEXT, _WRITING,
        "End the answer before this literal text; may be given several times.", usual=True,
        many=True,
    ),
    Setting(
        "json_schema", _TEXT, _WRITING,
        "Make each answer JSON that the JSON schema in this file allows (thinking before it stays free). Needs the "
        "extra serve.",
        usual=True, values="FILE",
    ),
    Setting(
        "grammar", _TEXT, _WRITING,
        "Make each answer a text of the grammar in this file: Lark as llguidance knows it, where start: /[0-9]+/ is a "
        "regular expression. Needs the extra serve.",
        usual=True, values="FILE",
    ),
    Setting(
        "cache", _EXPERTS, _ALL,
        "Memory for the experts alone, in place of --memory: 600MB, or 25% of all experts. The rest of the process "
        "is not limited. For comparisons.",
        values="SIZE|SHARE",
    ),
    Setting(
        "eviction", _EXPERTS, _ALL,
        "Which expert leaves the cache when another one needs room: expected (the one whose next use, to judge by "
        "its past, is furthest away), paper (rarely used, in a distant layer), lru (unused longest), layer-lru "
        "(unused longest in its layer), lfu (used least); auto: the policy that moeconv profile-paths found best for "
        "about this much memory, or expected.",
        default="auto", choices=("auto", "expected", "paper", "lru", "layer-lru", "lfu"),
    ),
    Setting(
        "predict", _EXPERTS, _ALL,
        "How experts to read ahead are predicted: gate (the next layer's router runs early), hash (the pack's hash "
        "function names the experts of all layers before the first one runs; moeconv train-hash adds it), "
        "transitions (the pack's path tables), none; auto: gate and hash, or gate without a hash function, or none "
        "if experts are so small that reading ahead costs time. Only reads that save time are made.",
        default="auto", choices=("auto", "gate", "hash", "transitions", "none"),
    ),
    Setting(
        "fill", _EXPERTS, _CHOOSING,
        "Experts that are read before the first request, while nothing else is to be done: used (as many as fit, those "
        "used most in the pack's recorded trace first, and before them those of an encoder's first layers), none; "
        "auto: used for serve with one pack and for chat at a terminal, else none.",
        default="auto", choices=("auto", "none", "used"),
    ),
    Setting(
        "routing", _EXPERTS, _ALL,
        "How tokens are routed to experts: exact (by the model's routers), hash (by the pack's hash function, "
        "without the routers), 25% (cache-aware routing: recently used experts are preferred to slightly better "
        "ones, as the pack promises for a cache of that share; moeconv quantize --resident adds it); auto: the "
        "largest share in the pack that the memory has room for, or exact. This changes answers.",
        default="auto", values="auto|exact|SHARE|hash",
    ),
    Setting(
        "io", _MACHINE, _ALL,
        "How experts are read: direct, buffered, or direct,4 with 4 threads; auto: the fastest way on this drive, "
        "measured once and remembered.",
        default="auto", values="auto|direct|buffered[,THREADS]",
    ),
    Setting(
        "threads", _MACHINE, _ALL,
        "Number of threads that compute. The default, and the most, is one for each core that this process may use.",
        int, least=1,
    ),
    Setting(
        "kernels", _MACHINE, _ALL,
        "Kernels that compute: auto (the best instruction set that moert info --system lists), an instruction set by "
        "name, or reference (numpy: slow, takes more memory, does not round activations to 8 bits).",
        default="auto", values="auto|reference|NAME",
    ),
    Setting(
        "kv", _MACHINE, _ALL,
        "Bits of the KV cache: 8 takes half the memory of 16 (make bench-rounding measures the added loss).",
        int, 16, choices=("16", "8"),
    ),
    Setting(
        "gpu_memory", _SECOND, _ALL,
        "Limit of the device's memory, such as 6GB. Default: most of what is free there.", values="SIZE",
    ),
    Setting(
        "device_keep", _SECOND, _ALL,
        "Which experts stay on the device: expected (those that will be used again soonest, to judge by their past; "
        "the default), popular (the most used ones of the pack's recorded trace, for the whole run), lru (the latest "
        "of each layer), layers (all of the last layers).",
        choices=("expected", "popular", "lru", "layers"),
    ),
    Setting(
        "device_experts", _SECOND, _ALL,
        "Where an expert is computed: cheapest (in each layer the fastest way, with a copy or without; the default), "
        "copied (always on the device), resident (on the device if it is there, else on the processor).",
        choices=("cheapest", "copied", "resident"),
    ),
    Setting(
        "neurons", _NEURONS, _ALL,
        "Which neurons of an expert are computed: exact (all), predicted (those that the pack's predictor names; "
        "only their blocks are read and no whole expert, so eviction and predict have no effect; moeconv "
        "train-neurons adds a predictor). This changes answers.",
        default="exact", choices=("exact", "predicted"),
    ),
    Setting(
        "keep_neurons", _NEURONS, _ALL,
        "Which blocks of neurons stay in memory, in packs with such blocks: recent (used often and lately), lru "
        "(used last), lfu (used most), window (those that fired for the last tokens, as many as fit).",
        default="recent", choices=("recent", "lru", "lfu", "window"),
    ),
    Setting(
        "top_k", _SAMPLING, _CHOOSING,
        "Sample from the k likeliest tokens; 0: from all.",
        int, 0,
    ),
    Setting(
        "top_p", _SAMPLING, _CHOOSING,
        "Sample from the likeliest tokens whose probabilities add up to this.", float, 1.0,
    ),
    Setting(
        "min_p", _SAMPLING, _CHOOSING,
        "Sample from tokens with at least this fraction of the likeliest token's probability.", float, 0.0
    ),
    Setting(
        "repeat_penalty", _SAMPLING, _CHOOSING,
        "Divide the logits of tokens in the prompt or the answer by this, and multiply negative logits by it, as "
        "repetition_penalty of transformers does; 1: no penalty. Models with an encoder count only the answer.",
        float, 1.0,
    ),
    Setting(
        "presence_penalty", _SAMPLING, _CHOOSING,
        "Subtract this from the logits of tokens in the answer, as OpenAI's presence_penalty does; 0: no penalty.",
        float, 0.0,
    ),
    Setting(
        "frequency_penalty", _SAMPLING, _CHOOSING,
        "Subtract this from the logit of a token for each time that it stands in the answer; 0: no penalty.",
        float, 0.0,
    ),
    Setting(
        "logit_bias", _SAMPLING, _WRITING,
        "Add a value from -100 to 100 to the logit of the token with this id; may be given several times.",
        values="ID=VALUE", many=True,
    ),
    Setting(
        "first_token", _SAMPLING, _RUN,
        "Begin each answer with this token of the tokenizer. A model that translates takes the language here, as in "
        "fra_Latn. Default: the pack's first token, if it has one.",
        values="TOKEN",
    ),
    Setting(
        "beams", _BEAMS, _RUN,
        "Width of the beam search; each expert is read once for all beams, and text appears as soon as all beams "
        "agree on it. 1: no beam search.",
        int, 1,
    ),
    Setting(
        "length_penalty", _BEAMS, _RUN,
        "With beams: the score of an answer is its log-probability divided by its number of tokens to the power of "
        "this; above 0 favours long answers, below 0 short ones.",
        float, 1.0,
    ),
    Setting(
        "early_stopping", _BEAMS, _RUN,
        "With beams: end when there are as many answers as beams (true), when no beam looks better than these "
        "answers (false), or when none can become better (never).",
        default="false", choices=("true", "false", "never"),
    ),
    Setting(
        "n_return", _BEAMS, _RUN,
        "With beams: print the N best answers, with a blank line between them; --json adds their scores.",
        int, 1,
        values="N", option="return",
    ),
    Setting(
        "template", _CHAT, _CHOOSING,
        "Chat template in place of the pack's own: a file, or one of the usual forms chatml, llama3 and alpaca.",
        values="NAME|FILE",
    ),
    Setting(
        "thinking", _CHAT, _WRITING,
        "Show the text that a model thinks before it answers (dimmed on a terminal), or hide it.", default="show",
        choices=("show", "hide"),
    ),
    Setting(
        "logprobs", _SHOWN, _WRITING,
        "With --json: add to each token of the answer its log-probability, and those of the N likeliest tokens in "
        "its place (natural logarithms, before penalties, bias, temperature and filters).",
        int, values="N",
    ),
    Setting(
        "draft", _TEXT, _CHOOSING,
        "Drafts of an answer: tokens that come next if the text goes on as it did before, several of which one pass "
        "reads. The answer is the same. none; auto (where measured times say that it pays); or a number: always "
        "draft this many tokens where some are found.",
        default="none", values="auto|none|N",
    ),
    Setting(
        "profile", _SHOWN, _RUN,
        "Write a trace of the run to this new file, for ui.perfetto.dev: the times of attention, router, cache, reads "
        "and experts in each layer of each token. --stats adds a table of them.",
        values="FILE",
    ),
    Setting(
        "raw", _SHOWN, _WRITING,
        "Print text to a terminal exactly as the model writes it. By default control characters and invisible "
        "letters are written out, as in <U+001B>.",
        bool, False,
    ),
)  # fmt: skip
"""All settings of moert."""
OPTIONS = {each.name: f"--{each.called}" if each.usual else f"--tune {each.called}" for each in SETTINGS}
"""Name in Python → the words for it on the command line."""

CHAT_NEW_TOKENS = 1024
"""Most tokens of a reply of `moert chat`, if the user names no other number."""

taking = partial(with_settings, SETTINGS)
"""Puts the settings of a command in the place of its parameter `asked`."""
grouped = partial(command_class, SETTINGS)
"""Makes the class of a command that has settings."""


_PACK = "Folder of the pack, or hf:owner/name for a pack of a hub, fetched if it is not there yet."
PackArgument = Annotated[Path, typer.Argument(metavar="PACK", help=_PACK, show_default=False)]
PacksArgument = Annotated[
    list[Path], typer.Argument(metavar="PACK...", help="Folders of packs, or hf:owner/name.", show_default=False)
]
HubArgument = Annotated[
    str, typer.Argument(metavar="OWNER/NAME[:REVISION]", help="A repository of a hub that holds a pack.")
]
StartOption = Annotated[
    str | None,
    typer.Option("--prompt", help="Text to start from; by default some built-in texts.", rich_help_panel=PROMPTS),
]
TokensOption = Annotated[
    int, typer.Option(min=1, help="Number of tokens to write after each prompt; an end token does not end it.")
]
LinesOption = Annotated[bool, typer.Option("--json", help="Print only one line of JSON for each pack.")]
DriveOption = Annotated[
    bool,
    typer.Option(
        "--drive",
        help="Run no model: measure the speed of the drive of each pack, by the size of a read and the number of "
        "simultaneous reads. With ReLU, print the piece-bytes of moeconv quantize that makes it fastest.",
    ),
]
InputOption = Annotated[
    Path | None,
    typer.Option(
        "--input",
        help="File of JSON lines, each with the field prompt, input or text; - is stdin. Each prompt starts from the "
        "same --seed.",
        rich_help_panel=PROMPTS,
    ),
]
SERVER = "Server"
HostOption = Annotated[
    str,
    typer.Option("--host", help="Address to listen on; 0.0.0.0 lets other machines in.", rich_help_panel=SERVER),
]
PortOption = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.", rich_help_panel=SERVER)
]
KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file", help="File with the key that clients have to send; without one, nobody needs a key.",
        show_default=False, rich_help_panel=SERVER,
    ),
]  # fmt: skip
OriginOption = Annotated[
    list[str] | None,
    typer.Option(
        "--origin", help="Let web pages of this origin call the server (CORS), as in https://example.org; * for all. "
        "May be given several times.", show_default=False, rich_help_panel=SERVER,
    ),
]  # fmt: skip
WaitingOption = Annotated[
    int,
    typer.Option(
        "--most-waiting", min=1, help="Refuse further clients (429) while this many wait or are answered.",
        rich_help_panel=SERVER,
    ),
]  # fmt: skip
CacheDirOption = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir", help="Folder for states of conversations that leave memory: after a restart with the same pack "
        "and settings, they go on from there without being read again.", show_default=False, rich_help_panel=SERVER,
    ),
]  # fmt: skip
CacheSizeOption = Annotated[
    str | None,
    typer.Option(
        "--cache-size", help="Most bytes of that folder, 2GB by default; the conversation that was used longest ago "
        "leaves first.", show_default=False, rich_help_panel=SERVER,
    ),
]  # fmt: skip
StatsOption = Annotated[bool, typer.Option("--stats", help="Print the figures of the run to stderr.")]
SystemOption = Annotated[
    str | None,
    typer.Option(
        "--system", help="System message: how the model should answer.", show_default=False, rich_help_panel=PROMPTS
    ),
]


def engine_settings(asked: Asked) -> EngineSettings:
    """Returns the settings of the engine. Raises SettingInvalid, InvalidMemory or IoInvalid."""
    from moert.engine.settings import EngineOptions, EngineSettings

    found = asked.of(EngineOptions.__annotations__)
    found["routing"] = found["routing"].strip()
    if found["memory"] is None and found["cache"] is None:
        found["memory"] = "auto"
    return EngineSettings(**found)


def generation_settings(asked: Asked) -> GenerationSettings:
    """Returns the settings of the generation. Raises SettingInvalid, RunError."""
    from moert.engine.generation import GenerationOptions, GenerationSettings

    found = asked.of(GenerationOptions.__annotations__)
    found |= {"logit_bias": bias_of(found.get("logit_bias")), "stop": tuple(found.get("stop") or ())}
    found |= {name: _text_of(name, found.get(name)) for name in ("json_schema", "grammar")}
    if "early_stopping" in found:
        found["early_stopping"] = {"true": True, "false": False}.get(found["early_stopping"], found["early_stopping"])
    settings = GenerationSettings(**found)
    if settings.constraint is not None:
        from moert.engine.registry import check_grammar

        check_grammar(settings.constraint)
    return settings


def _text_of(name: str, path: str | None) -> str | None:
    """Returns the text of a file that a setting names. Raises SettingInvalid."""
    if path is None:
        return None
    from moert.engine.constraint import MAX_GRAMMAR_BYTES

    try:
        with open(path, "rb") as file:
            return file.read(MAX_GRAMMAR_BYTES + 1).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
        raise SettingInvalid(name, f"{path!r} can't be read ({why}): give a file") from None


def bias_of(given: list[str] | None) -> dict[int, float] | None:
    """Returns token id → value of all --tune logit-bias. Raises RunError."""
    found = {}
    for each in given or ():
        token, _, value = each.partition("=")
        try:
            found[int(token)] = float(value)
        except ValueError:
            raise RunError(f"{said('logit_bias', each)}: give ID=VALUE, the id of a token and a number") from None
    return found or None


def check_shown(asked: Asked, as_json: bool, input_path: Path | None = None) -> None:
    """Raises RunError where logprobs are asked for and nothing would tell them, or raw text and all is JSON."""
    if asked["logprobs"] is not None and not as_json:
        raise RunError(f"{said('logprobs')} goes with --json: text has no place for them")
    if asked["raw"] and (as_json or input_path is not None):
        raise RunError(f"{said('raw')} has no effect with {'--json' if as_json else '--input'}: leave it out")


def check_unused(context: typer.Context, counts: Collection[str], beside: str) -> None:
    """Raises RunError for an option that was typed and does not count `beside` another."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE" and option.name not in counts:
            raise RunError(f"{option.opts[0]} has no effect with {beside}: leave it out")
