"""report.json and what else moeconv reads that others may have written: refused in one line, or a harmless page."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar

import pytest
from report_packs import NASTY, SWITCH, full_report, report_pack

from moeconv.artifacts import REPORT, to_json
from moeconv.command.cli import _exit_code
from moeconv.conversion.planning import Inputs, _finished
from moeconv.errors import ConversionError
from moeconv.measure.trial import Evaluation
from moeconv.measure.workdir import Journal
from moeconv.promise.judging import look
from moeconv.report import curves, writer
from moeconv.report.page import Chart
from moeconv.report.sections import marked
from moeconv.report.writer import MAX_REPORT_BYTES, read_report
from moeconv.strict_json import NotJson, parse
from moert.pack.errors import PackError
from moert.pack.manifest import FileEntry
from moert.pack.reader import Pack

pytest.importorskip("matplotlib", reason="the report's figures need matplotlib")
SCRIPT = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 16, 1 << 31, 1 << 63, 10**23, 10**29, -(10**20), 0.5, -0.5, 1e-300, 5e-324, 1e30,
    1e300, 1.7e308, -1e308, "", "x", "2", "nan", SCRIPT, "\u202e\x1b[2J", "x" * 10_000, [], [[]], [1, 2, 3],
    [None] * 3, [1e308] * 3, ["a"], {}, {"a": 1}, {SCRIPT: SCRIPT}, {"2": 5}, [{}], [[1] * 50], "D00/E000", "D99/E999",
]  # fmt: skip
TEXTS = ["Infinity", "-Infinity", "NaN", "1e999", "-1e999", "9" * 5000, "1" * 31, "[" * 70 + "]" * 70, "[" * 50_000,
         '{"a":' * 50_000, '{"a": 1, "a": 2}', '"\\ud800"', '"\\udc00x"', "tru", "", "\x00", "1_0", "+1", "0x10",
         ".5"]  # fmt: skip
MARK = "\u0001here\u0001"


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return Pack.open(report_pack(tmp_path_factory.mktemp("pack") / "p", SWITCH, to_json(full_report(SWITCH))))


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    """A report with every part, few experts in its table so that mutations hit all of it alike."""
    document = to_json(full_report(SWITCH))
    document["samples"] = document["samples"][:1]
    for name in ("costs", "coverage"):
        table = document["sensitivity"][name]
        document["sensitivity"][name] = {key: table[key] for key in list(table)[:3]}
    document["curve"] = document["curve"][-3:]
    measured = document["heldout"]
    document["dense"] = {
        "quantizer": "group", "group_size": 64, "bits": {"head": 8}, "nbytes": 5, "source_nbytes": 16,
        "alone": measured, "matrices": {"head.weight": 4}, "purpose": "memory",
    }  # fmt: skip
    document["standing"] = {
        "asked": 0.95, "documents": 3, "of_one_size": 2.5, "heldout_documents": 2, "needed": 30, "heldout_needed": None,
        "looks": 2, "notes": ["a note"],
    }  # fmt: skip
    document["residences"] = [{
        "share": 0.25, "recent": 2, "sure": 1, "bonus": [0.5], "exact_bytes": 9.5, "bytes": 4.5,
        "calibration": measured, "upper_bound": 0.04, "heldout": measured,
        "alone": [{"bytes": 3.0, "loss": 0.01, "upper": None}],
        "together": [{"bytes": 2.0, "loss": 0.02, "upper": 0.03}],
    }]  # fmt: skip
    document["route"] = {"kind": "hash", "top_k": 1, "width": 8, "alone": measured, "routers": measured}
    document["neurons"] = {
        "rank": 8, "missed": 0.02, "firing": 0.1, "neurons": 0.2, "blocks": 0.3, "per_block": 4, "alone": measured,
        "exact": measured,
    }  # fmt: skip
    return document


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if here:
        yield here
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*here, key))


def mutated(whole: dict[str, Any], place: tuple[Any, ...], rng: random.Random) -> bytes:
    """Another value there, or none, or what is no JSON value; or another name."""
    document = copy.deepcopy(whole)
    *way, last = place
    inner: Any = document
    for key in way:
        inner = inner[key]
    kind = rng.randrange(10)
    if kind == 0:
        del inner[last]
    elif kind == 1 and isinstance(inner, dict):
        inner[rng.choice([SCRIPT, "", "D99/E999", "D00/E000 at 99", "E00/E000", "x" * 500])] = inner.pop(last)
    elif kind < 4:
        inner[last] = MARK
        return json.dumps(document).replace(json.dumps(MARK), rng.choice(TEXTS)).encode()
    else:
        inner[last] = rng.choice(VALUES)
    return json.dumps(document).encode()


class Tags(HTMLParser):
    """What is in a page but text."""

    KNOWN: ClassVar = {
        "html", "head", "meta", "link", "title", "style", "body", "main", "h1", "h2", "p", "div", "b", "span", "nav",
        "a", "section", "figure", "svg", "footer", "script", "table", "thead", "tbody", "tr", "th", "td", "i", "button",
        "details", "summary", "dl", "dt", "dd", "del", "ins", "input", "label", "g", "path", "defs", "use", "clippath",
        "rect", "text", "image", "tspan", "pattern", "circle",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.KNOWN, tag
        self.scripts += tag == "script"
        for name, value in attrs:
            assert not name.startswith("on"), name
            assert "javascript:" not in (value or "")
            assert name not in ("src", "srcdoc", "action"), name


def check_page(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert tags.scripts == 1
    assert page.count("alert(1)") == page.count("alert(1)&lt;") + page.count("alert(1)&gt;")


def check_line(said: str) -> None:
    assert said.isprintable(), said
    assert len(said) < 600, said


class Painter:
    """Makes the parts of every tenth figure, and draws none: that would take a second."""

    def __init__(self) -> None:
        self._asked = 0

    def __call__(self, name: str, width: float, height: float, paint: Any) -> Chart:
        from matplotlib.figure import Figure

        self._asked += 1
        if self._asked % 10 == 0:
            paint(Figure(figsize=(width, height)))
        return Chart(name, "<svg ></svg>", b"", b"")


def shown(pack: Pack, body: bytes, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The page of the pack with this report.json; None where it is refused, in one line."""
    entry = FileEntry(len(body), "0" * 64, 0)
    manifest = pack.manifest
    changed = Pack(pack.root, manifest)
    read = pack.read_file
    with monkeypatch.context() as patch:
        patch.setitem(manifest.files, REPORT, entry)  # type: ignore[arg-type]
        patch.setattr(Pack, "read_file", lambda self, name: body if name == REPORT else read(name))
        try:
            return writer._contents(changed)["index.html"].decode()
        except (ConversionError, PackError) as error:
            check_line(str(error))
            return None


@pytest.mark.parametrize("more", [10, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", range(4))
def test_mutations_of_a_report(
    seed: int, more: int, pack: Pack, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With those of the other seeds every place at least once, and some more often."""
    painter = Painter()
    monkeypatch.setattr(curves, "draw", painter)
    rng = random.Random(seed)
    every = list(places(whole))
    mine = every[seed::4] + [rng.choice(every) for _ in range(more)]
    refused = 0
    for place in mine:
        page = shown(pack, mutated(whole, place, rng), monkeypatch)
        if page is None:
            refused += 1
        else:
            check_page(page)
    assert 0.4 * len(mine) < refused < len(mine)


def test_the_whole_report_is_shown(pack: Pack, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    page = shown(pack, json.dumps(whole).encode(), monkeypatch)
    assert page is not None
    check_page(page)


def test_extremes_are_drawn(pack: Pack, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of the largest numbers that a report may have."""
    for nbytes, loss in ((10**24, 1e308), (0, -1e308)):
        document = copy.deepcopy(whole)
        for point in document["curve"]:
            point |= {"nbytes": nbytes, "loss": loss, "upper": 1.7e308, "predicted_loss": loss}
        document["residences"][0]["alone"] = [{"bytes": 1e308, "loss": loss, "upper": 1.7e308}]
        for name in document["sensitivity"]["costs"]:
            document["sensitivity"]["costs"][name] = [loss, 1e308, -1e308]
        for name in document["sensitivity"]["coverage"]:
            document["sensitivity"]["coverage"][name] = 10**24
        document["target"] = {"kind": "bits", "value": 1e308}
        page = shown(pack, json.dumps(document).encode(), monkeypatch)
        assert page is not None
        check_page(page)


@pytest.mark.parametrize("text", [*TEXTS, "[]", "7", '"x"', "null"])
def test_what_is_no_report_at_all(pack: Pack, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(pack, text.encode(), monkeypatch) is None


def test_a_report_of_any_size_is_not_read(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pack.manifest.files, REPORT, FileEntry(MAX_REPORT_BYTES + 1, "0" * 64, 0))  # type: ignore[arg-type]
    monkeypatch.setattr(Pack, "read_file", lambda *_: pytest.fail("read"))
    with pytest.raises(ConversionError, match="none is larger than"):
        read_report(pack)


def test_a_resealed_pack_through_the_command(
    tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    body = json.dumps(whole).replace('"seed": 0', '"seed": Infinity').encode()
    path = report_pack(tmp_path / "p", SWITCH, body)
    assert _exit_code(["report", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("moeconv: report.json")
    assert said.count("\n") == 1
    assert "Infinity, which is not finite" in said


def test_texts_made_to_be_compared_for_ever() -> None:
    left, right = ("".join(f"x {letter}{number} " for number in range(1000)) for letter in "ab")
    assert marked(left, right) == (left, right)
    assert marked(left[:200], right[:200])[0].count("<del>") > 10
    assert marked(NASTY * 3, NASTY)[1].count("<script>") == 0


# Work directories -----------------------------------------------------------------------------------------------------

INPUTS: dict[str, Any] = {
    "schema": 2, "model": "m", "quantizer": "group", "group_size": 64, "metric": "perplexity", "samples": "s",
    "dense": {"head": 8}, "base_bits": 4, "base": [1.0, 0.1, 0.2, None], "coverage": [["decoder", 0, 1, 5]],
    "costs": [["decoder", 0, 1, [2, 2, 2], [0.1, None, 0.3]]],
    "units": [
        ["head", "", 0, "", 4, 0.1, None, 0.3], ["attention", "decoder", 1, "keys and values", 8, 0.1, 0.2, 0.3],
    ],
}  # fmt: skip


def write_sealed(path: Path, body: bytes) -> None:
    """As a sweep does."""
    Journal(path.with_name("journal.jsonl"), path.parent.name).write(path, body)


def test_mutations_of_what_a_sweep_leaves(tmp_path: Path) -> None:
    rng, every = random.Random(0), list(places(INPUTS))
    assert Inputs.from_json(INPUTS).table.costs
    read = 0
    for number in range(600):
        write_sealed(tmp_path / "planning.json", mutated(INPUTS, every[number % len(every)], rng))
        try:
            _finished(tmp_path)
            read += 1
        except ConversionError as error:
            check_line(str(error))
    assert 0 < read < 400


def test_mutations_of_residences(tmp_path: Path, whole: dict[str, Any]) -> None:
    write_sealed(tmp_path / "planning.json", json.dumps(INPUTS).encode())
    document = {"residences": whole["residences"]}
    rng, every = random.Random(0), list(places(document))
    for number in range(300):
        write_sealed(tmp_path / "residences.json", mutated(document, every[number % len(every)], rng))
        try:
            _finished(tmp_path)
        except ConversionError as error:
            check_line(str(error))


MEASURED = {
    "what": "x", "scores": [[1.0, 2], [0.5, 2]], "nats": [1.0, 2.0], "tokens": [3, 4], "kls": [0.1, 0.2],
    "seconds": 1.5, "flops": 7, "near_ties": 0, "samples": "s", "widths": [[2, 2], [4, 4]],
    "dense": [["head", "", 0, 4], ["attention", "decoder", 0, 8]],
}  # fmt: skip


def test_mutations_of_a_journal(tmp_path: Path) -> None:
    rng, every = random.Random(0), list(places(MEASURED))
    assert Evaluation.from_json(MEASURED).scores == ((1.0, 2), (0.5, 2))
    read = 0
    for number in range(600):
        line = mutated({"id": "a", "subject": "s", **MEASURED}, every[number % len(every)], rng)
        (tmp_path / "journal.jsonl").write_bytes(line.replace(b"\n", b"") + b"\n")
        try:
            journal = Journal(tmp_path / "journal.jsonl", "s")
            with journal.believed():
                found = Evaluation.from_json(journal.get("a") or {})
            assert found.columns().shape == (2, 2)
            assert sum(found.tokens) > 0
            read += 1
        except ConversionError as error:
            check_line(str(error))
    assert 0 < read < 500


@pytest.mark.parametrize(
    "line",
    ["[" * 50_000, "{}", "[]", "7", '{"conversion": 1, "texts": []}', '{"conversion": "c", "texts": 3}',
     '{"conversion": "a", "texts": [[]]}', '{"conversion": "b", "texts": ["t"]}', "\xff", '{"seal": {}}'],
)  # fmt: skip
def test_looks_that_are_none_are_refused(tmp_path: Path, line: str) -> None:
    look(tmp_path, "a", ["t"])
    with (tmp_path / "looks.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConversionError, match=r"looks\.jsonl:2 was changed") as caught:
        look(tmp_path, "d", ["t"])
    check_line(str(caught.value))


def test_recipes_are_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.toml"
    deep, long = b"a = " + b"[" * 50_000, b"a = " + b"9" * 5000
    for body in (deep, long, b"a = 1\na = 2\n", b"\xff", b"#" * (2 << 20), b"model = 3"):
        recipe.write_bytes(body)
        assert _exit_code(["recipe", "run", str(recipe), "--out", str(tmp_path / "o")]) == 2
        said = capsys.readouterr().err
        assert said.startswith("moeconv: ")
        assert said.count("\n") == 1
        assert len(said) < 1000


@pytest.mark.parametrize("text", TEXTS)
def test_strict_json(text: str) -> None:
    with pytest.raises(NotJson) as caught:
        parse(text)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 300


def test_strict_json_takes_what_is_json() -> None:
    value = {"a": [1, -2.5, 1e300, None, True, "ü\U0001f600\n"], "b": {"c": [[[]]]}}
    assert parse(json.dumps(value)) == value
    assert parse(json.dumps(value).encode()) == value
    assert parse("[NaN, 1e999]", finite=False)[1] == float("inf")
