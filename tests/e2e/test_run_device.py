"""`moert run --device`: a simulated card writes what the processor writes, and figures say that it is simulated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import Moert

from moert.beside.gpu.torch_device import TorchDevice
from tests.fast_card import FAST
from tests.tiny_packs import DECODER, write_pack

PROMPT, NEW = "one small step", "8"


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("device") / "tiny.pack", DECODER)


@pytest.fixture
def moert(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Moert:
    return Moert(capsys, monkeypatch)


def test_a_simulated_card_writes_the_same(moert: Moert, pack: Path) -> None:
    options = "--max-new-tokens", NEW, "--json", "--tune", "threads=1"
    assert moert("run", pack, PROMPT, *options) == 0
    plain = json.loads(moert.out)
    card = (
        "--device",
        "sim:t4",
        "--tune",
        "gpu-memory=200kB",
        "--tune",
        "device-keep=lru",
        "--tune",
        "device-experts=copied",
    )
    assert moert("run", pack, PROMPT, *options, *card) == 0
    found = json.loads(moert.out)
    assert (found["output"], found["tokens"]) == (plain["output"], plain["tokens"])
    assert plain["stats"]["device"] is None
    use = found["stats"]["device"]
    assert use["title"] == "T4, simulated"
    assert 0 < use["used_bytes"] <= use["capacity_bytes"] == 200_000
    assert use["counters"]["copied"] > 0


def test_a_device_of_torch_writes_the_same(moert: Moert, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the experts lies there too, and on this processor its memory is counted as on a card."""
    monkeypatch.setattr(TorchDevice, "costs", lambda device: FAST)
    options = "--max-new-tokens", NEW, "--json", "--tune", "threads=1", "--tune", "kernels=reference"
    assert moert("run", pack, PROMPT, *options) == 0
    plain = json.loads(moert.out)
    assert moert("run", pack, PROMPT, *options, "--device", "torch:cpu", "--tune", "gpu-memory=300kB") == 0
    found = json.loads(moert.out)
    assert (found["output"], found["tokens"]) == (plain["output"], plain["tokens"])
    use = found["stats"]["device"]
    assert use["title"] == "this processor, by torch"
    assert 0 < use["used_bytes"] <= use["capacity_bytes"] == 300_000


def test_a_card_that_is_not_there_is_one_line(moert: Moert, pack: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("it is there")
    assert moert("run", pack, PROMPT, "--device", "cuda:0") == 2
    assert moert.err.splitlines() == [moert.err.strip()]
    assert "--device cuda:0 is not there: this torch is built without CUDA" in moert.err or "no GPU" in moert.err


def test_without_a_device_torch_is_not_loaded(pack: Path) -> None:
    script = (
        "import sys\nfrom moert.engine.engine import Engine\n"
        f"with Engine.open({str(pack)!r}, threads=1) as engine:\n    engine.generate('a b', max_new_tokens=2)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_figures_say_that_they_are_simulated(moert: Moert, pack: Path) -> None:
    assert moert("run", pack, PROMPT, "--max-new-tokens", NEW, "--device", "sim:rtx3060", "--stats") == 0
    assert "device           RTX 3060, simulated" in moert.err
    assert "copies" in moert.err


def test_a_bench_says_what_a_card_would_give(moert: Moert, pack: Path) -> None:
    def summary() -> dict[str, object]:
        assert moert("bench", pack, "--device", "sim:a100", "--max-new-tokens", "4", "--tune", "threads=1") == 0
        assert "device           A100 40GB, simulated" in moert.out
        found: dict[str, object] = json.loads(moert.out.splitlines()[-1])
        return found

    first, second = summary(), summary()
    for name in ("tokens_per_s", "prompt_tokens_per_s", "device", "tokens_sha256"):
        assert first[name] == second[name]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "gpu"], "--device 'gpu' is none of"),
        (["--tune", "gpu-memory=1GB"], "--tune gpu-memory has no effect without a --device"),
        (["--tune", "device-keep=lru"], "--tune device-keep has no effect without a --device"),
        (["--device", "sim:t4", "--tune", "gpu-memory=1kB"], "--tune gpu-memory of 1.00 kB leaves"),
    ],
)
def test_refusals(moert: Moert, pack: Path, options: list[str], said: str) -> None:
    assert said in moert.refuses("run", pack, PROMPT, *options)
