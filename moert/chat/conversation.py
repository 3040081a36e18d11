"""A conversation: what was said so far, and what of it the model has read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moert.chat.speaker import Asked, Hear, Message, Reply, Speaker
from moert.errors import InputInvalid
from moert.generation.answer import Interrupted
from moert.generation.prefix import Prefix
from moert.generation.settings import GenerationOptions, GenerationSettings
from moert.pack.shown import in_one_line

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Conversation:
    """`messages` may be changed between two turns, `system` too: what was read is read again from the first difference.

    `tools` and `variables`: see moert.chat.speaker.Asked.
    """

    def __init__(
        self,
        speaker: Speaker,
        prefix: Prefix,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.messages: list[Message] = []
        self.system, self.tools, self.variables = system, tools, variables
        self._speaker, self._prefix = speaker, prefix

    def say(
        self,
        text: str,
        settings: GenerationSettings | None = None,
        hear: Hear | None = None,
        **changes: Unpack[GenerationOptions],
    ) -> Reply:
        """The reply to one more message of the user, as it will be remembered; `hear` gets it in pieces as it is made.
        `changes`: settings by name.

        Raises InputInvalid (PromptTooLong where the conversation has become so), TemplateFailed, SettingInvalid,
        BudgetTooSmall, OutOfMemory or PackError, and then nothing was said; Interrupted on Ctrl-C, and then as much as
        was written.
        """
        chosen = GenerationSettings.of(settings, changes)
        if not isinstance(text, str):
            raise InputInvalid(f"the message is {in_one_line(repr(text))[:60]}: give text")
        said: Message = {"role": "user", "content": text}
        system: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        asked = Asked([*system, *self.messages, said], self.tools, self.variables)
        try:
            reply = self._speaker.reply(asked, self._prefix, chosen, hear)
        except Interrupted as interrupt:
            for each in interrupt.answers:
                if isinstance(each, Reply) and each.text:
                    self.messages += [said, each.message]
            raise
        self.messages += [said, reply.message]
        return reply

    def reset(self) -> None:
        """Forgets what was said."""
        self.messages.clear()

    def undo(self) -> bool:
        """Forgets the user's last message and what came after it; False where there is none."""
        users = [at for at, each in enumerate(self.messages) if each["role"] == "user"]
        if users:
            del self.messages[users[-1] :]
        return bool(users)
