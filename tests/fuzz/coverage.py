"""One target under atheris, in a process of its own: inputs that reach new code are kept and changed further."""

from __future__ import annotations

import sys
from random import Random

import atheris

from tests.fuzz.job import Job
from tests.fuzz.mutate import mutated
from tests.fuzz.registry import load
from tests.fuzz.target import Judge


def main() -> None:
    job = Job.told()
    with atheris.instrument_imports(include=["moert", "moeconv"]):
        target = load(job.name)
        seeds = job.prepare(target)

    def change(body: bytes, longest: int, seed: int) -> bytes:
        """By our own means, or the library's in a quarter of the cases."""
        return atheris.Mutate(body, longest) if seed % 4 == 0 else mutated(body, Random(seed), seeds, longest)

    options = {
        "runs": job.runs, "max_total_time": job.seconds, "seed": job.seed, "max_len": target.longest,
        "timeout": int(4 * target.seconds), "rss_limit_mb": 0, "len_control": 0, "reduce_inputs": 1, "detect_leaks": 0,
        "print_final_stats": 1, "artifact_prefix": f"{job.findings}/",
    }  # fmt: skip
    flags = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup([sys.argv[0], *flags, str(job.kept), str(job.seeds)], Judge(target), custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
