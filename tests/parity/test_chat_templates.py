"""Chat templates give the same prompts as in transformers, letter for letter, and refuse the same conversations."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from chat_templates import CONVERSATIONS, OPTIONS, TEMPLATES, TOKENS, TOOLS, USER
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from moert.chat.renderer import Renderer
from moert.chat.sandbox import answer
from moert.errors import InputInvalid, TemplateFailed
from moert.pack.text import ChatFormat

SMALL = {
    "tojson": "{{ {'b': ['é', '<', none], 'a': 1.5} | tojson }}{{ {'b': 1, 'a': 'é'} | "
    "tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}",
    "generation in a loop": "{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.content }}{% endgeneration %}\n"
    "{{ x is defined }}{% endfor %}",
    "blocks": "  {% if true %}\n  a\n    {% endif %}\nb\n{# no #}\nc\n",
    "undefined": "{{ nothing }}{{ messages[0].nothing }}{{ nothing.more }}",
    "attributes": "{{ ''.__class__ }}|{{ messages.__len__ }}|{{ messages[0]['__class__'] }}",
    "a list that would change": "{{ messages.append(1) }}",
    "a name of a namespace": "{% set ns = namespace(__x=1) %}",
    "a file": "{% include 'x' %}",
    "self": "{% set ns = namespace(self=3, a='b') %}{{ ns.self }}{{ ns.a }}{{ dict(a=1) }}{{ dict.fromkeys('ab') }}",
    "no sense": "{% if %}",
    "documents": "{{ documents is none }}{{ tools is none }}",
}  # fmt: skip
ALL = TEMPLATES | SMALL


def theirs(template: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    """None where it is refused."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<unk>": 0}, "<unk>")), **TOKENS)
    tokenizer.chat_template = template
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=options.get("tools"), tokenize=False,
            add_generation_prompt=options.get("to_be_answered", True),
            continue_final_message=options.get("continues", False), **options.get("variables", {}),
        )  # fmt: skip
    except Exception:
        return None
    assert isinstance(text, str)
    return text


def asked(template: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> bytes:
    wanted = {"tools": None, "variables": None, "to_be_answered": True} | options
    return Renderer(ChatFormat(template, TOKENS)).request(messages, **wanted)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("template", ALL)
def test_the_same_prompt(template: str, options: str) -> None:
    for name, messages in CONVERSATIONS.items():
        expected = theirs(ALL[template], messages, OPTIONS[options])
        found = answer(asked(ALL[template], messages, OPTIONS[options]))
        assert found.get("text") == expected, name
        assert len(found) == 1


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_same_in_a_process_of_its_own(template: str) -> None:
    renderer = Renderer(ChatFormat(TEMPLATES[template], TOKENS))
    messages = CONVERSATIONS["three"]
    assert renderer.render(messages, TOOLS) == theirs(TEMPLATES[template], messages, {"tools": TOOLS})


class Here(Renderer):
    """Renders in this process."""

    def render(self, messages: Any, tools: Any = None, variables: Any = None, to_be_answered: bool = True) -> str:
        found = answer(self.request(messages, tools, variables, to_be_answered))
        if "text" not in found:
            raise TemplateFailed(str(found))
        return found["text"]


@pytest.mark.parametrize("said", ["Five", "", "Five, as ", " Five", "<think>\nfour and", "hm\n</think>\n\nFive"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_same_beginning_of_a_reply(template: str, said: str) -> None:
    renderer = Here(ChatFormat(TEMPLATES[template], TOKENS))
    messages = [USER, {"role": "assistant", "content": said}]
    expected = theirs(TEMPLATES[template], messages, {"to_be_answered": False, "continues": True})
    found = None
    with suppress(InputInvalid, TemplateFailed):
        found = "".join(renderer.continued(messages))
    if found is None:
        assert expected is None or "</think>" in said, "there a template may leave out thoughts"
    else:
        assert found == expected or (not said and found.rstrip() == expected), "theirs trims the prompt, too"
    with pytest.raises(InputInvalid, match="not the assistant's"):
        renderer.continued([USER])


def test_a_reply_that_a_template_changes_is_not_continued() -> None:
    for changed in ("{{ m.content | upper }}", "{{ m.content[:4] }}", "{{ m.content | replace('v', 'f') }}", "-"):
        renderer = Here(ChatFormat(f"{{% for m in messages %}}{changed}{{% endfor %}}", TOKENS))
        with pytest.raises(InputInvalid, match="template changes the last message: it can't be continued"):
            renderer.continued([USER, {"role": "assistant", "content": "Five fives"}])


def test_most_of_these_are_prompts_and_some_are_refused() -> None:
    texts = [theirs(template, messages, {}) for template in TEMPLATES.values() for messages in CONVERSATIONS.values()]
    assert 2 < texts.count(None) < 20
    assert len(set(texts)) > 30


def test_a_template_for_tools_takes_the_place_of_the_usual_one() -> None:
    renderer = Renderer(ChatFormat("usual", {}, "with {{ tools | length }}"))
    for tools, text in ((None, "usual"), (TOOLS, "with 1")):
        assert answer(renderer.request([USER], tools, None, True)) == {"text": text}


def test_what_it_says_when_it_refuses() -> None:
    found = answer(asked(TEMPLATES["mistral"], CONVERSATIONS["wrong order"], {}))
    assert found == {"refused": "Roles must alternate user/assistant/user/assistant"}
    with pytest.raises(TemplateFailed, match="refuses this conversation: Roles must alternate"):
        Renderer(ChatFormat(TEMPLATES["mistral"], TOKENS)).render(CONVERSATIONS["wrong order"])


def test_json_goes_both_ways() -> None:
    text = answer(asked("{{ ('[{\"a\": 1}]' | fromjson)[0].a + 1 }}", [USER], {}))["text"]
    assert json.loads(text) == 2
