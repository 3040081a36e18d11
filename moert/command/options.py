"""Options that several commands share, and the settings of Python that they stand for."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moert.command.prompts import Longest
from moert.command.settings import PROMPTS, SETTINGS
from moert.command.tuning import Asked, command_class, with_settings
from moert.errors import RunError, said

if TYPE_CHECKING:
    from moert.engine.generation import GenerationSettings
    from moert.engine.settings import EngineSettings


CHAT_NEW_TOKENS = 1024
"""Most tokens of a reply of `moert chat`, if the user names no other number."""

taking = partial(with_settings, SETTINGS)
"""Puts the settings of a command in the place of its parameter `asked`."""
grouped = partial(command_class, SETTINGS)
"""Makes the class of a command that has settings."""


PackArgument = Annotated[Path, typer.Argument(metavar="PACK", help="Folder of the pack.", show_default=False)]
PacksArgument = Annotated[list[Path], typer.Argument(metavar="PACK...", help="Folders of packs.", show_default=False)]
StartOption = Annotated[
    str | None,
    typer.Option("--prompt", help="Text to start from; by default some built-in texts.", rich_help_panel=PROMPTS),
]
TokensOption = Annotated[
    int, typer.Option(min=1, help="Number of tokens to write after each prompt; an end token does not end it.")
]
LinesOption = Annotated[bool, typer.Option("--json", help="Print only one line of JSON for each pack.")]
DriveOption = Annotated[
    bool,
    typer.Option(
        "--drive",
        help="Run no model: measure the speed of the drive of each pack, by the size of a read and the number of "
        "simultaneous reads. With ReLU, print the piece-bytes of moeconv quantize that makes it fastest.",
    ),
]
InputOption = Annotated[
    Path | None,
    typer.Option(
        "--input",
        help="File of JSON lines, each with the field prompt, input or text; - is stdin. Each prompt starts from the "
        "same --seed.",
        rich_help_panel=PROMPTS,
    ),
]
StatsOption = Annotated[bool, typer.Option("--stats", help="Print the figures of the run to stderr.")]
SystemOption = Annotated[
    str | None,
    typer.Option(
        "--system", help="System message: how the model should answer.", show_default=False, rich_help_panel=PROMPTS
    ),
]


def engine_settings(asked: Asked) -> EngineSettings:
    """Returns the settings of the engine. Raises SettingInvalid, InvalidMemory or IoInvalid."""
    from moert.engine.settings import EngineOptions, EngineSettings

    found = asked.of(EngineOptions.__annotations__)
    found["routing"] = found["routing"].strip()
    if found["memory"] is None and found["cache"] is None:
        found["memory"] = "auto"
    return EngineSettings(**found)


def generation_settings(asked: Asked) -> GenerationSettings:
    """Returns the settings of the generation. Raises SettingInvalid, RunError."""
    from moert.engine.generation import GenerationOptions, GenerationSettings

    found = asked.of(GenerationOptions.__annotations__)
    found |= {"logit_bias": bias_of(found["logit_bias"]), "stop": tuple(found["stop"] or ())}
    if "early_stopping" in found:
        found["early_stopping"] = {"true": True, "false": False}.get(found["early_stopping"], found["early_stopping"])
    return GenerationSettings(**found)


def bias_of(given: list[str] | None) -> dict[int, float] | None:
    """Returns token id → value of all --tune logit-bias. Raises RunError."""
    found = {}
    for each in given or ():
        token, _, value = each.partition("=")
        try:
            found[int(token)] = float(value)
        except ValueError:
            raise RunError(f"{said('logit_bias', each)}: give ID=VALUE, the id of a token and a number") from None
    return found or None


def check_shown(asked: Asked, as_json: bool, input_path: Path | None = None) -> None:
    """Raises RunError where logprobs are asked for and nothing would tell them, or raw text and all is JSON."""
    if asked["logprobs"] is not None and not as_json:
        raise RunError(f"{said('logprobs')} goes with --json: text has no place for them")
    if asked["raw"] and (as_json or input_path is not None):
        raise RunError(f"{said('raw')} has no effect with {'--json' if as_json else '--input'}: leave it out")


def longest_text(settings: EngineSettings) -> Longest:
    """Returns the length of the longest text that is read."""
    from moert.engine.budget import letters_within

    return Longest(*letters_within(settings.limit))


def check_unused(context: typer.Context, counts: Collection[str], beside: str) -> None:
    """Raises RunError for an option that was typed and does not count `beside` another."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE" and option.name not in counts:
            raise RunError(f"{option.opts[0]} has no effect with {beside}: leave it out")
