"""A pack in the project's own engine, as a session of recipes/bench/runner.py: `python -m recipes.bench.ours PACK`."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path

from recipes.bench.program import as_program
from recipes.bench.runner import serve

THREADS = 2


class Ours:
    """An engine that keeps all experts in memory. No token ends a text, so that all runs have the length asked for."""

    def __init__(self, pack: Path) -> None:
        from moert.engine.engine import Engine

        self._engine = Engine.open(pack, predict="none", threads=THREADS)
        self._reading = ExitStack()

    def generate(self, ids: list[int], new_tokens: int) -> tuple[list[int], float, float]:
        from moert.engine.generation import GenerationSettings

        answer = self._engine.generate(ids, GenerationSettings(max_new_tokens=new_tokens, ignore_eos=True))
        return answer.result.tokens, answer.time_to_first_token_s, answer.total_s

    def read(self, ids: list[int], room: int) -> None:
        from moert.engine.generation import GenerationSettings

        self._session = self._reading.enter_context(self._engine.session())
        self._session.add(ids, GenerationSettings(max_new_tokens=1 + room, ignore_eos=True))
        self._session.turn()

    def go_on(self, new_tokens: int) -> float:
        started = time.perf_counter()
        for _ in range(new_tokens):
            self._session.turn()
        return time.perf_counter() - started

    def forget(self) -> None:
        self._reading.close()

    def logits(self, ids: list[int]) -> list[float]:
        self._engine.reserve(len(ids), 1)
        return [float(value) for value in self._engine.model.prefill(ids)[1]]

    def fill(self) -> None:
        """Reads every expert; the rest was read at the start."""
        self._engine.reserve(1, 1)
        for key in self._engine.spec.expert_keys():
            with self._engine.cache.lease([key]) as lease:
                lease.all()

    def expert_bits(self) -> float:
        return self._engine.pack.manifest.effective_bits()

    def bytes_per_token(self) -> int:
        """Experts by their mean, top_k a layer, and all of the backbone but the embeddings; a tied head is read."""
        from safetensors import safe_open

        from moert.pack.manifest import BACKBONE

        manifest, spec = self._engine.pack.manifest, self._engine.spec
        total = manifest.expert_tensor_bytes() * spec.moe.router.top_k // spec.moe.n
        with safe_open(self._engine.pack.file(BACKBONE), framework="np") as file:
            for name in file.keys():  # noqa: SIM118
                if spec.head.tied or not name.startswith("embed."):
                    total += file.get_tensor(name).nbytes
        return total


def main() -> None:
    serve(lambda: Ours(Path(sys.argv[1])))


if __name__ == "__main__":
    as_program(main, __doc__, "PACK")
