"""Described settings as options of a command: the usual ones by themselves, all others by --tune NAME=VALUE."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from moert.described import HELP, Misasked, Setting, completed, listed, of_command, tuned, values_of

_NAME = "tune"
_MOST_COLUMNS = 100
_BASH = "complete_bash"
"""How bash asks for words."""
_BEFORE = "_MOERT_BEFORE_WORD"
"""Where the begin of a word is kept that bash does not want."""


@dataclass(frozen=True)
class Asked:
    """The settings of a command, by their names in Python. `given`: those that were typed."""

    values: Mapping[str, Any] = field(default_factory=dict)
    given: Collection[str] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def of(self, names: Collection[str]) -> dict[str, Any]:
        """Returns those of these settings that the command has."""
        return {name: value for name, value in self.values.items() if name in names}


NOTHING = Asked()
"""It stands for the settings in the signature of a command."""


class Mistaken(typer.BadParameter):
    """A mistake in the command line whose message is a line of its own."""

    def format_message(self) -> str:
        return self.message


def command_class(settings: Sequence[Setting], command: str) -> type[TyperCommand]:
    """Returns a class of commands whose help has the groups of its options, and which says where an option went."""
    moved = {each.called: each for each in of_command(settings, command, usual=False)}

    class Grouped(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            try:
                return super().parse_args(ctx, args)
            except Exception as error:
                name = str(getattr(error, "option_name", "")).lstrip("-")
                if name not in moved or any(f"--{name}" in option.opts for option in self.params):
                    raise
                setting = moved[name]
                form = tuned(name) if setting.kind is bool else tuned(name, setting.form)
                raise Mistaken(f"--{name} is now {form}", ctx) from None

        def format_options(self, ctx: Any, formatter: Any) -> None:
            sections: dict[str, list[tuple[str, str]]] = {}
            for each in self.get_params(ctx):
                record = each.get_help_record(ctx)
                if record is not None:
                    usual = "Arguments" if each.param_type_name == "argument" else "Options"
                    sections.setdefault(getattr(each, "rich_help_panel", None) or usual, []).append(record)
            for name, records in sorted(sections.items(), key=lambda each: each[0] == "Options"):
                with formatter.section(name):
                    formatter.write_dl(records)

    return Grouped


def with_settings(
    settings: Sequence[Setting], command: str, defaults: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that puts the options of a command's settings in the place of its parameter `asked`, which
    then gets their values. `defaults`: those that are other ones for this command."""
    usual, rest = (of_command(settings, command, usual) for usual in (True, False))
    usually = {each.name: each.default for each in (*usual, *rest)} | dict(defaults or {})

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        own = signature(function, eval_str=True)
        options = [*(_option(each, usually[each.name]) for each in usual), _tune_option(rest)]
        placed = list[Parameter]()
        for parameter in own.parameters.values():
            placed += options if parameter.name == "asked" else [parameter]

        @wraps(function)
        def taking(**typed: Any) -> None:
            said = values_of(typed.pop(_NAME) or (), rest)
            plain = {each.name: typed.pop(each.name) for each in usual}
            given = {name for name, value in plain.items() if value not in (None, usually[name])} | {*said}
            function(**typed, asked=Asked(usually | plain | said, given))

        taking.__signature__ = own.replace(parameters=placed)  # type: ignore[attr-defined]
        return taking

    return decorated


def _option(setting: Setting, default: Any) -> Parameter:
    kind: Any = list[str] if setting.many else setting.kind
    shown = typer.Option(
        f"--{setting.called}", help=setting.help, metavar=setting.values, min=setting.least,
        show_default=default is not None, rich_help_panel=setting.group,
    )  # fmt: skip
    annotation = Annotated[kind if default is not None else kind | None, shown]  # type: ignore[valid-type]
    return Parameter(setting.name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def _tune_option(settings: Sequence[Setting]) -> Parameter:
    names = ", ".join(each.called for each in settings)

    def checked(context: typer.Context, given: list[str] | None) -> list[str] | None:
        if context.resilient_parsing:
            return given
        if HELP in (given or ()):
            print(listed(settings, min(shutil.get_terminal_size().columns, _MOST_COLUMNS)))
            raise typer.Exit
        try:
            values_of(given or (), settings)
        except Misasked as error:
            raise Mistaken(str(error), context) from None
        return given

    def words(incomplete: str) -> list[str]:
        before = os.environ.get(_BEFORE, "")
        return [each.removeprefix(before) for each in completed(before + incomplete, settings)]

    shown = typer.Option(
        f"--{_NAME}", metavar="NAME=VALUE", callback=checked, is_eager=True, autocompletion=words, show_default=False,
        help=f"Another setting; may be given several times, and {tuned(HELP)} says what each does: {names}.",
    )  # fmt: skip
    annotation = Annotated[list[str] | None, shown]
    return Parameter(_NAME, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)


def prepare_completion(program: str) -> None:
    """Makes ready for a shell that asks how a word goes on, as `eval "$(_MOERT_COMPLETE=source_bash moert)"` has it."""
    asked = os.environ.get(f"_{program.upper()}_COMPLETE")
    if not asked:
        return
    from typer.completion import completion_init  # type: ignore[attr-defined]

    completion_init()
    place = os.environ.get("COMP_CWORD", "")
    if asked == _BASH and place.isdigit():
        _join_words(os.environ.get("COMP_WORDS", "").split("\n")[: int(place) + 1])


def _join_words(words: list[str]) -> None:
    """Writes the words of bash anew, the last of which is to go on. Bash takes NAME=VALUE for three words, and wants
    the third: they become one, and of the last only VALUE counts, and _BEFORE holds the rest."""
    joined = list[str]()
    for number, word in enumerate(words):
        if number and (word == "=" or words[number - 1] == "="):
            joined[-1] += word
        else:
            joined.append(word)
    name, sign, value = joined[-1].partition("=")
    if sign:
        joined[-1] = value
        os.environ[_BEFORE] = name + sign
    os.environ |= {"COMP_WORDS": "\n".join(joined), "COMP_CWORD": str(len(joined) - 1)}
