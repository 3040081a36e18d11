"""A family of models: its classes in transformers, its special tokens, its description."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeconv.source.archs.coding import scheme_of
from moeconv.source.archs.config import Config, UnsupportedModel, beside_text, text_settings
from moeconv.source.archs.description import Description
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec, StackName, Tokens

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# The classes in transformers that read a config.json.
# They compute nothing, and torch is not imported (except for Gemma 4, whose class imports the library for images).


def config_class(model_type: str) -> Any:
    """Returns the class of the settings of this model_type."""
    with torch_later():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return CONFIG_MAPPING[model_type]


class _Torch:
    """A stand-in for the module torch, which is imported when an attribute of it is read."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


_WITH_TORCH = ("transformers.modeling_rope_utils", "transformers.utils.type_validators")
"""Modules that classes of settings import, and that import torch (in two seconds) for functions that no such class
calls."""


@contextmanager
def torch_later() -> Iterator[None]:
    """Keeps torch out of an import of these classes inside a with block: the modules _WITH_TORCH get torch when one of
    their functions needs it. Modules that they import in turn are forgotten, so that a later import has torch."""
    utils: list[Any] = [import_module(name) for name in ("transformers.utils", "transformers.utils.import_utils")]
    asked = utils[0].is_torch_available
    if sys.modules.keys() >= set(_WITH_TORCH) or not asked():
        yield
        return
    import_module("transformers.tokenization_utils_base")  # which imports no torch
    before = set(sys.modules)
    for module in utils:
        module.is_torch_available = lambda: False
    try:
        for name in _WITH_TORCH:
            found: Any = import_module(name)
            found.torch = _Torch()
    finally:
        for module in utils:
            module.is_torch_available = asked
        for name in set(sys.modules) - before - set(_WITH_TORCH):
            if name.startswith("transformers."):
                del sys.modules[name]
                parent, _, last = name.rpartition(".")
                if parent in sys.modules:
                    vars(sys.modules[parent]).pop(last, None)
    yield


@contextmanager
def changed(of: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an attribute another value inside a with block."""
    before = getattr(of, name)
    setattr(of, name, value)
    try:
        yield
    finally:
        setattr(of, name, before)


# Special tokens: generation_config.json has the last word, config.json the first.

_FIELDS = {"bos": "bos", "pad": "pad", "start": "decoder_start", "first": "forced_bos"}


def token_id(name: str, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> int | None:
    """Returns one id, or None if neither file has it."""
    value = generation_config.get(name)
    return config.get(name) if value is None else value


def special_tokens(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> Tokens:
    """Returns all special tokens that a ModelSpec names. Raises UnsupportedModel."""
    found = {name: token_id(f"{field}_token_id", config, generation_config) for name, field in _FIELDS.items()}
    for name, value in found.items():
        if not isinstance(value, (int, type(None))):
            raise UnsupportedModel(f"{_FIELDS[name]}_token_id is {value!r}: it should be the number of a token")
    return Tokens(eos=token_ids("eos_token_id", config, generation_config), **found)


def token_ids(name: str, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns one id or a list of ids as a tuple; empty if neither file has it. Raises UnsupportedModel."""
    value: Any = token_id(name, config, generation_config)
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) for each in found):
        raise UnsupportedModel(f"{name} is {value!r}: it should be the number of a token, or a list of such numbers")
    return tuple(found)


def checked_start(config: Config, tokens: Tokens) -> Tokens:
    """Returns the tokens of a model with an encoder, whose decoder begins with a token: if none is given, with the
    token that begins texts, or the pad token. Raises UnsupportedModel."""
    config.get("forced_bos_token_id")  # it is in `tokens`
    start = next((token for token in (tokens.start, tokens.bos, tokens.pad) if token is not None), None)
    if start is None:
        raise UnsupportedModel("config.json has no decoder_start_token_id: an encoder–decoder model needs one")
    return replace(tokens, start=start)


# The interface of a family of Hugging Face models; most families fill it with a few names.


class Family:
    """A family whose models are decoders of transformers' usual shape; subclasses state their differences. `model_type`
    is the one of config.json."""

    model_type: str
    model_class: str
    """The name of the model's class in transformers."""
    config_type: str | None = None
    """The name by which transformers finds the class of its settings; None: `model_type`."""
    towers: Mapping[StackName, str] = {"decoder": "model"}
    layer_list = "layers"
    parts = 1
    """The number of a pack's layers, one after the other, that one layer of the model is."""
    more_results = 0
    """How many results a layer of the model returns beside the hidden states."""
    reads_mxfp4 = False
    beside: Set[str] = frozenset()
    """Settings of the larger model that it is published in, which do not touch the text."""
    inside_tied: bool | None = None
    """In a family inside a larger model: whether that one ties its head where it does not say so."""
    sees: Mapping[str, Any] | None = None
    """The settings of a tiny model for images, in a family whose text transformers runs inside such a model alone."""
    by_layers = True
    """True if a decoder of the family can be run one layer at a time."""
    loads_by_names = True
    """True if transformers finds all weights of a checkpoint: not of some that are published inside a larger one, or by
    a name that it does not know."""
    experts: Mapping[StackName, str] = {"decoder": "model.layers.{layer}.mlp.experts"}
    """Modules called as experts(x [tokens, d_model], selected, weights), see `routed`."""

    def of(self, config: Mapping[str, Any]) -> Family:
        """Returns the family of a config.json with this model_type: another one where its text model decides. Raises
        UnsupportedModel."""
        return self

    def describe(self, config: Config, tokens: Tokens) -> Description:
        """Returns the description of a checkpoint with these settings. Raises UnsupportedModel."""
        raise NotImplementedError

    def description(self, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> Description:
        """Returns the description of a checkpoint with these two files, as JSON objects. Raises ConfigInvalid, or
        UnsupportedModel, also for unknown settings."""
        return self.described(config, generation_config)[0]

    def described(
        self, config: Mapping[str, Any], generation_config: Mapping[str, Any]
    ) -> tuple[Description, Config]:  # fmt: skip
        """Returns the description, and the settings with a record of those that were read."""
        asked = Config(self.own(config), self._config_class)
        scheme = scheme_of(asked.quantization)
        if scheme is not None and scheme.name == "mxfp4" and not self.reads_mxfp4:
            raise UnsupportedModel(
                "config.json says that its weights are coded by mxfp4, which only gpt_oss is known for"
            )
        found = self.describe(asked, special_tokens(config, generation_config))
        found = replace(found, scheme=scheme)
        outer = beside_text(config, self.beside, self._config_class) if self.beside else ()
        return replace(found, without_effect=(*outer, *asked.check_all_read())), asked

    def own(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the settings of the model itself, from the config.json of a larger one. Raises UnsupportedModel."""
        return config if self.inside_tied is None else text_settings(config, self.inside_tied)

    def load(self, path: Path, dtype: torch.dtype) -> nn.Module:
        """Returns the model as transformers runs it, in eval mode, with the experts implementation that we compare
        with."""
        model: nn.Module = self._class.from_pretrained(
            path, dtype=dtype, experts_implementation="eager", local_files_only=True
        )
        return self.prepared(model.eval())

    def empty(self, config_dir: Path) -> nn.Module:
        """Returns the model built from its config.json alone, in float32 and eval mode; its weights must be filled
        in."""
        import torch

        settings = json.loads((config_dir / "config.json").read_text("utf-8"))
        config = Config(self.own(settings), self._config_class).parsed
        if self.sees is not None:
            tied = bool(config.tie_word_embeddings)
            inside = {"text_config": config, "vision_config": self.sees, "tie_word_embeddings": tied}
            config = self._class.config_class(**inside)
        model: nn.Module = self._class._from_config(config, dtype=torch.float32, experts_implementation="eager")
        return self.prepared(model.requires_grad_(False).eval())

    def prepared(self, model: nn.Module) -> nn.Module:
        """Changes a loaded model so that `resumed` is exact and experts can be called; returns it."""
        return model

    def tower(self, model: nn.Module, stack: StackName) -> nn.Module:
        """Returns the module of one stack, whose list of layers is its attribute `layer_list`."""
        return model.get_submodule(self.towers[stack])

    def resumed(self, layers: Sequence[nn.Module], start: int, stop: int | None = None) -> list[nn.Module]:
        """Returns the layers of a tower that continues from the hidden states that enter layer `start`, given to it as
        inputs_embeds; layers from `stop` on are left out too. Each layer keeps its place, by which some models look up
        its kind."""
        from moeconv.source.archs.modules import Skipped

        last = len(layers) if stop is None else stop
        return [layer if start <= at < last else Skipped(self.more_results) for at, layer in enumerate(layers)]

    @contextmanager
    def resuming(self, tower: nn.Module) -> Iterator[None]:
        """Keeps the tower, in a run of `resumed` inside a with block, from changing hidden states as it changes
        embeddings."""
        yield

    def place(self, layer: int) -> int:
        """Returns the place in `layer_list` of a layer of a pack."""
        return layer // self.parts

    def experts_module(self, model: nn.Module, at: LayerKey) -> nn.Module:
        return model.get_submodule(self.experts[at.stack].format(layer=self.place(at.layer)))

    def routed(self, selected: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Returns chosen int64 (-1 for none) and weights, both [tokens, top_k], from the arguments of an experts
        module."""
        return selected, weights

    def expert_weight(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        """Returns a view [out, in] of the loaded parameter: writing to it changes the model."""
        experts = self.experts_module(model, key.at)
        if projection == "down":
            return experts.get_parameter("down_proj").detach()[key.expert]
        gate, up = experts.get_parameter("gate_up_proj").detach()[key.expert].chunk(2)
        return gate if projection == "gate" else up

    def expert_bias(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        """Returns a view [out] of the loaded parameter, in a family whose experts have biases."""
        raise NotImplementedError

    def spelled(self, spec: ModelSpec) -> str | None:
        """Returns the text that a pack gets in place of a tokenizer.json that a checkpoint lacks; None if no text can
        replace it."""
        return None

    @property
    def _config_class(self) -> Any:
        return config_class(self.config_type or self.model_type)

    @property
    def _class(self) -> Any:
        import transformers

        return getattr(transformers, self.model_class)
