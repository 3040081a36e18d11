"""A family's settings in its config.json: every field is used or refused, unless it has no effect."""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from moeconv.errors import ConversionError
from moert.pack.codec import F32
from moert.pack.documents import MAX_COUNT, brief
from moert.pack.errors import PackError
from moert.pack.model_spec import MOST_LAYERS
from moert.pack.parts import MOST_TURN, Act, Attention, Ffn, Rope, Router

# Errors of a family that can't represent a model.


class UnsupportedModel(ConversionError):
    """A model with a feature that a pack can't describe, so that answers would differ. Take another model, or correct
    its config.json if that is wrong: [models.md](models.md) lists what each family may have."""


class ConfigInvalid(ConversionError):
    """Settings in config.json that transformers can't take, or that have no meaning. Fetch the model's own config.json
    again."""


class ShapeDiffers(ValueError):
    """A tensor whose shape differs from config.json's; the message is a part of a sentence. Fetch the model again,
    weights and config.json together."""


class ModelFailed(ConversionError):
    """A model that transformers can't build or run. See whether its config.json is the one of its weights."""


@contextmanager
def transformers_model(path: Path) -> Iterator[None]:
    """Turns errors of a with block that builds a model from `path`, or runs it first, into ModelFailed, in one line:
    whatever transformers raises there comes from the model's own files."""
    try:
        yield
    except (ConversionError, PackError, MemoryError, ModuleNotFoundError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelFailed(
            f"transformers can't run the model in {path} ({type(error).__name__}: {reason}): its config.json asks for "
            "what this family can't compute, or its weights are not those that it describes"
        ) from error


# The settings that transformers uses, as far as its source shows: the source is read, not run.

_SHARED = (
    "configuration_utils.py", "modeling_rope_utils.py", "modeling_utils.py", "modeling_layers.py", "masking_utils.py",
    "cache_utils.py", "integrations/moe.py", "integrations/sdpa_attention.py",
)  # fmt: skip
"""Files of transformers that run for every family."""
_READ = re.compile(r'config\.(\w+)|(?:getattr|hasattr)\([\w.]*config, "(\w+)"|"(\w+)" (?:not )?in [\w.]*config')


def without_effect(names: Collection[str], config_class: Any) -> tuple[str, ...]:
    """Returns the names, among those of some settings, that can't change an answer of the class's model: neither the
    class nor its modelling code knows them, or transformers drops them, since they concern the writing of texts."""
    from transformers import GenerationConfig

    if not names:
        return ()
    module = Path(str(sys.modules[config_class.__module__].__file__))
    models = module.parent.glob(module.name.replace("configuration_", "modeling_"))
    of_class = {*dir(config_class), *config_class.attribute_map, *_words(module)}
    of_model = {word for file in models for word in _words(file)} | _shared()
    dropped = set(vars(GenerationConfig())) - of_class  # type: ignore[no-untyped-call]
    return tuple(sorted(name for name in names if name in dropped or name not in of_class | of_model))


def _words(file: Path) -> Iterator[str]:
    """Yields all names and strings of a program, without its comments."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        for found in (getattr(node, field, None) for field in ("id", "attr", "arg", "value")):
            if isinstance(found, str):
                yield found


def _shared() -> Set[str]:
    """Returns the settings that are read for every family."""
    import transformers

    folder, found = Path(str(transformers.__file__)).parent, set()
    for file in (folder / name for name in _SHARED if (folder / name).is_file()):
        found |= {name for read in _READ.findall(file.read_text("utf-8")) for name in read}
    return found


def on(settings: Mapping[str, Any], name: str) -> bool:
    """Returns whether a setting has a value other than none, false or empty."""
    return settings[name] not in (None, False, [], {}) or name == "is_causal"


# The angles by which rotary positions turn a pair of features at each token, as in transformers.

Parameters = Mapping[str, Any]
"""The rope_parameters of config.json."""


def turns(theta: float, dims: int, of: int | None = None) -> F32:
    """Returns frequencies [dims / 2] of a head of `of` features (None: `dims`), of which `dims` turn. Powers are
    computed in float64 and rounded once."""
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(of or dims)
    with np.errstate(all="ignore"):  # the caller checks the result
        found: F32 = np.float32(1) / np.power(float(theta), exponents.astype(np.float64)).astype(np.float32)
    return found


def frequencies(parameters: Parameters, dims: int, longest: int) -> tuple[F32, float]:
    """Returns frequencies [dims / 2] of a kind of KINDS, and the factor of the turned features; `longest`: the
    positions of the model. Raises KeyError, TypeError, ValueError or ArithmeticError for parameters that a kind can't
    take."""
    plain = turns(parameters["rope_theta"], dims)
    with np.errstate(all="ignore"):
        found, factor = KINDS[parameters["rope_type"]](parameters, plain, longest)
    return found.astype(np.float32), float(factor)


def _linear(parameters: Parameters, plain: F32, _: int) -> tuple[F32, float]:
    return plain / parameters["factor"], 1.0


def _llama3(parameters: Parameters, plain: F32, _: int) -> tuple[F32, float]:
    """Returns Llama 3's frequencies: long waves become longer, short ones stay, and waves between change by degrees."""
    factor, low, high = (parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    length = parameters["original_max_position_embeddings"]
    waves = 2 * math.pi / plain
    degree = (length / waves - low) / (high - low)
    between = (1 - degree) * plain / factor + degree * plain
    found = np.where(waves > length / low, plain / factor, np.where(waves < length / high, plain, between))
    return found, 1.0


def _yarn(parameters: Parameters, plain: F32, longest: int) -> tuple[F32, float]:
    """Returns YaRN's frequencies and factor (arXiv 2309.00071)."""
    pairs, theta, length = len(plain), parameters["rope_theta"], parameters["original_max_position_embeddings"]
    factor = _factor(parameters, longest)

    def place(turns_in_all: float) -> float:
        """Returns the pair, between two, that turns `turns_in_all` times in a text of the original length."""
        return pairs * math.log(length / (turns_in_all * 2 * math.pi)) / math.log(theta)

    low, high = place(parameters.get("beta_fast") or 32), place(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high += 0.001 if low == high else 0
    kept = 1 - np.clip((np.arange(pairs, dtype=np.float32) - low) / (high - low), 0, 1)
    found = plain / factor * (1 - kept) + plain * kept
    if (said := parameters.get("attention_factor")) is not None:
        return found, said
    if (wide := parameters.get("mscale")) and (all_dims := parameters.get("mscale_all_dim")):
        return found, _scale(factor, wide) / _scale(factor, all_dims)
    return found, _scale(factor, 1)


def _scale(factor: float, wide: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * wide * math.log(factor) + 1.0


def _longrope(parameters: Parameters, plain: F32, longest: int) -> tuple[F32, float]:
    """Returns longrope's frequencies and factor, from the short factors, which transformers uses for texts of any
    length."""
    short, length = np.asarray(parameters["short_factor"], np.float32), parameters["original_max_position_embeddings"]
    if (said := parameters.get("attention_factor")) is None:
        factor = _factor(parameters, longest)
        said = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    return plain / short, said


def _factor(parameters: Parameters, longest: int) -> float:
    said = parameters.get("factor")
    return longest / parameters["original_max_position_embeddings"] if said is None else float(said)


KINDS: Mapping[str, Callable[[Parameters, F32, int], tuple[F32, float]]] = {
    "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope,
}  # fmt: skip


# config.json as a family reads it: no setting is ignored that might change the model's results.

# Settings of training, of further results, of tokens (see archs.family), or of the file's maker.
_NO_MATTER = {
    "_name_or_path", "architectures", "attention_dropout", "attention_probs_dropout_prob", "auto_map",
    "chunk_size_feed_forward", "classifier_dropout", "dropout_rate", "dtype", "finetuning_task", "hidden_dropout",
    "id2label", "initializer_factor", "initializer_range", "is_encoder_decoder", "label2id", "model_type",
    "output_attentions", "output_hidden_states", "output_router_logits", "pretraining_tp", "problem_type",
    "return_dict", "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef", "task_specific_params",
    "tokenizer_class", "torch_dtype", "transformers_version", "use_cache", "bos_token_id", "eos_token_id",
    "pad_token_id", "decoder_start_token_id", "sep_token_id", "name_or_path", "num_labels", "num_mtp_layers",
    "num_nextn_predict_layers", "_attn_implementation", "_attn_implementation_autoset",
}  # fmt: skip
_ACTIVATIONS = {
    "relu": "relu", "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new", "relu2": "relu2",
}  # fmt: skip
_ROPE_SETTINGS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
_LAYERS = ("num_hidden_layers", "num_layers", "num_decoder_layers")
_OF_LAYERS = ("layers", "_layer")
_MOST_LABELS = 1 << 20
_DTYPES = {"float64", "double", "float32", "float", "float16", "half", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
_OF_LOADING = ("dtype", "torch_dtype")
"""Settings with the type that transformers computes in by default; here it always gets another."""
_MOST_COMPUTED = 1 << 28
_ROPE_PARAMETERS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor",
    "high_freq_factor", "short_factor", "long_factor", "short_mscale", "long_mscale", "alpha",
}  # fmt: skip
_OTHER_THAN_NUMBERS: Mapping[str, type] = {
    "rope_type": str, "type": str, "truncate": bool, "short_factor": list, "long_factor": list,
}  # fmt: skip
Biases = Literal["qkv", "qkvo", "qkvog"] | None
T = TypeVar("T")
FIXED_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds whose frequencies do not depend on the length of a text."""


class Config:
    """The settings of config.json as transformers understands them, old names and defaults among them."""

    def __init__(self, raw: Mapping[str, Any], config_class: Any) -> None:
        """Raises ConfigInvalid for values that transformers can't take."""
        raw = _with_floats(raw)
        self._raw, self._known, self._class = raw, set(_NO_MATTER), config_class
        self.idle = set(_NO_MATTER)
        """Settings that this family's model in transformers never uses."""
        self._idle_of_rope: set[str] = set()
        self.allowed: dict[str, tuple[Any, ...]] = {}
        """Settings that were read and may have few values → these values."""
        _check_counts(raw)
        try:
            self.parsed: Any = config_class.from_dict({k: v for k, v in raw.items() if k not in _OF_LOADING})
        except Exception as error:
            raise ConfigInvalid(str(error) or type(error).__name__) from None

    def get(self, name: str, *aliases: str) -> Any:
        """Returns the value of a setting; `aliases`: other names that config.json may have for it."""
        self._known |= {name, *aliases}
        return getattr(self.parsed, name, None)

    def count(self, name: str, *aliases: str, least: int = 1) -> int:
        """Returns a setting that must be a whole number of at least `least`. Raises UnsupportedModel."""
        return count_of(name, self.get(name, *aliases), least)

    def number(self, name: str) -> float:
        """Returns a setting that must be a number other than 0. Raises UnsupportedModel."""
        return number_of(name, self.get(name))

    def one_of(self, name: str, allowed: Sequence[str]) -> str:
        """Returns a setting that must be one of `allowed`. Raises UnsupportedModel."""
        value, self.allowed[name] = self.get(name), tuple(allowed)
        if value not in allowed:
            raise UnsupportedModel(f"config.json sets {name} {value!r}: only {', '.join(allowed)} can be packed")
        return str(value)

    def activation(self, name: str) -> Act:
        """Returns the activation that a setting names. Raises UnsupportedModel."""
        return Act(_ACTIVATIONS[self.one_of(name, [*_ACTIVATIONS])])  # type: ignore[arg-type]

    def must_be(self, name: str, value: Any, why: str) -> None:
        """Raises UnsupportedModel if a setting differs from `value` (None and False count as equal)."""
        found, self.allowed[name] = self.get(name), (value,)
        if (found or None) != (value or None):
            raise UnsupportedModel(f"config.json sets {name} {found!r}: {why}")

    @property
    def quantization(self) -> Any:
        """quantization_config, as it stands (see `coding.scheme_of`); None without."""
        self._known.add("quantization_config")
        return self._raw.get("quantization_config")

    def without_effect(self, *names: str) -> None:
        """Notes settings that this family's model in transformers never uses."""
        self._known |= set(names)
        self.idle |= set(names)

    def without_effect_on_text(self, *names: str) -> None:
        """Notes settings of rope_parameters that distinguish kinds of positions of which text has only one."""
        self._idle_of_rope |= set(names)

    def only(self, **allowed: tuple[Any, ...]) -> None:
        """Checks settings that the class does not know, and that change the model's results. Raises UnsupportedModel if
        one has another value than those allowed."""
        for name, values in allowed.items():
            self._known.add(name)
            self.allowed[name] = values
            if name in self._raw and self._raw[name] not in (*values, None):
                raise UnsupportedModel(
                    f"config.json sets {name} {self._raw[name]!r}: transformers would compute as if it were "
                    f"{' or '.join(map(repr, values))}"
                )

    def biases(self, setting: str, which: Biases) -> Biases:
        """Returns attention's biases: `which`, if the setting is on, else None."""
        return which if self.get(setting) else None

    def attention(
        self, *, qk_norm: Literal["whole", "head"] | None = None, biases: Biases = None,
        **more: Any,
    ) -> Attention:  # fmt: skip
        """Returns attention with the heads of most families, turned by the first rope; `more`: other fields of the
        part."""
        heads, kv = self.count("num_attention_heads"), self.get("num_key_value_heads")
        dim = self.head_dim(turned=more.get("rope", 0) is not None)
        fields = {"scale": dim**-0.5, "clip": None, "rope": 0, "buckets": None, **more}
        return Attention(heads, heads if kv is None else kv, dim, qk_norm=qk_norm, biases=biases, **fields)

    def network(self, d_ff: str, activation: str = "hidden_act", bias: bool = False, times: int = 1) -> Ffn:
        """Returns a gated network whose width is a setting times `times`. Raises UnsupportedModel."""
        return Ffn(self.count(d_ff) * times, self.activation(activation), gated=True, bias=bias)

    def router(self, renormalise: Any, score: Any = "softmax", **more: Any) -> Router:
        """Returns a router that chooses num_experts_per_tok experts; `more`: other fields of the part. Raises
        UnsupportedModel."""
        return Router(self.count("num_experts_per_tok"), renormalise, None, score, **more)

    def of_layers(self, name: str, known: Mapping[str, T]) -> list[T]:
        """Returns the values in `known` of a setting that is a list of words, one for each layer. Raises
        UnsupportedModel."""
        kinds, self.allowed[name] = self.get(name), tuple(known)
        strange = [kinds] if not isinstance(kinds, list) else [kind for kind in kinds if kind not in [*known]]
        if strange:
            raise UnsupportedModel(
                f"config.json sets {name} with {strange[0]!r}: only {', '.join(known)} can be packed"
            )
        return [known[kind] for kind in kinds]

    def windows(self) -> list[int | None]:
        """Returns the window of each layer, from layer_types. Raises UnsupportedModel."""
        window, kinds = self.get("sliding_window", "max_window_layers"), self.get("layer_types")
        self.allowed["layer_types"] = ("full_attention", "sliding_attention")
        known: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
        unknown = next((kind for kind in kinds if kind not in known), None)
        if unknown is not None or (not window and "sliding_attention" in kinds):
            raise UnsupportedModel(
                f"config.json sets layer_types with {unknown or 'sliding_attention'!r} and sliding_window {window!r}: "
                "only full_attention, and sliding_attention with a window, can be packed"
            )
        return [known[kind] for kind in kinds]

    def head_dim(self, turned: bool = True) -> int:
        """Returns the features of an attention head; their number must be even if positions turn them. Raises
        UnsupportedModel."""
        features, heads = self.count("hidden_size"), self.count("num_attention_heads")
        given = None if self.get("head_dim") is None else self.count("head_dim")
        if given is None and features % heads:
            raise UnsupportedModel(
                f"config.json sets num_attention_heads {heads} for hidden_size {features}: the first "
                "does not divide the second, and there is no head_dim"
            )
        dim = given or features // heads
        if turned and dim % 2:
            raise UnsupportedModel(
                f"config.json sets num_attention_heads {heads} for hidden_size {features}, so that a head has {dim} "
                "features: rotary positions turn pairs of them, the number should be even"
            )
        return dim

    def rope_parameters(self) -> Mapping[str, Any]:
        """Returns the parameters of rotary positions, under all their names in config.json. Raises UnsupportedModel for
        an unknown one."""
        found = self.get(*_ROPE_SETTINGS)
        if not isinstance(found, dict):
            raise UnsupportedModel(f"config.json sets rope_parameters {found!r}, which are no parameters")
        return _checked_rope({name: value for name, value in found.items() if name not in self._idle_of_rope})

    def rope_parameters_of(self, kind: str) -> Mapping[str, Any]:
        """Returns the parameters of rotary positions of the layers of one kind, if each kind has its own. Raises
        UnsupportedModel."""
        found = self.get(*_ROPE_SETTINGS)
        if not isinstance(found, dict) or not isinstance(found.get(kind), dict):
            raise UnsupportedModel(f"config.json sets rope_parameters {found!r}, which does not say those of {kind}")
        return _checked_rope(found[kind])

    def frequencies(self, of: str | None = None) -> tuple[F32, float]:
        """Returns the frequencies [dims / 2] of a rope of a kind other than default, and its factor; `of`: see `rope`.
        Raises ConfigInvalid."""
        said, parsed = self.parsed.rope_parameters, self.parsed
        said = said if of is None else said[of]
        try:
            dim = getattr(parsed, "head_dim", None) or parsed.hidden_size // parsed.num_attention_heads
            share = said.get("partial_rotary_factor", 1.0)
            return frequencies(said, int(dim * share), parsed.max_position_embeddings)
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            why = f"it has no {error.args[0]}" if isinstance(error, KeyError) else str(error)
            raise ConfigInvalid(f"rope_parameters of the kind {said.get('rope_type')}: {why}") from None

    def rope(
        self, dim: int, partial: bool = False, of: str | None = None, kinds: tuple[str, ...] = FIXED_ROPES
    ) -> tuple[Rope, F32]:
        """Returns rotary positions of `dim` features, and their frequencies [dims / 2] as transformers computes them.
        `partial`: the family turns only the share of them that rope_parameters give. `of`: the kind of layers, in a
        family whose rope_parameters are by kind; `kinds`: the kinds of ropes that the family may have.

        Raises UnsupportedModel.
        """
        parameters = self.rope_parameters() if of is None else self.rope_parameters_of(of)
        self.allowed["rope_type"] = kinds
        kind, share = parameters.get("rope_type", "default"), parameters.get("partial_rotary_factor")
        share = 1.0 if share is None else share
        if share != 1 and not partial:
            raise UnsupportedModel(
                f"config.json sets partial_rotary_factor {share!r}: this family turns whole heads in transformers"
            )
        if kind == "default" and kind in kinds:
            dims, theta = int(dim * share), parameters.get("rope_theta")
            if not 1 < dims <= dim or not theta or theta < 0:
                raise UnsupportedModel(
                    f"config.json sets rope_theta {theta!r}, and {dims} of {dim} features of a head turn: "
                    "expected a number above 0 and 2 features or more"
                )
            return _turning(Rope(dims), turns(theta, dims))
        if kind not in kinds:
            raise UnsupportedModel(f"config.json sets the rope type {kind!r}: only {', '.join(kinds)} can be packed")
        found, factor = self.frequencies(of)
        return _turning(Rope(2 * len(found), factor), found)

    def unread(self) -> set[str]:
        """Returns the fields of the class that were not read, and that are not known to be without effect."""
        from dataclasses import fields

        return {each.name for each in fields(self.parsed)} - self._known

    def check_all_read(self) -> tuple[str, ...]:
        """Returns the settings that were not read and that have no effect in transformers. Raises UnsupportedModel for
        one that may have an effect, unless it is off."""
        return unread(self._raw, self._known, self._class)


def unread(settings: Mapping[str, Any], read: Set[str], config_class: Any, where: str = "") -> tuple[str, ...]:
    """Returns the settings that are on, were not read and have no effect on the class's model. `where`: their part of
    config.json, for messages. Raises UnsupportedModel for one that may have an effect."""
    names = [name for name in sorted(set(settings) - read) if on(settings, name)]
    idle = without_effect(names, config_class)
    if (strange := next((name for name in names if name not in idle), None)) is not None:
        named = strange or "a setting without a name"
        raise UnsupportedModel(
            f"config.json sets {named} {settings[strange]!r}{where}, which is not known for this family: it may "
            "change what the model computes, and a pack could not say so"
        )
    return idle


def count_of(name: str, found: Any, least: int = 1) -> int:
    """Returns the value of a setting that must be a whole number of at least `least`. Raises UnsupportedModel."""
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= MAX_COUNT:
        raise UnsupportedModel(f"config.json sets {name} {found!r}: it should be a whole number from {least} on")
    return found


def number_of(name: str, found: Any) -> float:
    """Returns the value of a setting that must be a number other than 0. Raises UnsupportedModel."""
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found) or not found:
        raise UnsupportedModel(f"config.json sets {name} {found!r}: it should be a number other than 0")
    return float(found)


def text_settings(config: Mapping[str, Any], tied: bool | None = None) -> Mapping[str, Any]:
    """Returns the settings of the text model inside a larger one. `tied`: whether the larger one ties its head where it
    does not say so (None: the text model's own setting holds). Raises UnsupportedModel."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise UnsupportedModel(f"config.json has no text_config: a {config.get('model_type')} model needs one")
    coding = {name: config[name] for name in ("quantization_config",) if name in config}
    head = {} if tied is None else {"tie_word_embeddings": config.get("tie_word_embeddings", tied)}
    return {**text, **coding, **head}


def beside_text(config: Mapping[str, Any], known: Set[str], config_class: Any) -> tuple[str, ...]:
    """Returns the settings without effect of a model with a text model inside, beside the text model's own (see
    `unread`); `known` do not touch its text. Raises UnsupportedModel."""
    read = {*known, *_NO_MATTER, "text_config", "tie_word_embeddings", "quantization_config"}
    return unread(config, read, config_class, " beside text_config")


def _with_floats(found: Any) -> Any:
    """Returns a JSON value with the numbers that JSON lacks, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(found, dict):
        if set(found) == {"__float__"} and found["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(found["__float__"])
        return {name: _with_floats(value) for name, value in found.items()}
    return [_with_floats(value) for value in found] if isinstance(found, list) else found


def _turning(rope: Rope, found: F32) -> tuple[Rope, F32]:
    """Returns the rope and its frequencies, if a pack can have them. Raises UnsupportedModel."""
    if not bool((np.abs(found) <= MOST_TURN).all()):
        raise UnsupportedModel(
            f"config.json turns heads by up to {float(np.abs(found).max()):g} a position: at most {MOST_TURN:g} "
            "can be packed"
        )
    return rope, found


def _checked_rope(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    unknown = next((name for name in parameters if name not in _ROPE_PARAMETERS), None)
    if unknown is not None:
        raise UnsupportedModel(
            f"config.json sets {unknown} {parameters[unknown]!r} in rope_parameters, which is not known: it may "
            "change what the model computes"
        )
    for name, value in parameters.items():
        known = _OTHER_THAN_NUMBERS.get(name, (int, float))
        share = name == "partial_rotary_factor" and isinstance(value, (int, float)) and not 0 <= value <= 1
        if value is not None and (not isinstance(value, known) or value != value or share):
            raise UnsupportedModel(f"config.json sets {name} {value!r} in rope_parameters, which has no such values")
    return parameters


def _check_counts(raw: Mapping[str, Any]) -> None:
    """Raises ConfigInvalid for too many layers or labels, before transformers makes a list of them, and for an unknown
    type of numbers."""
    for name in _LAYERS:
        found = raw.get(name, 1)
        if isinstance(found, int) and not 1 <= found <= MOST_LAYERS:
            raise ConfigInvalid(f"{name} is {brief(found)}, it should be 1 to {MOST_LAYERS}")
    for name, found in raw.items():
        if name.endswith(_OF_LAYERS) and isinstance(found, (int, float)) and found > MOST_LAYERS:
            raise ConfigInvalid(f"{name} is {brief(found)}, it should be at most {MOST_LAYERS}")
    for name in _OF_LOADING:
        if (found := raw.get(name)) is not None and not (isinstance(found, str) and found in _DTYPES):
            raise ConfigInvalid(f"{name} is {brief(found)}, it should be one of {', '.join(sorted(_DTYPES))}")
    labels = raw.get("num_labels", 2)
    if not isinstance(labels, int) or labels > _MOST_LABELS:
        raise ConfigInvalid(f"num_labels is {brief(labels)}, it should be a whole number up to {_MOST_LABELS}")


def check_computed(count: int) -> None:
    """Raises UnsupportedModel if tensors that no checkpoint has would have too many numbers, before they are made."""
    if count > _MOST_COMPUTED:
        raise UnsupportedModel(
            f"config.json implies {count} numbers that no checkpoint has, at most {_MOST_COMPUTED} are computed"
        )
