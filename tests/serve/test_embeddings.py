"""Embeddings of the server are those of the engine, in every form that clients ask for."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest
from chat_packs import SPEC, write_chat_pack
from serving import Running, serving
from tiny_packs import SWITCH, write_pack

from moert.engine.engine import Engine
from moert.engine.scoring import Pooling
from moert.serve import openai as openai_interface

TEXTS = ["hello", "one small step for the quick brown fox", "hello"]
PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def wanted(pack: Path) -> dict[str, list[list[float]]]:
    with Engine.open(pack) as engine:
        return {way: [engine.embed(text, way).tolist() for text in TEXTS] for way in ("mean", "last")}


def vectors(found: httpx.Response) -> list[list[float]]:
    data = found.json()["data"]
    assert [each["index"] for each in data] == [*range(len(data))]
    return [each["embedding"] for each in data]


def test_they_are_the_engines_from_texts_and_from_ids(
    client: httpx.Client, pack: Path, wanted: dict[str, list[list[float]]]
) -> None:
    with Engine.open(pack) as engine:
        ids = [engine.encode(text) for text in TEXTS]
    assert wanted["mean"] != wanted["last"]
    found = client.post(PATH, json={"model": "tiny", "input": TEXTS})
    assert found.json()["usage"] == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}
    assert vectors(found) == vectors(client.post(PATH, json={"input": ids})) == wanted["mean"]
    assert vectors(client.post(PATH, json={"input": TEXTS, "pooling": "last"})) == wanted["last"]
    assert vectors(client.post(PATH, json={"input": TEXTS[1]})) == wanted["mean"][1:2]
    assert vectors(client.post(PATH, json={"input": ids[1], "dimensions": 24})) == wanted["mean"][1:2]
    (coded,) = vectors(client.post(PATH, json={"input": ids[1], "encoding_format": "base64"}))
    assert np.frombuffer(base64.b64decode(str(coded)), "<f4").tolist() == wanted["mean"][1]


def test_clients_get_them(server: Running, wanted: dict[str, list[list[float]]]) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    found = client.embeddings.create(model="tiny", input=TEXTS)  # in base64, which it asks for by itself
    assert [each.embedding for each in found.data] == wanted["mean"]
    plain = client.embeddings.create(model="tiny", input=TEXTS[1], encoding_format="float")
    assert plain.data[0].embedding == wanted["mean"][1]
    local = ollama.Client(host=server.url).embed("tiny", TEXTS)
    assert [list(each) for each in local.embeddings] == wanted["mean"]
    assert local.prompt_eval_count == found.usage.prompt_tokens
    assert not ollama.Client(host=server.url).embed("tiny", "").embeddings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dimensions": 5}, "dimensions is 5: embeddings of this model have 24"), ({"pooling": "cls"}, "pooling"),
        ({"encoding_format": "int8"}, "encoding_format"), ({"input": ""}, "the prompt has no tokens"),
        ({"input": []}, "input should be text"), ({"input": [[]]}, "input should be text"),
        ({"input": [True]}, "input should be text"), ({"input": [[3], "a", 5]}, "input should be text"),
        ({"input": [9999]}, "outside the model's vocabulary"), ({"input": ["a"] * 2049}, "at most 2048"),
        ({"input": None}, "input is missing"), ({"colour": 1}, "colour is not supported"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(changes: dict[str, Any], words: str, client: httpx.Client) -> None:
    found = client.post(PATH, json={"input": "hello", **changes})
    assert found.status_code == 400
    assert words in found.json()["error"]["message"]
    assert "\n" not in found.json()["error"]["message"]


def test_a_text_beyond_the_context_is_refused(tmp_path: Path) -> None:
    with serving(write_chat_pack(tmp_path / "short.pack", SPEC)) as running:
        assert httpx.post(f"{running.url}{PATH}", json={"input": [5] * 300}, timeout=60).status_code == 200
        for given in ([5] * 301, "a" * 301):
            found = httpx.post(f"{running.url}{PATH}", json={"input": given}, timeout=60)
            assert found.status_code == 400
            assert "300" in found.json()["error"]["message"]
        found = httpx.post(f"{running.url}/api/embed", json={"model": "short", "input": "a", "truncate": True})
        assert found.status_code == 400


def test_models_with_an_encoder_have_none(tmp_path: Path) -> None:
    with serving(write_pack(tmp_path / "reads.pack", SWITCH, paths=False)) as running:
        found = httpx.post(f"{running.url}{PATH}", json={"input": "hello"}, timeout=60)
        assert found.status_code == 400
        assert "reads with an encoder" in found.json()["error"]["message"]


def test_texts_share_passes_of_bounded_length(
    client: httpx.Client, server: Running, wanted: dict[str, list[list[float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = server.host.there.values()
    passes, many = list[int](), worker.engine.embed_many

    def counted(texts: list[list[int]], pooling: Pooling) -> Any:
        passes.append(len(texts))
        return many(texts, pooling)

    monkeypatch.setattr(worker.engine, "embed_many", counted)
    assert vectors(client.post(PATH, json={"input": TEXTS * 2})) == wanted["mean"] * 2
    assert passes == [2 * len(TEXTS)]
    monkeypatch.setattr(openai_interface, "_PASS_TOKENS", 45)  # the second text alone has as many as 38
    assert vectors(client.post(PATH, json={"input": TEXTS * 2})) == wanted["mean"] * 2
    assert passes[1:] == [2, 2, 2]
    monkeypatch.setattr(openai_interface, "_PASS_TOKENS", 1)
    assert vectors(client.post(PATH, json={"input": TEXTS})) == wanted["mean"]
    assert passes[4:] == [1, 1, 1]


def test_others_are_answered_meanwhile(client: httpx.Client, wanted: dict[str, list[list[float]]]) -> None:
    """Embeddings run between answers, some texts at a time."""
    body = {"prompt": "hello", "max_tokens": 200, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        with httpx.Client(base_url=client.base_url, timeout=60) as other:
            assert vectors(other.post(PATH, json={"input": TEXTS})) == wanted["mean"]
        assert "data: [DONE]" in lines
