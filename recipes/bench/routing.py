"""Routing of a trained model for a model of random weights: which experts each token goes to, and is thought to go to.

What the wiki model's routers select on held-out text makes two streams, of different articles. Side by side, one with
experts 0 to 31 and the other with 32 to 63, they are a token's eight of 64 experts, as OLMoE has them. A random router
would spread its tokens evenly over all experts, which no trained one does.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moert.pack.codec import F32
from moert.pack.model_spec import LayerKey, ModelSpec

if TYPE_CHECKING:
    from moert.kernels.backend import I64
    from moert.models.ffn import Routed, Router, Routers
    from moert.models.kv import Recent

DATA = Path("build/data/wiki")
WINDOW = 256  # tokens: as far as the wiki model reads
LAYERS = 6

PERSISTENT_TOKENS = 1024
QWEN3_HITS = ((0.06, 0.40), (0.12, 0.57), (0.24, 0.78), (0.36, 0.88), (0.48, 0.93), (0.75, 0.98))
"""The hits of Qwen3-30B-A3B as published: (share of a layer's experts in memory, those used last; share of its demands
for experts that finds them there)."""

Routing = npt.NDArray[np.uint8]  # [tokens, layers, top_k], ascending in the last
Guesses = npt.NDArray[np.float16]
"""[tokens, layers, num_experts]: the probabilities that the router of a layer gives to a token when it is asked one
layer too early (moert.experts.predictors); nothing in the first layer."""


def join(first: Routing, second: Routing, num_experts: int) -> Routing:
    """Two streams [tokens, layers, top_k] of a model with `num_experts` → one [tokens, layers, 2 × top_k] of twice as
    many. Raises ValueError if their sizes differ."""
    if first.shape != second.shape:
        raise ValueError(f"streams of {first.shape} and {second.shape} can't be joined")
    return np.concatenate([np.sort(first, 2), np.sort(second, 2) + np.uint8(num_experts)], 2)


def record(
    pack: Path, windows: Sequence[Sequence[int]], preference: str = "exact", top_k: int | None = None
) -> tuple[Routing, Guesses]:
    """What the pack's own routers select, and guess, reading each window of tokens from its start, as a prompt or where
    they prefer experts (see moert.engine.budget) as if it were written. `top_k`: so many experts, as the routers rank
    them, and not as many as they select."""
    from moert.engine.engine import Engine

    seen: dict[LayerKey, list[I64]] = {}
    guessed: dict[LayerKey, list[F32]] = {}
    with Engine.open(pack, predict="none", threads=1, routing=preference) as engine:
        routers, layers = engine.model.routers, engine.spec.moe_layers()
        following = dict(itertools.pairwise(layers))

        class Heard(Replaced):
            """Writes down what a router says, and what the next one would say of the same tokens."""

            def route(self, x: F32, lengths: Sequence[int], recent: Sequence[Recent] = ()) -> Routed:
                routed = self.router.route(x, lengths, recent)
                seen.setdefault(self.at, []).append(routed.experts if top_k is None else ranked(self.router, x, top_k))
                if (after := following.get(self.at)) is not None:
                    guess = routers[after].guess
                    rows = [guess(x[token : token + 1]) for token in range(len(x))]
                    guessed.setdefault(after, []).append(np.stack(rows))
                return routed

        for at in layers:
            routers[at] = Heard(at, routers[at])
        for ids in windows:
            if preference == "exact":
                engine.reserve(len(ids), 1)
                engine.model.forward_all(list(ids))
                continue
            engine.reserve(1, len(ids))
            (state, first), *_ = engine.model.begin([ids[:1]])
            engine.model.read([state], [first])
            for token in ids[1:]:
                engine.model.step(state, token)
    guessed[layers[0]] = [np.zeros_like(part) for part in guessed[layers[1]]]
    experts = np.stack([np.concatenate(seen[layer]) for layer in layers], 1)
    scores = np.stack([np.concatenate(guessed[layer]) for layer in layers], 1)
    return experts.astype(np.uint8), scores.astype(np.float16)


def ranked(router: Router, x: F32, count: int) -> I64:
    """[tokens, count] of the experts that a router ranks highest."""
    scores = np.stack([router.guess(x[token : token + 1]) for token in range(len(x))])
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def windows_of(text: str, tokenizer: Any, count: int) -> list[list[int]]:
    """The first `count` windows of a text. Raises ValueError if there are fewer."""
    ids = tokenizer.encode(text).ids
    if len(ids) < count * WINDOW:
        raise ValueError(f"{len(ids)} tokens of text, {count * WINDOW} are needed")
    return [ids[at : at + WINDOW] for at in range(0, count * WINDOW, WINDOW)]


def like(pack: Path, split: str, count: int, spec: ModelSpec) -> tuple[Routing, Guesses]:
    """Routing for a model that has more layers, or more experts in them, than the trained one in `pack`, and chooses
    more of them: [count × WINDOW, layers, top_k]. Streams of different windows lie side by side until there are enough
    experts, each with its share of top_k, and go through the trained layers again, with other windows, until there are
    enough layers. Raises ValueError for numbers of experts that are no such multiple, or too little text."""
    from tokenizers import Tokenizer

    from moert.pack.reader import Pack

    model, moe, depth = Pack.open(pack).manifest.model, spec.moe, len(spec.moe_layers())
    beside, rounds = moe.n // model.moe.n, -(-depth // len(model.moe_layers()))
    if beside * model.moe.n != moe.n or moe.router.top_k % beside:
        raise ValueError(f"{moe.n} experts, {moe.router.top_k} chosen: no multiple of {model.moe.n} experts")
    tokenizer = Tokenizer.from_file(str(pack / "tokenizer.json"))
    windows = windows_of(text_of(split), tokenizer, rounds * beside * count)
    chosen, guesses = record(pack, windows, top_k=moe.router.top_k // beside)
    numbers = np.arange(beside, dtype=np.uint8)[:, None, None, None, None] * np.uint8(model.moe.n)
    parts = [each.reshape(beside, rounds, count * WINDOW, *each.shape[1:]) for each in (chosen, guesses)]
    parts[0] = np.sort(parts[0], -1) + numbers
    # [beside, rounds, tokens, layers, k] → [tokens, rounds × layers, beside × k]
    turned = [part.transpose(2, 1, 3, 0, 4).reshape(count * WINDOW, rounds * part.shape[3], -1) for part in parts]
    return turned[0][:, :depth], turned[1][:, :depth] / np.float16(beside)


def persistent(
    spec: ModelSpec, tokens: int, hits: Sequence[tuple[float, float]] = QWEN3_HITS, seed: int = 0
) -> Routing:  # fmt: skip
    """Returns routing [tokens, layers, top_k] with these hits under LRU by layer (see QWEN3_HITS). The chance of an
    expert follows from its place in the order of last use alone (LRU stack model: Spirn 1976, Distance String Models
    for Program Behavior): so all experts are used alike in the long run, and policies that count uses do worse than
    LRU. Raises ValueError for hits that no routing has."""
    layers, experts, top_k = len(spec.moe_layers()), spec.moe.n, spec.moe.router.top_k
    shares, found = zip((0.0, 0.0), *hits, (1.0, 1.0), strict=True)
    chances = top_k * np.diff(np.interp(np.arange(experts + 1) / experts, shares, found))  # by place, the latest first
    if not 0 < chances.min() <= chances.max() < 1:
        raise ValueError(f"{experts} experts, {top_k} chosen: an expert would be chosen more than once or never")
    rng, rates = np.random.default_rng(seed), -np.log1p(-chances)
    latest = rng.permuted(np.tile(np.arange(experts, dtype=np.uint8), (layers, 1)), axis=1)
    chosen = np.empty((tokens, layers, top_k), np.uint8)
    for token in range(tokens):
        places = np.argpartition(rng.exponential(size=latest.shape) / rates, top_k, axis=1)  # chosen ones first
        latest = np.take_along_axis(latest, np.hstack([places[:, :top_k], np.sort(places[:, top_k:])]), 1)
        chosen[token] = np.sort(latest[:, :top_k])
    return chosen


def text_of(split: str) -> str:
    lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return "".join(json.loads(line)["text"] for line in lines)


def joined(pack: Path, split: str, count: int, preference: str = "exact") -> tuple[Routing, Guesses]:
    """`count` windows of two streams of one split, joined, the first LAYERS layers: [count × WINDOW, LAYERS, ...]."""
    from tokenizers import Tokenizer

    from moert.pack.reader import Pack

    tokenizer = Tokenizer.from_file(str(pack / "tokenizer.json"))
    windows = windows_of(text_of(split), tokenizer, 2 * count)
    routing, guesses = record(pack, windows, preference)
    routing, guesses, half = routing[:, :LAYERS], guesses[:, :LAYERS], count * WINDOW
    both = join(routing[:half], routing[half:], Pack.open(pack).manifest.model.moe.n)
    return both, np.concatenate([guesses[:half], guesses[half:]], 2) / np.float16(2)


class Replaced:
    """A router in front of another."""

    def __init__(self, at: LayerKey, router: Router) -> None:
        self.at, self.router = at, router

    def route(self, x: F32, lengths: Sequence[int], recent: Sequence[Recent] = ()) -> Routed:
        return self.router.route(x, lengths, recent)

    def guess(self, x: F32) -> F32:
        return self.router.guess(x)


class ReplayedRouting:
    """A recorded routing, token after token: `take` what a layer selects, and what was guessed of it before.

    It goes on where the last request ended, and starts anew at the end of the recording.
    """

    def __init__(self, routing: Routing, guesses: Guesses) -> None:
        self._routing, self._guesses, self._at = routing, guesses, 0
        self._rows = np.arange(0)  # of the recording: the tokens on their way

    def replace(self, routers: Routers, layers: Sequence[LayerKey]) -> None:
        """Puts itself in the place of what these routers say and guess; the weights stay theirs."""
        for place, at in enumerate(layers):
            routers[at] = ReplayedRouter(at, routers[at], self, place)

    def take(self, place: int, lengths: Sequence[int]) -> Routing:
        """[tokens, top_k] of the layer with experts at this place; the first one moves on."""
        if place == 0:
            self._rows = self.rows(lengths)
        taken: Routing = self._routing[self._rows, place]
        return taken

    def rows(self, lengths: Sequence[int]) -> np.ndarray:
        """Returns the rows of the recording for the next tokens of sequences."""
        found = np.arange(self._at, self._at + sum(lengths)) % len(self._routing)
        self._at = (self._at + sum(lengths)) % len(self._routing)
        return found

    def guessed(self, place: int) -> F32:
        """[num_experts], the mean over the tokens on their way."""
        mean: F32 = self._guesses[self._rows, place].astype(np.float32).mean(0)
        return mean


class ReplayedRouter(Replaced):
    """Says what was recorded; hidden states and weights are those of the router behind it."""

    def __init__(self, at: LayerKey, router: Router, recorded: ReplayedRouting, place: int) -> None:
        super().__init__(at, router)
        self._recorded, self._place = recorded, place

    def route(self, x: F32, lengths: Sequence[int], recent: Sequence[Recent] = ()) -> Routed:
        taken = self._recorded.take(self._place, lengths).astype(np.int64)
        return self.router.route(x, lengths, recent)._replace(experts=taken)

    def guess(self, x: F32) -> F32:
        return self._recorded.guessed(self._place)
