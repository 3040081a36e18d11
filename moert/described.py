"""Settings, each described once: parsed, listed and completed from there. Both programs have a table of them."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moert.pack.errors import Error

HELP = "help"
"""The word that lists settings, in the place of NAME=VALUE."""


class Misasked(Error):
    """`--tune NAME=VALUE` has a name or a value that no setting can have. See [all settings](tune.md), or `--tune
    help`."""


@dataclass(frozen=True)
class Setting:
    """One setting of the programs.

    `name`: its name in Python; `commands`: the commands that take it, as an option of its own where it is `usual`, else
    as --tune NAME=VALUE; `group`: its heading in lists. `default` None is explained by `help`. `values` replaces the
    kind's word in lists. `choices`: all values that there are; `many`: it may be given several times."""

    name: str
    group: str
    commands: tuple[str, ...]
    help: str
    kind: type[str] | type[int] | type[float] | type[bool] = str
    default: Any = None
    usual: bool = False
    choices: tuple[str, ...] = ()
    values: str | None = None
    many: bool = False
    least: int | None = None
    option: str | None = None

    @property
    def called(self) -> str:
        """Returns the name on a command line, without dashes before it."""
        return self.option or self.name.replace("_", "-")

    @property
    def form(self) -> str:
        """Returns the words for its values."""
        return self.values or "|".join(self.choices) or _FORMS[self.kind]

    @property
    def usually(self) -> str:
        """Returns the default as text; empty where the help explains it."""
        return "" if self.default is None or self.kind is bool else str(self.default)

    def parsed(self, text: str) -> Any:
        """Returns the value that a text stands for. Raises Misasked."""
        if self.choices and text not in self.choices:
            raise Misasked(f"{tuned(self.called, text)}: {text!r} is not one of {', '.join(map(repr, self.choices))}")
        if self.kind is bool:
            if text not in _TRUTHS:
                raise Misasked(f"{tuned(self.called, text)}: {text!r} should be true or false")
            return _TRUTHS[text]
        try:
            value: Any = self.kind(text)
        except ValueError:
            raise Misasked(f"{tuned(self.called, text)}: {text!r} should be {_WORDS[self.kind]}") from None
        if self.least is not None and value < self.least:
            raise Misasked(f"{tuned(self.called, text)}: {text} should be at least {self.least}")
        return value


_FORMS = {str: "TEXT", int: "INTEGER", float: "NUMBER", bool: "true|false"}
_WORDS = {int: "a whole number", float: "a number"}
_TRUTHS = {"true": True, "false": False}


def tuned(name: str, value: object = None) -> str:
    """Returns the words of a command line for a setting by its name there, or for one with a value."""
    return f"--tune {name}" if value is None else f"--tune {name}={value}"


def of_command(settings: Iterable[Setting], command: str, usual: bool) -> list[Setting]:
    """Returns the settings of a command: the usual ones, or those of --tune."""
    return [each for each in settings if command in each.commands and each.usual is usual]


def values_of(given: Sequence[str], settings: Collection[Setting]) -> dict[str, Any]:
    """Returns name in Python → value of each NAME=VALUE; of two for one setting the last counts. Raises Misasked."""
    by_name = {each.called: each for each in settings}
    found: dict[str, Any] = {}
    for text in given:
        name, sign, value = text.partition("=")
        setting = by_name.get(name.strip().replace("_", "-"))
        if setting is None:
            raise Misasked(f"{tuned(text)}: {_missing(name.strip(), list(by_name))}")
        if not sign and setting.kind is not bool:
            raise Misasked(f"{tuned(text)} has no value: give {tuned(name, setting.form)}")
        made = setting.parsed(value if setting.kind is str else value.strip()) if sign else True
        found[setting.name] = [*found.get(setting.name, ()), made] if setting.many else made
    return found


def _missing(name: str, known: Sequence[str]) -> str:
    """Returns the end of a message: which name was meant, if one is like this one."""
    from difflib import get_close_matches

    likely = get_close_matches(name, known, 1) or [each for each in known if name and each.startswith(name)][:1]
    meant = f"did you mean {likely[0]}? " if likely else f"there is no setting {name!r}; " if name else ""
    return f"{meant}{tuned(HELP)} lists all"


def listed(settings: Sequence[Setting], width: int) -> str:
    """Returns the lines of --tune help, no wider than `width`."""
    lines = ["Give --tune NAME=VALUE, once for each setting:"]
    for group in dict.fromkeys(each.group for each in settings):
        lines += ["", f"{group}:"]
        for each in (each for each in settings if each.group == group):
            default = f"  [default: {each.usually}]" if each.usually else ""
            lines.append(f"  {each.called}={each.form}{default}")
            lines += textwrap.wrap(each.help, width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def completed(incomplete: str, settings: Iterable[Setting]) -> list[str]:
    """Returns the words of --tune that begin so: names, and behind a name its values."""
    likely = [each for each in settings if f"{each.called}=".startswith(incomplete.partition("=")[0])]
    words = [HELP]
    for each in likely:
        values = each.choices or (tuple(_TRUTHS) if each.kind is bool else ())
        alone = values and (len(likely) == 1 or incomplete.startswith(f"{each.called}="))
        words += [f"{each.called}={value}" for value in values] if alone else [f"{each.called}="]
    return [each for each in words if each.startswith(incomplete)]
