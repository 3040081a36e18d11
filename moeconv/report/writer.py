"""Reports: read from packs and written as pages."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from moeconv.artifacts import REPORT, SCHEMA, ConversionReport
from moeconv.errors import ConversionError
from moeconv.report.page import MARK, page, require_matplotlib
from moeconv.report.sections import (
    coverage_section,
    curve_section,
    dense_section,
    expert_section,
    importance_section,
    path_section,
    read_section,
    sample_section,
    step_section,
    width_section,
)
from moeconv.strict_json import NotJson, parse
from moert.pack.documents import brief, read
from moert.pack.errors import PackError
from moert.pack.files import placed
from moert.pack.model_spec import ModelSpec
from moert.pack.paths import PATHS, TransitionTable
from moert.pack.reader import Pack, pack_around

# Reading report.json of a pack. Packs come from strangers: every value is checked.

MAX_REPORT_BYTES = 1 << 26
"""The largest report.json that is read. For a model with 30,000 experts and each projection probed at four widths, it
has half of these bytes."""


def read_report(pack: Pack) -> ConversionReport:
    """Returns the report of a pack. Every field must be there, but for those with a default, which only some packs
    have; unknown fields are left out. Raises ConversionError if the pack has no report.json or one that this version
    does not read."""
    entry = pack.manifest.files.get(REPORT)
    if entry is None:
        raise ConversionError(
            f"the pack at {pack.root} has no {REPORT}, so nothing is known of its conversion: convert the model again "
            "with moeconv quantize"
        )
    if entry.nbytes > MAX_REPORT_BYTES:
        raise ConversionError(
            f"{REPORT} in {pack.root} has {entry.nbytes} bytes, none is larger than {MAX_REPORT_BYTES}: convert the "
            "model again"
        )
    try:
        document = parse(pack.read_file(REPORT))
    except NotJson as error:
        raise ConversionError(f"{REPORT} in {pack.root} is not JSON ({error}): convert the model again") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA or isinstance(schema, bool):
        raise ConversionError(
            f"{REPORT} in {pack.root} has schema {brief(schema)}, this version of moeconv reads {SCHEMA}: convert "
            "the model again (what was measured in its work directory is reused)"
        )
    try:
        return read(ConversionReport, document, REPORT)
    except PackError as error:
        raise ConversionError(
            f"{REPORT} in {pack.root} is not what moeconv quantize writes ({error}): convert the model again"
        ) from None


def check_about(report: ConversionReport, spec: ModelSpec) -> None:
    """Raises ConversionError for a report on experts that this model does not have."""
    table = report.sensitivity
    if table is None:
        return
    known = set(spec.expert_keys())
    strange = next((key for key in (*table.coverage, *(probe.key for probe in table.costs)) if key not in known), None)
    if strange is not None:
        raise ConversionError(f"{REPORT} speaks of expert {strange}, which the pack has not: convert the model again")


# Writing a report as a directory: index.html, with its figures beside it as SVG and PNG.

INDEX, FIGURES = "index.html", "figures"
_FIGURE = re.compile(r"[a-z0-9-]+\.(svg|png)")


def write_report(pack: Pack, out: Path) -> list[Path]:
    """Writes OUT/index.html and OUT/figures/*.svg, *.png; returns their paths, the page first.

    The page holds all its figures itself. An earlier report at `out` is replaced as a whole. Raises ConversionError
    (no report.json or another schema's, no matplotlib, `out` holds something else or can't be written) or PackError.
    """
    require_matplotlib()
    out = placed(out)
    _check_target(out)
    contents = _contents(pack)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        collected = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            _write(collected, contents)
            _swap(collected, out)
        finally:
            shutil.rmtree(collected, ignore_errors=True)
    except OSError as error:
        raise ConversionError(
            f"can't write the report to {out}: {error.strerror or error}; free some space or choose another --out"
        ) from None
    return [out / name for name in contents]


def _contents(pack: Pack) -> dict[str, bytes]:
    """Returns the contents of every file by its relative path."""
    report, manifest = read_report(pack), pack.manifest
    check_about(report, manifest.model)
    table = None
    if PATHS in manifest.files:
        table = TransitionTable.from_bytes(pack.read_file(PATHS))
        table.check(manifest.model)
    spec = manifest.model
    sections = [
        importance_section(report, spec),
        width_section(manifest),
        dense_section(report, manifest),
        curve_section(report, spec),
        *([read_section(report)] if report.residences else []),
        path_section(table, spec.moe.router.top_k),
        coverage_section(report, spec),
        step_section(report),
        sample_section(report),
        expert_section(report, manifest),
    ]
    contents = {INDEX: page(report, len(manifest.experts), sections).encode()}
    for section in sections:
        for chart in section.charts:
            contents[f"{FIGURES}/{chart.name}.svg"] = chart.svg
            contents[f"{FIGURES}/{chart.name}.png"] = chart.png
    return contents


def _check_target(out: Path) -> None:
    """Raises ConversionError for a target inside a pack, and for one that holds anything but a report."""
    if (pack := pack_around(out)) is not None:
        raise ConversionError(f"{out} lies in the pack {pack}: choose another --out")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConversionError(f"{out} is there and is not a report: it would be lost; choose another --out")
    if out.is_dir() and any(out.iterdir()) and not _is_report(out):
        raise ConversionError(f"{out} holds files that are not a report: they would be lost; choose another --out")


def _is_report(root: Path) -> bool:
    names = {path.relative_to(root).as_posix() for path in root.rglob("*")} - {INDEX, FIGURES}
    folder, start = f"{FIGURES}/", MARK.encode()
    if not all(name.startswith(folder) and _FIGURE.fullmatch(name[len(folder) :]) for name in names):
        return False
    try:
        with open(root / INDEX, "rb") as handle:
            return handle.read(len(start)) == start
    except OSError:
        return False


def _write(root: Path, contents: dict[str, bytes]) -> None:
    for name, body in contents.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(body)
    root.chmod(0o755)  # mkdtemp's own mode shuts others out


def _swap(collected: Path, out: Path) -> None:
    """Puts the new report in place of the old one, which comes back if that fails."""
    if not out.exists():
        os.rename(collected, out)
        return
    old = collected.with_name(f"{collected.name}.old")
    os.rename(out, old)
    try:
        os.rename(collected, out)
    except OSError:
        os.rename(old, out)
        raise
    shutil.rmtree(old)
