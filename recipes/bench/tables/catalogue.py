"""Every block by its name, as markers in the text call it."""

from __future__ import annotations

from collections.abc import Mapping

from recipes.bench.tables import (
    Block,
    ahead,
    demo,
    devices,
    flash,
    front,
    gradients,
    hashed,
    kernels,
    large,
    less,
    many,
    mixed,
    models,
    outlook,
    peers,
    plans,
    promise,
    quant,
    rounding,
    size,
    stream,
    sweep,
)

MISSED = "missed"
"""The block that lists the missed aims of all results."""
PER_KIND = ("kernels", "peers")
"""Results that are kept for each kind of processor, as NAME-KIND.json."""

BLOCKS: Mapping[str, Block] = {
    "front": Block("demo", front.two_models),
    "picture": Block("stream", front.beside_llama),
    "demo": Block("demo", demo.parts),
    "models": Block("models", models.parts),
    "references": Block("references", demo.parts),
    "peers": Block("peers", peers.parts),
    "kernels": Block("kernels", kernels.parts),
    "rounding": Block("rounding", rounding.parts),
    "stream": Block("stream", stream.shaped),
    "stream-trained": Block("stream", stream.trained),
    "ahead": Block("ahead", ahead.parts),
    "less": Block("less", less.parts),
    "sweep": Block("sweep", sweep.parts),
    "gradients": Block("gradients", gradients.parts),
    "plans": Block("plans", plans.parts),
    "quant": Block("quant", quant.parts),
    "mixed": Block("mixed", mixed.parts),
    "hash-names": Block("hashed", hashed.names),
    "hash-routing": Block("hashed", hashed.routing),
    "hash-hits": Block("hashed", hashed.hits),
    "hash-speeds": Block("hashed", hashed.speeds),
    "beforehand": Block("beforehand", hashed.beforehand),
    "flash-bytes": Block("flash", flash.nbytes),
    "flash-speeds": Block("flash", flash.speeds),
    "flash-curves": Block("flash", flash.curves),
    "promise": Block("promise", promise.parts),
    "size": Block("size", size.parts),
    "workers": Block("workers", size.parts),
    "large": Block("large", large.parts),
    "many": Block("many", many.parts),
    "devices": Block("devices", devices.parts),
    "outlook": Block("outlook", outlook.parts),
}
