"""The commands that work on a finished pack."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeconv.command import options
from moeconv.command.options import Calib, Heldout, Json

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from moeconv.progress import Bar


def say(line: str) -> None:
    """Tells a person."""
    print(line, file=sys.stderr, flush=True)


def progress(label: str, total: int, unit: str = "probe") -> AbstractContextManager[Bar]:
    """Shows a person how far a work is."""
    from moeconv.command.progress import bar

    return bar(label, total, unit)


def report(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="A pack that was converted with calibration text.")],
    out: Annotated[
        Path | None, typer.Option(help="A new folder for the page. Default: beside the pack, as PACK.report.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a page that shows why each expert got its bits: index.html, and its figures as PNG and SVG."""
    from moeconv.report.writer import write_report
    from moert.pack.reader import Pack

    found = Pack.open(pack)
    written = write_report(found, out or found.root.parent / f"{found.root.name}.report")
    print(json.dumps([str(path) for path in written]) if as_json else f"{written[0]} and {len(written) - 1} figures")


def profile_paths(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="A pack; the tables are added to it.")],
    calib: Calib = None,
    heldout: Heldout = None,
    samples: Annotated[int | None, typer.Option(help="Samples (or windows) of each split. Default: all.")] = None,
    context: options.PackContext = None,
    seed: Annotated[int | None, typer.Option(help="With --calib: seed of its split. Default: 0.")] = None,
    memory: options.Within = None,
    as_json: Json = False,
) -> None:
    """Record which expert follows which, so that the runtime can load experts before they are asked for.

    Without --calib, the text that the pack was converted with.
    """
    from moeconv.command.present import path_table
    from moeconv.conversion.profile import profile_paths as run
    from moert.pack.reader import Pack

    found, nbytes = run(
        Pack.open(pack), calib=calib, heldout=heldout, seed=seed, samples=samples, context=context, say=say,
        show=progress, memory_bytes=options.bytes_of(memory),
    )  # fmt: skip
    print(json.dumps({**asdict(found), "nbytes": nbytes}) if as_json else path_table(found, nbytes))


def train_hash(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="A pack; the hash function is added to it.")],
    calib: Calib = None,
    heldout: Heldout = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of what training draws, and with --calib of its split. Default: 0.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Samples (or windows) of each split. Default: all, and held out as many as have "
                                      "about 32,000 tokens.")
    ] = None,
    context: options.PackContext = None,
    width: Annotated[
        int | None, typer.Option(help="Features of its networks. Default: as many as the model has, 256 at most; less "
                                      "where it would take more than 2% of the pack, but 128.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Most times through the text. Default: 16.")] = None,
    work: Annotated[
        Path | None, typer.Option(help="Where routing and what was learnt are kept until it is done. Default: beside "
                                       "the pack, as PACK.hash.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="The model it was made from: also measure, on held-out text, what is lost "
                                      "against it where the function takes the routers' place.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="As of quantize, for a pack that was judged by a module of one's own. Default: "
                                      "the pack's, or with --calib what fits the text.")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Train a small network that says from the tokens alone which experts all layers will choose.

    Without --calib, on the text that the pack was converted with.
    """
    from moeconv.command.present import hash_json, hash_table
    from moeconv.conversion.hashing import Asked
    from moeconv.conversion.hashing import train_hash as run
    from moert.pack.reader import Pack

    asked = Asked(calib, heldout, seed, samples, context, width, epochs, work, against, metric)
    found = run(Pack.open(pack), asked, say, progress)
    print(json.dumps(hash_json(found)) if as_json else hash_table(found))


def verify(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="The pack to check.")],
    against: Annotated[str | None, typer.Option(help="The model it was made from.")] = None,
    as_json: Json = False,
) -> None:
    """Check every hash of a pack, and with --against that each expert is its source within its width's error."""
    from moeconv.command.present import verified
    from moeconv.packing.verify import verify as check
    from moeconv.source.checkpoint import Checkpoint
    from moert.pack.reader import Pack

    found = check(Pack.open(pack), None if against is None else Checkpoint.open(against), progress)
    print(json.dumps(asdict(found)) if as_json else verified(found, pack, against))
