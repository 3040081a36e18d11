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

Settings that few people change are not options of their own. `--tune NAME=VALUE` gives one, and may be repeated;
`moert run --tune help` lists the settings of a command. A setting that is true or false needs no value: `--tune raw`.
In Python and in recipes each is an argument with the same name, with `_` for `-`. This page is made from the
descriptions that the commands use (`make readme`).

    moert run model.pack "some text" --tune cache=50% --tune eviction=lru
    moeconv quantize MODEL --calib TEXT --tune signal=fisher

After `eval "$(_MOERT_COMPLETE=source_bash moert)"` a shell completes names and values; for moeconv use
`_MOECONV_COMPLETE` and its name. zsh and fish work in the same way.
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
