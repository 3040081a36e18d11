"""Every bench is run on very little: which they are, and what counts as a fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.bench import smoke

ROOT = Path(__file__).resolve().parents[2]


def test_every_bench_of_the_makefile_is_run() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {line.partition(":")[0] for line in makefile.splitlines() if line.startswith("bench-") and "##" in line}
    assert set(smoke.benches(makefile)) == targets - {"bench-smoke"}
    assert len(targets) > 15


def test_a_bench_without_its_peers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "LLAMA_FOLDER", tmp_path / "llama")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert smoke.unbuilt(makefile, "bench-quant") == [".built"]
    assert smoke.unbuilt(makefile, "bench-kernels") == ["kernels/.built"]
    assert smoke.unbuilt(makefile, "bench-peers") == smoke.unbuilt(makefile, "bench-sweep") == []
    (tmp_path / ".built").touch()
    assert smoke.unbuilt(makefile, "bench-quant") == []


def test_a_recipe_becomes_smaller_and_expects_nothing() -> None:
    said = smoke.smaller((ROOT / "recipes/wiki.toml").read_text(encoding="utf-8"))
    assert "samples = 8\nsweep_samples = 2\nheldout_samples = 8\n" in said
    assert "expect" not in said
    assert 'model = "models/wiki"' in said


@pytest.mark.parametrize(
    ("failed", "code", "without_library", "wrong"),
    [
        ([], 0, False, []),
        (["llama, ssd"], 1, True, []),
        (["llama, ssd"], 1, False, ["llama, ssd", "exit status 1: said"]),
        (["g2p, ssd"], 1, True, ["g2p, ssd"]),
    ],
)
def test_only_what_lacks_llamas_library_may_fail(
    failed: list[str], code: int, without_library: bool, wrong: list[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def ran(module: str) -> subprocess.CompletedProcess[str]:
        out = tmp_path / "build/bench/some.json"
        out.parent.mkdir(parents=True)
        out.write_text(json.dumps({"context": {"settings": {"failed": failed}}, "rows": []}))
        return subprocess.CompletedProcess([], code, "", "said")

    monkeypatch.setattr(smoke, "FOLDER", tmp_path)
    monkeypatch.setattr(smoke, "ran", ran)
    assert smoke.faults("some", without_library) == wrong


def test_a_bench_without_a_result_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "FOLDER", tmp_path)
    monkeypatch.setattr(smoke, "ran", lambda module: subprocess.CompletedProcess([], 2, "", "no safetensors"))
    assert smoke.faults("some", False) == ["exit status 2, no result: no safetensors"]


def test_sizes_are_small_where_it_is_asked_for_and_the_flag_is_taken() -> None:
    program = "import sys; from recipes.bench.sized import sized; print(sized(5, 1), sys.argv[1:])"
    for flags, said in (([], "5 []"), (["--smoke"], "1 []")):
        done = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True, cwd=ROOT)
        assert done.stdout.strip() == said
