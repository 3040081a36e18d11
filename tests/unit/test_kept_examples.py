"""Examples that a training finds again: taken as they were, made anew where they are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moeconv.errors import ConversionError
from moeconv.foresight.examples import filled, load_checkpoint, save_checkpoint

WHOLE = b"0123456789"


def filling(folder: Path, about: str = "a") -> tuple[dict[str, Any], bool]:
    """What was found, and whether it was made for that."""
    made = []

    def fill() -> dict[str, Any]:
        made.append(True)
        (folder / "x").write_bytes(WHOLE)
        (folder / "y").write_bytes(b"")
        return {"lengths": {"decoder": 5}}

    return filled(folder, about, fill), bool(made)


def test_they_are_taken_again_if_they_are_about_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "to-learn"
    first = filling(folder)
    assert first[1]
    assert first[0]["lengths"] == {"decoder": 5}
    assert filling(folder) == (first[0], False)
    assert filling(folder, "b")[1]
    assert not filling(folder, "b")[1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "x").write_bytes(WHOLE[:-1]),
        lambda folder: (folder / "x").write_bytes(b""),
        lambda folder: (folder / "x").write_bytes(b"1" + WHOLE[1:]),
        lambda folder: (folder / "z").write_bytes(b""),
        lambda folder: (folder / "examples.json").write_text(
            (folder / "examples.json").read_text().replace('"decoder": 5', '"decoder": 4')
        ),
        lambda folder: (folder / "y").unlink(),
        lambda folder: (folder / "examples.json").unlink(),
        *(lambda folder, text=text: (folder / "examples.json").write_text(text) for text in ("", "[]", "{}", "{", "3")),
    ],
)
def test_damaged_ones_are_made_anew(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    whole = filling(tmp_path / "to-learn")
    damage(tmp_path / "to-learn")
    assert filling(tmp_path / "to-learn") == whole
    assert (tmp_path / "to-learn" / "x").read_bytes() == WHOLE


def test_a_checkpoint_that_was_changed_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    state = {"weights": torch.arange(1000.0)}
    save_checkpoint(path, "a", state)
    found = load_checkpoint(path, "a")
    assert found is not None
    assert torch.equal(found["weights"], state["weights"])
    assert load_checkpoint(path, "b") is None
    whole = path.read_bytes()
    for at in range(0, len(whole), len(whole) // 50):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ConversionError, match=r"it was changed since it was made\): delete it, and training") as e:
            load_checkpoint(path, "a")
        assert "\n" not in str(e.value)


def test_a_folder_that_can_not_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConversionError, match=r"can't use .*to-learn: .*; free it or give another --work"):
        filling(tmp_path / "file" / "to-learn")
