"""Routing for a model of Mixtral's shape, recorded from the wiki model: no trace of Mixtral itself is published.

The wiki model's 32 experts are taken four at a time: a token goes to the two such groups that hold the experts which
its router ranks highest, and a group is guessed with the probability of its four. Its eight layers come four times
over, each time with other text. So popularity, repetition from token to token and guesses are those of a trained
model, of a smaller one than Mixtral. They came out like what is known of Mixtral: an expert of the token before comes
again for 50 to 67% of tokens (46 to 67% there, Jiang et al. 2024), and of two guesses 80% are right.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moert.pack.files import atomic_write
from recipes.bench import routing

LAYERS, EXPERTS, TOP_K = 32, 8, 2
_ROUNDS, _RANKED = 4, 8
FOLDER = Path("build/bench/cards")

Chosen = npt.NDArray[np.uint8]
Guesses = npt.NDArray[np.float16]


class Routes(NamedTuple):
    """`chosen` [tokens, LAYERS, TOP_K] ascending; `guesses` [tokens, LAYERS, EXPERTS]: probabilities by the router of
    the layer, asked a layer too early."""

    chosen: Chosen
    guesses: Guesses


def recorded(pack: Path, split: str, windows: int) -> Routes:
    """`windows` windows of text of each round, recorded once and kept."""
    kept = FOLDER / f"{split}-{windows}.npz"
    if not kept.exists():
        found = _record(pack, split, windows)
        FOLDER.mkdir(parents=True, exist_ok=True)
        with atomic_write(kept) as fresh, fresh.open("wb") as stream:
            np.savez(stream, chosen=found.chosen, guesses=found.guesses)
    with np.load(kept) as read:
        return Routes(read["chosen"], read["guesses"])


def _record(pack: Path, split: str, windows: int) -> Routes:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pack / "tokenizer.json"))
    texts = routing.windows_of(routing.text_of(split), tokenizer, _ROUNDS * windows)
    ranked, guesses = routing.record(pack, texts, top_k=_RANKED)
    chosen = grouped(ranked)
    sums = guesses.astype(np.float32).reshape(*guesses.shape[:2], EXPERTS, -1).sum(-1).astype(np.float16)
    return Routes(*(_rounds(part, windows) for part in (chosen, sums)))


def grouped(ranked: npt.NDArray[np.uint8], size: int = 4) -> Chosen:
    """[tokens, layers, ranked], the best first → the two groups of `size` experts that come first in it, ascending."""
    groups = ranked // size
    first = groups[..., 0]
    other = groups != first[..., None]
    at = np.where(other.any(-1), other.argmax(-1), 0)
    second = np.take_along_axis(groups, at[..., None], -1)[..., 0]
    second = np.where(other.any(-1), second, (first + 1) % EXPERTS)
    return np.sort(np.stack([first, second], -1), -1).astype(np.uint8)


def _rounds(part: npt.NDArray[np.generic], windows: int) -> npt.NDArray[np.generic]:
    """[rounds × tokens, layers, n] → [tokens, rounds × layers, n]"""
    tokens = windows * routing.WINDOW
    parts = part.reshape(_ROUNDS, tokens, *part.shape[1:])
    return np.concatenate(list(parts), 1)[:, :LAYERS]
