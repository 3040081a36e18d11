"""An unquantized checkpoint in transformers, as a session of runner.py: `python -m recipes.bench.source DIR`.

Greedy `generate` with its defaults: keys and values are kept, in the checkpoint's precision widened to float32.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from recipes.bench.ours import THREADS
from recipes.bench.program import as_program
from recipes.bench.runner import serve


class Source:
    """The model that a pack was made of."""

    def __init__(self, checkpoint: str) -> None:
        os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        import torch

        from moeconv.source.checkpoint import Checkpoint

        torch.set_num_threads(THREADS)
        found = Checkpoint.open(checkpoint)
        model: Any = found.model(torch.float32)
        model.generation_config.eos_token_id = None  # all runs have the length asked for
        self._model = model

    def generate(self, ids: list[int], new_tokens: int) -> tuple[list[int], float, float]:
        """The time of the first token is not told apart: it is 0."""
        import torch

        started = time.perf_counter()
        with torch.inference_mode():
            written = self._model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=new_tokens)
        return written[0, -new_tokens:].tolist(), 0.0, time.perf_counter() - started


def main() -> None:
    serve(lambda: Source(sys.argv[1]))


if __name__ == "__main__":
    as_program(main, __doc__, "DIR")
