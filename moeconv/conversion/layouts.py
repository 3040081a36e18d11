"""How experts lie in a pack, by the names that --layout has for it."""

from __future__ import annotations

from collections.abc import Mapping

from moeconv.errors import SettingsError
from moert.pack.manifest import Files
from moert.pack.model_spec import ModelSpec
from moert.pack.neurons import Neurons

PIECE_BYTES = 4096
"""Of a block's columns at most: what drives read at once."""
BY_NEURONS: Mapping[str, Neurons] = {
    "neuron": Neurons(PIECE_BYTES, bundled=True),
    "columns": Neurons(PIECE_BYTES, bundled=False),
}
LAYOUTS = ("expert", "layer", *BY_NEURONS, "auto")
PAYS_BYTES = 128 << 10
"""Of an expert at 4 bits: below that it is read as soon as the few neurons of it that fire."""


def files_of(layout: str) -> Files:
    """What has a file of its own."""
    return "layer" if layout == "layer" else "expert"


def neurons_of(layout: str, spec: ModelSpec, mxfp4: bool) -> Neurons | None:
    """How neurons lie in blocks; None where they do not. Raises SettingsError for a model that can't have them so."""
    act = spec.moe.ffn.act
    if layout == "auto":
        pays = act.exact_zeros and not mxfp4 and spec.weights_per_expert() // 2 >= PAYS_BYTES
        return BY_NEURONS["columns"] if pays else None
    found = BY_NEURONS.get(layout)
    if found is not None and not act.exact_zeros:
        raise SettingsError(
            f"--layout {layout} is for experts whose neurons are often exactly zero (relu, relu2), and this model's "
            f"activation is {act.name}: leave it out"
        )
    if found is not None and mxfp4:
        raise SettingsError(f"--layout {layout} does not go with a source in MXFP4: leave it out")
    return found
