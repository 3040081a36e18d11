"""What a family of models is: its classes, its tokens, its description."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeconv.source.archs.config import Config, UnsupportedModel, beside_text
from moeconv.source.archs.description import Description
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec, StackName, Tokens

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# The classes in transformers that read a config.json. They compute nothing, and torch stays out (but of Gemma 4,
# whose class imports what images are read with).


def config_class(model_type: str) -> Any:
    """Returns the class of the settings of this model_type."""
    with torch_later():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return CONFIG_MAPPING[model_type]


class _Torch:
    """Stands for the module, which is imported when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


@contextmanager
def torch_later() -> Iterator[None]:
    """Around what imports those classes. One module that they begin with, modeling_rope_utils, imports torch (in two
    seconds) for functions that no class of settings calls: here it gets it when one of them is called."""
    utils: Any = import_module("transformers.utils")
    name, asked = "transformers.modeling_rope_utils", utils.is_torch_available
    if name in sys.modules or not asked():
        yield
        return
    utils.is_torch_available = lambda: False
    try:
        rope_utils: Any = import_module(name)
    finally:
        utils.is_torch_available = asked
    rope_utils.torch = _Torch()
    yield


# Special tokens: generation_config.json has the last word, config.json the first.

_FIELDS = {"bos": "bos", "pad": "pad", "start": "decoder_start", "first": "forced_bos"}


def token_id(name: str, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> int | None:
    """One id, or None where neither file has it."""
    value = generation_config.get(name)
    return config.get(name) if value is None else value


def special_tokens(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> Tokens:
    """All that a ModelSpec names."""
    found = {name: token_id(f"{field}_token_id", config, generation_config) for name, field in _FIELDS.items()}
    return Tokens(eos=token_ids("eos_token_id", config, generation_config), **found)


def token_ids(name: str, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """One id or a list of them, as a tuple; empty where neither file has it."""
    value = token_id(name, config, generation_config)
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def checked_start(config: Config, tokens: Tokens) -> Tokens:
    """Those of a model with an encoder, whose decoder begins with a token: where none is given, with that which begins
    texts, or the pad token. Raises UnsupportedModel."""
    config.get("forced_bos_token_id")  # it is in `tokens`
    start = next((token for token in (tokens.start, tokens.bos, tokens.pad) if token is not None), None)
    if start is None:
        raise UnsupportedModel("config.json has no decoder_start_token_id: an encoder–decoder model needs one")
    return replace(tokens, start=start)


# What the converter asks of a family of Hugging Face models; most answer it with a few names.


class Family:
    """A decoder of transformers' usual shape; others say in what they differ. `model_type` is that of config.json."""

    model_type: str
    model_class: str
    """In transformers."""
    config_type: str | None = None
    """By which transformers knows the class of its settings; None: by `model_type`."""
    towers: Mapping[StackName, str] = {"decoder": "model"}
    layer_list = "layers"
    reads_mxfp4 = False
    beside: Set[str] = frozenset()
    """Settings of the larger model that it is published in, which do not touch the text."""
    by_layers = True
    """Whether a decoder of it can be run one layer at a time."""
    loads_by_names = True
    """Whether transformers finds all weights of a checkpoint: not of some that are published inside a larger one,
    or by a name that it does not know."""
    experts: Mapping[StackName, str] = {"decoder": "model.layers.{layer}.mlp.experts"}
    """Modules called as experts(x [tokens, d_model], selected, weights), see `routed`."""

    def describe(self, config: Config, tokens: Tokens) -> Description:
        """Raises UnsupportedModel."""
        raise NotImplementedError

    def description(self, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> Description:
        """Of both files as JSON objects. Raises ConfigInvalid, or UnsupportedModel, for settings too that are not
        known."""
        return self.described(config, generation_config)[0]

    def described(
        self, config: Mapping[str, Any], generation_config: Mapping[str, Any]
    ) -> tuple[Description, Config]:  # fmt: skip
        """The same, and the settings as they were asked for."""
        asked = Config(self.own(config), self._config_class)
        coding = asked.coding()
        if coding == "mxfp4" and not self.reads_mxfp4:
            raise UnsupportedModel(
                "config.json says that its weights are coded by mxfp4, which only gpt_oss is known for"
            )
        found = self.describe(asked, special_tokens(config, generation_config))
        outer = beside_text(config, self.beside, self._config_class) if self.beside else ()
        return replace(found, without_effect=(*outer, *asked.check_all_read())), asked

    def own(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings of the model itself, in the config.json of a larger one. Raises UnsupportedModel."""
        return config

    def load(self, path: Path, dtype: torch.dtype) -> nn.Module:
        """The model as transformers runs it, in eval mode, with the one experts implementation we compare with."""
        model: nn.Module = self._class.from_pretrained(
            path, dtype=dtype, experts_implementation="eager", local_files_only=True
        )
        return self.prepared(model.eval())

    def empty(self, config_dir: Path) -> nn.Module:
        """The same model from its config.json alone, in float32 and eval mode, with weights still to be filled in."""
        import torch

        config = self._config_class.from_pretrained(config_dir, local_files_only=True)
        model: nn.Module = self._class._from_config(config, dtype=torch.float32, experts_implementation="eager")
        return self.prepared(model.requires_grad_(False).eval())

    def prepared(self, model: nn.Module) -> nn.Module:
        """What has to be changed so that `resumed` is exact."""
        return model

    def tower(self, model: nn.Module, stack: StackName) -> nn.Module:
        """The module of one stack, whose list of layers is its attribute `layer_list`."""
        return model.get_submodule(self.towers[stack])

    def resumed(self, layers: Sequence[nn.Module], start: int, stop: int | None = None) -> list[nn.Module]:
        """The layers of a tower that goes on from the hidden states that enter layer `start`, which are given to it as
        inputs_embeds, and of those only up to `stop`. Each keeps its place: some models look up by it what kind of
        layer it is."""
        from moeconv.source.archs.modules import Skipped

        last = len(layers) if stop is None else stop
        return [layer if start <= at < last else Skipped() for at, layer in enumerate(layers)]

    @contextmanager
    def resuming(self, tower: nn.Module) -> Iterator[None]:
        """Around a run of `resumed`: what the tower does to embeddings must not be done to hidden states."""
        yield

    def experts_module(self, model: nn.Module, at: LayerKey) -> nn.Module:
        return model.get_submodule(self.experts[at.stack].format(layer=at.layer))

    def routed(self, selected: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """What an experts module is called with → chosen int64 and weights, both [tokens, top_k]; -1 for none."""
        return selected, weights

    def expert_weight(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        """A view [out, in] of the loaded parameter: writing to it changes the model."""
        experts = self.experts_module(model, key.at)
        if projection == "down":
            return experts.get_parameter("down_proj").detach()[key.expert]
        gate, up = experts.get_parameter("gate_up_proj").detach()[key.expert].chunk(2)
        return gate if projection == "gate" else up

    def expert_bias(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        """A view [out] of the loaded parameter, of a family whose experts have biases."""
        raise NotImplementedError

    def spelled(self, spec: ModelSpec) -> str | None:
        """What stands in a pack for a tokenizer.json that a checkpoint has not; None: nothing can."""
        return None

    @property
    def _config_class(self) -> Any:
        return config_class(self.config_type or self.model_type)

    @property
    def _class(self) -> Any:
        import transformers

        return getattr(transformers, self.model_class)
