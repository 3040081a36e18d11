"""Runs packs in Python on a library of kernels that was compiled with sanitizers: `make test-sanitize-python`.

Packs are written first, which takes torch; a process that has the sanitizers in it then runs them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from moert.pack.layout import Neurons
from moert.pack.manifest import Preference
from moert.pack.model_spec import ModelSpec
from tests import random_packs, tiny_packs
from tests.random_hash import add_hash
from tests.random_predictor import add_predictor

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so.6")
"""What the library needs to be there before anything else."""
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip


class Failed(Exception):
    """The sanitizers reported something, or were not at work."""


def preloaded(compiler: str) -> str:
    """Raises Failed where the compiler has no such library to be loaded first."""
    found = []
    for name in LIBRARIES:
        path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        if not os.path.isabs(path.strip()):
            raise Failed(f"{compiler} has no {name}: give a gcc with its sanitizers, make CC=gcc test-sanitize-python")
        found.append(path.strip())
    return ":".join(found)


def packs(root: Path) -> None:
    """One for each model and each layout, so that every function of the library is called."""
    together = Neurons(512, bundled=False, together=True)
    for name, spec in tiny_packs.SPECS.items():
        _pack(root / f"tiny-{name}", spec)
    for name, spec in random_packs.SPECS.items():
        _pack(root / f"random-{name}", spec, name)
    for name, spec in random_packs.NEURON_SPECS.items():
        add_predictor(_pack(root / f"neurons-{name}", spec, neurons=together))
    for name in ("decoder", "switch"):
        add_hash(_pack(root / f"hash-{name}", tiny_packs.SPECS[name]))
    large = tiny_packs.DECODER_SHAPE.but(d_model=96, d_ff=300, num_experts=4, decoder=(True, True))  # overlaps reading
    _pack(root / "large", large.spec, "large", bits=(16,))
    layers = len(tiny_packs.DECODER.moe_layers())
    preference = Preference(0.5, 4, 1, (0.3,) * layers)
    _pack(root / "preferring", tiny_packs.DECODER, preferences=(preference,), files="layer")


def _pack(out: Path, spec: ModelSpec, name: str = "", **chosen: Any) -> Path:
    """`name`: of a pack without tokenizer and paths. Nothing ends a text."""
    endless = replace(spec, tokens=replace(spec.tokens, eos=()))
    paths = not name and "neurons" not in chosen
    return tiny_packs.write_pack(out, endless, paths, tokenizer=not name, seed=len(name), **chosen)


def run(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.sanitized_runs", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def main(arguments: list[str]) -> int:
    """A compiler, the library that it has made, and how many damaged packs are run."""
    compiler, library, damaged = arguments
    environment = {**os.environ, **OPTIONS, "LD_PRELOAD": preloaded(compiler)}
    with tempfile.TemporaryDirectory(prefix="sanitized-") as made:
        packs(Path(made))
        environment |= {"XDG_CACHE_HOME": made, "TMPDIR": made}
        broken = run([library, made, "broken"], environment)
        if broken.returncode == 0 or "AddressSanitizer" not in broken.stderr:
            raise Failed(f"a read past the end of a buffer is not noticed:\n{broken.stdout}{broken.stderr}")
        done = run([library, made, damaged], environment)
    if done.returncode:
        raise Failed(f"{done.stdout[-2000:]}{done.stderr[-8000:]}")
    print(done.stdout, end="")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except Failed as error:
        raise SystemExit(str(error)) from None
