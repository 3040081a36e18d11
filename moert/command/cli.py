"""The command `moert`: parse, call, print."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moert import __version__
from moert.command import console
from moert.command.engine_options import UNSAID, SaidOptions, with_engine_options
from moert.command.figures import figures
from moert.command.info import info
from moert.command.options import (
    CHAT_NEW_TOKENS,
    BeamsOption,
    DriveOption,
    EarlyStopping,
    EarlyStoppingOption,
    FirstTokenOption,
    FrequencyPenaltyOption,
    InputOption,
    LengthPenaltyOption,
    LogitBiasOption,
    LogprobsOption,
    MaxNewTokensOption,
    MinPOption,
    PackArgument,
    PresencePenaltyOption,
    RawOption,
    RepeatPenaltyOption,
    ReturnOption,
    SeedOption,
    StatsOption,
    StopOption,
    SystemOption,
    TemperatureOption,
    TemplateOption,
    Thinking,
    ThinkingOption,
    TopKOption,
    TopPOption,
    bias_of,
    check_logprobs,
    check_raw,
    check_unused,
    longest_text,
)
from moert.command.prompts import Source, check_output, read_prompt
from moert.command.score import score
from moert.errors import RunError
from moert.wording import said

if TYPE_CHECKING:
    from moert.generation.settings import GenerationSettings

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True,
    help="Run a model.pack inside a memory budget.",
    epilog="Exit codes: 0; 2 for a mistake of the user, which is one line; 130 after Ctrl-C; 143 after SIGTERM.",
)  # fmt: skip


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moert {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
@with_engine_options
def run(
    pack: PackArgument,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="Text to continue or transform; stdin if nothing is given.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Read one prompt from a text file.")] = None,
    input_path: InputOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="With --input: write the answers here, not to stdout.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what the file of --output holds.")] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask the prompt as a question, by the model's chat template.")
    ] = False,
    system: SystemOption = None,
    template: TemplateOption = None,
    thinking: ThinkingOption = Thinking.show,
    batch: Annotated[
        int,
        typer.Option(
            min=1,
            help="With --input: run so many prompts at once, so that each expert is read once for all of them; it pays "
            "where experts are read again and again. The answers are the same (but for rounding with --kernels "
            "reference) and come in order, when their batch is done.",
        ),
    ] = 1,
    engine_options: SaidOptions = UNSAID,
    max_new_tokens: MaxNewTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = 0,
    repeat_penalty: RepeatPenaltyOption = 1.0,
    presence_penalty: PresencePenaltyOption = 0.0,
    frequency_penalty: FrequencyPenaltyOption = 0.0,
    logit_bias: LogitBiasOption = None,
    logprobs: LogprobsOption = None,
    stop: StopOption = None,
    first_token: FirstTokenOption = None,
    beams: BeamsOption = 1,
    length_penalty: LengthPenaltyOption = 1.0,
    early_stopping: EarlyStoppingOption = EarlyStopping.false,
    n_return: ReturnOption = 1,
    raw: RawOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with tokens and figures.")] = False,
    stats: StatsOption = False,
) -> None:
    """Run one prompt, or each prompt of a JSONL file."""
    given = [
        name for name, value in (("PROMPT", prompt), ("--file", file), ("--input", input_path)) if value is not None
    ]
    if len(given) > 1:
        raise RunError(f"{' and '.join(given)} exclude each other: give one prompt or one file")
    if output is not None and input_path is None:
        raise RunError("--output goes with --input: for one prompt redirect stdout")
    if overwrite and output is None:
        raise RunError("--overwrite goes with --output: nothing else is replaced")
    if batch != 1 and input_path is None:
        raise RunError(f"--batch {batch} goes with --input: there is one prompt")
    if chat and input_path is not None:
        raise RunError("--chat takes one prompt: --input runs prompts as they are")
    of_chats = {"--system": system, "--template": template, "--thinking": thinking is not Thinking.show or None}
    for name, value in of_chats.items():
        if not chat and value is not None:
            raise RunError(f"{name} goes with --chat: else a prompt is run as it is")
    if chat and beams != 1:
        raise RunError(f"--beams {beams} searches one text: --chat takes the likeliest token each time")
    if raw:
        check_raw(as_json, input_path)
    if input_path is not None and output is not None:
        check_output(input_path, output, sys.stdin, overwrite)
    check_logprobs(logprobs, as_json)
    settings = _settings(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        repeat_penalty=repeat_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        logit_bias=bias_of(logit_bias), logprobs=logprobs, stop=tuple(stop or ()), first_token=first_token,
        beams=beams, length_penalty=length_penalty, n_return=n_return,
        early_stopping={"true": True, "false": False}.get(early_stopping.value, early_stopping.value),
    )  # fmt: skip
    chosen = engine_options.settings().but(template=template)
    longest = longest_text(chosen)
    text = read_prompt(prompt, file, sys.stdin, longest) if input_path is None else ""  # before anything is loaded
    from moert.command.answers import run_prompt, run_records
    from moert.engine import Engine

    engine = Engine.open(pack, chosen)
    to_stderr = stats and not (as_json and input_path is None)
    with engine, figures(engine, as_json) if to_stderr else nullcontext():
        if chat:
            from moert.command.chat import Printer, turn

            turn(engine.conversation(system), text, settings, Printer(engine, thinking is Thinking.show, as_json, raw))
        elif input_path is None:
            run_prompt(engine, text, settings, as_json, console.writer(raw))
        else:
            run_records(engine, Source(input_path, longest), output, batch, settings, as_json)


@app.command()
@with_engine_options
def chat(
    pack: PackArgument,
    system: SystemOption = None,
    template: TemplateOption = None,
    thinking: ThinkingOption = Thinking.show,
    engine_options: SaidOptions = UNSAID,
    max_new_tokens: MaxNewTokensOption = CHAT_NEW_TOKENS,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = 0,
    repeat_penalty: RepeatPenaltyOption = 1.0,
    presence_penalty: PresencePenaltyOption = 0.0,
    frequency_penalty: FrequencyPenaltyOption = 0.0,
    logit_bias: LogitBiasOption = None,
    logprobs: LogprobsOption = None,
    stop: StopOption = None,
    raw: RawOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each answer.")] = False,
    stats: StatsOption = False,
) -> None:
    """Hold a conversation: each line of the input is a message. /help lists commands."""
    if raw:
        check_raw(as_json)
    check_logprobs(logprobs, as_json)
    settings = _settings(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        repeat_penalty=repeat_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        logit_bias=bias_of(logit_bias), logprobs=logprobs, stop=tuple(stop or ()),
    )  # fmt: skip
    chosen = engine_options.settings().but(template=template)
    from moert.command.chat import Printer, converse
    from moert.engine import Engine

    engine = Engine.open(pack, chosen)
    with engine, figures(engine, as_json) if stats else nullcontext():
        printer = Printer(engine, thinking is Thinking.show, as_json, raw)
        converse(engine.conversation(system), settings, printer, longest_text(chosen))


@app.command()
@with_engine_options
def bench(
    context: typer.Context,
    packs: Annotated[list[Path], typer.Argument(metavar="PACK...", help="Directories of packs.", show_default=False)],
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Text to start from; by default some built-in ones.")
    ] = None,
    input_path: InputOption = None,
    engine_options: SaidOptions = UNSAID,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to write after each prompt; an end token does not stop it.")
    ] = 32,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="DIR",
            help="Also run over cache sizes and with parts of the engine left out, see which experts tokens go to, and "
            "draw figures of it all into this folder.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="With --plot: also into a folder with other pictures, and over them.")
    ] = False,
    drive: DriveOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print nothing but one line of JSON for each pack.")] = False,
) -> None:
    """Measure how fast packs run on this device, and how near that is to what is possible."""
    if overwrite and plot is None:
        raise RunError("--overwrite goes with --plot: nothing else is replaced")
    if drive:
        check_unused(context, {"packs", "drive", "plot", "overwrite", "as_json"}, "--drive: it runs no model")
        from moert.bench.command import drives

        drives(packs, plot, as_json, overwrite)
        return
    chosen = engine_options.settings()
    from moert.bench import command
    from moert.bench.measure import BenchSettings

    settings = BenchSettings(chosen, max_new_tokens)
    command.bench(packs, settings, command.texts_of(prompt, input_path, longest_text(chosen)), plot, as_json, overwrite)


app.command()(score)
app.command()(info)


def _settings(**chosen: Any) -> GenerationSettings:
    from moert.generation.settings import GenerationSettings

    settings = GenerationSettings(**chosen)
    unused = " and ".join(map(said, settings.without_effect))
    if unused:
        console.note(f"{unused} would count only above --temperature 0: there the likeliest token is taken each time")
    return settings


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and ends the process: 0, 2 for a user's mistake, 130 after Ctrl-C, 143 after SIGTERM.

    A reader of stdout that goes away ends it by SIGPIPE (141 in a shell).
    """
    console.prepare()
    console.leave(lambda: _exit_code(arguments))


def _exit_code(arguments: list[str] | None) -> int:
    return console.exit_code(lambda: app(arguments, standalone_mode=False, prog_name="moert"), arguments)


if __name__ == "__main__":
    main()
