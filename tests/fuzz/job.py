"""What a process of the fuzzer is told, and the bounds that it gives itself."""

from __future__ import annotations

import argparse
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.target import Target

_DATA_BYTES = 3 << 30  # of the whole process


@dataclass(frozen=True)
class Job:
    """One target. `runs` inputs, or as many as `seconds` are enough for; `folder` gets the inputs that it begins with,
    those that were worth keeping, and what was found."""

    name: str
    runs: int
    seconds: int
    seed: int
    folder: Path

    @property
    def seeds(self) -> Path:
        return self.folder / "seeds"

    @property
    def kept(self) -> Path:
        return self.folder / "kept"

    @property
    def findings(self) -> Path:
        return self.folder / "findings"

    @classmethod
    def told(cls) -> Job:
        """By the command line."""
        parser = argparse.ArgumentParser()
        parser.add_argument("name")
        for name in ("runs", "seconds", "seed"):
            parser.add_argument(f"--{name}", type=int, required=True)
        parser.add_argument("--folder", type=Path, required=True)
        return cls(**vars(parser.parse_args()))

    def command(self, module: str) -> list[str]:
        """That runs it."""
        numbers = [f"--{name}={getattr(self, name)}" for name in ("runs", "seconds", "seed")]
        return [sys.executable, "-m", module, self.name, *numbers, f"--folder={self.folder}"]

    def prepare(self, target: Target) -> list[bytes]:
        """Writes the seeds, bounds the process, and gives the seeds back. They are read once, so that what readers
        import late is there before the first input is timed."""
        for folder in (self.seeds, self.kept, self.findings):
            folder.mkdir(parents=True, exist_ok=True)
        seeds = target.seeds()
        for number, seed in enumerate(seeds):
            (self.seeds / str(number)).write_bytes(seed)
        resource.setrlimit(resource.RLIMIT_DATA, (_DATA_BYTES, _DATA_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for seed in seeds:
            with suppress(*target.errors):
                target.read(seed)
        return seeds
