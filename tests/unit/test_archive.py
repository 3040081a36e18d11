"""States of conversations in files: the same bits after a restart, damaged and foreign files, bounds."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from random_hash import add_hash
from tiny_packs import SPECS, write_pack

from moert.engine import archive
from moert.engine.archive import Folder
from moert.engine.engine import Engine
from moert.engine.prefixes import Prefixes
from moert.engine.session import Answer, Continued
from moert.pack.manifest import Preference
from moert.pack.model_spec import ModelSpec

KINDS = [name for name, spec in sorted(SPECS.items()) if spec.continues]
NEW = 6
ASKED: Any = {"max_new_tokens": NEW, "ignore_eos": True, "logprobs": 3}
BEGIN = [3 + at % 11 for at in range(150)]
MOST = 1 << 24


def prefers(spec: ModelSpec) -> tuple[Preference, ...]:
    layers = sum(at.stack == "decoder" for at in spec.moe_layers())
    return (Preference(0.3, spec.moe.router.top_k + 1, 0, (0.2,) * layers),)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("archive")
    return {name: add_hash(write_pack(root / f"{name}.pack", SPECS[name], False, preferences=prefers(SPECS[name])))
            for name in KINDS}  # fmt: skip


@contextmanager
def kept(pack: Path, folder: Path, most: int = MOST, **settings: Any) -> Iterator[tuple[Engine, Prefixes, list[str]]]:
    """An engine with its prefix cache in a folder, and the notes about it."""
    notes: list[str] = []
    chosen = {"predict": "none", "threads": 1, "routing": "exact", **settings}
    with Engine.open(pack, notify=notes.append, **chosen) as engine:
        yield engine, engine.prefixes(Folder(folder, most)), notes


def ask(engine: Engine, ids: list[int], prefixes: Prefixes) -> Answer:
    with engine.session() as session:
        request = session.add(Continued(ids, engine.text.detokenizer(), prefixes), **ASKED)
        for _ in session:
            pass
    return request.answer


def alone(engine: Engine, ids: list[int]) -> list[int]:
    return engine.generate(ids, **ASKED).tokens


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.prefix"))


def written(pack: Path, folder: Path, *more: list[int]) -> list[int]:
    """The next turn of a conversation whose first one is in the folder."""
    with kept(pack, folder) as (engine, prefixes, _):
        first = ask(engine, BEGIN, prefixes)
        for ids in more:
            ask(engine, ids, prefixes)
    return [*BEGIN, *first.tokens, 5, 6, 7]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *product(KINDS, ({}, {"kv": 8}, {"kernels": "reference"}, {"routing": "30%"})),
        ("decoder", {"routing": "hash", "predict": "hash"}),
        ("decoder", {"device": "torch:cpu", "kernels": "reference"}),
    ],
    ids=str,
)
def test_a_restart_changes_no_token_and_reads_only_new_ones(
    name: str, settings: dict[str, Any], packs: dict[str, Path], tmp_path: Path
) -> None:
    with kept(packs[name], tmp_path, **settings) as (engine, prefixes, _):
        first = ask(engine, BEGIN, prefixes)
        assert not files(tmp_path), "it is in memory"
    ids = [*BEGIN, *first.tokens, 5, 6, 7]
    with kept(packs[name], tmp_path, **settings) as (engine, prefixes, notes):
        found = ask(engine, ids, prefixes)
        assert found.tokens == alone(engine, ids)
        if "kernels" not in settings:  # bit for bit
            wanted = [step.chosen.logprob for step in engine.generate(ids, **ASKED).logprobs or []]
            assert [step.chosen.logprob for step in found.logprobs or []] == wanted
        exact = settings.get("routing") != "30%"  # tokens behind a prompt are routed by those before
        assert found.kept_tokens == len(BEGIN) + (NEW - 1 if exact else 0)
        other = [*BEGIN, 9, 9]  # goes back to the end of the prompt
        again = ask(engine, other, prefixes)
        assert again.tokens == alone(engine, other)
        assert again.kept_tokens == len(BEGIN)
    assert not [note for note in notes if "aside" in note]


def test_nobody_else_may_read_them(packs: dict[str, Path], tmp_path: Path) -> None:
    written(packs["decoder"], tmp_path)
    assert [stat.S_IMODE(path.stat().st_mode) for path in files(tmp_path)] == [0o600]


def test_a_state_that_leaves_memory_comes_back(packs: dict[str, Path], tmp_path: Path) -> None:
    with kept(packs["decoder"], tmp_path) as (engine, prefixes, _):
        first = ask(engine, BEGIN, prefixes)
        while prefixes.drop():
            pass
        assert (len(files(tmp_path)), prefixes.held_bytes) == (1, 0)
        ids = [*BEGIN, *first.tokens, 4]
        found = ask(engine, ids, prefixes)
        assert found.kept_tokens == len(BEGIN) + NEW - 1
        assert found.tokens == alone(engine, ids)
    (last,) = files(tmp_path)
    assert last.stat().st_size > 0, "the longer one took the place of the shorter one"


@pytest.mark.parametrize("settings", [{"kv": 8}, {"kernels": "reference"}], ids=str)
def test_other_settings_find_nothing(settings: dict[str, Any], packs: dict[str, Path], tmp_path: Path) -> None:
    ids = written(packs["decoder"], tmp_path)
    with kept(packs["decoder"], tmp_path, **settings) as (engine, prefixes, notes):
        assert ask(engine, ids, prefixes).kept_tokens == 0
        assert notes == []
    with kept(packs["decoder"], tmp_path, predict="gate", cache="60%") as (engine, prefixes, _):
        assert ask(engine, ids, prefixes).kept_tokens > 0, "policies change no state"


def test_another_pack_finds_nothing(packs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    ids = written(packs["decoder"], tmp_path / "kept")
    other = write_pack(tmp_path / "other.pack", SPECS["decoder"], paths=False, seed=1)
    with kept(other, tmp_path / "kept") as (engine, prefixes, _):
        assert ask(engine, ids, prefixes).kept_tokens == 0


def flipped(place: int) -> Any:
    def change(body: bytearray) -> bytearray:
        body[place] ^= 1
        return body

    return change


def other_digest(body: bytearray) -> bytearray:
    body[20:21] = b"0" if body[20:21] != b"0" else b"1"
    return body


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body[: len(body) // 2], "cut short"), (lambda body: body[:-1], "cut short"),
        (lambda body: bytearray(), "no file of kept tokens"), (lambda body: body + b"x", "cut short"),
        (lambda body: bytearray(b"%PDF" * 99), "no file of kept tokens"), (other_digest, "of another pack"),
        (lambda body: body.replace(b"moert-prefix 1 ", b"moert-prefix 0 ", 1), "format 0, this program reads 1"),
        (flipped(-1), "damaged"), (flipped(-40), "damaged"), (flipped(200), "damaged"), (flipped(2000), "damaged"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["decoder", "mixers"])
def test_a_file_that_cannot_be_used_is_one_line(
    name: str, change: Any, words: str, packs: dict[str, Path], tmp_path: Path
) -> None:
    ids = written(packs[name], tmp_path)
    for path in files(tmp_path):
        path.write_bytes(change(bytearray(path.read_bytes())))
    count = len(files(tmp_path))
    with kept(packs[name], tmp_path) as (engine, prefixes, notes):
        for _ in range(2):
            assert ask(engine, ids, prefixes).tokens == alone(engine, ids)
        assert len(notes) == count
        assert all("is left aside" in note and words in note for note in notes)
    with kept(packs[name], tmp_path) as (engine, prefixes, _):
        assert ask(engine, [*ids, 3], prefixes).kept_tokens >= len(ids), "it was written anew"


def test_a_file_that_has_gone_is_not_missed(packs: dict[str, Path], tmp_path: Path) -> None:
    ids = written(packs["decoder"], tmp_path)
    with kept(packs["decoder"], tmp_path) as (engine, prefixes, notes):
        for path in files(tmp_path):
            path.unlink()
        assert ask(engine, ids, prefixes).tokens == alone(engine, ids)
        assert notes == []


def test_the_folder_is_bounded_and_the_one_used_longest_ago_leaves(packs: dict[str, Path], tmp_path: Path) -> None:
    written(packs["decoder"], tmp_path)
    (first,) = files(tmp_path)
    most = 2 * first.stat().st_size + first.stat().st_size // 2
    (tmp_path / "notes.prefix").write_bytes(b"mine" * 99999)
    left = tmp_path / f"{first.name}.0123abcd.tmp"
    left.write_bytes(b"left by a program that was killed")
    os.utime(left, (1, 1))
    others = [[at, *BEGIN[1:]] for at in (4, 5)]
    with kept(packs["decoder"], tmp_path, most) as (engine, prefixes, _):
        ask(engine, others[0], prefixes)
        ask(engine, [*BEGIN, 3], prefixes)
        ask(engine, others[1], prefixes)
    assert (tmp_path / "notes.prefix").exists(), "files of others are left alone"
    assert not left.exists()
    assert len(files(tmp_path)) == 3
    with kept(packs["decoder"], tmp_path, most) as (engine, prefixes, _):
        kept_tokens = [ask(engine, [*ids, 8], prefixes).kept_tokens for ids in (BEGIN, others[1], others[0])]
    assert kept_tokens[:2] == [len(BEGIN)] * 2
    assert kept_tokens[2] == 0


def test_a_conversation_that_is_too_large_is_one_line(packs: dict[str, Path], tmp_path: Path) -> None:
    with kept(packs["decoder"], tmp_path, 1000) as (engine, prefixes, notes):
        for ids in (BEGIN, BEGIN[1:], BEGIN[2:]):
            ask(engine, ids, prefixes)
    assert len(notes) == 1
    assert "more than the 1000 bytes of" in notes[0]
    assert not files(tmp_path)


def test_on_a_full_disk_all_goes_on(packs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def full(path: Path, durable: bool = True) -> Iterator[Path]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield path

    monkeypatch.setattr(archive, "atomic_write", full)
    with kept(packs["decoder"], tmp_path) as (engine, prefixes, notes):
        for ids in (BEGIN, BEGIN[1:]):
            assert ask(engine, ids, prefixes).tokens == alone(engine, ids)
            prefixes.drop()
    assert len(notes) == 1
    assert "No space left on device" in notes[0]


def test_a_long_conversation_is_not_loaded_for_a_short_beginning(packs: dict[str, Path], tmp_path: Path) -> None:
    written(packs["decoder"], tmp_path)
    for few, found in ((len(BEGIN) // 20, 0), (len(BEGIN) // 10, len(BEGIN) // 10)):
        with kept(packs["decoder"], tmp_path) as (engine, prefixes, _):
            assert ask(engine, [*BEGIN[:few], 2, 2], prefixes).kept_tokens == found


def test_under_a_limit_room_is_made_before_a_state_is_loaded(
    packs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = written(packs["decoder"], tmp_path)
    with Engine.open(packs["decoder"], predict="none", threads=1) as engine:
        least = engine.smallest_memory(300, 64)
    with kept(packs["decoder"], tmp_path, memory=least + (8 << 20)) as (engine, prefixes, _):
        asked: list[str] = []
        aside = engine._admission.aside

        def heard(nbytes: int, purpose: str) -> None:
            asked.append(purpose)
            aside(nbytes, purpose)

        monkeypatch.setattr(engine._admission, "aside", heard)
        found = ask(engine, ids, prefixes)
        assert found.kept_tokens == len(BEGIN) + NEW - 1
        assert found.tokens == alone(engine, ids)
        assert asked == ["load a conversation that was kept"]
