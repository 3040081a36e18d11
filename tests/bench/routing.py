"""Routing of a trained model for a model of random weights: which experts each token goes to, and is thought to go to.

What the wiki model's routers select on held-out text makes two streams, of different articles. Side by side, one with
experts 0 to 31 and the other with 32 to 63, they are a token's eight of 64 experts, as OLMoE has them. A random router
would spread its tokens evenly over all experts, which no trained one does.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moert.pack.model_spec import Stack

if TYPE_CHECKING:
    from moert.engine import Engine

DATA = Path("build/data/wiki")
WINDOW = 256  # tokens: as far as the wiki model reads
LAYERS = 6

Routing = npt.NDArray[np.uint8]  # [tokens, layers, top_k], ascending in the last
Guesses = npt.NDArray[np.float16]
"""[tokens, layers, num_experts]: the probabilities that the router of a layer gives to a token when it is asked one
layer too early (moert.predict.gate); nothing in the first layer."""


def join(first: Routing, second: Routing, num_experts: int) -> Routing:
    """Two streams [tokens, layers, top_k] of a model with `num_experts` → one [tokens, layers, 2 × top_k] of twice as
    many. Raises ValueError if their sizes differ."""
    if first.shape != second.shape:
        raise ValueError(f"streams of {first.shape} and {second.shape} can't be joined")
    return np.concatenate([np.sort(first, 2), np.sort(second, 2) + np.uint8(num_experts)], 2)


def record(pack: Path, windows: Sequence[Sequence[int]]) -> tuple[Routing, Guesses]:
    """What the pack's own routers select, and guess, reading each window of tokens from its start."""
    import torch

    from moert.engine import Engine

    seen: dict[int, list[Any]] = {}
    guessed: dict[int, list[Any]] = {}
    with Engine.open(pack, predictor="none", threads=1) as engine:
        inner, routers, layers = engine.runner.run, engine.model.guesses(), engine.spec.decoder.moe_layers
        following = dict(itertools.pairwise(layers))

        def run(stack: Stack, layer: int, hidden: Any, experts: Any, weights: Any, out: Any) -> None:
            seen.setdefault(layer, []).append(experts.clone())
            if layer in following:
                guess = routers[stack, following[layer]]
                guessed.setdefault(following[layer], []).append(torch.stack([guess(row) for row in out.split(1)]))
            inner(stack, layer, hidden, experts, weights, out)

        engine.runner.run = run  # type: ignore[method-assign]
        for ids in windows:
            engine.reserve(len(ids), 1)
            engine.model.forward_all(list(ids))
    guessed[layers[0]] = [torch.zeros_like(part) for part in guessed[layers[1]]]
    experts, scores = (torch.stack([torch.cat(parts[layer]) for layer in layers], 1) for parts in (seen, guessed))
    return experts.numpy().astype(np.uint8), scores.numpy().astype(np.float16)


def windows_of(text: str, tokenizer: Any, count: int) -> list[list[int]]:
    """The first `count` windows of a text. Raises ValueError if there are fewer."""
    ids = tokenizer.encode(text).ids
    if len(ids) < count * WINDOW:
        raise ValueError(f"{len(ids)} tokens of text, {count * WINDOW} are needed")
    return [ids[at : at + WINDOW] for at in range(0, count * WINDOW, WINDOW)]


def joined(pack: Path, split: str, count: int) -> tuple[Routing, Guesses]:
    """`count` windows of two streams of one split, joined, the first LAYERS layers: [count × WINDOW, LAYERS, ...]."""
    from tokenizers import Tokenizer

    from moert.pack.reader import Pack

    lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    tokenizer = Tokenizer.from_file(str(pack / "tokenizer.json"))
    windows = windows_of("".join(json.loads(line)["text"] for line in lines), tokenizer, 2 * count)
    routing, guesses = (each[:, :LAYERS] for each in record(pack, windows))
    half = count * WINDOW
    both = join(routing[:half], routing[half:], Pack.open(pack).manifest.model.moe.num_experts)
    return both, np.concatenate([guesses[:half], guesses[half:]], 2) / np.float16(2)


class ReplayedRouting:
    """Puts a recorded routing in the place of what an engine's routers say and guess; the weights stay theirs.

    Token after token, it goes on where the last request ended, and starts anew at the end of the recording.
    """

    def __init__(self, engine: Engine, routing: Routing, guesses: Guesses) -> None:
        runner: Any = engine.runner
        self._routing, self._guesses, self._at = routing, guesses, 0
        self._one, self._many = runner.run_one, runner.run
        layers = engine.spec.decoder.moe_layers
        self._places, self._last = {layer: place for place, layer in enumerate(layers)}, layers[-1]
        self._rows = np.arange(0)  # of the recording: the tokens on their way
        runner.run_one, runner.run = self.run_one, self.run
        if engine.ahead is not None:
            engine.ahead.guesses = {("decoder", layer): partial(self._guess, layer) for layer in layers}

    def run_one(self, stack: Stack, layer: int, hidden: Any, experts: list[int], weights: Any, out: Any) -> None:
        """See moert.models.moe.ExpertRunner."""
        self._one(stack, layer, hidden, self._take(layer, 1)[0].tolist(), weights, out)

    def run(self, stack: Stack, layer: int, hidden: Any, experts: Any, weights: Any, out: Any) -> None:
        """The same for some tokens."""
        import torch

        taken = self._take(layer, len(hidden))
        if len(hidden) == 1:
            self._one(stack, layer, hidden, taken[0].tolist(), weights[0], out)
        else:
            self._many(stack, layer, hidden, torch.from_numpy(taken.astype(np.int64)), weights, out)

    def _take(self, layer: int, tokens: int) -> Routing:
        """[tokens, top_k]; the last layer moves on."""
        self._rows = np.arange(self._at, self._at + tokens) % len(self._routing)
        if layer == self._last:
            self._at = (self._at + tokens) % len(self._routing)
        taken: Routing = self._routing[self._rows, self._places[layer]]
        return taken

    def _guess(self, layer: int, x: Any) -> Any:
        """[num_experts], the mean over the tokens on their way, whatever their hidden states x are."""
        import torch

        return torch.from_numpy(self._guesses[self._rows, self._places[layer]].astype(np.float32).mean(0))
