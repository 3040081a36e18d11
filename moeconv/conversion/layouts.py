"""How experts lie in a pack, by the names that --layout has for it."""

from __future__ import annotations

from collections.abc import Mapping

from moeconv.errors import SettingsError
from moert.pack.layout import MOST_PIECE_BYTES, SECTOR, Neurons
from moert.pack.manifest import Files
from moert.pack.model_spec import ModelSpec

BY_NEURONS: Mapping[str, bool] = {"neuron": True, "columns": False}
"""Layout → whether columns lie beside the rows of their neurons."""
PIECE_BYTES = 4096
"""Of a block's columns at most: what drives read at once."""
_TOGETHER = 2
"""Neurons that a block is to have at 4 bits: with more of them, nearly all blocks have one that fires."""
LAYOUTS = ("expert", "layer", *BY_NEURONS, "auto")
PAYS_BYTES = 128 << 10
"""Of an expert at 4 bits: below that it is read as soon as the few neurons of it that fire. So are, of any size, those
that a router chooses: what is asked for often stays, which is more than what fires of it (recipes/LOG.md)."""


def files_of(layout: str) -> Files:
    """What has a file of its own."""
    return "layer" if layout == "layer" else "expert"


def check_piece_bytes(layout: str, piece_bytes: int | None) -> None:
    """Raises SettingsError."""
    if piece_bytes is None:
        return
    if layout not in (*BY_NEURONS, "auto"):
        raise SettingsError(f"--piece-bytes has no effect on --layout {layout}: leave it out, or take --layout columns")
    if piece_bytes % SECTOR or not SECTOR <= piece_bytes <= MOST_PIECE_BYTES:
        raise SettingsError(
            f"--piece-bytes {piece_bytes}: expected a multiple of {SECTOR}, {SECTOR} to {MOST_PIECE_BYTES}"
        )


def neurons_of(layout: str, spec: ModelSpec, mxfp4: bool, piece_bytes: int | None = None) -> Neurons | None:
    """How neurons lie in blocks, whose columns take at most `piece_bytes` (None: as many as is usual); None where they
    do not. Raises SettingsError for a model that can't have them so."""
    act = spec.moe.ffn.act
    if layout == "auto":
        large = spec.weights_per_expert() // 2 >= PAYS_BYTES
        pays = large and act.exact_zeros and not mxfp4 and not spec.moe.chooses
        return blocks_of(spec, False, piece_bytes) if pays else None
    if layout not in BY_NEURONS:
        return None
    if not act.exact_zeros:
        raise SettingsError(
            f"--layout {layout} is for experts whose neurons are often exactly zero (relu, relu2), and this model's "
            f"activation is {act.name}: leave it out"
        )
    if mxfp4:
        raise SettingsError(f"--layout {layout} does not go with a source in MXFP4: leave it out")
    return blocks_of(spec, BY_NEURONS[layout], piece_bytes)


def blocks_of(spec: ModelSpec, bundled: bool, piece_bytes: int | None = None) -> Neurons:
    """Blocks as small as they are worth it, unless it is said: of a few neurons, and of no less than a drive reads."""
    if piece_bytes is not None:
        return Neurons(piece_bytes, bundled, together=not bundled)
    few = _TOGETHER * spec.expert_width // 2
    nbytes = SECTOR
    while nbytes < min(few, PIECE_BYTES):
        nbytes *= 2
    return Neurons(nbytes, bundled, together=not bundled)
