"""The tables of docs/recipes.md: every key of a recipe, its type, an example, and what the command says of its option.

`python tests/rules/recipes_text.py --write` brings them up to date; without --write it only says whether they differ.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import typer

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "docs" / "recipes.md"
sys.path[:0] = [str(ROOT)]

from pages import brought_up_to_date  # noqa: E402

from moeconv.command.cli import app  # noqa: E402
from moeconv.command.recipe import KEYS, Expectations  # noqa: E402
from moeconv.conversion.settings import Options  # noqa: E402
from moeconv.tuned import TUNED  # noqa: E402

EXAMPLES: Mapping[str, str] = {
    "model": '"models/g2p"', "calib": '"g2p"', "heldout": '"held-out.txt"', "loss": '"5%"', "size": '"120MB"',
    "bits_per_weight": "3.2", "confidence": '"95%"', "strict": "true", "margin": '"20%"', "resident": '"25%"',
    "fields": '{input = "question", target = "answer"}', "metric": '"rouge2"', "quantizer": '"trellis"',
    "group_size": "64", "allocation": '"knapsack"', "signal": '"kl"', "per_projection": "true", "bits": "[2, 3, 4, 8]",
    "dense_bits": '"attention=8,head=8"', "purpose": '"memory"',
    "samples": "2000", "sweep_samples": "400", "heldout_samples": "4000",
    "context": "256", "max_new_tokens": "64", "memory": '"4GB"', "cluster": '"auto"',
    "layout": '"layer"', "piece_bytes": "4096", "route": '"hash"', "neurons": '"predicted"', "seed": "0",
    "scales": '"fitted"',
    "profile_paths": "true", "expect": "{heldout_loss_at_most = 0.05}",
}  # fmt: skip
LIMITS: Mapping[str, tuple[str, str]] = {
    "heldout_loss_at_most": ("0.05", "The loss on held-out text is at most this. Without it, at most the target."),
    "calibration_loss_at_most": ("0.05", "The loss on the calibration text is at most this."),
    "expert_bytes_at_most": ("2_300_000", "All experts together take at most so many bytes."),
    "reference_at_least": ("0.6", "The metric of the unquantized model on held-out text is at least this."),
    "reference_at_most": ("230", "The metric of the unquantized model on held-out text is at most this."),
}  # fmt: skip
_SAID = {
    "profile_paths": "Whether moeconv profile-paths runs on the pack too. Default: true.",
    "expect": "Limits that the result must keep, see below.",
}
_NOT_TOML = (type(None), os.PathLike[str])
_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}
_TABLE = re.compile(r"(<!-- reckoned: (?P<name>keys|limits) -->\n).*?(<!-- end -->)", re.DOTALL)


def kind(hint: Any) -> str:
    """Returns the words for a type."""
    if get_origin(hint) is Sequence:
        return "list"
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    toml = [one for one in kinds if one not in _NOT_TOML]
    return " or ".join(kind(one) if get_origin(one) is Sequence else _WORDS.get(one, "table") for one in toml)


def rows(name: str) -> list[tuple[str, str, str, str]]:
    """Returns of each key its name, type, example and meaning."""
    if name == "limits":
        hints = get_type_hints(Expectations)
        return [(key, kind(hints[key]), *LIMITS[key]) for key in hints]
    options = {option.name: option.help for option in typer.main.get_command(app).commands["quantize"].params}  # type: ignore[attr-defined]
    options |= {setting.name: setting.help for setting in TUNED}
    options |= {"model": "A folder with a Hugging Face model, a GGUF file, or a hub id."} | _SAID
    hints = get_type_hints(Options) | {"model": str, "profile_paths": bool, "expect": Mapping}
    placed = [*(key for key in EXAMPLES if key in KEYS), *sorted(KEYS - {*EXAMPLES})]
    return [(key, "table" if key == "expect" else kind(hints[key]), EXAMPLES[key], options[key]) for key in placed]


def _called(option: re.Match[str]) -> str:
    """Returns an option by the name that a recipe has for it."""
    key = option[1].replace("-", "_")
    return f"`{key}`" if key in KEYS else option[0]


def table(name: str) -> str:
    """Returns the rows as a table."""
    lines = ["| key | type | example | meaning |", "|---|---|---|---|"]
    for key, what, example, meaning in rows(name):
        text = re.sub(r"--([a-z][a-z-]*)", _called, meaning)
        lines.append(f"| `{key}` | {what} | `{example}` | {' '.join(text.split())} |")
    return "\n".join(lines) + "\n"


def recipes_text() -> str:
    """Returns the page with both tables as the programs are now."""
    return _TABLE.sub(lambda at: f"{at[1]}{table(at['name'])}{at[3]}", RECIPES.read_text(encoding="utf-8"))


if __name__ == "__main__":
    raise SystemExit(brought_up_to_date(RECIPES, recipes_text()))
