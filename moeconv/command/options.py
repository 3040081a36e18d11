"""Options of the command line that several commands have."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from moeconv.tuned import TUNED
from moert.command.tuning import Asked, command_class, with_settings

taking = partial(with_settings, TUNED)
"""Puts the settings of a command in the place of its parameter `asked`."""
grouped = partial(command_class, TUNED)
"""Makes the class of a command that has settings."""
TARGET, TEXT, WIDTHS, PACK = "Target", "Text", "Widths", "Pack and machine"
Json = Annotated[bool, typer.Option("--json", help="Print each result as a JSON object on one line.")]
Calib = Annotated[
    str | None,
    typer.Option(help="Calibration text: a name in calib_data/; a JSONL, CSV or parquet file with the fields input and "
                      "target, text, messages, or input, choices and label; a .txt file; or a data set: "
                      "hf:NAME[/CONFIG], or a folder made by save_to_disk.", rich_help_panel=TEXT),
]  # fmt: skip
Heldout = Annotated[
    str | None,
    typer.Option(
        help="Other text to measure the result on; without it, --calib is split in halves.", rich_help_panel=TEXT
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        help="Seed of the random split of the text and of the random draws behind intervals and bounds.",
        rich_help_panel=PACK,
    ),
]
Loss = Annotated[
    str | None, typer.Option(help="Largest loss: 5% or 0.05. Loss is the relative drop of the metric; for perplexity, "
                                  "which is per word, its relative rise. Default, without --size or "
                                  "--bits-per-weight: 5%.", rich_help_panel=TARGET)
]  # fmt: skip
Size = Annotated[
    str | None,
    typer.Option(
        help="Instead of a loss: most bytes that all experts may take, such as 120MB.", rich_help_panel=TARGET
    ),
]
BitsPerWeight = Annotated[
    float | None,
    typer.Option(
        help="Instead of a loss: most bits for each weight of an expert, scales included, on average.",
        rich_help_panel=TARGET,
    ),
]
ModelOrWork = Annotated[
    str, typer.Argument(metavar="MODEL_OR_WORK", help="A model, as moeconv check takes it; or the --work directory of "
                                                      "an earlier quantize.")
]  # fmt: skip
PlanBits = Annotated[
    str | None,
    typer.Option(
        "--bits", help="Widths that experts may get. Default: all that were measured.", rich_help_panel=TARGET
    ),
]
Within = Annotated[
    str | None, typer.Option("--memory", help="What the whole process may take, such as 4GB. A model that does not fit "
                                              "goes through memory layer by layer. Default: what is free.",
                                              rich_help_panel=PACK)
]  # fmt: skip
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a pack at --out also where it is another model's, or holds a file "
                                           "that no conversion wrote, which is lost. Without it only a pack of the "
                                           "same model is replaced.", rich_help_panel=PACK)
]  # fmt: skip
PackContext = Annotated[
    int | None,
    typer.Option("--context", help="Tokens in a window of running text. Default: as converted, else 256."),
]
Curve = Annotated[bool, typer.Option("--curve", help="Show all plans too: size against predicted and measured loss.")]
PackMemory = Annotated[
    str | None, typer.Option(help="Of a model: memory that its pack would run in, such as 4GB. Default: what is free.")
]
DriveSpeed = Annotated[
    str | None, typer.Option(help="Of a model: how fast the drive of its pack is read, such as 500MB/s. Default: as "
                                  "moert has measured the one here, else 500MB/s.")
]  # fmt: skip


def bytes_of(memory: str | None) -> int | None:
    """Returns the bytes of --memory. Raises SettingsError for text that is no size."""
    from moeconv.conversion.settings import parse_bytes

    return None if memory is None else parse_bytes(memory, "--memory")


def typed(context: typer.Context, asked: Asked) -> list[str]:
    """Returns the names of the options and settings that were typed, whatever their values."""
    sources = {name: context.get_parameter_source(name) for name in context.params if name != "tune"}
    return [*(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"),
            *asked.given]  # fmt: skip
