"""moeconv's command line beside a Ray cluster of its own with so many workers, all on as many cores.

`python -m recipes.bench.workers_run 2 quantize DIR --tune cluster=auto …`
"""

from __future__ import annotations

import logging
import os
import sys

from moeconv.command import cli
from recipes.bench.program import as_program


def main() -> None:
    count = int(sys.argv.pop(1))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])  # what it starts inherits that
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(
        address="local", num_cpus=count, include_dashboard=False, object_store_memory=128 << 20, log_to_driver=False,
        logging_level=logging.CRITICAL,
    )  # fmt: skip
    cli.main()


if __name__ == "__main__":
    as_program(main, __doc__, "COUNT ARGUMENTS...")
