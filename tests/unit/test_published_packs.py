"""Packs written to a hub: the files of the manifest and a card, in one commit, over nothing that is not a pack."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import huggingface_hub
import pytest
from report_packs import full_pack
from tiny_packs import SPECS, write_pack

from moeconv.command import cli
from moeconv.errors import ConversionError
from moeconv.report.published import card, push
from moeconv.report.writer import read_report
from moert.pack.errors import HashMismatch
from moert.pack.reader import Pack


class Answer(NamedTuple):
    commit_url: str


class FakeApi:
    """A hub with one repository. `there`: its files; `error`: raised by a commit."""

    def __init__(self, there: set[str], error: Exception | None = None) -> None:
        self.there, self.error = there, error
        self.made: list[tuple[str, bool]] = []
        self.commits = 0

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> None:
        assert exist_ok
        self.made.append((name, private))

    def list_repo_files(self, name: str) -> list[str]:
        assert name == "me/pack"
        return sorted(self.there)

    def create_commit(self, name: str, operations: list[Any], commit_message: str) -> Answer:
        if self.error is not None:
            raise self.error
        assert commit_message
        for each in operations:
            if isinstance(each, huggingface_hub.CommitOperationDelete):
                self.there.remove(each.path_in_repo)
            else:
                self.there.add(each.path_in_repo)
                body = each.path_or_fileobj
                self.card = body.decode() if isinstance(body, bytes) else self.card if self.commits else ""
        self.commits += 1
        return Answer(f"https://hub/{name}/commit/1")


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    return Pack.open(write_pack(tmp_path / "model.pack", SPECS["decoder"]))


def with_api(monkeypatch: pytest.MonkeyPatch, *there: str, error: Exception | None = None) -> FakeApi:
    api = FakeApi({".gitattributes", *there}, error)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    return api


def quiet(_: str) -> None:
    pass


def test_a_pack_and_its_card(pack: Pack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    api = with_api(monkeypatch)
    (pack.root / "notes.txt").write_text("mine")
    assert cli._exit_code(["push", str(pack.root), "me/pack", "--private"]) == 0
    assert capsys.readouterr().out == "https://hub/me/pack/commit/1\n"
    assert api.made == [("me/pack", True)]
    assert api.there == {".gitattributes", "README.md", "manifest.json", *pack.sizes()}
    assert "moert run hf:me/pack" in api.card
    assert f"| experts | {len(pack.manifest.experts)}, " in api.card


def test_a_newer_pack_takes_the_place_of_one_only_if_asked(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    api = with_api(monkeypatch, "manifest.json", "README.md", "experts/old.bin")
    with pytest.raises(ConversionError, match="me/pack holds a pack: --overwrite replaces it"):
        push(pack, "me/pack", private=False, overwrite=False, say=quiet)
    assert api.commits == 0
    push(pack, "me/pack", private=False, overwrite=True, say=quiet)
    assert api.there == {".gitattributes", "README.md", "manifest.json", *pack.sizes()}


def test_a_repository_of_something_else_stays(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    api = with_api(monkeypatch, "model.safetensors")
    for overwrite in (False, True):
        with pytest.raises(ConversionError, match=r"holds 'model.safetensors' and no pack"):
            push(pack, "me/pack", private=False, overwrite=overwrite, say=quiet)
    assert api.commits == 0


class Unreachable(Exception):
    """An error as of a library below huggingface_hub, which is neither an OSError nor a ValueError."""


class Forbidden(OSError):
    response = SimpleNamespace(status_code=403)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (Unreachable("[Errno 111] Connection refused"), "run the same again later"),
        (Forbidden("403 Forbidden"), "is the token one that may write (HF_TOKEN)?"),
    ],
)
def test_a_hub_that_takes_nothing_is_one_line(
    error: Exception, advice: str, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_api(monkeypatch, error=error)
    with pytest.raises(ConversionError) as caught:
        push(pack, "me/pack", private=False, overwrite=False, say=quiet)
    assert str(caught.value) == f"me/pack can't be written ({error}): {advice}"


def test_refusals(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    with_api(monkeypatch, error=OSError("401 Client Error\nno"))
    with pytest.raises(ConversionError, match=r"can't be written \(401 Client Error no\)"):
        push(pack, "me/pack", private=False, overwrite=False, say=quiet)
    for name in ("pack", "../pack", "me/..", "a/b/c"):
        with pytest.raises(ConversionError, match="is no repository of a hub"):
            push(pack, name, private=False, overwrite=False, say=quiet)
    file = pack.file(pack.manifest.experts[0].path)
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(HashMismatch):
        push(pack, "me/pack", private=False, overwrite=False, say=quiet)


def test_a_card_says_losses_text_and_promise(tmp_path: Path) -> None:
    found = Pack.open(full_pack(tmp_path / "full.pack"))
    report = read_report(found)
    text = card(found, report, "me/full")
    assert text.startswith("---\nlibrary_name: moert\n")
    assert f"| aim | loss {report.target.value:g} |" in text
    assert report.calibration is not None
    assert f"calibration text | {report.calibration.loss:.2%} [" in text
    assert f"with {report.confidence:.0%} confidence" in text
