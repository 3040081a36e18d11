"""The command `moert`: parse, call, print."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moert import __version__
from moert.command import console
from moert.command.prompts import PromptRecord, Source, check_output, longest_text, read_prompt, read_records
from moert.command.settings import (
    CHAT_NEW_TOKENS,
    PROMPTS,
    CacheDirOption,
    CacheSizeOption,
    DriveOption,
    HostOption,
    HubArgument,
    InputOption,
    KeyOption,
    LinesOption,
    OriginOption,
    PackArgument,
    PacksArgument,
    PortOption,
    StartOption,
    StatsOption,
    SystemOption,
    TokensOption,
    WaitingOption,
    check_shown,
    check_unused,
    engine_settings,
    generation_settings,
    grouped,
    taking,
)
from moert.command.tuning import NOTHING, Asked, prepare_completion
from moert.errors import InputInvalid, RunError, said
from moert.pack.errors import PackError
from moert.pack.messages import in_one_line, json_line

if TYPE_CHECKING:
    from moert.engine.engine import Engine
    from moert.engine.generation import GenerationSettings
    from moert.engine.scoring import Likelihood, Score
    from moert.hub.catalogue import Pulled


def info(
    pack: Annotated[Path | None, typer.Argument(metavar="PACK", help="Folder of the pack.", show_default=False)] = None,
    system: Annotated[
        bool, typer.Option("--system", help="Print this machine's memory, cores and kernels instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the contents of a pack, its loss, and the smallest memory that it runs in; or facts about this machine."""
    if (pack is None) != system:
        raise RunError("moert info describes a pack or this machine: give PACK or --system")
    if pack is None:
        _print_system(as_json)
        return
    from moert.command.description import describe, description_lines
    from moert.engine.budget import room_within
    from moert.pack.reader import Pack

    opened = Pack.open(_here(pack), room_within(None))
    print(json.dumps(describe(opened), indent=1) if as_json else "\n".join(map(in_one_line, description_lines(opened))))


def _print_system(as_json: bool) -> None:
    from moert.command.description import system_facts, system_lines

    facts = system_facts()
    print(json.dumps(facts, indent=1) if as_json else "\n".join(map(in_one_line, system_lines(facts))))


@contextmanager
def figures(engine: Engine, as_json: bool) -> Iterator[None]:
    """Prints the figures of the run at the end, also if Ctrl-C or an error brings the end after a token was made."""
    try:
        yield
    except (KeyboardInterrupt, PackError, RunError):
        if engine.times.new_tokens:
            _print_figures(engine, as_json)
        raise
    _print_figures(engine, as_json)


def _print_figures(engine: Engine, as_json: bool) -> None:
    found = engine.stats()
    print(json.dumps(found.to_dict()) if as_json else "\n".join(found.lines()), file=sys.stderr)


@taking("score")
def score(
    pack: PackArgument,
    text: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="Text to score; stdin if nothing is given.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Score the text of a file.", rich_help_panel=PROMPTS)
    ] = None,
    input_path: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help="JSON lines, each with the field prompt, input or text, and with an encoder target; - is stdin.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="With an encoder: the text to score; the encoder reads the other text.", show_default=False),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Cut texts into windows of this many tokens, without special tokens, and score each window except "
            "its first token, as moeconv measures perplexity (by default with 256). Without this option a text "
            "is scored as a whole.",
            show_default=False,
        ),
    ] = None,
    asked: Asked = NOTHING,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each text, and with --input one for all of them.")
    ] = False,
) -> None:
    """Print the log-likelihood of text, and its perplexity per token and per word."""
    _check_one("text", ("TEXT", text), ("--file", file), ("--input", input_path))
    if target is not None and input_path is not None:
        raise RunError("--target goes with one text: with --input each line has a field target")
    chosen = engine_settings(asked)
    longest = longest_text(chosen)
    alone = read_prompt(text, file, sys.stdin, longest) if input_path is None else ""
    from moert.engine.engine import Engine

    with Engine.open(_here(pack), chosen) as engine:
        if input_path is not None:
            _score_records(engine, Source(input_path, longest), context, as_json)
            return
        found = engine.score(alone, target, context)
        print(json_line(_fields(found)) if as_json else "\n".join(_lines(found)), flush=True)


def _score_records(engine: Engine, source: Source, context: int | None, as_json: bool) -> None:
    from moert.engine.scoring import Likelihood

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


app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True,
    help="Run a model.pack within a memory limit.",
    epilog="Exit codes: 0; 2 for a mistake of the user, which is one line; 130 after Ctrl-C; 143 after SIGTERM.",
)  # fmt: skip


def _print_version(wanted: bool) -> None:
    if wanted:
        from moert.built import version_line
        from moert.kernels import auto_name

        print(version_line("moert", __version__, f"kernels {auto_name()}"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version, the commit and the kernels."
        ),
    ] = False,
) -> None:
    pass


@app.command(cls=grouped("run"))
@taking("run")
def run(
    pack: PackArgument,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="Text to continue or transform; stdin if nothing is given.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Read one prompt from a text file.", rich_help_panel=PROMPTS)
    ] = None,
    input_path: InputOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="With --input: write the answers here, not to stdout.", rich_help_panel=PROMPTS),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the contents of the --output file.", rich_help_panel=PROMPTS)
    ] = False,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Send the prompt as a message, with the model's chat template.", rich_help_panel=PROMPTS
        ),
    ] = False,
    system: SystemOption = None,
    batch: Annotated[
        int,
        typer.Option(
            min=1,
            help="With --input: run this many prompts at once, so that each expert is read once for all of them; "
            "useful if experts are read again and again. The answers are the same (except for rounding with "
            "kernels=reference), and come in order when their batch is done.",
            rich_help_panel=PROMPTS,
        ),
    ] = 1,
    asked: Asked = NOTHING,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with tokens and figures.")] = False,
    stats: StatsOption = False,
) -> None:
    """Run one prompt, or each prompt of a JSONL file."""
    _check_one("prompt", ("PROMPT", prompt), ("--file", file), ("--input", input_path))
    if output is not None and input_path is None:
        raise RunError("--output goes with --input: for one prompt redirect stdout")
    if overwrite and output is None:
        raise RunError("--overwrite goes with --output: nothing else is replaced")
    if batch != 1 and input_path is None:
        raise RunError(f"--batch {batch} goes with --input: there is one prompt")
    if chat and input_path is not None:
        raise RunError("--chat takes one prompt: --input runs prompts as they are")
    of_chats = {"system": system is not None, **{name: name in asked.given for name in ("template", "thinking")}}
    for name, unused in of_chats.items():
        if not chat and unused:
            raise RunError(f"{said(name)} goes with --chat: else a prompt is run as it is")
    if chat and asked["beams"] != 1:
        raise RunError(f"{said('beams', asked['beams'])} searches one text: --chat takes the likeliest token each time")
    check_shown(asked, as_json, input_path)
    if input_path is not None and output is not None:
        check_output(input_path, output, sys.stdin, overwrite)
    settings = _settings(asked)
    chosen = engine_settings(asked)
    longest = longest_text(chosen)
    text = read_prompt(prompt, file, sys.stdin, longest) if input_path is None else ""  # before anything is loaded
    from moert.command.prompts import run_prompt, run_records
    from moert.engine.engine import Engine

    pack = _here(pack)
    if chat:
        from moert.command.chat import Printer, opened, turn

        engine = opened(pack, chosen, settings.max_new_tokens)
    else:
        engine = Engine.open(pack, chosen)
    to_stderr = stats and not (as_json and input_path is None)
    with engine, figures(engine, as_json) if to_stderr else nullcontext():
        if chat:
            printer = Printer(engine, asked["thinking"] == "show", as_json, asked["raw"])
            turn(engine.conversation(system), text, settings, printer)
        elif input_path is None:
            run_prompt(engine, text, settings, as_json, console.writer(asked["raw"]))
        else:
            run_records(engine, Source(input_path, longest), output, batch, settings, as_json)


@app.command(cls=grouped("chat"))
@taking("chat", {"max_new_tokens": CHAT_NEW_TOKENS})
def chat(
    pack: PackArgument,
    system: SystemOption = None,
    asked: Asked = NOTHING,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each answer.")] = False,
    stats: StatsOption = False,
) -> None:
    """Hold a conversation: each line of the input is a message. /help lists commands."""
    check_shown(asked, as_json)
    settings = _settings(asked)
    chosen = engine_settings(asked)
    from moert.command.chat import Printer, converse, opened

    engine = opened(_here(pack), chosen, settings.max_new_tokens)
    with engine, figures(engine, as_json) if stats else nullcontext():
        if sys.stdin.isatty():  # a pipe has its first message at once
            engine.fill()
        printer = Printer(engine, asked["thinking"] == "show", as_json, asked["raw"])
        converse(engine.conversation(system), settings, printer, longest_text(chosen))


@app.command(cls=grouped("serve"))
@taking("serve", {"max_new_tokens": CHAT_NEW_TOKENS})
def serve(
    packs: PacksArgument,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8080,
    key_file: KeyOption = None,
    origins: OriginOption = None,
    most_waiting: WaitingOption = 64,
    cache_dir: CacheDirOption = None,
    cache_size: CacheSizeOption = None,
    asked: Asked = NOTHING,
) -> None:
    """Answer clients that speak OpenAI's, Anthropic's or Ollama's interface, until Ctrl-C."""
    defaults, chosen = _settings(asked), engine_settings(asked)
    from moert.command.serving import folder_of, run_server

    folder, found = folder_of(cache_dir, cache_size), [_here(pack) for pack in packs]
    run_server(found, (host, port), key_file, origins or (), most_waiting, folder, defaults, chosen)


@app.command(cls=grouped("bench"))
@taking("bench")
def bench(
    context: typer.Context,
    packs: PacksArgument,
    prompt: StartOption = None,
    input_path: InputOption = None,
    asked: Asked = NOTHING,
    max_new_tokens: TokensOption = 32,
    drive: DriveOption = False,
    as_json: LinesOption = False,
) -> None:
    """Measure the speed of packs on this device, and compare it with the possible speed."""
    if drive:
        check_unused(context, {"packs", "drive", "as_json"}, "--drive: it runs no model")
        from moert.bench.drive import bench_drives

        for _ in bench_drives(packs, as_json):
            pass
        return
    chosen = engine_settings(asked)
    from moert.bench import command
    from moert.bench.measure import BenchSettings

    texts = command.texts_of(prompt, input_path, longest_text(chosen))
    command.bench([_here(pack) for pack in packs], BenchSettings(chosen, max_new_tokens), texts, as_json)


app.command(cls=grouped("score"))(score)
app.command()(info)


@app.command()
def pull(
    pack: HubArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fetch a pack from a hub into the catalogue, checked file by file; an interrupted one goes on where it ended."""
    from moert.hub.catalogue import pull as fetched
    from moert.hub.client import parse_id

    found = fetched(parse_id(pack), lambda text: None if as_json else print(in_one_line(text)))
    if as_json:
        print(json_line(_of_catalogue(found)))


@app.command("list")
def list_packs(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the packs that were fetched from a hub."""
    from moert.hub.catalogue import home, listed

    packs = listed()
    if as_json:
        print(json_line([_of_catalogue(each) for each in packs]))
    elif not packs:
        print(in_one_line(f"the catalogue in {home()} is empty: moert pull owner/name fetches a pack"))
    for each in () if as_json else packs:
        print(in_one_line(f"hf:{each.id}  {each.nbytes / 1e6:,.1f} MB  commit {each.commit[:10]}  {each.folder}"))


@app.command()
def rm(pack: HubArgument) -> None:
    """Remove a pack from the catalogue."""
    from moert.hub.catalogue import removed
    from moert.hub.client import parse_id

    found = removed(parse_id(pack))
    print(f"removed {found.id}, {found.nbytes / 1e6:,.1f} MB")


def _of_catalogue(found: Pulled) -> dict[str, Any]:
    return {"id": str(found.id), "commit": found.commit, "bytes": found.nbytes, "folder": str(found.folder)}


def _here(pack: Path) -> Path:
    """Returns the folder of a pack, fetched first if hf:owner/name names one that is not in the catalogue."""
    if not str(pack).startswith("hf:"):
        return pack
    from moert.hub.catalogue import located

    return located(str(pack), console.note)


def _check_one(what: str, *sources: tuple[str, object]) -> None:
    """Raises RunError where more than one source, each with its name, is given."""
    given = [name for name, value in sources if value is not None]
    if len(given) > 1:
        raise RunError(f"{' and '.join(given)} exclude each other: give one {what} or one file")


def _settings(asked: Asked) -> GenerationSettings:
    settings = generation_settings(asked)
    unused = " and ".join(map(said, settings.without_effect))
    if unused:
        console.note(f"{unused} would count only above --temperature 0: there the likeliest token is taken each time")
    return settings


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and ends the process: 0, 2 for a user's mistake, 130 after Ctrl-C, 141 where the reader of
    stdout went away, 143 after SIGTERM."""
    console.prepare()
    prepare_completion("moert")
    console.leave(lambda: _exit_code(arguments))


def _exit_code(arguments: list[str] | None) -> int:
    return console.exit_code(lambda: app(arguments, standalone_mode=False, prog_name="moert"), arguments)


if __name__ == "__main__":
    main()
