"""The connection to a Ray cluster: one that is there already, or one that is started here."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from moeconv.errors import ConversionError

_ANSWER_S = 5.0
_STORE_BYTES = 128 << 20  # what passes through are token ids and scores


class ClusterError(ConversionError):
    """No cluster, no process on it, or a task that it can't do. The message is one line."""


def connected(address: str) -> tuple[Any, bool]:
    """Ray, and whether the connection is ours to close."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # its news of lost processes would go to our stdout
    try:
        import ray
    except ImportError:
        raise ClusterError("--cluster needs Ray: install the extra cluster (pip install 'moert[cluster]')") from None
    if ray.is_initialized():
        return ray, False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    there = _running() if address == "auto" else address
    if there is not None and not _answers(there):  # Ray itself would try for minutes
        raise ClusterError(f"--cluster {address}: nothing answers at {there}: is the cluster up, and the port right?")
    try:
        if there is None:
            ray.init(address="local", include_dashboard=False, object_store_memory=_STORE_BYTES, **quiet)
        else:
            ray.init(address=address, **quiet)  # "auto" as such: only then does Ray look for its token by itself
    except Exception as error:  # Ray has no common error for what can go wrong here
        ray.shutdown()
        raise ClusterError(
            f"--cluster {address}: can't connect ({last_line(error)}): its Ray and Python must be those of this "
            f"machine (Ray {ray.__version__}); host:port serves only its own nodes, others need ray://host:port; with "
            "token authentication set RAY_AUTH_MODE=token"
        ) from None
    return ray, True


def _running() -> str | None:
    """The address that the environment names; else the one that `ray start` left on this machine, if it answers."""
    if named := os.environ.get("RAY_ADDRESS"):
        return named
    with suppress(OSError):
        noted = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", "ray_current_cluster")
        address = noted.read_text().strip()
        if _answers(address):
            return address
    return None


def _answers(address: str) -> bool:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def last_line(error: BaseException | None) -> str:
    """The kind of an error and the last line that is not empty of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
