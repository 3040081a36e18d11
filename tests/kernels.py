"""The kernels that tests run on: the reference, and the native ones where they were built."""

from __future__ import annotations

import pytest

from moert.kernels import library

NATIVE = library.load() is not None
needs_native = pytest.mark.skipif(not NATIVE, reason=f"no native kernels: {library.missing()}")
KERNELS = ["reference", pytest.param("auto", marks=needs_native)]
