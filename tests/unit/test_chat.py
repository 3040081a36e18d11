"""Conversations: what is remembered, what is read again, and thinking told from answers."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chat_packs import ENDLESS, TEMPLATE, THINKING, write_chat_pack
from hypothesis import given
from hypothesis import strategies as st
from tiny_packs import DECODER, DECODER_SHAPE, MIXERS_SHAPE, SWITCH, write_pack
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from moeconv.writer import add_to_pack
from moert.chat.conversation import Part, Reply, Splitter, begins_with, marks_of
from moert.command.description import describe, description_lines
from moert.engine.engine import Engine
from moert.engine.session import Interrupted
from moert.engine.text import Detokenizer, Text
from moert.errors import Busy, ChatImpossible, InputInvalid, PromptTooLong, SettingInvalid, TemplateFailed
from moert.pack.errors import ChatInvalid
from moert.pack.reader import Pack
from moert.pack.text import CHAT, ChatFormat, dump_chat
from tests.kernels import NATIVE
from tests.refusing import one_line

NEW = {"max_new_tokens": 12}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine.open(write_chat_pack(tmp_path_factory.mktemp("chat") / "p"), predict="none", threads=1)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    pack = write_chat_pack(tmp_path_factory.mktemp("chat") / "endless", ENDLESS)
    return Engine.open(pack, predict="none", threads=1)


@pytest.fixture(scope="module")
def mixing(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Of a model with states of fixed size."""
    spec = MIXERS_SHAPE.but(eos=(1, 9), max_positions=300).spec
    return Engine.open(write_chat_pack(tmp_path_factory.mktemp("chat") / "m", spec), predict="none", threads=1)


@pytest.fixture(scope="module", params=["attention", "states"])
def either(request: pytest.FixtureRequest, engine: Engine, mixing: Engine) -> Engine:
    return engine if request.param == "attention" else mixing


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_question_is_what_the_template_makes_of_it(engine: Engine) -> None:
    reply = engine.chat([user("hello")], **NEW)
    ids = engine.text.encode("user hello</s>assistant ", whole=True)
    assert 1 in ids  # the special token, not its letters
    assert reply.prompt_tokens == len(ids)
    assert reply.result.tokens == engine.generate(ids, **NEW).result.tokens
    pieces = list[str]()
    again = engine.chat([user("hello")], on_text=pieces.append, **NEW)
    assert (again.result, "".join(pieces)) == (reply.result, reply.text)
    assert reply.text == reply.result.text
    assert reply.message == {"role": "assistant", "content": reply.text}


def test_a_conversation_is_remembered_and_writes_what_a_fresh_one_writes(either: Engine) -> None:
    talk, messages = either.conversation("be brief"), [{"role": "system", "content": "be brief"}]
    for turn, text in enumerate(("hello there", "how are you", "so am i")):
        messages.append(user(text))
        reply = talk.say(text, temperature=0.7, seed=turn, **NEW)
        if NATIVE:
            fresh = either.chat(messages, temperature=0.7, seed=turn, **NEW)
            assert reply.result == fresh.result
            assert (fresh.kept_tokens, reply.prompt_tokens) == (0, fresh.prompt_tokens)
        assert (reply.kept_tokens > 0) == (turn > 0)
        messages.append(dict(reply.message))
    assert talk.messages == messages[1:]


def test_only_what_is_new_is_read(either: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, read = either, list[int]()
    real = engine.model.read

    def count(states: Sequence[Any], sequences: Sequence[Sequence[int]]) -> Any:
        read.extend(map(len, sequences))
        return real(states, sequences)

    monkeypatch.setattr(engine.model, "read", count)
    talk = engine.conversation()
    talk.say("hello there", max_new_tokens=1)
    read.clear()
    talk.messages = [user("hello there"), {"role": "assistant", "content": "well"}]
    reply = talk.say("so", max_new_tokens=1)
    new = len(engine.text.encode("well</s>user so</s>assistant ", whole=True))
    assert read == [new]
    assert reply.kept_tokens == reply.prompt_tokens - new
    read.clear()
    talk.reset()
    talk.system = "be brief"
    assert talk.say("so", max_new_tokens=1).kept_tokens == 0
    assert len(read) == 1


def test_what_fails_was_never_said(engine: Engine) -> None:
    talk = engine.conversation()
    talk.say("hello", **NEW)
    before = list(talk.messages)
    with pytest.raises(PromptTooLong, match="the model can take 299"):
        talk.say("x" * 400)
    with pytest.raises(InputInvalid, match="not valid Unicode"):
        talk.say("\ud800")
    with pytest.raises(SettingInvalid):
        talk.say("hello", temperature=-1.0)
    talk.messages.append({"role": "tool", "content": "3"})
    with one_line(TemplateFailed, "refuses this conversation: no tools here"):
        talk.say("hello")
    del talk.messages[-1]
    assert talk.messages == before
    assert talk.say("hello", **NEW).kept_tokens > 0


def test_ctrl_c_keeps_what_was_said_and_read(endless: Engine) -> None:
    talk, heard = endless.conversation(), list[str]()

    def hear(part: Part, text: str) -> None:
        heard.append(text)
        if len(heard) == 5:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as stopped:
        talk.say("hello", hear=hear, max_new_tokens=1000)
    reply = stopped.value.answers[0]
    assert isinstance(reply, Reply)
    assert reply.text == "".join(heard)
    assert reply.result.stop_reason == "interrupted"
    assert talk.messages == [user("hello"), reply.message]
    assert talk.say("and", max_new_tokens=2).kept_tokens >= reply.prompt_tokens - 1


def test_ctrl_c_before_a_word_leaves_the_question_out(endless: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = endless.conversation()

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for place in ("runner.run", "text.encode"):
        owner, name = place.split(".")
        with monkeypatch.context() as broken:
            broken.setattr(getattr(endless, owner), name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                talk.say("hello")
        assert talk.messages == []
    assert talk.say("hello", max_new_tokens=2).result == endless.chat([user("hello")], max_new_tokens=2).result


def test_every_end_token_ends_an_answer(tmp_path: Path) -> None:
    with Engine.open(write_chat_pack(tmp_path / "long", ENDLESS), predict="none", threads=1) as engine:
        tokens = engine.chat([user("hello")], **NEW).result.tokens
    first, second = tokens[3], tokens[7]
    for ends in ((second,), (second, first)):
        spec = DECODER_SHAPE.but(eos=ends, max_positions=None).spec
        with Engine.open(write_chat_pack(tmp_path / str(len(ends)), spec), predict="none", threads=1) as engine:
            result = engine.chat([user("hello")], **NEW).result
        assert result.tokens == tokens[: min(map(tokens.index, ends)) + 1]
        assert result.stop_reason == "eos"


def test_the_tokenizers_end_token_ends_a_reply_too(tmp_path: Path) -> None:
    """As in checkpoints whose generation_config.json names another; no other text ends at it."""
    spec = DECODER_SHAPE.but(eos=(9,), max_positions=None).spec
    with Engine.open(write_chat_pack(tmp_path / "p", spec), predict="none", threads=1) as engine:
        tokens = engine.chat([user("hello")], **NEW).result.tokens
    end = tokens[3]
    pack = write_chat_pack(tmp_path / "q", spec, marks={end: "<|over|>"})
    chat = ChatFormat(TEMPLATE, {"eos_token": "<|over|>"})
    add_to_pack(pack, Pack.open(pack).manifest, CHAT, dump_chat(chat))
    with Engine.open(pack, predict="none", threads=1) as engine:
        reply = engine.chat([user("hello")], **NEW).result
        ids = engine.text.encode("user hello</s>assistant ", whole=True)
        assert engine.generate(ids, **NEW).result.tokens == tokens
        assert engine.chat([user("hello")], ignore_eos=True, **NEW).result.tokens == tokens
    assert (reply.tokens, reply.stop_reason) == (tokens[: tokens.index(end) + 1], "eos")
    said = describe(Pack.open(pack))["end_tokens"]
    assert [(each["id"], each["only_in_chat"]) for each in said] == [(9, False), (end, True)]
    assert said[1]["token"] == "<|over|>"
    (line,) = [line for line in description_lines(Pack.open(pack)) if line.startswith("end tokens")]
    assert line == f"end tokens       {said[0]['token']} (9), <|over|> ({end}) in chat"


def test_thinking_is_told_from_the_answer(tmp_path: Path) -> None:
    with Engine.open(write_chat_pack(tmp_path / "plain", ENDLESS, THINKING), predict="none", threads=1) as engine:
        reply = engine.chat([user("hello")], **NEW)
        assert (reply.text, reply.thinking) == ("", reply.result.text)
    tokens = reply.result.tokens
    mark = next(token for token in tokens[2:] if token > 30 and token not in tokens[:2])
    pack = write_chat_pack(tmp_path / "marked", ENDLESS, THINKING, {mark: "</think>"})
    heard = {"thinking": "", "answer": ""}

    def hear(part: Part, text: str) -> None:
        heard[part] += text

    with Engine.open(pack, predict="none", threads=1) as engine:
        talk = engine.conversation()
        reply = talk.say("hello", hear=hear, **NEW)
    thought, _, answer = reply.result.text.partition("</think>")
    assert thought
    assert answer
    assert (reply.thinking, reply.text) == (thought, answer.replace("</think>", ""))
    assert heard == {"thinking": reply.thinking, "answer": reply.text}
    assert talk.messages[1] == {"role": "assistant", "content": reply.text, "reasoning_content": thought}


def test_variables_and_tools_reach_the_template(tmp_path: Path) -> None:
    pack = write_chat_pack(tmp_path / "p", template="{{ word }}{{ tools[0].name }}{{ messages[0].content }}")
    with Engine.open(pack, predict="none", threads=1) as engine:
        reply = engine.chat([user("c")], tools=[{"name": "b"}], variables={"word": "a"}, max_new_tokens=3)
        assert reply.result.tokens == engine.generate("abc", max_new_tokens=3).result.tokens
        talk = engine.conversation(tools=[{"name": "b"}], variables={"word": "a"})
        assert talk.say("c", max_new_tokens=3).result == reply.result


def test_packs_that_can_not_chat_are_one_line(tmp_path: Path) -> None:
    for name, spec, words in (("switch", SWITCH, "reads with an encoder"), ("bare", DECODER, "has no chat template")):
        with Engine.open(write_pack(tmp_path / name, spec, paths=False), predict="none", threads=1) as engine:
            for ask in (engine.conversation, lambda engine=engine: engine.chat([user("a")])):
                with one_line(ChatImpossible, words):
                    ask()
    pack = tmp_path / "bare"
    add_to_pack(pack, Pack.open(pack).manifest, CHAT, b"{}")
    with Engine.open(pack, predict="none", threads=1) as engine, pytest.raises(ChatInvalid, match="lacks the field"):
        engine.conversation()


def test_what_a_conversation_keeps_is_known_while_it_is_there(engine: Engine) -> None:
    gc.collect()
    before = engine._regulator.kept_bytes()
    talk = engine.conversation()
    talk.say("hello", **NEW)
    assert engine._regulator.kept_bytes() - before == talk._prefix.held_bytes > 0
    del talk
    gc.collect()
    assert engine._regulator.kept_bytes() == before


def test_room_is_made_for_what_renders(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    monkeypatch.setattr(engine._admission, "aside", lambda nbytes, purpose: asked.append(nbytes))
    engine.chat([user("hello")], max_new_tokens=1)
    assert 20 << 20 < asked[0] < 40 << 20
    with engine.session(), pytest.raises(Busy):
        engine.chat([user("hello")])


# Marks ----------------------------------------------------------------------------------------------------------------

HARMONY = marks_of(ChatFormat("<|channel|>", {}))
USUAL = marks_of(ChatFormat(TEMPLATE, {}))


def split(text: str, marks: Any, first: Part = "answer", at: Sequence[int] = ()) -> dict[str, str]:
    splitter, found = Splitter(marks, first), {"thinking": "", "answer": ""}
    ends = sorted({0, *(min(place, len(text)) for place in at), len(text)})
    pieces = [piece for start, end in pairwise(ends) for piece in splitter.push(text[start:end])]
    for part, piece in [*pieces, *splitter.flush()]:
        found[part] += piece
    return found


@pytest.mark.parametrize(
    ("marks", "text", "first", "thinking", "answer"),
    [
        (USUAL, "plain\n", "answer", "", "plain\n"),
        (USUAL, "\n\nplain", "answer", "", "\n\nplain"),
        (USUAL, "<think>\nhm\n</think>\n\nFive.", "answer", "hm\n", "Five."),
        (USUAL, "\nhm</think>Five.", "thinking", "hm", "Five."),
        (USUAL, "hm <thi", "thinking", "hm <thi", ""),
        (USUAL, "a<think>b</think>c<think>d", "answer", "bd", "ac"),
        (HARMONY, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Five.",
         "answer", "hm", "Five."),
        (HARMONY, "<|channel|>final<|message|>Five.<|end|>x", "answer", "", "Five."),
    ],
)  # fmt: skip
def test_parts(marks: Any, text: str, first: Part, thinking: str, answer: str) -> None:
    assert split(text, marks, first) == {"thinking": thinking, "answer": answer}


@given(
    words=st.lists(st.sampled_from(["a", "\n", "<", "<think>", "</think>", "</thi", "nk>", "é"]), max_size=12),
    at=st.lists(st.integers(0, 60)),
)
def test_where_pieces_end_does_not_matter(words: list[str], at: list[int]) -> None:
    text = "".join(words)
    assert split(text, USUAL, at=at) == split(text, USUAL)


def test_which_marks_and_where_a_prompt_leaves_off() -> None:
    assert "[THINK]" in marks_of(ChatFormat("{{ '[/THINK]' }}", {}))
    assert "<|channel|>final<|message|>" in HARMONY
    assert begins_with("x<think>\n", USUAL) == "thinking"
    assert begins_with("<think>\n\n</think>\n\n", USUAL) == "answer"
    assert begins_with("say <think> to me\n", USUAL) == "answer"


def test_special_tokens_give_text_where_they_are_marks() -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "<unk>": 2}, "<unk>"))
    tokenizer.add_special_tokens([AddedToken("<think>", special=True), AddedToken("<end>", special=True)])
    text = Text(Pack.__new__(Pack))
    vars(text)["tokenizer"] = tokenizer
    ids = [tokenizer.token_to_id(token) for token in ("<think>", "a", "<end>", "b")]
    for detokenizer, expected in ((text.detokenizer_with(USUAL), "<think> a b"), (text.detokenizer(), "a b")):
        assert isinstance(detokenizer, Detokenizer)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == expected
