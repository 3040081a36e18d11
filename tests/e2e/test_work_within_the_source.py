"""A work directory in the source's own folder: the conversion resumes from it, and the source stays the same source."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from converting import command, environment, running_text
from tiny import tiny_olmoe

from moeconv.source.checkpoint import Checkpoint


def digests(root: Path, names: list[str]) -> dict[str, str]:
    return {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in names}


@pytest.mark.slow
def test_work_files_are_no_part_of_the_source(tmp_path: Path) -> None:
    """As MODEL/work, and as MODEL itself, with the pack there too."""
    model, calib = tiny_olmoe(tmp_path / "model"), running_text(tmp_path / "text.jsonl")
    source = sorted(path.name for path in model.iterdir())
    before, known = digests(model, source), Checkpoint.open(model).sha256
    for work, out in ((model / "work", tmp_path / "beside.pack"), (model, model / "within.pack")):
        asked = command(model, calib, out, work, "--loss", "20%", "--json")
        first, again = (
            subprocess.run([*asked, *more], capture_output=True, text=True, check=False, env=environment())
            for more in ((), ("--overwrite",))
        )
        assert (first.returncode, again.returncode) in ((0, 0), (3, 3)), first.stderr + again.stderr
        assert json.loads(again.stdout)["evaluations"] == json.loads(first.stdout)["evaluations"]
        assert ", 0 measurements in its journal" in first.stderr
        assert ", 0 measurements in its journal" not in again.stderr
        assert Checkpoint.open(model).sha256 == known
        assert digests(model, source) == before
