"""The settings of GPTSAN-japanese, as a class for transformers."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class GptsanJapaneseConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """The settings of its config.json, with the names and defaults that transformers 4.57.6 had for them."""

    model_type = "gptsan-japanese"
    attribute_map = {  # noqa: RUF012 - transformers wants a dict here
        "hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers",
    }  # fmt: skip

    vocab_size: int = 36000
    max_position_embeddings: int = 1280
    d_model: int = 1024
    d_ff: int = 8192
    d_ext: int = 4096
    d_spout: int = 128
    num_switch_layers: int = 10
    num_ext_layers: int = 0
    num_layers: int | None = None
    num_heads: int = 16
    num_experts: int = 16
    expert_capacity: int = 128
    dropout_rate: float | int = 0.0
    layer_norm_epsilon: float = 1e-5
    router_bias: bool = False
    router_jitter_noise: float | int = 0.0
    router_dtype: str = "float32"
    router_ignore_padding_tokens: bool = False
    initializer_factor: float | int = 0.002
    output_router_logits: bool = False
    use_cache: bool = True
    tie_word_embeddings: bool = True
    separator_token_id: int | None = 35998
    bos_token_id: int | None = None
    pad_token_id: int | None = 35995
    eos_token_id: int | list[int] | None = 35999

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_layers is None:
            self.num_layers = self.num_switch_layers + self.num_ext_layers
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
