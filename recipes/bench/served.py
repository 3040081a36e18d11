"""A server whose routers are told where to go, for recipes.bench.serve: started with the pack, a file of routings and
settings of the engine as JSON, it prints its address as `moert serve` does and runs until it is ended."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moert.engine.settings import EngineSettings
from recipes.bench.program import as_program
from recipes.bench.routing import Guesses, ReplayedRouting, Routing
from tests.serving import serving


class ReplayedStreams(ReplayedRouting):
    """Recordings [streams, tokens, ...] for sequences that run together: each prompt begins the next one. Prompts have
    more than one token, and sequences end in the order in which they began."""

    def __init__(self, routing: Routing, guesses: Guesses) -> None:
        self._streams, self._tokens = routing.shape[:2]
        self._begun, self._places = 0, list[int]()
        super().__init__(routing.reshape(-1, *routing.shape[2:]), guesses.reshape(-1, *guesses.shape[2:]))

    def rows(self, lengths: Sequence[int]) -> np.ndarray:
        """Returns the rows of the recording for the next tokens of each sequence."""
        new = sum(length > 1 for length in lengths)
        going = len(lengths) - new
        self._places = self._places[len(self._places) - going :]
        for _ in range(new):
            self._places.append(self._begun % self._streams * self._tokens)
            self._begun += 1
        found = [np.arange(at, at + length) for at, length in zip(self._places, lengths, strict=True)]
        self._places = [at + length for at, length in zip(self._places, lengths, strict=True)]
        return np.concatenate(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("pack", "routes", "settings"):
        parser.add_argument(name, type=json.loads if name == "settings" else Path)
    given = parser.parse_args()
    with serving(given.pack, engine=EngineSettings(**given.settings)) as running, np.load(given.routes) as recorded:
        engine = next(iter(running.host.there.values())).engine
        streams = ReplayedStreams(recorded["streams"], recorded["guesses"])
        streams.replace(engine.model.routers, engine.spec.moe_layers())
        print(f"{running.url} answers, routed", flush=True)
        signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    as_program(main)
