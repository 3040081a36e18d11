"""`make check-gpu` where there is no GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from recipes.bench import card


def test_without_a_gpu_it_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["card"])
    assert card.main() == 0
    assert capsys.readouterr().out == "make check-gpu: there is no GPU with CUDA here, so nothing is checked\n"
