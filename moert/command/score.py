"""`moert score`: how likely a model holds given texts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moert.command.engine_options import UNSAID, SaidOptions, with_engine_options
from moert.command.options import (
    PackArgument,
    longest_text,
)
from moert.command.prompts import PromptRecord, Source, read_prompt, read_records
from moert.errors import InputInvalid, RunError
from moert.pack.shown import json_line

if TYPE_CHECKING:
    from moert.engine import Engine
    from moert.generation.scoring import Likelihood, Score


@with_engine_options
def score(
    pack: PackArgument,
    text: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="Text to score; stdin if nothing is given.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Score the text of a file.")] = None,
    input_path: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help="JSON lines, each with the field prompt, input or text, and with an encoder target; - is stdin.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="With an encoder, which reads the text: what is scored behind it.", show_default=False),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Cut texts into windows of so many tokens, without special ones, and score each but for its first "
            "token, as moeconv measures perplexity (of 256, if it was told nothing else). By default a text is scored "
            "whole.",
            show_default=False,
        ),
    ] = None,
    engine_options: SaidOptions = UNSAID,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each text, and with --input one for all of them.")
    ] = False,
) -> None:
    """Print the log-likelihood of text, and its perplexity a token and a word."""
    given = [name for name, value in (("TEXT", text), ("--file", file), ("--input", input_path)) if value is not None]
    if len(given) > 1:
        raise RunError(f"{' and '.join(given)} exclude each other: give one text or one file")
    if target is not None and input_path is not None:
        raise RunError("--target goes with one text: with --input each line has a field target")
    chosen = engine_options.settings()
    longest = longest_text(chosen)
    alone = read_prompt(text, file, sys.stdin, longest) if input_path is None else ""
    from moert.engine import Engine

    with Engine.open(pack, chosen) as engine:
        if input_path is not None:
            _score_records(engine, Source(input_path, longest), context, as_json)
            return
        found = engine.score(alone, target, context)
        print(json_line(_fields(found)) if as_json else "\n".join(_lines(found)), flush=True)


def _score_records(engine: Engine, source: Source, context: int | None, as_json: bool) -> None:
    from moert.generation.scoring import Likelihood

    texts, total = 0, Likelihood(0.0, 0, 0)
    for number, record in enumerate(read_records(source, sys.stdin, lambda text: None), start=1):
        try:
            found = engine.score(record.prompt, _target(record), context)
        except InputInvalid as error:
            raise InputInvalid(f"text {number} of {source.path}: {error}") from None
        texts, total = number, total + found
        if as_json:
            print(json_line({**record.fields, **_fields(found)}), flush=True)
    told = {"texts": texts, **_figures(total)}
    print(json_line(told) if as_json else "\n".join([f"texts           {texts}", *_lines(total)]), flush=True)


def _target(record: PromptRecord) -> str | None:
    target = record.fields.get("target")
    if target is not None and not isinstance(target, str):
        raise InputInvalid(f"target should be text, found {type(target).__name__}")
    return target


def _figures(found: Likelihood) -> dict[str, Any]:
    return {
        "log_likelihood": found.log_likelihood,
        "scored_tokens": found.scored,
        "words": found.words,
        "perplexity_a_token": found.token_perplexity,
        "perplexity_a_word": found.word_perplexity,
    }


def _fields(found: Score) -> dict[str, Any]:
    return {**_figures(found), "windows": found.windows, "tokens": found.tokens, "logprobs": found.logprobs}


def _lines(found: Likelihood) -> list[str]:
    words = found.word_perplexity
    return [
        f"log-likelihood  {found.log_likelihood:.4f} nats",
        f"perplexity      {found.token_perplexity:.4f} a token, over {found.scored} tokens",
        f"                {words:.4f} a word, over {found.words} words" if words is not None else
        "                none a word: no word ends in what is scored",
    ]  # fmt: skip
