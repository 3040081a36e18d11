"""A process for commands that may neither hang nor eat the machine, one for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from limited import DATA_BYTES, Limited


@pytest.fixture(scope="module")
def limited(request: pytest.FixtureRequest) -> Iterator[Limited]:
    """Limited to the file's DATA_BYTES, if it has one."""
    found = Limited(getattr(request.module, "DATA_BYTES", DATA_BYTES))
    yield found
    found.close()
