"""Packs on a hub: each is written with a model card that says its loss, on which text, and its sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

from moeconv.artifacts import REPORT, ConversionReport
from moeconv.errors import ConversionError
from moeconv.report.writer import read_report
from moert.pack.manifest import Quality
from moert.pack.reader import MANIFEST, Pack, bits_histogram

_REFUSED = (401, 403)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
CARD = "README.md"
_CARD = """\
---
library_name: moert
tags:
- moert
- mixture-of-experts
- quantized
---

# {name}

A pack of a {family} model for moert, which reads experts from the drive within a memory limit. moeconv made it.

    moert pull {name}
    moert run hf:{name} "some text" --memory 2GB
    moert info hf:{name}    # its contents, and the smallest --memory

| | |
| --- | --- |
{table}

A loss is relative to the source model, on text like the one named; it says nothing of other text.
"""


def push(pack: Pack, name: str, private: bool, overwrite: bool, say: Callable[[str], object]) -> str:
    """Writes a pack and its card to the repository `name`, which is made if it is missing, in one commit; returns the
    commit's address. Files that only an earlier pack had go. Raises ConversionError."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError

    if _NAME.fullmatch(name) is None or ".." in name:
        raise ConversionError(f"{name[:200]!r} is no repository of a hub: give owner/name")
    for _ in pack.verify_hashes():
        pass
    text = card(pack, read_report(pack) if REPORT in pack.manifest.files else None, name)
    files = [MANIFEST, *pack.sizes()]
    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        there = set(api.list_repo_files(name))
        if MANIFEST in there and not overwrite:
            raise ConversionError(f"{name} holds a pack: --overwrite replaces it")
        if strange := sorted(there - {MANIFEST, CARD, ".gitattributes"}) if MANIFEST not in there else []:
            raise ConversionError(f"{name} holds {strange[0]!r} and no pack: give a new repository")
        say(f"writing {len(files)} files, {sum(pack.sizes().values()) / 1e6:,.1f} MB, to {name}")
        gone = sorted(there - {*files, CARD, ".gitattributes"})
        operations: list[Any] = [
            *(CommitOperationDelete(path) for path in gone),
            *(CommitOperationAdd(path, str(pack.file(path))) for path in files),
            CommitOperationAdd(CARD, text.encode()),
        ]
        return str(api.create_commit(name, operations, commit_message="A pack for moert").commit_url)
    except ConversionError:
        raise
    except Exception as error:  # huggingface_hub raises those of the libraries below it too
        reason = " ".join(str(error).split())[:300]
        refused = getattr(getattr(error, "response", None), "status_code", None) in _REFUSED
        if refused or isinstance(error, LocalTokenNotFoundError):
            token = "is the token one that may write (HF_TOKEN)?"
            raise ConversionError(f"{name} can't be written ({reason}): {token}") from None
        raise ConversionError(f"{name} can't be written ({reason}): run the same again later") from None


def card(pack: Pack, report: ConversionReport | None, name: str) -> str:
    """Returns the README.md of a pack for the repository `name`, in Markdown with a head for the hub. `report`: None if
    the pack has none."""
    manifest = pack.manifest
    spec, quantization = manifest.model, manifest.quantization
    widths = ", ".join(f"{count} × {bits:g} bits" for bits, count in bits_histogram(manifest.experts).items())
    experts = sum(entry.file_bytes for entry in manifest.experts)
    other = sum(file.nbytes for file in manifest.files.values())
    rows = [
        ("experts", f"{len(manifest.experts)}, {experts / 1e6:,.1f} MB"),
        ("widths of their matrices", f"{widths} ({quantization.quantizer})"),
        ("everything else", f"{other / 1e6:,.1f} MB"),
        *_losses(report or manifest.quality),
    ]
    if report is not None:
        rows += [
            ("text", PurePath(report.calibration_source).name),
            ("aim", f"{report.target.kind} {report.target.value:g}"),
        ]
        if report.confidence is not None and report.upper_bound is not None:
            rows.append(("promise", f"a loss below {report.upper_bound:.2%}, with {report.confidence:.0%} confidence"))
    table = [f"| {_cell(one)} | {_cell(two)} |" for one, two in rows]
    return _CARD.format(name=name, family=spec.family, table="\n".join(table))


def _losses(found: ConversionReport | Quality | None) -> Iterator[tuple[str, str]]:
    if found is None:
        return
    for part, loss in (("calibration", found.calibration), ("held-out", found.heldout)):
        if loss is not None:
            yield f"loss of {found.metric}, {part} text", f"{loss.loss:.2%} [{loss.low:.2%}, {loss.high:.2%}]"


def _cell(text: str) -> str:
    """Returns text of strangers as one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
