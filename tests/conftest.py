"""Settings for all tests: no network, one thread, the same random examples in each run, another order in each."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # threads for the few small tensors of each model take longer than they do
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin stand still where others want the cores too

import numpy as np
import pytest
import torch
from command_line import Moert
from hypothesis import settings
from longest import LONGEST
from random_packs import write_pack

from moert.command import description
from moert.experts import store

torch.set_num_threads(1)
for path in Path(np.__file__).parents[1].glob("numpy.libs/libscipy_openblas*"):  # whose threads spin while they wait
    if set_num_threads := getattr(ctypes.CDLL(str(path)), "scipy_openblas_set_num_threads64_", None):
        set_num_threads(1)
store._PAUSES_S = (0.0, 0.0, 0.0)  # what a test damages does not mend itself
description.MOST_BYTES = 8 << 20  # to multiply 256 MiB of each width takes seconds; a slow test does
SLOW_S = 1800.0  # that a slow test may take; for all others pyproject.toml says it
MEMORY, ROOM_BYTES = Path("/dev/shm"), 4 << 30
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGPIPE") if hasattr(signal, name)]
_CACHE = tempfile.TemporaryDirectory(prefix="moert-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name  # drives are remembered there
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # where the tests run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Puts the many small files of tests into memory: to sync and delete them takes a drive minutes."""
    if config.option.markexpr and _takes_direct_reads(MEMORY):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    config.option.loadscopereorder = False  # they are in order
    config.option.randomly_reset_seed = False  # the order is random; numbers are as below


def _takes_direct_reads(folder: Path) -> bool:
    """Returns whether `folder` can be written to, has room and can be read past the page cache, which older systems
    refuse in memory."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
        return shutil.disk_usage(folder).free >= ROOM_BYTES
    except (OSError, AttributeError):
        return False


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Says which order the tests run in: pytest -q keeps that to itself."""
    seed, plugins = session.config.getoption("randomly_seed", None), session.config.pluginmanager
    if seed is not None and (terminal := plugins.get_plugin("terminalreporter")) is not None:
        terminal.write_line(f"random order: again with pytest --randomly-seed={seed}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Looks for no garbage while tests are collected, and leaves modules and tests out of every later search."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives slow tests the time that they may take, and where several processes take files in turn, begins with the
    longest, then those of most tests."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))
    if hasattr(config, "workerinput"):
        ranks = {f"test_{name}": rank for rank, name in enumerate(LONGEST)}
        counts = Counter(item.path for item in items)
        items.sort(key=lambda item: (ranks.get(item.path.stem, len(ranks)), -counts[item.path]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Gives each test the same random numbers in each run, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """Undoes for the next test the settings that a command makes for its whole process: torch's threads, and handlers
    of signals (a broken pipe ends a command, and would end all tests)."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    torch.set_num_threads(1)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def on_a_drive() -> Iterator[Path]:
    """An empty directory on a drive, also where other tests' files lie in memory."""
    with tempfile.TemporaryDirectory(prefix="moert-drive-") as folder:
        yield Path(folder)


@pytest.fixture
def moert(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Moert:
    return Moert(capsys, monkeypatch)


@pytest.fixture
def pack_dir(tmp_path: Path) -> Path:
    """A small pack on disk: a decoder with gated experts of mixed widths."""
    out = tmp_path / "model.pack"
    write_pack(out)
    return out
