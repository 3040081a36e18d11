"""The server's page in a real browser: it fills itself, holds a conversation and shows figures of the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
from serving import serving
from starlette.responses import HTMLResponse

from moert.engine.engine import Engine
from moert.serve import server as module

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ACTS = """<script>
setTimeout(() => {
  at("temperature").value = 0; at("max_tokens").value = 12;
  at("text").value = "hello"; at("form").requestSubmit();
}, 1500);
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on this machine")
def test_a_conversation_is_held(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = files("moert.serve").joinpath("page.html").read_text(encoding="utf-8")

    async def acting(request: object) -> HTMLResponse:
        return HTMLResponse(text.replace("</html>", f"{ACTS}</html>"))

    monkeypatch.setattr(module, "_page", acting)
    with serving(pack) as running:
        command = [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr",
            "--virtual-time-budget=6000", "--dump-dom", running.url,
        ]  # fmt: skip
        environment = {**os.environ, "HOME": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment, check=True)
    with Engine.open(pack) as engine:
        said = engine.chat([{"role": "user", "content": "hello"}], max_new_tokens=12).text
    assert '<option value="tiny">tiny</option>' in done.stdout
    assert '<div class="user">hello</div>' in done.stdout
    assert f"<div>{said}</div>" in done.stdout
    assert "Experts in memory when needed" in done.stdout
    assert '<div class="error">' not in done.stdout
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line and "favicon" not in line] == []
