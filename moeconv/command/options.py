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
    typer.Option(help="Calibration text: a name in calib_data/; a JSONL, CSV or parquet file with the fields input "
                      "and target, text, messages, or input, choices and label; a .txt file with blank lines between "
                      "paragraphs; or a data set: hf:NAME[/CONFIG], or a folder made by save_to_disk.",
                 rich_help_panel=TEXT),
]  # fmt: skip
Heldout = Annotated[
    str | None,
    typer.Option(help="Text that only measures the result. Default: half of --calib.", rich_help_panel=TEXT),
]
Seed = Annotated[
    int,
    typer.Option(
        help="Seed of the random split of the text, and of the random draws for intervals and bounds.",
        rich_help_panel=PACK,
    ),
]
Loss = Annotated[
    str | None, typer.Option(help="Largest loss: 5% or 0.05. Loss is the relative drop of the metric, or the "
                                  "relative rise of perplexity (per word). Default, without --size or "
                                  "--bits-per-weight: 5%.", rich_help_panel=TARGET)
]  # fmt: skip
Size = Annotated[
    str | None,
    typer.Option(
        help="Instead of a loss: the largest size of all experts together, such as 120MB.", rich_help_panel=TARGET
    ),
]
BitsPerWeight = Annotated[
    float | None,
    typer.Option(
        help="Instead of a loss: the most bits for each weight of an expert, on average, with scales.",
        rich_help_panel=TARGET,
    ),
]
Purpose = Annotated[
    str, typer.Option("--for", help="With --loss: the bytes to save: size (of the pack), memory (those that must stay "
                                    "in memory) or speed (those that are read for a token).", rich_help_panel=TARGET)
]  # fmt: skip
ModelOrWork = Annotated[
    str, typer.Argument(metavar="MODEL_OR_WORK", help="A model, as moeconv check takes it; or the --work folder of "
                                                      "an earlier conversion.")
]  # fmt: skip
PlanBits = Annotated[
    str | None,
    typer.Option("--bits", help="Widths that experts may get. Default: all measured widths.", rich_help_panel=TARGET),
]
Within = Annotated[
    str | None, typer.Option("--memory", help="Memory limit of the whole process, such as 4GB. A model that does not "
                                              "fit goes through memory layer by layer. Default: the free memory.",
                                              rich_help_panel=PACK)
]  # fmt: skip
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a pack at --out even if it is of another model, or holds a file "
                                           "that no conversion wrote (that file is lost). Without this option only a "
                                           "pack of the same model is replaced.", rich_help_panel=PACK)
]  # fmt: skip
PackContext = Annotated[
    int | None,
    typer.Option(
        "--context", help="Number of tokens in a window of running text. Default: as in the conversion, else 256."
    ),
]
Curve = Annotated[bool, typer.Option("--curve", help="Show all plans too: size, predicted loss and measured loss.")]
PackMemory = Annotated[
    str | None,
    typer.Option(help="For a model: the memory that its pack will run in, such as 4GB. Default: the free memory."),
]
DriveSpeed = Annotated[
    str | None, typer.Option(help="For a model: the speed of the drive with its pack, such as 500MB/s. Default: the "
                                  "speed that moert measured here, else 500MB/s.")
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
