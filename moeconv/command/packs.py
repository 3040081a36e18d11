"""The commands that work on a finished pack."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moeconv.command import options
from moeconv.command.options import Calib, Heldout, Json
from moeconv.progress import bar, say
from moert.pack.messages import shown

PackMetric = Annotated[
    str | None, typer.Option(help="Metric, as in moeconv quantize, for a pack that was judged by your own module. "
                                  "Such a module is a program with all your rights, so use only one that you trust. "
                                  "Default: the pack's metric, unless it is a module; with --calib, the usual metric "
                                  "for the text.")
]  # fmt: skip


def report(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="A pack that was converted with calibration text.")],
    out: Annotated[
        Path | None, typer.Option(help="A new folder for the page. Default: beside the pack, as PACK.report.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a page that shows why each expert got its bits: index.html, and its figures as PNG and SVG."""
    from moeconv.report.writer import write_report
    from moert.pack.files import beside
    from moert.pack.reader import Pack

    found = Pack.open(pack)
    written = write_report(found, out or beside(found.root, "report"))
    print(
        shown(
            json.dumps([str(path) for path in written]) if as_json else f"{written[0]} and {len(written) - 1} figures"
        )
    )


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
    """Record which expert follows which, so that moert can read experts ahead and choose its eviction policy.

    Without --calib, the text of the pack's conversion is used.
    """
    from moeconv.command.present import path_table
    from moeconv.conversion.additions import profile_paths as run
    from moert.pack.reader import Pack

    found, nbytes = run(
        Pack.open(pack), calib=calib, heldout=heldout, seed=seed, samples=samples, context=context, say=say,
        show=bar, memory_bytes=options.bytes_of(memory),
    )  # fmt: skip
    print(shown(json.dumps({**asdict(found), "nbytes": nbytes}) if as_json else path_table(found, nbytes)))


def train_hash(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="A pack; the hash function is added to it.")],
    calib: Calib = None,
    heldout: Heldout = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the random draws of the training, and with --calib of its split. "
                                      "Default: 0.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Number of samples (or windows) of each split. Default: all calibration "
                                      "samples, and held-out samples with about 32,000 tokens.")
    ] = None,
    context: options.PackContext = None,
    width: Annotated[
        int | None, typer.Option(help="Number of features of its networks. Default: as many as the model has, at "
                                      "most 256; fewer, but at least 128, if they would take more than 2% of the "
                                      "pack.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Most passes through the text. Default: 16.")] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder of the recorded routing and the checkpoints, until the training is "
                                       "done. Default: beside the pack, as PACK.hash.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="The pack's source model: also measure, on held-out text, the loss against it "
                                      "with the function in place of the routers.")
    ] = None,
    metric: PackMetric = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Train a small network that predicts the experts of all layers from the tokens alone.

    Without --calib, the text of the pack's conversion is used.
    """
    from moeconv.command.present import hash_json, hash_table
    from moeconv.conversion.additions import HashAsked
    from moeconv.conversion.additions import train_hash as run
    from moert.pack.reader import Pack

    asked = HashAsked(calib, heldout, seed, samples, context, epochs, work, against, metric, width)
    found = run(Pack.open(pack), asked, say, bar)
    print(shown(json.dumps(hash_json(found)) if as_json else hash_table(found)))


def train_neurons(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="A pack with blocks of neurons; the predictor is added "
                                                              "to it.")],
    calib: Calib = None,
    heldout: Heldout = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the order in which the training reads its examples, and with --calib "
                                      "of its split. Default: 0.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Number of samples (or windows) of each split. Default: as many as show each "
                                      "expert about 32,000 tokens, but at most 131,000 tokens, and 16,000 held-out "
                                      "tokens.")
    ] = None,
    context: options.PackContext = None,
    rank: Annotated[
        int | None, typer.Option(help="Rank of its matrices: the number of features by which neurons are named. "
                                      "Default: a sixteenth of an expert's input features, 8 to 256.")
    ] = None,
    missed: Annotated[
        str, typer.Option(help="Share of the firing neurons' contributions that may go unnamed, and count as zero, "
                               "on the training text. A smaller share reads more.")
    ] = "2%",
    epochs: Annotated[int | None, typer.Option(help="Most passes through the text. Default: 10.")] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder of the recorded firings and the checkpoints, until the training is "
                                       "done. Default: beside the pack, as PACK.neurons.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="The pack's source model: also measure, on held-out text, the loss against it "
                                      "with only the named neurons.")
    ] = None,
    metric: PackMetric = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Train a small network for each layer that predicts which neurons of its experts will fire.

    moert run --tune neurons=predicted reads and computes only these. Without --calib, the text of the pack's conversion
    is used.
    """
    from moeconv.command.present import neurons_json, neurons_table
    from moeconv.conversion.additions import NeuronsAsked
    from moeconv.conversion.additions import train_neurons as run
    from moeconv.conversion.settings import parse_share
    from moert.pack.reader import Pack

    share = parse_share(missed, "--missed")
    asked = NeuronsAsked(calib, heldout, seed, samples, context, epochs, work, against, metric, rank, share)
    found = run(Pack.open(pack), asked, say, bar)
    print(shown(json.dumps(neurons_json(found)) if as_json else neurons_table(found)))


def verify(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="The pack to check.")],
    against: Annotated[str | None, typer.Option(help="The pack's source model.")] = None,
    as_json: Json = False,
) -> None:
    """Check every hash of a pack, and with --against that each expert is its source within the error of its bits."""
    from moeconv.artifacts import REPORT
    from moeconv.command.present import verified
    from moeconv.errors import ConversionError
    from moeconv.packing.packed import verify as check
    from moeconv.report.writer import read_report
    from moeconv.source.checkpoint import Checkpoint
    from moert.pack.reader import Pack

    opened = Pack.open(pack)
    trained = False
    if against is not None and REPORT in opened.manifest.files:
        with suppress(ConversionError):
            trained = read_report(opened).scales is not None
    found = check(opened, None if against is None else Checkpoint.open(against), bar, trained)
    print(shown(json.dumps(asdict(found)) if as_json else verified(found, pack, against)))


def push(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="A finished pack.")],
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository of the hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the pack that the repository holds.")] = False,
    as_json: Json = False,
) -> None:
    """Write a pack to a hub, with a model card that says its loss, text and sizes; moert pull fetches it.

    The token is that of HF_TOKEN, or of hf auth login.
    """
    from moeconv.report.published import push as run
    from moert.pack.reader import Pack

    url = run(Pack.open(pack), name, private, overwrite, say)
    print(shown(json.dumps({"url": url}) if as_json else url))
