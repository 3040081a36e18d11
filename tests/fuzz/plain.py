"""One target by hypothesis, where there is no atheris: seeds changed at random, without a look at what they reach."""

from __future__ import annotations

import faulthandler
import sys
import time
from hashlib import sha256
from random import Random

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from tests.fuzz.job import Job
from tests.fuzz.mutate import mutated
from tests.fuzz.registry import load
from tests.fuzz.target import Finding, Judge, Target


def fuzz(job: Job, target: Target) -> int:
    """How many inputs were tried. Raises Finding, once its input is written; a hang ends the process, with its input
    written too."""
    seeds, judge, ends = job.prepare(target), Judge(target), time.monotonic() + job.seconds
    last = job.findings / "last"

    @seeded(job.seed)
    @settings(
        max_examples=job.runs, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.sampled_from(seeds), st.integers(0, 1 << 62))
    def every(body: bytes, number: int) -> None:
        if time.monotonic() > ends:
            return
        changed = mutated(body, Random(number), seeds, target.longest)
        last.write_bytes(changed)
        faulthandler.dump_traceback_later(4 * target.seconds, exit=True)
        try:
            judge(changed)
        except Finding:
            last.replace(job.findings / f"crash-{sha256(changed).hexdigest()}")
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()

    every()
    last.unlink(missing_ok=True)
    return judge.tried


def main() -> int:
    job, began = Job.told(), time.monotonic()
    try:
        tried = fuzz(job, load(job.name))
    except Finding as error:
        print(f"{Finding.__module__}.{Finding.__qualname__}: {error}", file=sys.stderr)
        return 1
    print(f"stat::number_of_executed_units: {tried}", file=sys.stderr)
    print(f"stat::average_exec_per_sec: {tried / (time.monotonic() - began):.0f}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
