"""The command line of moeconv: parse, call, print. Heavy imports happen inside the commands."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from moeconv.recipe import Recipe
    from moeconv.sensitivity import Progress
    from moeconv.settings import Settings

app = typer.Typer(
    help="Turn a Mixture-of-Experts checkpoint into a model.pack at a loss that you choose.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip


def _print_version(wanted: bool) -> None:
    if wanted:
        from moeconv import __version__

        print(f"moeconv {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


recipe_app = typer.Typer(help="Conversion recipes: a model, a target, and what must come out.", no_args_is_help=True)
app.add_typer(recipe_app, name="recipe")

EXIT_USER, EXIT_MISSED, EXIT_INTERRUPTED = 2, 3, 130

Json = Annotated[bool, typer.Option("--json", help="Print each result as a JSON object on one line.")]
Calib = Annotated[
    str | None,
    typer.Option(help="Calibration text: a name in calib_data/, or a JSONL, CSV or parquet file with the fields "
                      "input and target, or text."),
]  # fmt: skip
Heldout = Annotated[
    str | None, typer.Option(help="A second file to measure the result on; without it, --calib is split in halves.")
]
Seed = Annotated[int, typer.Option(help="Seed of the split and of the intervals.")]


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A local Hugging Face directory or a hub id.")],
    loss: Annotated[
        str, typer.Option(help="Largest loss: 5% or 0.05. Loss is the relative drop of the metric; for perplexity "
                               "its relative rise.")
    ] = "5%",
    margin: Annotated[
        str, typer.Option(help="Share of --loss to leave free on the calibration text, since other text may lose more.")
    ] = "0%",
    calib: Calib = None,
    heldout: Heldout = None,
    metric: Annotated[
        str | None, typer.Option(help="rouge2, exact_match or perplexity. Default: what fits the model.")
    ] = None,
    quantizer: Annotated[
        str, typer.Option(help="channel: one scale per output channel. group: one per --group-size inputs.")
    ] = "channel",
    group_size: Annotated[
        int | None, typer.Option(help="Inputs per scale for the group quantizer: 32, 64 or 128. Default: 64.")
    ] = None,
    bits: Annotated[str, typer.Option(help="Widths that experts may get. 16 alone writes an unquantised pack.")]
    = "2,3,4,8,16",
    out: Annotated[Path, typer.Option(help="Where the pack goes.")] = Path("model.pack"),
    work: Annotated[
        Path | None, typer.Option(help="Where measurements are kept for reruns. Default: beside --out, as OUT.work.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Calibration samples (or windows) to use. Default: all.")] = None,
    sweep_samples: Annotated[
        int | None, typer.Option(help="Of these, how many the importance of each expert is measured on. Default: all.")
    ] = None,
    heldout_samples: Annotated[int | None, typer.Option(help="Held-out samples to use. Default: all.")] = None,
    context: Annotated[int, typer.Option(help="Tokens in a window of running text.")] = 256,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest generated output. Default: a little above the longest target.")
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure what each expert is worth, give each its width under the target loss, and write the pack."""
    from moeconv.settings import Settings, parse_bits, parse_share

    out = Path(os.path.abspath(out))
    settings = Settings(
        model, out, work or out.parent / f"{out.name}.work", parse_share(loss), parse_share(margin, "--margin"),
        calib, heldout, metric, quantizer, group_size, parse_bits(bits), seed, samples, sweep_samples,
        heldout_samples, context, max_new_tokens,
    )  # fmt: skip
    if _convert(settings, as_json):
        raise typer.Exit(EXIT_MISSED)


@app.command()
def profile_paths(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="A pack; the tables are added to it.")],
    calib: Calib = None,
    heldout: Heldout = None,
    samples: Annotated[int | None, typer.Option(help="Samples (or windows) of each split. Default: all.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens in a window of running text. Default: as converted, else 256.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="With --calib: seed of its split. Default: 0.")] = None,
    as_json: Json = False,
) -> None:
    """Record which expert follows which, so that the runtime can load experts before they are asked for.

    Without --calib, the text that the pack was converted with.
    """
    from moeconv.present import path_table
    from moeconv.profile import profile_paths as run
    from moert.pack.reader import Pack

    found, nbytes = run(
        Pack.open(pack), calib=calib, heldout=heldout, seed=seed, samples=samples, context=context, say=_say
    )
    print(json.dumps({**asdict(found), "nbytes": nbytes}) if as_json else path_table(found, nbytes))


@app.command()
def verify(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="The pack to check.")],
    against: Annotated[str | None, typer.Option(help="The model it was made from.")] = None,
    as_json: Json = False,
) -> None:
    """Check every hash of a pack, and with --against that each expert is its source within its width's error."""
    from moeconv.checkpoint import Checkpoint
    from moeconv.verify import verify as check
    from moert.pack.reader import Pack

    found = check(Pack.open(pack), None if against is None else Checkpoint.open(against))
    compared = "" if found.worst is None else f"; largest error {found.worst:.0%} of what its width allows"
    print(json.dumps(asdict(found)) if as_json else f"{pack}: {found.files} files, {found.experts} experts{compared}")


@recipe_app.command("run")
def recipe_run(
    recipes: Annotated[list[Path], typer.Argument(metavar="RECIPE", help="Recipe files (TOML).")],
    out: Annotated[Path, typer.Option(help="Where packs and measurements go.")] = Path("build/recipes"),
    as_json: Json = False,
) -> None:
    """Convert each recipe, reusing what was measured before, and fail when an expectation does not hold."""
    from moeconv.recipe import Recipe

    loaded = [Recipe.load(path, out) for path in recipes]
    failures = [line for recipe in loaded for line in _run_recipe(recipe, as_json)]
    for line in failures:
        print(f"moeconv: {line}", file=sys.stderr)
    if failures:
        raise typer.Exit(EXIT_MISSED)


def _run_recipe(recipe: Recipe, as_json: bool) -> list[str]:
    from moeconv.conversion import Conversion
    from moeconv.present import conversion_table
    from moeconv.profile import profile_paths as profile
    from moert.pack.reader import Pack

    _, report = Conversion(recipe.settings, _say, _progress(recipe.name)).run()
    out = recipe.settings.out
    print(json.dumps(_as_json(report)) if as_json else conversion_table(report, str(out)))
    if recipe.paths:
        profile(Pack.open(out), calib=None, heldout=None, seed=None, samples=recipe.settings.samples, context=None,
                say=_say)  # fmt: skip
    return [f"{recipe.name}: {line}" for line in recipe.failures(report)]


def _convert(settings: Settings, as_json: bool) -> bool:
    """Runs a conversion and prints it; True if the held-out loss misses the target."""
    from moeconv.conversion import Conversion
    from moeconv.present import conversion_table, missed_target

    _, report = Conversion(settings, _say, _progress("sweep")).run()
    print(json.dumps(_as_json(report)) if as_json else conversion_table(report, str(settings.out)))
    missed = missed_target(report)
    if missed:
        print(f"moeconv: {missed}", file=sys.stderr)
    return missed is not None


def _as_json(report: object) -> dict[str, object]:
    from moeconv.artifacts import to_json

    return to_json(report)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _progress(label: str) -> Progress:
    from moeconv.progress import bar

    return bar(label)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and ends the process: 0, 2 a user's mistake, 3 a missed target, 130 after Ctrl-C."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin slow each other down on a shared machine
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    sys.exit(_exit_code(arguments))


def _exit_code(arguments: list[str] | None) -> int:
    from moeconv.errors import ConversionError, TargetMissed
    from moert.pack.errors import PackError

    try:
        code = app(arguments, standalone_mode=False, prog_name="moeconv")
        sys.stdout.flush()
        if code == EXIT_INTERRUPTED:
            print("moeconv: interrupted; what was measured is kept, run the same command to go on", file=sys.stderr)
        return code if isinstance(code, int) else 0
    except (ConversionError, PackError) as error:
        print(f"moeconv: {error}", file=sys.stderr)
        return EXIT_MISSED if isinstance(error, TargetMissed) else EXIT_USER
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"moeconv: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return EXIT_USER
    except Exception as error:
        message = getattr(error, "format_message", None)  # a mistake in the command line, as the parser saw it
        if message is None:
            raise
        text = message()
        shown = text if text.startswith("Usage:") else f"moeconv: {' '.join(text.split())} (--help lists the options)"
        print(shown, file=sys.stderr)
        return EXIT_USER


if __name__ == "__main__":
    main()
