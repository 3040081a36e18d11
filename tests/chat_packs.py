"""Packs that can chat: random weights, one token a letter, a template of their own."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_packs import DECODER_SHAPE, write_pack

from moeconv.writer import add_files
from moert.pack.model_spec import ModelSpec
from moert.pack.reader import Pack
from moert.pack.text import CHAT, ChatFormat, dump_chat

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }} {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
THINKING = TEMPLATE.replace("assistant {% endif", "assistant <think>{% endif")
SPEC = DECODER_SHAPE.but(eos=(1, 9), max_positions=300).spec
ENDLESS = DECODER_SHAPE.but(eos=(), max_positions=None).spec


def write_chat_pack(
    out: Path, spec: ModelSpec = SPEC, template: str = TEMPLATE, marks: dict[int, str] | None = None
) -> Path:
    """`marks`: what tokens of these ids are called in place of two letters."""
    write_pack(out, spec, paths=False)
    manifest = Pack.open(out).manifest
    tokenizer = json.loads((out / "tokenizer.json").read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    for name in [name for name, number in vocabulary.items() if number in (marks or {})]:
        number = vocabulary.pop(name)
        vocabulary[(marks or {})[number]] = number
        tokenizer["added_tokens"].append({
            "id": number, "content": (marks or {})[number], "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": False,
        })  # fmt: skip
    chat = ChatFormat(template, {"eos_token": "</s>"})
    add_files(out, manifest, {"tokenizer.json": json.dumps(tokenizer).encode(), CHAT: dump_chat(chat)})
    return out
