"""The chat template of a conversation: the pack's own, one of a file, or one of those that have names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moert.errors import ChatImpossible, SettingInvalid
from moert.generation.text import Text
from moert.pack.chat import MAX_CHAT_BYTES, ChatFormat, load_chat
from moert.pack.errors import ChatInvalid
from moert.pack.reader import Pack

_EACH = "{{ bos_token }}{% for m in messages %}"
_END = "{% endfor %}{% if add_generation_prompt %}"
TEMPLATES: Mapping[str, tuple[str, str]] = {
    "chatml": (
        _EACH + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        + _END + "{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_end|>",
    ),
    "llama3": (
        _EACH + "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}"
        + _END + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        "<|eot_id|>",
    ),
    "alpaca": (
        _EACH + "{% if m.role == 'system' %}{{ m.content + '\n\n' }}"
        "{% elif m.role == 'user' %}{{ '### Instruction:\n' + m.content + '\n\n' }}"
        "{% else %}{{ '### Response:\n' + m.content + '\n\n' }}{% endif %}"
        + _END + "{{ '### Response:\n' }}{% endif %}",
        "### Instruction:",
    ),
}  # fmt: skip
"""Name → a template as models trained for that form of conversation know it, and what ends a reply there."""


def chat_of(pack: Pack, text: Text, template: str | None = None) -> ChatFormat:
    """Returns how a model holds conversations: by the pack's own template, or by `template`, a name or a file. Raises
    ChatImpossible, SettingInvalid, or a PackError for a chat.json that can't be used."""
    if pack.manifest.model.encoder is not None:
        raise ChatImpossible(_impossible(pack, "its model reads with an encoder, and takes prompts as they are"))
    own = load_chat(pack)
    if template is None:
        if own is None:
            why = "it has no chat template: say which by --template (chatml, say), or give prompts as they are"
            raise ChatImpossible(_impossible(pack, why))
        return own
    tokens = _own_tokens(pack, text) if own is None else dict(own.tokens)
    if template in TEMPLATES:
        body, end = TEMPLATES[template]
        return ChatFormat(body, {**tokens, "eos_token": end})
    return ChatFormat(_read(template), tokens)


def _impossible(pack: Pack, why: str) -> str:
    return f"the pack at {pack.root} can't chat: {why}, with moert run"


def _own_tokens(pack: Pack, text: Text) -> dict[str, str]:
    """Returns the names that templates call the model's special tokens by, of a pack that has no chat.json."""
    special = pack.manifest.model.tokens
    ids = {"bos_token": special.bos, "eos_token": next(iter(special.eos), None)}
    names = {name: text.tokenizer.id_to_token(number) for name, number in ids.items() if number is not None}
    return {name: token or "" for name, token in names.items()}


def _read(path: str) -> str:
    """Returns the template in a file. Raises SettingInvalid."""
    try:
        with Path(path).open("rb") as file:
            body = file.read(MAX_CHAT_BYTES + 1)
        if not body or len(body) > MAX_CHAT_BYTES:
            raise ChatInvalid(f"it should be text of 1 to {MAX_CHAT_BYTES} bytes")
        return body.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, ChatInvalid) as error:
        why = getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
        names = ", ".join(TEMPLATES)
        raise SettingInvalid("template", f"{path!r} can't be used ({why}): give a file, or one of {names}") from None
