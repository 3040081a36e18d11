"""docs/models.md: every family's parts, what of it is checked and what is refused, as the families themselves say it.

`python tests/rules/models_text.py --write` brings it up to date; without --write it only says whether it differs.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "docs" / "models.md"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from models_sizes import section as sizes  # noqa: E402
from pages import brought_up_to_date  # noqa: E402
from published import CORRECTED, MADE_UP, PUBLISHED, Config  # noqa: E402
from tiny import TINY  # noqa: E402

from moeconv.plan.outlook import parameters  # noqa: E402
from moeconv.source.archs import FAMILIES, REFUSED  # noqa: E402
from moeconv.source.archs.config import Config as Asked  # noqa: E402
from moeconv.source.gguf.names import ARCHS  # noqa: E402
from moeconv.source.gguf.names import REFUSED as LAYOUTS  # noqa: E402
from moeconv.source.gguf.tokenizer import CUTS  # noqa: E402
from moeconv.source.outline import features  # noqa: E402
from moert.pack.model_spec import ModelSpec  # noqa: E402

_INTRODUCTION = (
    "`make readme` writes this page from the families in `moeconv/source/archs` and from the settings of published "
    "models in `tests/published.py`; a test compares. `moeconv check MODEL` prints the same for a single model, with "
    "the size of its pack and the memory that it needs.",
    "The `model_type` in config.json decides the family of a model. Each family has the same checks:",
)
_CHECKED = (
    "**Equality with transformers.** Tiny models with random weights, in all variants below, give the logits of "
    "transformers and write the same tokens: numpy to within 1e-4, the native kernels to within their rounding "
    "(`tests/parity`).",
    "**The right tensors.** Each tensor of a checkpoint has one place in the pack, of the same shape, and no tensor "
    "is left over (`tests/unit/test_archs.py`).",
    "**An exact sweep.** A model that runs in parts, as in the sweep, gives the results of the whole model "
    "(`tests/unit/test_scorers.py`). The sweep's result for an expert equals that of a full evaluation; some families "
    "are compared, which stand for the others (`tests/unit/test_probes.py`).",
    "**The published shapes.** The config.json of each model below opens, has the number of parameters that its makers "
    "state, and can be planned (`tests/unit/test_published.py`). One layer of each kind, with random weights, runs at "
    "full size on the native kernels and gives the results of plain arithmetic "
    "(`tests/e2e/test_published_layers.py`). Nobody has run these models as a whole here; some files were not at hand, "
    "and `tests/published.py` says which.",
    "**Every setting.** If transformers uses a field of config.json, the field is read, known to have no effect, or "
    "refused. Changed at random, it gets an answer or a reason (`tests/unit/test_config_fields.py`).",
)
_REFUSED_FIRST = (
    "A setting that is on and unknown for the family, if transformers' class or its modelling code has it, or if other "
    "code than transformers' follows it. A setting that neither of them has changes nothing in transformers; a note "
    "names it.",
)
_REFUSED_LAST = (
    "Weights in a coding that is not read. Read are, in every family, the weights of GPTQ (2, 3, 4 and 8 bits, inputs "
    "in any order), AWQ (gemm), AutoRound, compressed-tensors (whole numbers of 4 and 8 bits, FP8, NVFP4, MXFP4), "
    "modelopt (FP8, MXFP8, NVFP4), bitsandbytes (NF4, FP4, 8 bits), and FP8 with a scale for each matrix, row or "
    "block, also beside experts in FP4 (DeepSeek-V4); each was compared with the numbers that its own library reads "
    "(`tests/golden/codings.py`), MXFP8 and DeepSeek-V4's with their definitions. A loss is against these numbers; "
    "scales for the rounding of activations are left out. gpt-oss, experts in FP4 and MXFP4 of compressed-tensors "
    "keep their four bits if the plan gives at least four. Experts in 4 bits without zero points, in groups of 32, 64 "
    "or 128 inputs in their order, are stored as they are for `--bits 4` (`--quantizer source`).",
    "Checkpoints in other files than safetensors and GGUF. If several files have a tensor, the index decides which "
    "counts.",
    "A tensor without a place in the pack, except those that a note names as left out: layers that predict several "
    "tokens at once, images, and indexers, which only longer texts than a pack's need.",
)


_GGUF = (
    "A GGUF file of llama.cpp stands for a folder, alone or as one of several files: `moeconv quantize model.gguf`, "
    "also `check` and `plan`, and `owner/name/model.gguf` of the hub. Its weights are the numbers that its types "
    "mean, exactly, times the numbers that some files have beside a matrix (NVFP4); experts in MXFP4, for `--bits 4` "
    "those in Q4_0 or Q4_1, and for `--bits 8` those in Q8_0 stay as they are. A loss is one against the file, not "
    "against the model that the file was made of. The settings and the tokenizer come from the file's metadata. Where "
    "these do not say a setting, it is the one that llama.cpp takes for granted for all models of the architecture: "
    "files of a model with another one can't be told apart.",
    f"Architectures: {', '.join(f'`{name}`' for name in ARCHS)}. Tokenizers: `gpt2`, `llama`, `t5` and `gemma4`. Ways "
    f"to cut text into words before pairs of tokens merge: {', '.join(f'`{name}`' for name in CUTS)}. All others are "
    f"refused by their names, these with a reason: {'; '.join(f'`{name}` ({why})' for name, why in LAYOUTS.items())}. "
    "Families of this page without an architecture have no GGUF files, or none whose layout a program states.",
    "Files that llama.cpp's own program makes of a tiny model of each family give the packs that its safetensors give, "
    "byte for byte in 16 bits (`tests/unit/test_gguf.py` has such files, written anew).",
)


def text() -> str:
    allowed = {name: _allowed(name) for name in FAMILIES}
    common = {
        setting: values
        for setting, values in allowed["qwen2_moe"].items()
        if sum(values == others.get(setting) for others in allowed.values()) > len(FAMILIES) // 2
    }
    refused = [f"`{setting}` other than {_values(values)}." for setting, values in common.items()]
    lines = ["# Models"]
    for paragraph in _INTRODUCTION:
        lines += ["", *textwrap.wrap(paragraph, 120, break_on_hyphens=False)]
    lines += ["", *map(_bullet, _CHECKED), "", "## Refused for every family", ""]
    lines += ["Each of these is refused in one line, before any long work starts:", ""]
    lines += map(_bullet, (*_REFUSED_FIRST, *refused, *_REFUSED_LAST))
    lines += ["", "## GGUF files"]
    for paragraph in _GGUF:
        lines += ["", *textwrap.wrap(paragraph, 120, break_on_hyphens=False)]
    lines += ["", "## Known and refused", "", "`moeconv check` refuses these by name, with the same reason:", ""]
    lines += [_bullet(f"`{name}`: {reason}.") for name, reason in REFUSED.items()]
    lines += ["", *sizes()]
    for name in sorted(FAMILIES):
        own = {setting: values for setting, values in allowed[name].items() if common.get(setting) != values}
        lines += ["", *_family(name, own)]
    return "\n".join(lines) + "\n"


def _family(name: str, allowed: dict[str, tuple[Any, ...]]) -> list[str]:
    first, config = next(iter(_published(name).items()))
    found, _ = _described(config)
    spec, numbers = found.spec, parameters(found.spec, found.computed)
    about = (sys.modules[type(FAMILIES[name]).__module__].__doc__ or "").strip()
    refused = "; ".join(f"`{setting}` other than {_values(values)}" for setting, values in allowed.items())
    most = "at most " if spec.moe.router.identities else ""
    bullets = [
        f"Parts of {first}: {', '.join(features(spec))}.",
        f"{first} has {numbers.total / 1e9:.1f} billion parameters, {most}{numbers.active / 1e9:.1f} of them for each "
        f"token; "
        f"{_experts(spec)}.",
        f"Published shapes: {', '.join(each for each in _published(name) if each not in MADE_UP) or MADE_UP[first]}.",
        *(
            f"The config.json of {each} says {CORRECTED[each]}, which its weights are not: correct it first."
            for each in _published(name)
            if each in CORRECTED
        ),
        f"Variants beside transformers: {', '.join(TINY[name][1])}.",
        *([f"Left out, with a note: {what}." for what in _left_out(found.left_out.values())]),
        *([f"Refused: {refused}."] if refused else []),
    ]
    return [f"## `{name}`", "", *textwrap.wrap(" ".join(about.split()), 120), "", *map(_bullet, bullets)]


def _experts(spec: ModelSpec) -> str:
    experts, layers = spec.moe, len(spec.experts)
    if experts.n == 1:
        return f"one network in each of {layers} layers, which is packed as an expert"
    return f"{experts.n} experts in each of {layers} layers, {experts.router.top_k} for each token"


def _left_out(notes: Any) -> list[str]:
    return [note.partition(" are left out")[0] for note in dict.fromkeys(notes)]


def _published(family: str) -> dict[str, Config]:
    return {name: config for name, config in PUBLISHED.items() if config["model_type"] == family}


def _described(config: Config) -> Any:
    return FAMILIES[config["model_type"]].of(config).described(config, {})


def _allowed(family: str) -> dict[str, tuple[Any, ...]]:
    """Settings of the first published model that may have few values → those."""
    asked: Asked = _described(next(iter(_published(family).values())))[1]
    return asked.allowed


def _values(values: tuple[Any, ...]) -> str:
    shown = list(dict.fromkeys(map(_value, values)))
    return " or ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _value(value: Any) -> str:
    if isinstance(value, dict) or value == []:
        return "one that says the same" if value else "an empty list"
    if isinstance(value, list):
        return "a list that says the same" if len(set(map(str, value))) > 1 else f"{_value(value[0])} in each layer"
    return {None: "none", False: "false", True: "true"}.get(value, str(value)) if _is_word(value) else str(value)


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _bullet(line: str) -> str:
    return "\n".join(textwrap.wrap(line, 120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False))


if __name__ == "__main__":
    raise SystemExit(brought_up_to_date(MODELS, text()))
