"""Chat templates by name and from files, in place of a pack's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_packs import ENDLESS, write_chat_pack
from tiny_packs import DECODER, write_pack

from moert.chat.renderer import TEMPLATES, Renderer, chat_of
from moert.engine.engine import Engine
from moert.errors import ChatImpossible, SettingInvalid

TALK = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And you?"},
]  # fmt: skip
WANTED = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nAnd you?<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd you?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "alpaca": "Be brief.\n\n### Instruction:\nHi\n\n### Response:\nHello\n\n"
    "### Instruction:\nAnd you?\n\n### Response:\n",
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack that came with no chat template."""
    return write_pack(tmp_path_factory.mktemp("templates") / "bare", DECODER, paths=False)


@pytest.mark.parametrize("name", TEMPLATES)
def test_named_templates_make_the_prompts_that_models_were_trained_on(bare: Path, name: str) -> None:
    with Engine.open(bare) as engine:
        chat = chat_of(engine.pack, engine.text, name)
        special = engine.spec.tokens.bos
        first = "" if special is None else engine.text.tokenizer.id_to_token(special)
    assert Renderer(chat).render(TALK) == first + WANTED[name]
    assert chat.ends == [TEMPLATES[name][1]]


def test_a_reply_ends_where_the_template_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer has no such token: the text ends the reply, and does not become part of it."""
    pack, body = write_chat_pack(tmp_path / "p", ENDLESS), TEMPLATES["chatml"][0]
    with Engine.open(pack, template="chatml") as engine:
        written = engine.chat(TALK, max_new_tokens=12).text
    end = written[4:6]
    monkeypatch.setattr("moert.chat.renderer.TEMPLATES", {"chatml": (body, end)})
    with Engine.open(pack, template="chatml") as engine:
        reply = engine.chat(TALK, max_new_tokens=12)
    assert (reply.text, reply.stop_reason) == (written[: written.index(end)], "stop_string")


def test_a_file_takes_the_place_of_the_packs_own(tmp_path: Path) -> None:
    pack, template = write_chat_pack(tmp_path / "p"), tmp_path / "shout.jinja"
    template.write_text("{{ messages[-1].content | upper }}", encoding="utf-8")
    with Engine.open(pack, template=str(template)) as engine, Engine.open(pack) as usual:
        assert Renderer(chat_of(engine.pack, engine.text, str(template))).render(TALK) == "AND YOU?"
        prompt = engine.text.encode("AND YOU?", whole=True)
        assert engine.chat(TALK, max_new_tokens=4).result.tokens == engine.generate(prompt, max_new_tokens=4).tokens
        assert usual.chat(TALK, max_new_tokens=4).prompt_tokens != len(prompt)


def test_without_any_the_way_out_is_said(bare: Path, tmp_path: Path) -> None:
    with Engine.open(bare) as engine, pytest.raises(ChatImpossible, match="no chat template: say which by template"):
        engine.chat(TALK)
    for wrong, why in ((tmp_path / "missing", "No such file"), (tmp_path, "directory"), (_empty(tmp_path), "1 to")):
        with Engine.open(bare, template=str(wrong)) as engine, pytest.raises(SettingInvalid, match=why):
            engine.chat(TALK)


def _empty(folder: Path) -> Path:
    (folder / "empty").write_bytes(b"")
    return folder / "empty"
