"""The command line of moeconv: parse, call, print. Heavy imports happen inside the commands."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeconv.command import options, packs
from moeconv.command.options import BitsPerWeight, Calib, Json, Loss, Seed, Size
from moeconv.progress import bar, say
from moeconv.tuned import said
from moert.command.tuning import NOTHING, Asked, prepare_completion
from moert.pack.fence import left_behind, owned_stderr
from moert.pack.files import beside, placed
from moert.pack.messages import (
    USAGE,
    asks_json,
    complain,
    failure,
    own_streams,
    print_failure,
    refused_stream,
    short_of_memory,
    shown,
    silence,
    without_reader,
)

if TYPE_CHECKING:
    from moeconv.command.recipe import Recipe
    from moeconv.conversion.settings import Settings

app = typer.Typer(
    help="Turn a Mixture-of-Experts checkpoint into a model.pack at a loss that you choose.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip


def _print_version(wanted: bool) -> None:
    if wanted:
        from moeconv import __version__
        from moert.built import version_line

        print(version_line("moeconv", __version__))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and the commit."),
    ] = False,
) -> None:
    pass


recipe_app = typer.Typer(help="Conversion recipes: a model, a target, and the expected results.", no_args_is_help=True)
app.add_typer(recipe_app, name="recipe")

EXIT_USER, EXIT_MISSED, EXIT_INTERRUPTED = USAGE, 3, 130


@app.command(cls=options.grouped("quantize"))
@options.taking("quantize")
def quantize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder with a Hugging Face model, a GGUF file, or a hub id.")
    ],
    loss: Loss = None,
    size: Size = None,
    bits_per_weight: BitsPerWeight = None,
    confidence: Annotated[
        str, typer.Option(help="Probability that the loss stays below --loss on further text of the same kind and "
                               "amount as the held-out text; other kinds of text are not promised. 95% needs text of "
                               "30 documents, 90% of 15. none: only the measured loss on the calibration text must "
                               "stay below --loss.", rich_help_panel=options.TARGET)
    ] = "95%",
    resident: Annotated[
        str | None, typer.Option(help="Cache-aware routing for a share of the experts in memory, such as 25%, or for "
                                      "the --memory that moert run will get, such as 2GB, or for several shares, "
                                      "12%,25%. Routing then prefers experts that were used lately, so that less is "
                                      "read. Bits and routing together stay within --loss; bits are fitted to the "
                                      "first share. moert run takes the share that fits its memory.",
                                      rich_help_panel=options.TARGET)
    ] = None,
    calib: Calib = None,
    fields: Annotated[
        str | None, typer.Option(help="Names of the fields in your text: input=question,target=answer. "
                                      "document=title names the field that is equal in all rows of a document: these "
                                      "depend on each other, stay in one part of the text, and are counted as one. "
                                      "document=row says that no rows are alike. Default: the field document, or "
                                      "documents that show in the text (headings, long rows), or runs of rows.",
                                      rich_help_panel=options.TEXT)
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="rouge1, rouge2, rougeL, exact_match, perplexity (per word), token_perplexity "
                                      "(per token), accuracy, f1, or the path of an evaluate module. Such a module "
                                      "is a program with all your rights, so use only one that you trust. Default: "
                                      "the usual metric for the text.",
                                      rich_help_panel=options.TEXT)
    ] = None,
    quantizer: Annotated[
        str | None, typer.Option(help="channel: even steps from the smallest to the largest weight of each output "
                                      "channel. group: scales fitted by least squares, for each group of inputs. "
                                      "gptq: codes chosen so that later weights make up for the rounding errors of "
                                      "earlier ones. trellis: the same with codes of 1 to 4 bits that name pairs of "
                                      "weights, which lose less. source: at 4 bits the codes of a checkpoint that has "
                                      "4 bits without zero points, as they are, and others as group. Default: "
                                      "trellis; where blocks of neurons or --tune group-size need plain codes, gptq, "
                                      "or group without --calib; source for --bits 4 of such a checkpoint.",
                                      rich_help_panel=options.WIDTHS)
    ] = None,
    bits: Annotated[
        str | None, typer.Option(help="Widths that experts may get. A single width needs no --calib; 16 alone writes "
                                      "an unquantized pack. Default: 1,1.5,2,2.5,3,4,8,16; with another "
                                      "quantizer than trellis 2,3,4,8,16.", rich_help_panel=options.WIDTHS)
    ] = None,
    dense_bits: Annotated[
        str | None, typer.Option(help="Width of all other matrices, such as 8, or by role: attention=4,head=8 "
                                      "(roles: attention, mixer, router, ffn, head, embed), or source: as in the "
                                      "checkpoint. Their loss counts for --loss. Default: with --loss, widths for "
                                      "each role of each layer by their measured loss, as for experts; else 8, but "
                                      "for routers.", rich_help_panel=options.WIDTHS)
    ] = None,
    purpose: options.Purpose = "size",
    out: Annotated[Path, typer.Option(help="Path of the new pack.", rich_help_panel=options.PACK)] = Path("model.pack"),
    work: Annotated[
        Path | None, typer.Option(help="Folder of the measurements, for reruns. Default: beside --out, as OUT.work.",
                                  rich_help_panel=options.PACK)
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Number of calibration samples (or windows) that plans are judged on. Default: "
                                      "three quarters of all.", rich_help_panel=options.TEXT)
    ] = None,
    context: Annotated[int, typer.Option(help="Number of tokens in a window of running text.",
                                         rich_help_panel=options.TEXT)] = 256,
    memory: options.Within = None,
    layout: Annotated[
        str | None, typer.Option(help="Order of the experts' bytes: expert (a file for each expert), layer (a file "
                                      "for each layer); for experts with ReLU also columns (blocks of neurons, so "
                                      "that only firing ones are read) or neuron (the same, with all of a neuron in "
                                      "one place); auto (columns if experts are large and each token passes all "
                                      "experts of a layer, as in OPT, else expert). Default: expert; with "
                                      "neurons=predicted, neuron.", rich_help_panel=options.PACK)
    ] = None,
    seed: Seed = 0,
    overwrite: options.Overwrite = False,
    asked: Asked = NOTHING,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure the sensitivity of each expert, choose bits that meet the target, and write the pack."""
    from moeconv.conversion.settings import (
        EVERY_WIDTH,
        Settings,
        parse_bits,
        parse_confidence,
        parse_dense_bits,
        parse_fields,
        parse_resident,
        parse_share,
    )
    from moeconv.conversion.settings import parse_target as target

    out = placed(out)
    own = dict(asked.values)
    own["margin"] = parse_share(own["margin"], said("margin"))
    settings = Settings(
        model, out, work or beside(out, "work"), target(loss, size, bits_per_weight),
        confidence=parse_confidence(confidence), calib=calib, fields=parse_fields(fields),
        metric=metric, quantizer=quantizer, bits=EVERY_WIDTH if bits is None else parse_bits(bits), seed=seed,
        samples=samples, context=context,
        memory_bytes=options.bytes_of(memory), dense_bits=None if dense_bits is None else parse_dense_bits(dense_bits),
        purpose=purpose, resident=parse_resident(resident), layout=layout, overwrite=overwrite, **own,
    )  # fmt: skip
    if _convert(settings, as_json):
        raise typer.Exit(EXIT_MISSED)


@app.command()
def check(
    model: Annotated[
        str, typer.Argument(metavar="MODEL_OR_CONFIG", help="A folder with a Hugging Face model, a GGUF file, a "
                                                            "config.json, or a hub id (only its settings and index are "
                                                            "fetched).")
    ],
    layout: Annotated[str, typer.Option(help="Order of the experts' bytes, as in moeconv quantize.")] = "expert",
    as_json: Json = False,
) -> None:  # fmt: skip
    """Say whether a model can be converted, and how large its pack would be; reads no weights."""
    from moeconv.command.check import as_json as plain
    from moeconv.command.check import check as run
    from moeconv.command.check import lines
    from moeconv.conversion.host import this_host

    found = run(model, this_host(), layout)
    print(shown(json.dumps(plain(found)) if as_json else "\n".join(lines(found))))


@app.command(cls=options.grouped("plan"))
@options.taking("plan")
def plan(
    context: typer.Context,
    what: options.ModelOrWork,
    memory: options.PackMemory = None,
    drive: options.DriveSpeed = None,
    loss: Loss = None,
    size: Size = None,
    bits_per_weight: BitsPerWeight = None,
    purpose: options.Purpose = "size",
    bits: options.PlanBits = None,
    whole_curve: options.Curve = False,
    asked: Asked = NOTHING,
    as_json: Json = False,
) -> None:
    """For a model: estimate the size and speed of its packs, and the time to convert it. For a work directory: the
    plan for a target, from the measurements there. Measures no loss."""
    from moeconv.command import forecast
    from moeconv.command.present import plan_table
    from moeconv.conversion.planning import plan as run
    from moeconv.conversion.settings import parse_bits, parse_target

    if forecast.is_model(what, options.typed(context, asked)):
        expected = forecast.asked(what, memory, drive)
        print(shown(json.dumps(forecast.as_json(expected)) if as_json else "\n".join(forecast.lines(expected))))
        return
    target = parse_target(loss, size, bits_per_weight)
    widths = None if bits is None else parse_bits(bits)
    found = run(Path(what), target, asked["allocation"], asked["signal"], widths, purpose)
    print(shown(json.dumps(_as_json(found)) if as_json else plan_table(found, target, whole_curve)))


for work_on_a_pack in (
    packs.report,
    packs.profile_paths,
    packs.train_hash,
    packs.train_neurons,
    packs.verify,
    packs.push,
):
    app.command()(work_on_a_pack)


@recipe_app.command("run")
def recipe_run(
    recipes: Annotated[list[Path], typer.Argument(metavar="RECIPE", help="Recipe files (TOML).")],
    out: Annotated[Path, typer.Option(help="Folder of the packs and their measurements.")] = Path("build/recipes"),
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let recipes run programs that they name as metrics, with all your "
                                                "rights: read them first.")
    ] = False,
    overwrite: options.Overwrite = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Convert each recipe, reusing earlier measurements, and fail if an expectation does not hold."""
    from moeconv.command.recipe import Recipe, check_apart, named

    check_apart(recipes)
    loaded = {path: Recipe.load(path, out, allow_code, overwrite) for path in recipes}
    failures = list[str]()
    for path, recipe in loaded.items():
        with named(path):
            failures += [f"{recipe.name}: {line}" for line in _run_recipe(recipe, as_json)]
    for line in failures:
        say(f"moeconv: {line}")
    if failures:
        raise typer.Exit(EXIT_MISSED)


def _run_recipe(recipe: Recipe, as_json: bool) -> list[str]:
    """Converts a recipe and prints its result; returns a line for each limit that does not hold."""
    from moeconv.command.present import conversion_table
    from moeconv.command.recipe import as_keys
    from moeconv.conversion.additions import profile_paths as profile
    from moeconv.conversion.conversion import Conversion
    from moeconv.errors import TargetMissed
    from moert.pack.reader import Pack

    try:
        _, report = Conversion(recipe.settings, say, bar, profiled_next=recipe.paths).run()
    except TargetMissed as error:  # the other recipes run nevertheless
        failures = [as_keys(str(error))]
        if as_json:
            print(shown(json.dumps(_outcome(recipe, failures))))
        return failures
    out = recipe.settings.out
    failures = recipe.failures(report)
    print(
        shown(json.dumps({**_outcome(recipe, failures), **_as_json(report)}))
        if as_json
        else conversion_table(report, str(out))
    )
    if recipe.paths:
        profile(Pack.open(out), calib=None, heldout=None, seed=None, samples=recipe.settings.samples, context=None,
                say=say, show=bar, memory_bytes=recipe.settings.memory_bytes)  # fmt: skip
    return failures


def _outcome(recipe: Recipe, failures: list[str]) -> dict[str, object]:
    """Returns the entries of JSON that say whether a recipe passed."""
    missed = _missed("; ".join(failures))
    return {"recipe": recipe.name, "passed": not failures, "failures": failures, **missed}


def _convert(settings: Settings, as_json: bool) -> bool:
    """Runs a conversion and prints it; True if the held-out loss misses the target."""
    from moeconv.command.present import conversion_table, missed_target, next_steps
    from moeconv.conversion.conversion import Conversion
    from moert.pack.paths import PATHS

    manifest, report = Conversion(settings, say, bar).run()
    missed = missed_target(report)
    if as_json:
        print(json.dumps({**_as_json(report), **_missed(missed)}))
    else:
        table, steps = (
            conversion_table(report, str(settings.out)),
            next_steps(report, settings.out, PATHS in manifest.files),
        )
        print(shown(f"{table}\n{steps}"))
    if missed:
        say(f"moeconv: {missed}")
    return missed is not None


def _missed(message: str | None) -> dict[str, object]:
    """Returns the entries of JSON for a result that was written but misses the target."""
    return failure("TargetMissed", message, EXIT_MISSED) if message else {}


def _as_json(report: object) -> dict[str, object]:
    from moeconv.artifacts import to_json

    return to_json(report)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and ends the process: 0, 2 a user's mistake, 3 a missed target, 130 after Ctrl-C,
    141 where the reader of stdout went away."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin slow each other down on a shared machine
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    own_streams()
    prepare_completion("moeconv")
    code = _exit_code(arguments)
    if left_behind():  # threads that still run are not waited for
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


_RESUMING = (["quantize"], ["recipe"], ["train-hash"], ["train-neurons"])


def _exit_code(arguments: list[str] | None) -> int:
    try:
        with owned_stderr():
            code = app(arguments, standalone_mode=False, prog_name="moeconv")
        sys.stdout.flush()
        if code == EXIT_INTERRUPTED:
            resumes = (sys.argv[1:] if arguments is None else arguments)[:1] in _RESUMING
            kept = "; what was measured is kept, run the same command to go on" if resumes else ""
            complain(f"moeconv: interrupted{kept}")
        return code if isinstance(code, int) else 0
    except (BrokenPipeError, SystemExit) as error:
        return without_reader(error)
    except Exception as error:
        if refused_stream(error):
            silence(sys.stdout)
        if (found := _mistake(error)) is None:
            raise
        kind, message = found
        if message.startswith("Usage:"):  # no arguments at all: the help
            complain(message)
        else:
            say(f"moeconv: {message}")
        code = EXIT_MISSED if kind == "TargetMissed" else EXIT_USER
        if asks_json(arguments):
            print_failure(kind, message, code)
        return code


def _mistake(error: Exception) -> tuple[str, str] | None:
    """Returns the name and the message of a user's mistake; None for any other error."""
    from moeconv.errors import ConversionError, missing_extra
    from moert.pack.errors import PackError

    if isinstance(error, (ConversionError, PackError)):
        return type(error).__name__, str(error)
    if isinstance(error, ModuleNotFoundError):
        return None if (advice := missing_extra(error)) is None else ("ExtraMissing", advice)
    if isinstance(error, OSError) and not short_of_memory(error):
        return "OSError", f"{error.filename or 'stdout'}: {error.strerror or error}"
    if short_of_memory(error):
        short = "the system gives no more memory: give a smaller --memory, or this process a higher limit"
        return "OutOfMemory", short
    message = getattr(error, "format_message", None)  # a mistake in the command line, as the parser saw it
    if message is None:
        return None
    text = message()
    return "UsageError", text if text.startswith("Usage:") else f"{' '.join(text.split())} (--help lists the options)"


if __name__ == "__main__":
    main()
