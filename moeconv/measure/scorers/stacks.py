"""One stack of a loaded model, run from any of its layers on: resuming at a layer boundary is exact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from moeconv.source.archs import Family
from moert.pack.model_spec import StackName

After = Callable[[int, Tensor], Tensor | None]
"""after(layer, hidden [rows, tokens, d_model]): sees what leaves a layer, and may replace it."""


class StackRunner:
    def __init__(self, model: Any, family: Family, stack: StackName) -> None:
        self.family = family
        self.module = family.tower(model, stack)
        self.attribute = family.layer_list
        self.n_layers = len(getattr(self.module, self.attribute))

    def run(
        self, inputs: dict[str, Any], start: int = 0, after: After | None = None, stop: int | None = None
    ) -> Tensor:
        """Final hidden states [rows, tokens, d_model], normed. `inputs` are the stack's own keyword arguments:
        input_ids, or inputs_embeds for hidden states that enter the layer `start`. `stop`: layers from there on are
        left out."""
        layers = getattr(self.module, self.attribute)
        hooks = []
        if after is not None:
            hooks = [layers[at].register_forward_hook(_hook(at, after)) for at in range(start, stop or self.n_layers)]
        setattr(self.module, self.attribute, nn.ModuleList(self.family.resumed(layers, start, stop)))
        try:
            with self.family.resuming(self.module) if start else nullcontext():
                hidden: Tensor = self.module(**{"use_cache": False, **inputs}).last_hidden_state
            return hidden
        finally:
            setattr(self.module, self.attribute, layers)
            for hook in hooks:
                hook.remove()


def _hook(layer: int, after: After) -> Any:
    def seen(_: Any, __: Any, output: Any) -> Any:
        hidden = output if isinstance(output, Tensor) else output[0]
        replaced = after(layer, hidden)
        if replaced is None:
            return None
        return replaced if isinstance(output, Tensor) else (replaced, *output[1:])

    return seen
