"""The answers of `moert run`: to one prompt as they are made, to many as lines of JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moert.command import console
from moert.command.prompts import STDIN, LineWriter, PromptRecord, Source, followed, grouped, read_records
from moert.errors import RunError
from moert.pack.errors import PackError
from moert.pack.shown import json_line

if TYPE_CHECKING:
    from moert.engine import Engine
    from moert.generation.answer import Answer
    from moert.generation.generation import GenerationResult
    from moert.generation.settings import GenerationSettings


def run_prompt(
    engine: Engine, prompt: str, settings: GenerationSettings, as_json: bool, show: Callable[[str], None]
) -> None:
    """Text as it is made, by `show`, or at its end JSON with all figures. Raises what Engine.generate does."""
    from moert.generation.answer import Interrupted

    begun = False

    def write(piece: str) -> None:
        nonlocal begun
        begun = True
        show(piece)

    interrupt = None
    try:
        answer = engine.generate(prompt, settings, None if as_json else write)
    except Interrupted as error:
        answer, interrupt = error.answers[0], error
    except (PackError, RunError):
        if begun:
            print(flush=True)  # so that the error has a line for itself
        raise
    for other in answer.others if not as_json else ():
        show(f"\n\n{other.text}")
    print(json_line({**_answer(answer), "stats": engine.stats().to_dict()}) if as_json else "", flush=True)
    if answer.result.stop_reason == "context_full":
        console.note(
            f"the text ends because the model's context is full: {answer.prompt_tokens} prompt tokens and "
            f"{len(answer.result.tokens)} new ones"
        )
    if interrupt is not None:
        raise interrupt


def run_records(
    engine: Engine, source: Source, output: Path | None, batch: int, settings: GenerationSettings, as_json: bool
) -> None:
    """A line of JSON for each of an input. Raises what Engine.generate_many does, and InputInvalid."""

    def check(prompt: str) -> None:
        engine.check(prompt, settings.max_new_tokens, settings.beams)

    groups = grouped(read_records(source, sys.stdin, check), batch)
    # Whoever writes to stdin may wait for an answer first.
    pairs = ((group, list[PromptRecord]()) for group in groups) if source.path == STDIN else followed(groups)
    full = 0
    with LineWriter(output) as writer:
        for group, behind in pairs:
            for answer, record in zip(_answers(engine, group, behind, settings), group, strict=True):
                if answer.finished:
                    writer.write({**record.fields, **(_answer(answer) if as_json else _texts(answer))})
                full += answer.result.stop_reason == "context_full"
    if full:
        console.note(f"{full} of the texts end because the model's context is full (--json says which)")


def _answers(
    engine: Engine, group: Sequence[PromptRecord], behind: Sequence[PromptRecord], settings: GenerationSettings
) -> Iterator[Answer]:
    """The answers to a group as they come, also those that Ctrl-C cuts short; the group behind it is next."""
    from moert.generation.answer import Interrupted

    prompts, coming = ([record.prompt for record in records] for records in (group, behind))
    try:
        yield from engine.generate_many(prompts, settings, coming=coming)
    except Interrupted as interrupt:
        yield from interrupt.answers
        raise


def _answer(answer: Answer) -> dict[str, Any]:
    found = {**_result(answer.result), "prompt_tokens": answer.prompt_tokens}
    return {**found, "others": [*map(_result, answer.others)]} if answer.others else found


def _result(result: GenerationResult) -> dict[str, Any]:
    found = {"output": result.text, "tokens": result.tokens, "stop_reason": result.stop_reason}
    score = {} if result.score is None else {"score": result.score}
    return {**found, **score, **logprobs_of(result)}


def logprobs_of(result: GenerationResult) -> dict[str, Any]:
    """As JSON has them, where there are some."""
    if result.logprobs is None:
        return {}
    told = (
        {**each.chosen._asdict(), "likeliest": [one._asdict() for one in each.likeliest]} for each in result.logprobs
    )
    return {"logprobs": list(told)}


def _texts(answer: Answer) -> dict[str, Any]:
    others = [other.text for other in answer.others]
    return {"output": answer.text, "others": others} if others else {"output": answer.text}
