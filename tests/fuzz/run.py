"""Readers of files from strangers on inputs that are changed at random. `make fuzz-few` and `make fuzz` run it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.job import Job
from tests.fuzz.registry import TARGETS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "fuzz"
MOST_KEPT_BYTES = 300_000  # of all targets together, a config.json of each family among them
_COVERAGE, _PLAIN = "tests.fuzz.coverage", "tests.fuzz.plain"
_ENDLESS = (1 << 31) - 1  # the most that libFuzzer takes
_FEW_S = 40  # where a machine is slow; inputs end a target before
_STARTS_S = 300
_SAID = re.compile(r"^(?:tests\.fuzz\.target\.)?Finding: (.*)$|^==\d+== ?ERROR: (libFuzzer: .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """`found`: what is wrong with the target, None where all is well."""

    name: str
    inputs: int
    a_second: float
    found: str | None

    def __str__(self) -> str:
        said = f"{self.name:12} {self.inputs:12,} inputs, {self.a_second:9,.0f} a second"
        return said if self.found is None else f"{said}: FOUND {self.found}"


def outcome(job: Job, module: str) -> Outcome:
    """Runs a target in a process of its own, whose words go to a file beside its findings."""
    shutil.rmtree(job.findings, ignore_errors=True)
    job.folder.mkdir(parents=True, exist_ok=True)
    log, began = job.folder / "log", time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, log.open("wb") as out:
        environment = {**os.environ, "TMPDIR": folder, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            job.command(module), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
        )
        try:
            status: int | None = process.wait(job.seconds + _STARTS_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            process.kill()
            process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    numbers = [re.search(rf"^stat::{name}: +(\d+)", text, re.MULTILINE) for name in
               ("number_of_executed_units", "average_exec_per_sec")]  # fmt: skip
    inputs, a_second = (float(number[1]) if number else 0.0 for number in numbers)
    if status == 0 and inputs:
        return Outcome(job.name, int(inputs), a_second, None)
    said = [one or other for one, other in _SAID.findall(text)]
    why = said[0] if said else "it did not end" if status is None else f"it ended with {status}"
    inputs_at = sorted(map(str, job.findings.glob("*"))) or [str(log)]
    return Outcome(job.name, int(inputs), time.monotonic() - began, f"{why}: see {inputs_at[0]} and {log}")


def trim(folders: Sequence[Path], most_bytes: int) -> None:
    """What was kept of all targets, down to so many bytes: of each the smallest inputs stay."""
    for folder in folders:
        left = most_bytes // len(folders)
        for path in sorted(folder.glob("*"), key=lambda path: (path.stat().st_size, path.name)):
            left -= path.stat().st_size
            if left < 0:
                path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help="by default all")
    parser.add_argument("--seconds", type=int, help="of all together; without it each target gets the same few inputs")
    parser.add_argument("--seed", type=int, help="by default another one each time, but for the few")
    parser.add_argument("--plain", action="store_true", help="by hypothesis, even where there is atheris")
    asked = parser.parse_args()
    names = asked.targets or list(TARGETS)
    if unknown := sorted({*names} - {*TARGETS}):
        parser.error(f"there is no target {unknown[0]!r}: {', '.join(TARGETS)}")
    guided = importlib.util.find_spec("atheris") is not None and not asked.plain
    cores = min(len(os.sched_getaffinity(0)), len(names))
    jobs = [_job(name, asked, asked.seconds and max(1, asked.seconds * cores // len(names))) for name in names]
    print(f"{len(names)} targets, {'guided by coverage' if guided else 'by hypothesis'}, seed {jobs[0].seed}")
    with ThreadPoolExecutor(cores) as pool:
        outcomes = []
        for found in pool.map(lambda job: outcome(job, _COVERAGE if guided else _PLAIN), jobs):
            print(found, flush=True)
            outcomes.append(found)
    trim([job.kept for job in jobs], MOST_KEPT_BYTES)
    print(f"{sum(each.inputs for each in outcomes):,} inputs in all")
    return int(any(each.found for each in outcomes))


def _job(name: str, asked: argparse.Namespace, seconds: int | None) -> Job:
    """`seconds`: None gives it few inputs, which do not go on from those that an earlier run has kept."""
    if seconds is None:
        shutil.rmtree(FOLDER / "few" / name, ignore_errors=True)
        return Job(name, TARGETS[name], _FEW_S, asked.seed or 1, FOLDER / "few" / name)
    return Job(name, _ENDLESS, seconds, asked.seed or int(time.time()), FOLDER / name)


if __name__ == "__main__":
    sys.exit(main())
