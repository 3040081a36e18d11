"""report.json of a pack, as the value that the conversion wrote. Packs come from strangers: nothing is believed."""

from __future__ import annotations

from moeconv.artifacts import REPORT, SCHEMA, ConversionReport
from moeconv.errors import ConversionError
from moeconv.strict_json import NotJson, parse
from moert.pack.documents import brief, read
from moert.pack.errors import PackError
from moert.pack.model_spec import ModelSpec
from moert.pack.reader import Pack

MAX_REPORT_BYTES = 1 << 26
"""Of a model with 30,000 experts, each projection of each probed at four widths, it has half of that."""


def read_report(pack: Pack) -> ConversionReport:
    """Every field of the value must be there, but for those with a default, which only some packs have; fields that are
    not known are left out. Raises ConversionError if the pack has no report.json or one that this version does not
    read."""
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
    """That what it says of experts is said of experts of this model. Raises ConversionError."""
    table = report.sensitivity
    if table is None:
        return
    known = set(spec.expert_keys())
    strange = next((key for key in (*table.coverage, *(probe.key for probe in table.costs)) if key not in known), None)
    if strange is not None:
        raise ConversionError(f"{REPORT} speaks of expert {strange}, which the pack has not: convert the model again")
