"""Programs of others on the server, as their users call them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
from chat_packs import TEMPLATE
from grammar_packs import byte_level, write_grammar_pack
from pydantic import BaseModel
from serving import Running, serving

from moert.engine.engine import Engine

HELLO: Any = [{"role": "user", "content": "hello"}]
NEW = 12


@pytest.fixture(scope="module")
def said(pack: Path) -> str:
    with Engine.open(pack) as engine:
        return engine.chat(HELLO, max_new_tokens=NEW).text


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_openai_chats(client: openai.OpenAI, said: str) -> None:
    assert [each.id for each in client.models.list()] == ["tiny"]
    whole = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=NEW)
    assert whole.choices[0].message.content == said
    assert whole.usage is not None
    assert whole.usage.completion_tokens == NEW
    with client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=NEW, stream=True) as pieces:
        assert "".join(each.choices[0].delta.content or "" for each in pieces) == said
    assert client.completions.create(model="tiny", prompt="abc", max_tokens=3).choices[0].finish_reason == "length"


def test_openai_responds(client: openai.OpenAI, said: str) -> None:
    first = client.responses.create(model="tiny", input="hello", max_output_tokens=NEW)
    assert (first.output_text, first.status) == (said, "incomplete")
    kinds = []
    with client.responses.stream(
        model="tiny", input="more", max_output_tokens=NEW, previous_response_id=first.id
    ) as pieces:
        kinds = [each.type for each in pieces]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")


def test_openai_parses_an_answer(tmp_path: Path) -> None:
    class Answer(BaseModel):
        right: bool

    with serving(write_grammar_pack(tmp_path / "bytes.pack", byte_level(), TEMPLATE)) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        found = client.chat.completions.parse(model="bytes", messages=HELLO, response_format=Answer, max_tokens=400)
        assert isinstance(found.choices[0].message.parsed, Answer)
        response = client.responses.parse(model="bytes", input="hello", text_format=Answer, max_output_tokens=400)
        assert isinstance(response.output_parsed, Answer)
        local = ollama.Client(host=running.url)
        text = local.chat("bytes", messages=HELLO, format=Answer.model_json_schema(), options={"num_predict": 400})
        assert isinstance(Answer.model_validate_json(text.message.content or ""), Answer)


def test_openai_is_told_its_mistakes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has tiny"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="modalities is not supported"):
        client.chat.completions.create(model="tiny", messages=HELLO, modalities=["audio"])


def test_openai_asks_many_things_at_once(server: Running, pack: Path) -> None:
    prompts: list[Any] = [[{"role": "user", "content": "hello " * count}] for count in range(1, 9)]

    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            asked = [client.chat.completions.create(model="tiny", messages=each, max_tokens=NEW) for each in prompts]
            return [each.choices[0].message.content for each in await asyncio.gather(*asked)]

    with Engine.open(pack) as engine:
        assert asyncio.run(ask()) == [engine.chat(each, max_new_tokens=NEW).text for each in prompts]


def test_anthropic_chats(server: Running, said: str) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    whole = client.messages.create(model="tiny", messages=HELLO, max_tokens=NEW)
    assert [each.text for each in whole.content if each.type == "text"] == [said]
    with client.messages.stream(model="tiny", messages=HELLO, max_tokens=NEW) as pieces:
        assert "".join(pieces.text_stream) == said
        last = pieces.get_final_message()
    assert (last.stop_reason, last.usage.output_tokens) == ("max_tokens", NEW)
    count = client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens
    assert count == last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.NotFoundError, match="this server has tiny"):
        client.messages.create(model="other", messages=HELLO, max_tokens=NEW)


def test_ollama_chats(server: Running, said: str) -> None:
    client = ollama.Client(host=server.url)
    assert [each.model for each in client.list().models] == ["tiny"]
    assert client.show("tiny").capabilities is not None
    options = {"num_predict": NEW}
    assert client.chat("tiny", messages=HELLO, options=options).message.content == said
    pieces = client.chat("tiny", messages=HELLO, options=options, stream=True)
    assert "".join(each.message.content or "" for each in pieces) == said
    assert client.generate("tiny", "hello", options=options).response == said
    with pytest.raises(ollama.ResponseError, match="this server has tiny"):
        client.chat("other", messages=HELLO)
