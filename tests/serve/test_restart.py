"""Conversations of a server go on after it was started again, with the same answers, and without reading their past."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_packs import ENDLESS, SPEC, write_chat_pack
from command_line import Moert
from serving import serving
from tiny_packs import MIXERS, with_ends

from moert.engine.archive import Folder
from moert.engine.engine import Engine

HELLO = [{"role": "user", "content": "hello, who are you and where do you come from?"}]
NEW = 12
CHAT = "/v1/chat/completions"


def turn(url: str, messages: list[Any]) -> tuple[str, int, int]:
    """The answer, how many tokens the prompt has, and how many of them were not read again."""
    body = {"messages": messages, "max_tokens": NEW}
    found = httpx.post(f"{url}{CHAT}", json=body, timeout=60).json()
    usage = found["usage"]
    kept: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["message"]["content"], usage["prompt_tokens"], kept


@pytest.mark.parametrize("name", ["decoder", "mixers"])
def test_a_conversation_goes_on_after_a_restart(name: str, tmp_path: Path) -> None:
    spec = ENDLESS if name == "decoder" else with_ends(MIXERS, ())
    pack, folder = write_chat_pack(tmp_path / "tiny.pack", spec), Folder(tmp_path / "kept", 1 << 30)
    folder.path.mkdir()
    with serving(pack, folder=folder) as running:
        said, read, kept = turn(running.url, HELLO)
        assert kept == 0
    talk = [*HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": "and then?"}]
    with serving(pack, folder=folder) as running:
        again = turn(running.url, talk)
        assert again[2] >= read, "all of the first prompt, at least"
    with serving(pack) as running:
        assert turn(running.url, talk) == (*again[:2], 0)
    with Engine.open(pack) as engine:
        assert engine.chat(talk, max_new_tokens=NEW).text == again[0]


def test_two_packs_share_a_folder(tmp_path: Path) -> None:
    packs = [write_chat_pack(tmp_path / f"{name}.pack", spec) for name, spec in (("a", ENDLESS), ("b", SPEC))]
    body = {"messages": HELLO, "max_tokens": NEW}
    kept = []
    for _ in range(2):
        with serving(*packs, folder=Folder(tmp_path, 1 << 30)) as running:
            for name in "ab":
                found = httpx.post(f"{running.url}{CHAT}", json={**body, "model": name}, timeout=60).json()["usage"]
                kept.append(found["prompt_tokens_details"]["cached_tokens"])
    again = found["prompt_tokens"] - 1
    assert kept == [0, 0, again, again]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cache-size", "1GB"], "--cache-size has no effect without --cache-dir: leave it out"),
        (["--cache-dir", "{file}"], "can't be written"),
        (["--cache-dir", "{new}", "--cache-size", "big"], "not a size"),
    ],
)
def test_a_folder_that_cannot_be_is_one_line(
    arguments: list[str], words: str, pack: Path, tmp_path: Path, moert: Moert
) -> None:
    (tmp_path / "file").write_text("")
    places = {"file": str(tmp_path / "file"), "new": str(tmp_path / "new")}
    assert words in moert.refuses("serve", pack, *(each.format(**places) for each in arguments))
