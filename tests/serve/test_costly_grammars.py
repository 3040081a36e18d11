"""Grammars are compiled beside the answers, and one of a stranger's that costs too much is one line."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serving import Running, until

from moert.beside import grammar as grammars
from moert.engine.constraint import Grammar
from moert.errors import BudgetTooSmall
from moert.serve.worker import Worker

PATH = "/v1/completions"
PLAIN = {"prompt": "hello", "max_tokens": 20}


def chain(rule: str, count: int) -> str:
    """Returns a grammar in which each rule is made of the next one."""
    names = [rule.format(at=at, next=at + 1) for at in range(count)]
    first, last = names[0].split(":")[0], names[-1].split(":")[0][0]
    return "\n".join([f"start: {first}", *names, f'{last}{count}: "a"'])


COSTLY = {
    "deep rules overflow a stack": {"grammar": chain('a{at}: "b" a{next}', 6000)},
    "deep tokens double": {"grammar": chain("A{at}: A{next}{{2}}", 400)},
    "many symbols": {"grammar": "start: " + "|".join(['"a"'] * 30_000)},
    "deep references": {"response_format": {"type": "json_schema", "json_schema": {"schema": {
        "$ref": "#/$defs/0", "$defs": {str(at): {"type": "array", "items": {"$ref": f"#/$defs/{at + 1}"}}
                                       for at in range(4000)} | {"4000": {"type": "null"}},
    }}}},
}  # fmt: skip


@pytest.fixture
def worker(server: Running) -> Worker:
    (found,) = server.host.there.values()
    return found


class Held:
    """A compilation that begins when a grammar comes and goes on when `go_on` is set."""

    def __init__(self, then: Callable[..., Any]) -> None:
        self.begun, self.go_on, self._then = threading.Event(), threading.Event(), then

    def __call__(self, *arguments: Any) -> Any:
        self.begun.set()
        assert self.go_on.wait(60)
        return self._then(*arguments)


def held(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Held:
    made = Held(getattr(owner, name))
    monkeypatch.setattr(owner, name, lambda *arguments: made(*arguments))
    return made


@pytest.mark.parametrize("name", COSTLY)
def test_a_grammar_that_costs_too_much_is_refused(name: str, client: httpx.Client) -> None:
    found = client.post(PATH, json={**PLAIN, **COSTLY[name]})
    text = found.json()["error"]["message"]
    assert found.status_code == 400
    assert "that can't be followed (" in text
    assert "\n" not in text
    assert len(text) < 400
    assert client.post(PATH, json={**PLAIN, "grammar": 'start: "ab"'}).json()["choices"][0]["text"] == "ab"


@pytest.mark.parametrize(
    ("owner", "name", "text"), [(grammars, "check_apart", "apart"), (grammars.Matchers, "of", "here")]
)
def test_others_are_answered_while_a_grammar_is_compiled(
    owner: Any, name: str, text: str, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = client.post(PATH, json=PLAIN).json()["choices"]
    compiling = held(monkeypatch, owner, name)
    with ThreadPoolExecutor(1) as pool:
        bound = pool.submit(client.post, PATH, json={**PLAIN, "grammar": f'start: "{text}"'})
        assert compiling.begun.wait(60)
        assert client.post(PATH, json=PLAIN).json()["choices"] == wanted
        assert not bound.done()
        compiling.go_on.set()
        assert bound.result().json()["choices"][0]["text"] == text


def test_others_are_answered_while_a_grammar_looks_for_tokens(
    client: httpx.Client, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the answer is the same; one whose client has left meanwhile ends."""
    body = {**PLAIN, "grammar": "start: /[ab]{9}/"}
    wanted, bound_wanted = (client.post(PATH, json=each).json()["choices"] for each in (PLAIN, body))
    looking = held(monkeypatch, grammars.TokenMatcher, "_consume")
    with ThreadPoolExecutor(1) as pool:
        bound = pool.submit(client.post, PATH, json=body)
        assert looking.begun.wait(60)
        assert client.post(PATH, json=PLAIN).json()["choices"] == wanted
        with pytest.raises(httpx.TimeoutException):
            client.post(PATH, json={**body, "seed": 3}, timeout=0.1)
        until(lambda: worker.unfinished == 1)
        assert not bound.done()
        looking.go_on.set()
        assert bound.result().json()["choices"] == bound_wanted


def test_a_grammar_that_is_known_needs_no_process(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Grammar]()
    monkeypatch.setattr(grammars, "check_apart", seen.append)
    body = {**PLAIN, "n": 2, "grammar": "start: /[ab]{3}/"}
    first, second = (client.post(PATH, json=body).json()["choices"] for _ in range(2))
    assert first == second
    assert [each.text for each in seen] == ["start: /[ab]{3}/"]
    client.post(PATH, json={**body, "grammar": "start: /[ab]{4}/"})
    assert len(seen) == 2


def test_a_process_without_room_waits_for_the_answers(
    client: httpx.Client, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its room is given back."""
    reserved, reserve = list[int](), worker.engine.reserve_aside

    def narrow(nbytes: int, purpose: str) -> None:
        if worker.slots():
            raise BudgetTooSmall("no room", 1)
        reserve(nbytes, purpose)
        reserved.append(nbytes)

    monkeypatch.setattr(worker.engine, "reserve_aside", narrow)
    with ThreadPoolExecutor(1) as pool:
        with client.stream("POST", PATH, json={**PLAIN, "max_tokens": 150, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            bound: Future[httpx.Response] = pool.submit(client.post, PATH, json={**PLAIN, "grammar": 'start: "bb"'})
            assert "data: [DONE]" in lines
        assert bound.result().json()["choices"][0]["text"] == "bb"
    assert reserved
    until(lambda: worker.engine._regulator._reserved_bytes == 0)


def test_answers_that_are_cut_while_their_grammar_is_compiled(
    client: httpx.Client, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling = held(monkeypatch, grammars, "check_apart")
    with ThreadPoolExecutor(1) as pool:
        bound = pool.submit(client.post, PATH, json={**PLAIN, "grammar": 'start: "cut"'})
        assert compiling.begun.wait(60)
        worker.cut()
        assert bound.result().status_code == 503
        compiling.go_on.set()
    assert client.post(PATH, json=PLAIN).status_code == 200
    until(lambda: worker.unfinished == 0)
