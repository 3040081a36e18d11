"""The list of what a wheel needs: made by pip from wheels that lie in a folder, valid, complete, with hashes."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest

from tests.sbom import Failed, bill, check, main, needs, resolved, written


def wheel(folder: Path, name: str, version: str, requires: Sequence[str] = ()) -> Path:
    """One with nothing in it."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info, extra = f"{name}-{version}.dist-info", "".join(f"Requires-Dist: {each}\n" for each in requires)
    with zipfile.ZipFile(path, "w") as archive:
        head = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nLicense-Expression: MIT\n"
        archive.writestr(f"{info}/METADATA", f"{head}Provides-Extra: dev\n{extra}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheels(tmp_path: Path) -> dict[str, Path]:
    """By the names of what they hold; moert needs others, of which one needs the last."""
    (tmp_path / "dist").mkdir()
    ours = ["some-base>=1", 'of_windows; sys_platform == "win32"', 'only-dev; extra == "dev"']
    return {
        "moert": wheel(tmp_path / "dist", "moert", "0.1.0", ours),
        "some-base": wheel(tmp_path, "some_base", "1.2", ["deepest"]),
        "deepest": wheel(tmp_path, "deepest", "3.0"),
        "only-dev": wheel(tmp_path, "only_dev", "1.0"),
    }


def offline(wheels: dict[str, Path]) -> list[str]:
    return ["--no-index", "--find-links", str(wheels["deepest"].parent)]


def test_the_list_is_valid_complete_and_has_the_hashes_of_the_files(wheels: dict[str, Path]) -> None:
    out = written(wheels["moert"], offline(wheels))
    assert out.name == "moert-0.1.0-py3-none-any.cdx.json"
    document = json.loads(out.read_text(encoding="utf-8"))
    check(json.dumps(document), ["moert", "some-base", "deepest"])
    found = {each["name"]: each for each in (*document["components"], document["metadata"]["component"])}
    assert {*found} == {"moert", "some-base", "deepest"}
    for name, each in found.items():
        assert [one["content"] for one in each["hashes"]] == [sha256(wheels[name].read_bytes()).hexdigest()]
        assert each["purl"] == f"pkg:pypi/{name}@{each['version']}"
    below = {each["ref"]: each.get("dependsOn", []) for each in document["dependencies"]}
    assert below["moert@0.1.0"] == ["some-base@1.2"]
    assert below["some-base@1.2"] == ["deepest@3.0"]
    assert "://" not in json.dumps(document["components"])


def test_what_can_not_be_found_is_said(wheels: dict[str, Path]) -> None:
    wheels["some-base"].unlink()
    with pytest.raises(Failed, match="some-base"):
        written(wheels["moert"], offline(wheels))
    with pytest.raises(Failed, match="no wheel"):
        main([str(wheels["deepest"].parent / "empty")])


def test_a_package_without_a_hash_is_refused(wheels: dict[str, Path]) -> None:
    installed = resolved(wheels["moert"], offline(wheels))
    for item in installed:
        item["download_info"]["archive_info"].clear()
    with pytest.raises(Failed, match="no sha256"):
        bill(wheels["moert"], installed)


def test_a_list_that_is_wrong_is_refused(wheels: dict[str, Path]) -> None:
    good = json.loads(written(wheels["moert"], offline(wheels)).read_text(encoding="utf-8"))
    with pytest.raises(Failed, match="lacks numpy"):
        check(json.dumps(good), ["numpy"])
    with pytest.raises(Failed, match="no version or no sha256"):
        check(json.dumps({**good, "components": [{**each, "hashes": []} for each in good["components"]]}), [])
    with pytest.raises(Failed, match="as a dependency"):
        check(json.dumps({**good, "dependencies": good["dependencies"][:1]} | {"dependencies": [
            {"ref": "moert@0.1.0", "dependsOn": ["lost@1"]}]}), [])  # fmt: skip
    with pytest.raises(Failed, match="not valid"):
        check(json.dumps({**good, "specVersion": 16}), [])


def test_extras_and_other_systems_are_not_needed() -> None:
    asked = {"requires_dist": ["A_b>1", 'c; extra == "dev"', 'd; python_version < "3"', 'e; python_version > "3"']}
    assert list(needs(asked)) == ["a-b", "e"]
    assert list(needs({})) == []
