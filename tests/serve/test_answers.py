"""Answers of the server are those of the engine, in every interface, whole and in pieces, alone and among others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from chat_packs import ENDLESS, TEMPLATE, THINKING, write_chat_pack
from grammar_packs import TOKENIZERS, write_grammar_pack
from serving import serving

from moert.engine.engine import Engine
from moert.engine.generation import StopReason
from moert.serve import anthropic, openai
from moert.serve.forms import Ended

HELLO = [{"role": "user", "content": "hello"}]
NEW = 12


@pytest.fixture(scope="module")
def said(pack: Path) -> str:
    with Engine.open(pack) as engine:
        return engine.chat(HELLO, max_new_tokens=NEW).text


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chunks(client: httpx.Client, **more: Any) -> list[Any]:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": NEW, "stream": True, **more}
    found = client.post("/v1/chat/completions", json=body)
    assert found.text.count("[DONE]") == 1
    return events(found.text)


def test_chat_is_the_engines_whole_and_in_pieces(client: httpx.Client, said: str) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": NEW}
    (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": said}, "length")
    found = chunks(client, stream_options={"include_usage": True})
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in found[:-1]) == said
    reasons = [each["choices"][0]["finish_reason"] for each in found[:-1]]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}, "one chunk says how it ended"
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == NEW


def test_no_usage_comes_unasked(client: httpx.Client) -> None:
    assert all("usage" not in each for each in chunks(client))


def test_other_interfaces_say_the_same(client: httpx.Client, said: str) -> None:
    message = {"model": "tiny", "messages": HELLO, "max_tokens": NEW}
    found = client.post("/v1/messages", json=message).json()
    assert (found["content"], found["stop_reason"]) == ([{"type": "text", "text": said}], "max_tokens")
    pieces = events(client.post("/v1/messages", json={**message, "stream": True}).text)
    assert "".join(each["delta"]["text"] for each in pieces if each["type"] == "content_block_delta") == said
    kinds = [each["type"] for each in pieces if each["type"] != "content_block_delta"]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]

    body = {"model": "tiny", "input": "hello", "max_output_tokens": NEW}
    response = client.post("/v1/responses", json=body).json()
    assert (response["output"][0]["content"][0]["text"], response["status"]) == (said, "incomplete")
    pieces = events(client.post("/v1/responses", json={**body, "stream": True}).text)
    assert [each["sequence_number"] for each in pieces] == [*range(len(pieces))]
    assert "".join(each["delta"] for each in pieces if each["type"] == "response.output_text.delta") == said
    assert pieces[-1]["response"]["output"][0]["content"] == response["output"][0]["content"]

    body = {"model": "tiny:latest", "messages": HELLO, "options": {"num_predict": NEW}}
    lines = [json.loads(line) for line in client.post("/api/chat", json=body).text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == said
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["eval_count"] == NEW
    body = {"model": "tiny", "prompt": "hello", "stream": False, "options": {"num_predict": NEW}}
    assert client.post("/api/generate", json=body).json()["response"] == said


def test_a_previous_response_is_remembered(client: httpx.Client, pack: Path, said: str) -> None:
    first = client.post("/v1/responses", json={"model": "tiny", "input": "hello", "max_output_tokens": NEW}).json()
    body = {"model": "tiny", "input": "and", "max_output_tokens": NEW, "previous_response_id": first["id"]}
    second = client.post("/v1/responses", json=body).json()
    talk = [*HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": "and"}]
    with Engine.open(pack) as engine:
        assert second["output"][0]["content"][0]["text"] == engine.chat(talk, max_new_tokens=NEW).text
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > first["usage"]["input_tokens"]
    lost = client.post("/v1/responses", json={**body, "previous_response_id": "resp_0"})
    assert (lost.status_code, lost.json()["error"]["param"]) == (404, "previous_response_id")


def test_text_is_the_engines_from_words_and_from_ids(client: httpx.Client, pack: Path) -> None:
    with Engine.open(pack) as engine:
        texts = [engine.generate(prompt, max_new_tokens=NEW).text for prompt in ("abc", "hello")]
        ids = engine.encode("abc")
    body = {"model": "tiny", "prompt": ["abc", "hello"], "max_tokens": NEW}
    assert [each["text"] for each in client.post("/v1/completions", json=body).json()["choices"]] == texts
    found = client.post("/v1/completions", json={**body, "prompt": ids, "stream": True})
    assert "".join(each["choices"][0]["text"] for each in events(found.text)) == texts[0]


def test_several_answers_are_those_of_their_seeds(client: httpx.Client, pack: Path) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": NEW, "n": 3, "temperature": 1.0, "seed": 5}
    found = client.post("/v1/chat/completions", json=body).json()
    with Engine.open(pack) as engine:
        wanted = [engine.chat(HELLO, max_new_tokens=NEW, temperature=1.0, seed=seed).text for seed in (5, 6, 7)]
    assert [each["message"]["content"] for each in found["choices"]] == wanted
    assert found["usage"]["completion_tokens"] == 3 * NEW
    unseeded = {name: value for name, value in body.items() if name != "seed"}
    found = [client.post("/v1/chat/completions", json=unseeded).json() for _ in range(2)]
    texts = {tuple(each["message"]["content"] for each in one["choices"]) for one in found}
    assert len(texts) > 1, "without a seed one is drawn"


def test_nobody_changes_another_ones_answer(client: httpx.Client, pack: Path) -> None:
    prompts = ["hello " * count for count in range(1, 17)]
    with Engine.open(pack) as engine:
        wanted = [
            engine.generate(prompt, max_new_tokens=20, temperature=0.7, seed=at).text
            for at, prompt in enumerate(prompts)
        ]

    def ask(at: int) -> str:
        body = {"model": "tiny", "prompt": prompts[at], "max_tokens": 20, "temperature": 0.7, "seed": at}
        text: str = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert [*pool.map(ask, range(len(prompts)))] == wanted


def test_stop_strings_end_an_answer_and_are_named(client: httpx.Client, said: str) -> None:
    stop = said[4:6]
    body = {"model": "tiny", "messages": HELLO, "max_tokens": NEW}
    (choice,) = client.post("/v1/chat/completions", json={**body, "stop": ["~", stop]}).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (said[: said.index(stop)], "stop")
    found = client.post("/v1/messages", json={**body, "stop_sequences": ["~", stop]}).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)


@pytest.mark.parametrize("reason", get_args(StopReason))
def test_an_answer_that_is_cut_short_says_so(reason: StopReason) -> None:
    end = Ended(0, reason, 5, 3, 0, stop="~" if reason == "stop_string" else None)
    whole = reason in ("eos", "stop_string")
    assert end.whole == whole
    assert openai._reason(end) == ("stop" if whole else "length")
    assert openai._reason(end, called=True) == ("tool_calls" if whole else "length")
    assert anthropic._reason(end, False, ()) == ("end_turn" if whole else "max_tokens", None)


def test_log_probabilities_are_those_of_the_engine(client: httpx.Client, pack: Path) -> None:
    with Engine.open(pack) as engine:
        wanted = engine.chat(HELLO, max_new_tokens=NEW, logprobs=2).logprobs or []
    body = {"model": "tiny", "messages": HELLO, "max_tokens": NEW, "logprobs": True, "top_logprobs": 2}
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    pieces = [each["choices"][0]["logprobs"] for each in chunks(client, logprobs=True, top_logprobs=2)]
    assert [step for each in pieces if each for step in each["content"]] == whole
    assert [(step["token"], step["logprob"]) for step in whole] == [
        (step.chosen.text, step.chosen.logprob) for step in wanted
    ]
    assert [len(step["top_logprobs"]) for step in whole] == [2] * NEW


@pytest.fixture(scope="module", params=["bytes", "fallback"])
def spelling(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A pack whose tokens are often parts of a character, and the address of its server."""
    out = tmp_path_factory.mktemp("spelling") / "spells.pack"
    pack = write_grammar_pack(out, TOKENIZERS[request.param](), TEMPLATE)
    with serving(pack) as running:
        yield pack, running.url


def test_tokens_of_half_a_character_have_their_own_bytes(spelling: tuple[Path, str]) -> None:
    body = {"messages": HELLO, "grammar": 'start: "a\N{EURO SIGN}ßb"', "logprobs": True, "top_logprobs": 20}
    (choice,) = httpx.post(f"{spelling[1]}/v1/chat/completions", json=body, timeout=60).json()["choices"]
    steps = choice["logprobs"]["content"][:-1]  # without the end token
    assert choice["message"]["content"] == "a\N{EURO SIGN}ßb"
    assert b"".join(bytes(step["bytes"]) for step in steps) == "a\N{EURO SIGN}ßb".encode()
    assert {step["token"] for step in steps} == {"a", "\ufffd", "b"}
    likely = [bytes(each["bytes"]) for each in steps[0]["top_logprobs"] if each["token"]]
    assert len({*likely}) == len(likely) > 10, "each token is told from the others"


def test_a_prompt_of_split_characters_is_echoed_as_it_was(spelling: tuple[Path, str]) -> None:
    pack, url = spelling
    text = "a\N{EURO SIGN}b"
    body = {"prompt": text, "max_tokens": 0, "logprobs": 20, "echo": True}
    (choice,) = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert choice["text"] == text
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]
    with Engine.open(pack) as engine:
        steps = [step for *_, step in engine.steps(text, 20) if step is not None]
    for found, step in zip(choice["logprobs"]["top_logprobs"][1:], steps, strict=True):
        assert found == {text: max(each.logprob for each in step.likeliest if each.text == text) for text in found}


def test_offsets_are_places_in_the_answer_whole_and_in_pieces(spelling: tuple[Path, str]) -> None:
    body = {"prompt": "a", "grammar": 'start: "\N{EURO SIGN}ßb"', "logprobs": 0}
    whole = httpx.post(f"{spelling[1]}/v1/completions", json=body, timeout=60).json()["choices"][0]
    pieces = events(httpx.post(f"{spelling[1]}/v1/completions", json={**body, "stream": True}, timeout=60).text)
    assert whole["logprobs"]["text_offset"] == [0, 0, 0, 1, 1, 2, 3]
    found = [each["choices"][0]["logprobs"] for each in pieces if each["choices"][0]["logprobs"]]
    assert [at for each in found for at in each["text_offset"]] == whole["logprobs"]["text_offset"]


@pytest.mark.parametrize("most", [0, 1])
def test_echo_scores_the_prompt(most: int, client: httpx.Client, pack: Path) -> None:
    body = {"model": "tiny", "prompt": "hello world", "max_tokens": most, "logprobs": 1, "echo": True}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    with Engine.open(pack) as engine:
        score = engine.score("hello world")
        new = engine.generate("hello world", max_new_tokens=1).text
    found = choice["logprobs"]["token_logprobs"]
    assert found[: len(score.logprobs)] == pytest.approx(score.logprobs, abs=1e-5)
    assert choice["text"] == "hello world" + new * most
    assert len(found) == len(score.tokens) + most
    assert all(len(each) == 1 for each in choice["logprobs"]["top_logprobs"][1:])


def test_a_conversation_goes_on_without_reading_its_past(client: httpx.Client, said: str) -> None:
    talk = [*HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    body = {"model": "tiny", "messages": HELLO, "max_tokens": NEW}
    first = client.post("/v1/chat/completions", json=body).json()["usage"]
    second = client.post("/v1/chat/completions", json={**body, "messages": talk}).json()["usage"]
    assert second["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"], "but for how its answer is cut"


def test_thinking_has_a_field_of_its_own(tmp_path: Path) -> None:
    pack = write_chat_pack(tmp_path / "thinks.pack", ENDLESS, THINKING, {20: "</think>", 21: "<think>"})
    with Engine.open(pack) as engine:
        wanted = engine.chat(HELLO, max_new_tokens=200, temperature=1.0, seed=3, logit_bias={20: 3.0})
    assert wanted.thinking
    assert wanted.text
    with serving(pack) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        body = {"messages": HELLO, "max_tokens": 200, "temperature": 1.0, "seed": 3, "logit_bias": {"20": 3}}
        message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (wanted.text, wanted.thinking)


def test_tokens_and_text_go_both_ways(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"content": "hello world"}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": "hello world"}
    count = client.post("/v1/messages/count_tokens", json={"messages": HELLO}).json()["input_tokens"]
    used = client.post("/v1/messages", json={"messages": HELLO, "max_tokens": 1}).json()["usage"]
    assert count == used["input_tokens"] + used["cache_read_input_tokens"]
    assert count == client.post("/tokenize", json={"messages": HELLO}).json()["count"]
