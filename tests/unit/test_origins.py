"""Origins of web pages that a server lets in: each is one that a browser sends."""

from __future__ import annotations

import pytest

from moert.command.serving import check_origins
from moert.errors import RunError

SENT = ["*", "null", "https://example.org", "http://localhost:3000", "http://[::1]:8000", "chrome-extension://abcdef"]


def test_origins_of_browsers_are_taken() -> None:
    check_origins(SENT)


@pytest.mark.parametrize(
    "origin",
    ["https://example.org/", "example.org", "https://Example.org", "https://example.org:443", "http://a:80", "", "**",
     "https://*.example.org", "http://a:b", "http://a?b"],
)  # fmt: skip
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(RunError, match="is no origin: give one as browsers send it"):
        check_origins([SENT[2], origin])
