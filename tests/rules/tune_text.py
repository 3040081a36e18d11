"""docs/tune.md: every setting that is given by --tune, made of the descriptions of both programs.

`python tests/rules/tune_text.py --write` brings it up to date; without --write it only says whether it differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pages import brought_up_to_date

from moeconv.tuned import TUNED
from moert.command.settings import SETTINGS
from moert.described import Setting

TUNE = Path(__file__).resolve().parents[2] / "docs" / "tune.md"
HEAD = """\
# Settings by `--tune`

What few people change is no option of its own: `--tune NAME=VALUE` gives it, once for each setting, and
`moert run --tune help` lists what a command takes. A setting that is true or false needs no value: `--tune raw`. In
Python, and in recipes, each is an argument by the same name, with `_` for `-`. This page is made of the descriptions
that commands and completion are made of (`make readme`).

    moert run model.pack "some text" --tune cache=50% --tune eviction=lru
    moeconv quantize MODEL --calib TEXT --tune signal=fisher

A shell completes names and values after `eval "$(_MOERT_COMPLETE=source_bash moert)"`, and for moeconv after the same
with `_MOECONV_COMPLETE` and its name; zsh and fish are called alike.
"""


def text() -> str:
    """Returns the page."""
    parts = [HEAD.strip("\n"), "<!-- reckoned: settings -->"]
    for program, settings in (("moert", SETTINGS), ("moeconv", TUNED)):
        tuned = [each for each in settings if not each.usual]
        parts.append(f"## {program}")
        for group in dict.fromkeys(each.group for each in tuned):
            parts += [f"### {group}", "\n".join(_rows([each for each in tuned if each.group == group]))]
    return "\n\n".join([*parts, "<!-- end -->"]) + "\n"


def _rows(settings: Sequence[Setting]) -> Iterator[str]:
    yield from ("| setting | default | commands | |", "|---|---|---|---|")
    for each in settings:
        form = f"{each.called}={each.form}".replace("|", "\\|")
        default = f"`{each.usually}`" if each.usually else ""
        yield f"| `{form}` | {default} | {', '.join(each.commands)} | {each.help} |"


if __name__ == "__main__":
    raise SystemExit(brought_up_to_date(TUNE, text()))
