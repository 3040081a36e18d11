"""Options that several commands share, and the settings that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moert.command.prompts import Longest
from moert.errors import RunError

if TYPE_CHECKING:
    from moert.engine.settings import EngineSettings


CHAT_NEW_TOKENS = 1024
"""Most tokens of a reply of `moert chat`, if the user names no other number."""


class Eviction(str, Enum):
    auto = "auto"
    expected = "expected"
    paper = "paper"
    lru = "lru"
    layer_lru = "layer-lru"
    lfu = "lfu"


class Predict(str, Enum):
    auto = "auto"
    gate = "gate"
    hash = "hash"
    transitions = "transitions"
    none = "none"


class KeepNeurons(str, Enum):
    recent = "recent"
    lru = "lru"
    lfu = "lfu"
    window = "window"


class Neurons(str, Enum):
    exact = "exact"
    predicted = "predicted"


class EarlyStopping(str, Enum):
    true = "true"
    false = "false"
    never = "never"


class DeviceKeep(str, Enum):
    expected = "expected"
    popular = "popular"
    lru = "lru"
    layers = "layers"


class DeviceExperts(str, Enum):
    cheapest = "cheapest"
    copied = "copied"
    resident = "resident"


class Thinking(str, Enum):
    show = "show"
    hide = "hide"


PackArgument = Annotated[Path, typer.Argument(metavar="PACK", help="Directory of the pack.", show_default=False)]
DriveOption = Annotated[
    bool,
    typer.Option(
        "--drive",
        help="Run nothing: measure how fast the drive of each pack is, over the size of a read and how many are asked "
        "for at once. With ReLU, say which --piece-bytes of moeconv quantize that makes the fastest.",
    ),
]
InputOption = Annotated[
    Path | None,
    typer.Option(
        "--input",
        help="JSON lines, each with the field prompt, input or text; - is stdin. Each starts from the same --seed.",
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Memory for the whole process: 1.5GB, 800MB, 512MiB; 50% of what is free; auto, without --cache the "
        "default: what is free, less a margin, also where a control group limits it.",
        show_default=False,
    ),
]
CacheOption = Annotated[
    str | None,
    typer.Option(
        help="Instead of --memory: room for the experts alone, 600MB or 25% of them, whatever else the process "
        "takes. For comparisons.",
        show_default=False,
    ),
]
EvictionOption = Annotated[
    Eviction,
    typer.Option(
        help="Which expert leaves when room is needed: expected (needed again last, as its use so far suggests), paper "
        "(used seldom, in a layer that is far), lru (unused longest), layer-lru (the same within its layer), lfu (used "
        "least); auto: what did best with about this room for experts when the pack's paths were profiled, or expected."
    ),
]
KeepNeuronsOption = Annotated[
    KeepNeurons,
    typer.Option(
        help="Which neurons stay, of a pack whose experts lie in blocks of them: recent (used often and lately), lru "
        "(used last), lfu (used most), window (those that fired for the last tokens, as many as fit)."
    ),
]
NeuronsOption = Annotated[
    Neurons,
    typer.Option(
        help="Which neurons of an expert count: exact (all), predicted (those that the pack's predictor names before "
        "any is computed; only their blocks are read, and no expert whole, so that --eviction and --predict have "
        "nothing to decide; moeconv train-neurons adds one). Answers depend on this."
    ),
]
PredictOption = Annotated[
    Predict,
    typer.Option(
        help="What names the experts to read ahead: gate (the next layer's router, asked early), hash (the pack's hash "
        "function, which names those of all layers before the first has run; moeconv train-hash adds it), transitions "
        "(the pack's path tables), none; auto: gate and hash together, or gate where there is no hash "
        "function, and none where experts are so small that reading ahead loses. Only what pays is read."
    ),
]
IoOption = Annotated[
    str,
    typer.Option(
        help="How experts are read: direct, buffered, or direct,4 with 4 threads; auto: what is fastest on this "
        "drive, measured once and remembered."
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Threads that compute; by default, and at most, one for each core that this process may use.",
        show_default=False,
    ),
]
KernelsOption = Annotated[
    str,
    typer.Option(
        help="What computes: auto (the best instruction set that moert info --system lists), one of those by name, "
        "or reference (numpy: slow, takes more memory, does not round activations to 8 bits)."
    ),
]


KvOption = Annotated[
    str,
    typer.Option(
        "--kv",
        metavar="16|8",
        help="Bits of keys and values: 8 take half the memory of 16 (make bench-rounding: what that adds to a loss).",
    ),
]


RoutingOption = Annotated[
    str,
    typer.Option(
        "--routing",
        "--route",
        metavar="auto|exact|SHARE|hash",
        help="Which experts a token goes to: exact, as the model says; hash: as the pack's hash function says, without "
        "asking the routers; 25%: nearly as good ones that were used lately "
        "are preferred, as the pack has it for room for that share of the experts, with a promise of its own (moeconv "
        "quantize --resident); auto: what the pack has for the room that there is. Answers depend on this.",
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        help="A second place for experts, and what else fits: none, auto (a GPU where there is one), cuda:0, or a "
        "simulated card, sim:rtx3060, sim:t4, sim:rtx3080-mobile, sim:a100: the same answers, and times as that card "
        "and a machine around it would have them. A GPU rounds in other ways than the processor.",
    ),
]
GpuMemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Of the device's memory no more than this: 6GB. By default most of what is free there.", show_default=False
    ),
]
DeviceKeepOption = Annotated[
    DeviceKeep | None,
    typer.Option(
        help="Who stays on the device: expected (whoever is not needed again last, as its use so far suggests; the "
        "default), popular (most of the pack's recorded trace, for good), lru (the latest of each layer), layers (all "
        "of the last layers).",
        show_default=False,
    ),
]
DeviceExpertsOption = Annotated[
    DeviceExperts | None,
    typer.Option(
        help="Who computes an expert: cheapest (for each layer what is done soonest: there, there after a copy, or the "
        "processor; the default), copied (always the device), resident (the device what lies there, else the "
        "processor).",
        show_default=False,
    ),
]
MaxNewTokensOption = Annotated[int, typer.Option(help="The most tokens to write.")]
TemperatureOption = Annotated[float, typer.Option(help="0 takes the likeliest token each time.")]
TopKOption = Annotated[int, typer.Option(help="Draw among the k likeliest tokens; 0: all.")]
TopPOption = Annotated[float, typer.Option(help="Draw among the likeliest tokens whose probabilities add up to this.")]
MinPOption = Annotated[float, typer.Option(help="Draw among tokens at least this fraction as likely as the likeliest.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the random draws at a temperature above 0.")]
StopOption = Annotated[
    list[str] | None,
    typer.Option(help="End before this text, taken literally; may be given several times.", show_default=False),
]
RepeatPenaltyOption = Annotated[
    float,
    typer.Option(
        help="Divide the logits of tokens that stand in the prompt or the answer by this, and multiply those below 0, "
        "as repetition_penalty of transformers does; 1: none. Behind an encoder the answer alone counts."
    ),
]
PresencePenaltyOption = Annotated[
    float, typer.Option(help="Take this from the logits of tokens that stand in the answer, as OpenAI's does; 0: none.")
]
FrequencyPenaltyOption = Annotated[
    float, typer.Option(help="The same for each time that a token stands in the answer.")
]
LogitBiasOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID=VALUE",
        help="Add a value from -100 to 100 to the logit of the token with this id; may be given several times.",
        show_default=False,
    ),
]
LogprobsOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="With --json: of each token of the answer, and of the N likeliest ones in its place, the natural "
        "logarithm of its probability, before penalties, bias, temperature and filters.",
        show_default=False,
    ),
]
FirstTokenOption = Annotated[
    str | None,
    typer.Option(
        metavar="TOKEN",
        help="Begin each answer with this token of the tokenizer's: of a model that translates, the language, as in "
        "fra_Latn. By default what the pack says, if anything.",
        show_default=False,
    ),
]
BeamsOption = Annotated[
    int,
    typer.Option(
        help="Beam search: so many beginnings of the answer go on at a time, and the likeliest answer is given; each "
        "expert is read once for all of them. Text appears as soon as all of them agree on it. 1: none."
    ),
]
LengthPenaltyOption = Annotated[
    float,
    typer.Option(
        help="With --beams: answers are compared by the logarithm of what they are likely, over their number of tokens "
        "to the power of this; above 0 favours long ones, below 0 short ones."
    ),
]
EarlyStoppingOption = Annotated[
    EarlyStopping,
    typer.Option(
        help="With --beams: end as soon as there are as many answers as beams (true), when the beams do not look "
        "better than these (false), or when none can become better (never)."
    ),
]
ReturnOption = Annotated[
    int,
    typer.Option(
        "--return", metavar="N", help="With --beams: give the N best answers, with a blank line between; --json says "
        "how they score.",
    ),
]  # fmt: skip
RawOption = Annotated[
    bool,
    typer.Option(
        "--raw",
        help="Print text to a terminal as the model writes it. By default control characters and letters that nobody "
        "sees are written out there, as in <U+001B>.",
    ),
]
StatsOption = Annotated[bool, typer.Option("--stats", help="Print the figures of the run to stderr.")]
SystemOption = Annotated[
    str | None, typer.Option("--system", help="What to tell the model first: how to answer.", show_default=False)
]
TemplateOption = Annotated[
    str | None,
    typer.Option(
        help="In place of the pack's own chat template: a file, or chatml, llama3 or alpaca, forms that models are "
        "trained for.",
        show_default=False,
    ),
]
ThinkingOption = Annotated[
    Thinking, typer.Option(help="What a model thinks before it answers: show it, dimmed on a terminal, or hide it.")
]


def bias_of(given: list[str] | None) -> dict[int, float] | None:
    """Returns the values of --logit-bias by the ids of tokens; None without any. Raises RunError."""
    found = {}
    for each in given or ():
        token, _, value = each.partition("=")
        try:
            found[int(token)] = float(value)
        except ValueError:
            raise RunError(f"--logit-bias {each}: give ID=VALUE, the id of a token and a number") from None
    return found or None


def check_logprobs(logprobs: int | None, as_json: bool) -> None:
    """Raises RunError where --logprobs was given without --json, which alone shows them."""
    if logprobs is not None and not as_json:
        raise RunError("--logprobs goes with --json: text has no place for them")


def longest_text(settings: EngineSettings) -> Longest:
    """Returns the longest text that is read."""
    from moert.engine.budget import letters_within

    return Longest(*letters_within(settings.limit))


def check_raw(as_json: bool, input_path: Path | None = None) -> None:
    """Raises RunError where --raw was given and nothing is written but JSON."""
    if as_json or input_path is not None:
        raise RunError(f"--raw has no effect with {'--json' if as_json else '--input'}: leave it out")


def check_unused(context: typer.Context, counts: Collection[str], beside: str) -> None:
    """Raises RunError for an option that was typed and does not count `beside` another."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE" and option.name not in counts:
            raise RunError(f"{option.opts[0]} has no effect with {beside}: leave it out")


@dataclass(frozen=True)
class SaidOptions:
    """The options of the engine, as the user gave them."""

    memory: MemoryOption = None
    cache: CacheOption = None
    eviction: EvictionOption = Eviction.auto
    keep_neurons: KeepNeuronsOption = KeepNeurons.recent
    neurons: NeuronsOption = Neurons.exact
    predict: PredictOption = Predict.auto
    io: IoOption = "auto"
    threads: ThreadsOption = None
    kernels: KernelsOption = "auto"
    kv: KvOption = "16"
    routing: RoutingOption = "auto"
    device: DeviceOption = "none"
    gpu_memory: GpuMemoryOption = None
    device_keep: DeviceKeepOption = None
    device_experts: DeviceExpertsOption = None

    def settings(self) -> EngineSettings:
        """Returns the engine's settings. Raises SettingInvalid, InvalidMemory or IoInvalid."""
        from moert.engine.settings import EngineSettings

        bits = int(self.kv) if self.kv.strip() in ("8", "16") else self.kv
        limit = "auto" if self.memory is None and self.cache is None else self.memory
        return EngineSettings(
            limit, self.cache, self.eviction.value, self.predict.value, self.io, self.threads, self.kernels,
            bits, self.routing.strip(), self.keep_neurons.value, self.neurons.value,  # type: ignore[arg-type]
            self.device, self.gpu_memory,
            *(None if each is None else each.value for each in (self.device_keep, self.device_experts)),
        )  # fmt: skip


UNSAID = SaidOptions()


def with_engine_options(command: Callable[..., None], names: Collection[str] | None = None) -> Callable[..., None]:
    """Returns the command with the fields of SaidOptions, or those of these names, as options of its own, in the place
    of its parameter `engine_options`."""
    every = signature(SaidOptions, eval_str=True).parameters
    options = {name: option for name, option in every.items() if names is None or name in names}
    listed = list[Parameter]()
    own = signature(command, eval_str=True)
    for parameter in own.parameters.values():
        listed += options.values() if parameter.name == "engine_options" else [parameter]

    @wraps(command)
    def taking(**given: object) -> None:
        said = {name: given.pop(name) for name in options}
        command(**given, engine_options=SaidOptions(**said))  # type: ignore[arg-type]

    taking.__signature__ = own.replace(parameters=listed)  # type: ignore[attr-defined]
    return taking
