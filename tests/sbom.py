"""Writes beside each wheel of dist/ which packages it needs, with versions and hashes: CycloneDX as JSON. `make sbom`.

Versions are those that pip takes where our constraints hold; hashes are of the files that it would install for the
wheel's platform. Nothing says where they came from: a package of that name, version and hash is the same anywhere.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = SchemaVersion.V1_6
SUFFIX = ".cdx.json"
_CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
_PLATFORMS = ("manylinux2014", "manylinux_2_28")


class Failed(Exception):
    """A list can't be made, or is not what it should be; the message says why."""


def resolved(wheel: Path, options: Sequence[str] = ()) -> list[Mapping[str, Any]]:
    """What pip would install for a wheel, as its report has it. Raises Failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--dry-run",
            "--ignore-installed", "--only-binary=:all:", "--report", report, "--target", folder, "-c", _CONSTRAINTS,
            *_platform(wheel), *options, wheel,
        ]  # fmt: skip
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"pip does not find what {wheel.name} needs: {done.stderr.strip()}")
        found: list[Mapping[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return found


def bill(wheel: Path, installed: Iterable[Mapping[str, Any]]) -> Bom:
    """The list for a wheel. Raises Failed where a package has no sha256."""
    ours, others = Bom(), {}
    for item in installed:
        made = _component(item)
        if made.name == "moert":
            made.type, made.hashes = (
                ComponentType.APPLICATION,
                [_sha256(hashlib.sha256(wheel.read_bytes()).hexdigest())],
            )
        others[made.name] = (made, item["metadata"])
    if "moert" not in others:
        raise Failed(f"{wheel.name} is not in what pip would install for it")
    ours.metadata.component = others["moert"][0]
    ours.metadata.properties.add(Property(name="moert:python", value=platform.python_version()))
    ours.metadata.properties.add(Property(name="moert:wheel", value=wheel.name))
    hashes = sorted(one.content for made, _ in others.values() for one in made.hashes)
    ours.serial_number = uuid5(NAMESPACE_URL, " ".join([wheel.name, *hashes]))
    ours.components.update(made for name, (made, _) in others.items() if name != "moert")
    for made, metadata in others.values():
        ours.register_dependency(made, [others[name][0] for name in needs(metadata) if name in others])
    return ours


def needs(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Names of the packages that one needs without extras."""
    for text in metadata.get("requires_dist", []):
        asked = Requirement(text)
        if asked.marker is None or asked.marker.evaluate({**default_environment(), "extra": ""}):
            yield canonicalize_name(asked.name)


def check(text: str, wanted: Iterable[str]) -> None:
    """That a list is valid, has each of these packages, and of each package a version and a sha256. Raises Failed."""
    if (wrong := JsonStrictValidator(SCHEMA).validate_str(text)) is not None:
        raise Failed(f"the list is not valid CycloneDX: {' '.join(str(wrong).split())[:300]}")
    document = json.loads(text)
    components = {each["name"]: each for each in (*document.get("components", []), document["metadata"]["component"])}
    for name, each in components.items():
        hashes = [one["content"] for one in each.get("hashes", []) if one["alg"] == "SHA-256"]
        if not each.get("version") or not any(len(content) == 64 for content in hashes):
            raise Failed(f"{name} has no version or no sha256")
    listed = {each["ref"]: each.get("dependsOn", []) for each in document["dependencies"]}
    if missing := sorted({*wanted} - {*components}):
        raise Failed(f"the list lacks {', '.join(missing)}")
    if lost := sorted({ref for needed in listed.values() for ref in needed} - {*listed}):
        raise Failed(f"the list names {lost[0]} as a dependency, and does not have it")


def written(wheel: Path, options: Sequence[str] = ()) -> Path:
    """The file beside a wheel. Raises Failed."""
    installed = resolved(wheel, options)
    text = make_outputter(bill(wheel, installed), OutputFormat.JSON, SCHEMA).output_as_string(indent=1)
    ours = next(item["metadata"] for item in installed if canonicalize_name(item["metadata"]["name"]) == "moert")
    check(text, ["moert", *needs(ours)])
    out = wheel.with_name(wheel.name.removesuffix(".whl") + SUFFIX)
    out.write_text(text + "\n", encoding="utf-8")
    return out


def _platform(wheel: Path) -> list[str]:
    """Options for pip where a wheel is for another machine than this one."""
    machine = next((name for name in ("x86_64", "aarch64") if wheel.stem.endswith(name)), platform.machine())
    return [f"--platform={kind}_{machine}" for kind in _PLATFORMS] if machine != platform.machine() else []


def _component(item: Mapping[str, Any]) -> Component:
    metadata, hashes = item["metadata"], item.get("download_info", {}).get("archive_info", {}).get("hashes", {})
    name, version = canonicalize_name(metadata["name"]), metadata["version"]
    if "sha256" not in hashes:
        raise Failed(f"pip gives no sha256 for {name} {version}")
    licence = metadata.get("license_expression")
    return Component(
        name=name, version=version, type=ComponentType.LIBRARY, bom_ref=f"{name}@{version}",
        purl=PackageURL("pypi", None, name, version), hashes=[_sha256(hashes["sha256"])],
        licenses=[LicenseExpression(licence)] if licence else None,
    )  # fmt: skip


def _sha256(content: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=content)


def main(arguments: list[str]) -> int:
    wheels = sorted(Path(arguments[0]).resolve().glob("*.whl"))
    if not wheels:
        raise Failed(f"there is no wheel in {arguments[0]}: run make wheel")
    for wheel in wheels:
        print(written(wheel))
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except Failed as error:
        raise SystemExit(str(error)) from None
