"""The settings of moert's commands, each described once."""

from __future__ import annotations

from moert.described import Setting

_ALL, _WRITING, _RUN = ("run", "chat", "score", "bench"), ("run", "chat"), ("run",)
PROMPTS = "Prompts"
_ROOM, _TEXT = "Memory and device", "Answers"
_EXPERTS, _MACHINE, _SECOND, _NEURONS = "Experts", "Processor and drive", "Device", "Neurons"
_SAMPLING, _BEAMS, _CHAT, _SHOWN = "Sampling", "Beam search", "Chat", "What is printed"

SETTINGS = (
    Setting(
        "memory", _ROOM, _ALL,
        "Memory for the whole process: 1.5GB, 800MB, 512MiB; 50% of what is free; auto, the default where no cache is "
        "given: what is free, less a margin, also where a control group limits it.",
        usual=True,
    ),
    Setting(
        "device", _ROOM, _ALL,
        "A second place for experts, and what else fits: none, auto (a GPU where there is one), cuda:0, or a "
        "simulated card, sim:rtx3060, sim:t4, sim:rtx3080-mobile, sim:a100: the same answers, and times as that card "
        "and a machine around it would have them. A GPU rounds in other ways than the processor.",
        default="none", usual=True, values="DEVICE",
    ),
    Setting("max_new_tokens", _TEXT, _WRITING, "The most tokens to write.", int, 256, usual=True),
    Setting("temperature", _TEXT, _WRITING, "0 takes the likeliest token each time.", float, 0.0, usual=True),
    Setting("top_k", _TEXT, _WRITING, "Draw among the k likeliest tokens; 0: all.", int, 0, usual=True),
    Setting(
        "top_p", _TEXT, _WRITING, "Draw among the likeliest tokens whose probabilities add up to this.", float, 1.0,
        usual=True,
    ),
    Setting("seed", _TEXT, _WRITING, "Seed of the random draws at a temperature above 0.", int, 0, usual=True),
    Setting(
        "stop", _TEXT, _WRITING, "End before this text, taken literally; may be given several times.", usual=True,
        many=True,
    ),
    Setting(
        "cache", _EXPERTS, _ALL,
        "Instead of --memory: room for the experts alone, 600MB or 25% of them, whatever else the process takes. For "
        "comparisons.",
        values="SIZE|SHARE",
    ),
    Setting(
        "eviction", _EXPERTS, _ALL,
        "Which expert leaves when room is needed: expected (needed again last, as its use so far suggests), paper "
        "(used seldom, in a layer that is far), lru (unused longest), layer-lru (the same within its layer), lfu (used "
        "least); auto: what did best with about this room for experts when the pack's paths were profiled, or "
        "expected.",
        default="auto", choices=("auto", "expected", "paper", "lru", "layer-lru", "lfu"),
    ),
    Setting(
        "predict", _EXPERTS, _ALL,
        "What names the experts to read ahead: gate (the next layer's router, asked early), hash (the pack's hash "
        "function, which names those of all layers before the first has run; moeconv train-hash adds it), transitions "
        "(the pack's path tables), none; auto: gate and hash together, or gate where there is no hash function, and "
        "none where experts are so small that reading ahead loses. Only what pays is read.",
        default="auto", choices=("auto", "gate", "hash", "transitions", "none"),
    ),
    Setting(
        "routing", _EXPERTS, _ALL,
        "Which experts a token goes to: exact, as the model says; hash: as the pack's hash function says, without "
        "asking the routers; 25%: nearly as good ones that were used lately are preferred, as the pack has it for room "
        "for that share of the experts, with a promise of its own (moeconv quantize --resident); auto: what the pack "
        "has for the room that there is. Answers depend on this.",
        default="auto", values="auto|exact|SHARE|hash",
    ),
    Setting(
        "io", _MACHINE, _ALL,
        "How experts are read: direct, buffered, or direct,4 with 4 threads; auto: what is fastest on this drive, "
        "measured once and remembered.",
        default="auto", values="auto|direct|buffered[,THREADS]",
    ),
    Setting(
        "threads", _MACHINE, _ALL,
        "Threads that compute; by default, and at most, one for each core that this process may use.", int, least=1,
    ),
    Setting(
        "kernels", _MACHINE, _ALL,
        "What computes: auto (the best instruction set that moert info --system lists), one of those by name, or "
        "reference (numpy: slow, takes more memory, does not round activations to 8 bits).",
        default="auto", values="auto|reference|NAME",
    ),
    Setting(
        "kv", _MACHINE, _ALL,
        "Bits of keys and values: 8 take half the memory of 16 (make bench-rounding: what that adds to a loss).",
        int, 16, choices=("16", "8"),
    ),
    Setting(
        "gpu_memory", _SECOND, _ALL,
        "Of the device's memory no more than this: 6GB. By default most of what is free there.", values="SIZE",
    ),
    Setting(
        "device_keep", _SECOND, _ALL,
        "Who stays on the device: expected (whoever is not needed again last, as its use so far suggests; the "
        "default), popular (most of the pack's recorded trace, for good), lru (the latest of each layer), layers (all "
        "of the last layers).",
        choices=("expected", "popular", "lru", "layers"),
    ),
    Setting(
        "device_experts", _SECOND, _ALL,
        "Who computes an expert: cheapest (for each layer what is done soonest: there, there after a copy, or the "
        "processor; the default), copied (always the device), resident (the device what lies there, else the "
        "processor).",
        choices=("cheapest", "copied", "resident"),
    ),
    Setting(
        "neurons", _NEURONS, _ALL,
        "Which neurons of an expert count: exact (all), predicted (those that the pack's predictor names before any is "
        "computed; only their blocks are read, and no expert whole, so that eviction and predict have nothing to "
        "decide; moeconv train-neurons adds one). Answers depend on this.",
        default="exact", choices=("exact", "predicted"),
    ),
    Setting(
        "keep_neurons", _NEURONS, _ALL,
        "Which neurons stay, of a pack whose experts lie in blocks of them: recent (used often and lately), lru "
        "(used last), lfu (used most), window (those that fired for the last tokens, as many as fit).",
        default="recent", choices=("recent", "lru", "lfu", "window"),
    ),
    Setting(
        "min_p", _SAMPLING, _WRITING, "Draw among tokens at least this fraction as likely as the likeliest.", float, 0.0
    ),
    Setting(
        "repeat_penalty", _SAMPLING, _WRITING,
        "Divide the logits of tokens that stand in the prompt or the answer by this, and multiply those below 0, as "
        "repetition_penalty of transformers does; 1: none. Behind an encoder the answer alone counts.",
        float, 1.0,
    ),
    Setting(
        "presence_penalty", _SAMPLING, _WRITING,
        "Take this from the logits of tokens that stand in the answer, as OpenAI's does; 0: none.", float, 0.0,
    ),
    Setting(
        "frequency_penalty", _SAMPLING, _WRITING,
        "As presence-penalty, for each time that a token stands in the answer.", float, 0.0,
    ),
    Setting(
        "logit_bias", _SAMPLING, _WRITING,
        "Add a value from -100 to 100 to the logit of the token with this id; may be given several times.",
        values="ID=VALUE", many=True,
    ),
    Setting(
        "first_token", _SAMPLING, _RUN,
        "Begin each answer with this token of the tokenizer's: of a model that translates, the language, as in "
        "fra_Latn. By default what the pack says, if anything.",
        values="TOKEN",
    ),
    Setting(
        "beams", _BEAMS, _RUN,
        "How many beginnings of the answer go on at a time; the likeliest answer is given, and each expert is read "
        "once for all of them. Text appears as soon as all of them agree on it. 1: none.",
        int, 1,
    ),
    Setting(
        "length_penalty", _BEAMS, _RUN,
        "With beams: answers are compared by the logarithm of what they are likely, over their number of tokens to the "
        "power of this; above 0 favours long ones, below 0 short ones.",
        float, 1.0,
    ),
    Setting(
        "early_stopping", _BEAMS, _RUN,
        "With beams: end as soon as there are as many answers as beams (true), when the beams do not look better than "
        "these (false), or when none can become better (never).",
        default="false", choices=("true", "false", "never"),
    ),
    Setting(
        "n_return", _BEAMS, _RUN,
        "With beams: give the N best answers, with a blank line between; --json says how they score.", int, 1,
        values="N", option="return",
    ),
    Setting(
        "template", _CHAT, _WRITING,
        "In place of the pack's own chat template: a file, or chatml, llama3 or alpaca, forms that models are trained "
        "for.",
        values="NAME|FILE",
    ),
    Setting(
        "thinking", _CHAT, _WRITING,
        "What a model thinks before it answers: show it, dimmed on a terminal, or hide it.", default="show",
        choices=("show", "hide"),
    ),
    Setting(
        "logprobs", _SHOWN, _WRITING,
        "With --json: of each token of the answer, and of the N likeliest ones in its place, the natural logarithm of "
        "its probability, before penalties, bias, temperature and filters.",
        int, values="N",
    ),
    Setting(
        "raw", _SHOWN, _WRITING,
        "Print text to a terminal as the model writes it. By default control characters and letters that nobody sees "
        "are written out there, as in <U+001B>.",
        bool, False,
    ),
)  # fmt: skip
"""All settings of moert."""
OPTIONS = {each.name: f"--{each.called}" if each.usual else f"--tune {each.called}" for each in SETTINGS}
"""Name in Python → the words for it on the command line."""
