"""Results of benches, what of them is kept, and the tables, sentences and the picture that are made of them."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from recipes.bench import blocks, kept, picture, stream
from recipes.bench.blocks import BLOCKS, rendered
from recipes.bench.race import Device, Entry, Outcome
from recipes.bench.result import Result, Row, context, read, row_of_runs, write
from recipes.bench.result import table as table_of
from recipes.bench.stream_packs import Packs
from recipes.bench.streamed import Segment
from recipes.bench.tables import Block
from recipes.bench.tables import speed as tables
from tests import tiny_packs

# The form in which benches hand over their blocks.


def test_aims_say_whether_they_are_met():
    row = Row("bytes", 0.6, "share")
    assert (row.at_most(0.6).aim, row.at_most(0.6).met, row.at_most(0.5).met) == ("≤ 0.6", True, False)
    assert (row.at_least(0.6).aim, row.at_least(0.6).met, row.at_least(0.7).met) == ("≥ 0.6", True, False)
    assert not row.at_least(math.nextafter(0.6, 1)).met, "an aim is met at its limit and not near it"
    assert not row.at_most(math.nextafter(0.6, 0)).met


def test_repeated_runs_give_their_median_and_the_distance_of_the_quartiles():
    row = row_of_runs("time", [4.0, 1.0, 2.0, 3.0, 100.0], "s")
    assert (row.value, row.spread, row.runs) == (3.0, 2.0, 5)
    assert row_of_runs("time", [4.0], "s").spread is None
    with pytest.raises(ValueError, match="time: no runs"):
        row_of_runs("time", [], "s")


def test_an_aim_and_an_interval_keep_what_was_measured():
    row = row_of_runs("time", [1.0, 2.0, 3.0], "s").within(1.1, 2.9, 3).at_most(5)
    assert (row.name, row.value, row.unit, row.spread, row.runs) == ("time", 2.0, "s", 1.0, 3)
    assert (row.low, row.high, row.n, row.met) == (1.1, 2.9, 3, True)


def test_the_file_has_the_context_and_what_is_known_of_every_row(tmp_path):
    rows = [Row("a", 1.5, "s", 0.1, 3).at_most(1), Row("b", 2.0, "bytes")]
    path = write("some", context({"seed": 0}, ["safetensors"]), rows, tmp_path / "new")
    assert path == tmp_path / "new" / "some.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert set(found) == {"context", "rows"}
    where = found["context"]
    assert set(where) == {"commit", "changed", "date", "seconds", "hardware", "versions", "settings"}
    assert set(where["hardware"]) == {"processor", "cores", "memory_gib", "isa"}
    assert where["settings"] == {"seed": 0}
    assert {"python", "numpy", "torch", "safetensors"} <= set(where["versions"])
    assert found["rows"][0] == {
        "name": "a", "value": 1.5, "unit": "s", "spread": 0.1, "runs": 3, "aim": "≤ 1", "met": False,
    }  # fmt: skip
    assert found["rows"][1] == {"name": "b", "value": 2.0, "unit": "bytes", "runs": 1}
    assert [file.name for file in path.parent.iterdir()] == ["some.json"]


def test_what_was_written_is_read_again(tmp_path):
    rows = [Row("a", 1.5, "s").within(1, 2, 9).at_least(1), Row("b", 2.0, "bytes")]
    result = read(write("some", {"commit": "abc"}, rows, tmp_path))
    assert result == Result({"commit": "abc"}, rows)
    assert result.by_name["b"] == rows[1]


@pytest.mark.parametrize("text", ["", "{}", '{"context": {}, "rows": [{"nam": 1}]}', '{"context": {}, "rows": 1}'])
def test_what_is_no_result_is_refused_by_name(tmp_path, text):
    path = tmp_path / "some.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"some\.json is no result file"):
        read(path)


def test_two_rows_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two rows are called 'a'"):
        _ = Result({}, [Row("b", 1, ""), Row("a", 1, ""), Row("a", 2, "")]).by_name


def git(*command):
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *author, *command], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for variable in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(variable, raising=False)
    git("init")
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "README.md").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    return tmp_path


def test_a_checkout_without_changes_is_named_by_its_commit(checkout):
    where = context({})
    assert not where["changed"]
    assert len(where["commit"]) == 12
    (checkout / "README.md").write_text("2")
    (checkout / "docs").mkdir()
    (checkout / "docs" / "some.json").write_text("2")
    assert context({}) | {"date": 0, "seconds": 0} == where | {"date": 0, "seconds": 0}


@pytest.mark.parametrize("file", ["code.py", "new.py"])
def test_changed_and_new_files_are_told(checkout, file):
    clean = context({})["commit"]
    (checkout / file).write_text("2")
    assert (context({})["commit"], context({})["changed"]) == (f"{clean}+", True)


def test_a_row_that_came_to_no_number_costs_no_other(tmp_path, capsys):
    path = write("some", context({}), [Row("a", float("nan"), "s"), Row("b", 2.0, "s")], tmp_path)
    found = read(path)
    assert ([row.name for row in found.rows], found.context["no number"]) == (["b"], ["a"])
    assert capsys.readouterr().err == "no number: a\n"


def test_a_context_that_json_cannot_hold_is_refused_and_leaves_the_old_file(tmp_path):
    write("some", context({}), [Row("a", 1.0, "s")], tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        write("some", context({"wrong": float("nan")}), [Row("a", 2.0, "s")], tmp_path)
    assert json.loads((tmp_path / "some.json").read_text())["rows"][0]["value"] == 1.0


def test_the_table_has_a_line_for_each_row_and_counts_the_aims():
    rows = [Row("a", 1.5, "s").at_most(1), Row("long name", 1234567.0, "bytes").at_least(1), Row("c", 0.012345, "s")]
    lines = table_of(rows).splitlines()
    assert len(lines) == 5
    assert lines[1].endswith("NO")
    assert lines[2].split() == ["long", "name", "1,234,567", "bytes", "1", "≥", "1", "yes"]
    assert "0.01235" in lines[3] or "0.01234" in lines[3]
    assert lines[-1] == "1 of 2 aims met"


# Tables and sentences of the text from result files: made-up results, made-up text.

WHERE = {
    "commit": "0123456789ab",
    "changed": False,
    "date": "2026-01-02T03:04:05+00:00",
    "hardware": {"processor": "Some CPU", "cores": 2, "memory_gib": 24, "isa": "avx2"},
    "settings": {},
}
ROWS = [
    Row("speed", 12.345, "tokens/s").at_least(10),
    Row("ratio", 1.62, "× the peer's").at_most(1),
    Row("share", 0.123, "of naive").at_most(0.1),
    Row("loss", -0.04, "%").within(-0.3, 0.21, 60),
    Row("bytes", 1234567.0, "bytes"),
]
RESULT = Result(WHERE, ROWS)


def parts(result):
    return [[("", "value"), ("ratio", "{ratio}"), ("speed", "{speed}")], "It is {speed|.1f} a second."]


@pytest.fixture
def one_block(monkeypatch):
    for module in (blocks, kept):
        monkeypatch.setattr(module, "BLOCKS", {"some": Block("bench", parts)})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{speed}", "12.3"),
        ("{speed|.2f} tokens/s", "12.35 tokens/s"),
        ("{bytes}", "1,234,567"),
        ("{loss|%}", "0.0%"),
        ("{loss|.2%}", "-0.04%"),
        ("{loss|interval.1%}", "0.0% (-0.3% to 0.2%)"),
        ("{speed|interval}", "12.3"),
        ("{loss@n} samples, {loss@spread}{loss@unit}", "60 samples, %"),
        ("{ratio}", "1.62"),
        ("{ratio|.1f} ×", "1.6 ×"),
        ("{share|%}", "12%"),
        ("{ratio}, {ratio}, {speed}", "1.62, 1.62, 12.3"),
        ("{ratio@runs}", "1"),
        ("no figure", "no figure"),
        ("", ""),
    ],
)
def test_cells(template, text):
    assert blocks.filled(template, RESULT) == text


def test_what_was_measured_several_times_has_its_spread():
    rows = [Row("a", 0.4321, "", 0.02, 5), Row("b", 1234.5, "s", 20.0, 5), Row("c", 4.4, "s", 0.001, 5)]
    said = blocks.filled("{a} {a|%} {b} {c|.1f} {a|.1f}", Result(WHERE, [*rows, Row("d", 1.0, "")]))
    assert said == "0.432 ± 0.01 43% ± 1% 1,234 ± 10 4.4 0.4"


def test_a_row_that_is_not_there_is_an_error_unless_its_part_failed():
    with pytest.raises(blocks.RowMissing, match="no row 'spee'; nearest: 'speed'"):
        blocks.filled("{spee}", RESULT)
    failed = Result({**WHERE, "settings": {"failed": ["llama"]}}, ROWS)
    assert blocks.filled("{spee}", failed) == "failed"
    assert blocks.filled("{speed}", failed) == "12.3"


TEXT = "top\n<!-- table: some -->\nold\n<!-- end -->\nrest <!-- help: x -->\nhelp\n<!-- end -->\n"
NEW = """top
<!-- table: some -->
| | value |
|---|---|
| ratio | 1.62 |
| speed | 12.3 |

*Commit 0123456, 2026-01-02, Some CPU, 2 cores, 24 GiB, avx2.*

It is 12.3 a second.
<!-- end -->
rest <!-- help: x -->
help
<!-- end -->
"""


def test_a_block_is_made_from_its_result_and_nothing_else_changes(one_block):
    assert blocks.regenerated(TEXT, {"bench": RESULT}) == NEW
    assert blocks.regenerated(NEW, {"bench": RESULT}) == NEW


def test_a_block_without_its_result_stays_and_is_told(one_block):
    assert blocks.regenerated(TEXT, {"other": RESULT}) == TEXT
    assert blocks.waiting(TEXT, {"other": RESULT}) == ["some"]
    assert blocks.waiting(TEXT, {"bench": RESULT}) == []


def test_a_table_of_results_with_other_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="'some' has 2 cells under a head of 3"):
        blocks.markdown([("processor", "", "moert"), ("some", "1")])


def test_a_block_without_a_table_ends_with_its_run():
    made = blocks.rendered(["One.", "It is {speed|.1f} a second."], RESULT)
    assert made.startswith("One.\n\nIt is 12.3 a second.\n\n*Commit 0123456")


def test_a_block_that_nothing_defines_is_refused(one_block):
    with pytest.raises(ValueError, match="no table is called other"):
        blocks.regenerated(TEXT.replace("some", "other"), {"bench": RESULT})


def test_all_missed_aims_can_be_listed():
    text = "<!-- table: missed -->\n<!-- end -->"
    made = blocks.regenerated(text, {"bench": RESULT})
    assert "| bench | ratio | 1.62 × the peer's | ≤ 1 |" in made
    assert "| bench | 1 of 3 |" in made
    assert "speed" not in made
    assert "None was missed." in blocks.regenerated(text, {"bench": Result(WHERE, ROWS[:1])})
    assert blocks.regenerated(text, {}) == text


def test_a_result_is_kept_with_its_missed_aims(one_block, tmp_path):
    source = write("bench", WHERE, ROWS, tmp_path / "build")
    assert kept.keep(source, tmp_path / "docs") == tmp_path / "docs" / "bench.json"
    assert read(tmp_path / "docs" / "bench.json") == RESULT


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"commit": "0123+", "changed": True}, "differ from commit 0123: commit, then"),
        ({"settings": {"commits of the splits": ["0123456789ab", "another"]}}, r"other commits \(another\)"),
    ],
)
def test_a_result_that_stands_for_no_single_commit_is_refused(one_block, tmp_path, where, said):
    source = write("bench", WHERE | where, ROWS, tmp_path)
    with pytest.raises(ValueError, match=said):
        kept.keep(source, tmp_path / "docs")
    assert not (tmp_path / "docs").exists()


def test_what_can_be_kept_is_kept_and_the_rest_is_told(one_block, tmp_path, monkeypatch, capsys):
    sources = [write("bench", WHERE, ROWS, tmp_path), write("other", WHERE | {"changed": True}, ROWS, tmp_path)]
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    monkeypatch.setattr(kept, "RESULTS", tmp_path / "docs")
    assert kept.main([]) == 1
    assert "run the benches first" in capsys.readouterr().err
    assert kept.main(sources) == 1
    said = capsys.readouterr()
    assert said.out == "docs/bench.json kept, of commit 0123456789ab\n"
    assert "other.json is not kept: it was measured with files that differ" in said.err
    assert kept.main(sources[:1]) == 0


def test_a_result_that_its_tables_cannot_be_made_from_is_refused(one_block, tmp_path):
    with pytest.raises(blocks.RowMissing, match="no row 'ratio'"):
        kept.keep(write("bench", WHERE, ROWS[:1], tmp_path), tmp_path / "docs")


def test_a_large_result_keeps_what_is_quoted_or_missed_and_counts_the_rest(one_block, tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "MOST_BYTES", 500)
    rows = [*ROWS, Row("met", 1.0, "s").at_most(2), Row("missed", 3.0, "s").at_most(2)]
    small = read(kept.keep(write("bench", WHERE, rows, tmp_path / "build"), tmp_path / "docs"))
    assert [row.name for row in small.rows] == ["speed", "ratio", "share", "missed"]
    assert small.context["left_out"] == {"rows": 3, "aims_met": 1}
    whole = Result(WHERE, rows)
    assert blocks.regenerated(TEXT, {"bench": small}) == blocks.regenerated(TEXT, {"bench": whole})
    assert "| bench | 2 of 5 |" in blocks.missed_table({"bench": small})


def test_speed_is_kept_and_shown_for_each_kind_of_processor(one_block, tmp_path, monkeypatch, capsys):
    for module in (blocks, kept):
        monkeypatch.setattr(module, "PER_KIND", ("bench",))
    rows = [Row("speed", 10.0, "tokens/s", 1.0, 5), *ROWS[1:]]
    amx = WHERE | {"hardware": WHERE["hardware"] | {"processor": "Another(R) CPU", "isa": "amx"}}
    for where in (amx, WHERE):
        kept.keep(write("bench", where, rows, tmp_path / "build"), tmp_path)
    assert {path.name for path in tmp_path.glob("*.json")} == {"bench-amx.json", "bench-avx2.json"}
    made = blocks.regenerated(TEXT, {"bench-amx": Result(amx, rows), "bench-avx2": Result(WHERE, rows)})
    assert "| processor | | value |" in made
    assert "| Another CPU, amx | speed | 10 ± 0.5 |" in made
    assert "| Some CPU, avx2 | speed | 10 ± 0.5 |" in made
    assert "Another CPU, amx: It is 10.0" in made
    assert made.count("*Commit 0123456") == 2
    for value, told in ((9.5, []), (8.9, ["speed was 10 and is 8.9 tokens/s"]), (12.0, [])):
        now = Result(WHERE, [Row("speed", value, "tokens/s", 0.5, 5), *ROWS[1:]])
        assert list(kept.fallen(Result(WHERE, rows), now)) == told
        assert list(kept.fallen(Result(amx, rows), now)) == []
    kept.keep(write("bench", WHERE, [Row("speed", 8.9, "tokens/s"), *ROWS[1:]], tmp_path / "build"), tmp_path)
    assert capsys.readouterr().err == "bench-avx2: speed was 10 and is 8.9 tokens/s\n"


def complete(parts, rows, settings):
    """A result that has every row which the parts name."""
    result = Result({**WHERE, "settings": settings}, rows)
    names = set(blocks.names(str(list(parts(result))))) - set(result.by_name)
    return Result(result.context, [*rows, *(Row(name, 0.5, "share").within(0.4, 0.6, 9) for name in sorted(names))])


SEEN = {  # rows and settings that a definition looks at before it names others
    "demo": [
        "g2p: target",
        "wiki: target",
        "g2p: matrices at 2 bits",
        "wiki: matrices at 2 bits",
        "wiki: matrices at 3 bits",
    ],
    "references": ["marks: target", "marks: matrices at 2 bits"],
    "less": [
        "wiki: 1% beyond, 25% in memory: asks for",
        "wikids, nvme: --resident 50% to exact",
        "olmoe-shaped (own routers), ssd, 8 MB: preferring 50% to llama.cpp",
    ],
    "gradients": ["wiki: time"],
    "devices": [
        f"rtx3060, one request{each}" for each in (": two devices", ": layers split", ": by the best of the others")
    ],
    "fiddler": ["t4, 4 beams: two devices", "t4, 4 beams: layers split"],
    "card": ["one request: two devices", "one request: layers split"],
    "hash-names": [
        "wiki, decoder, short: among the first 4",
        "wiki, decoder, short: among the first 12",
        "wiki, decoder, before the first layer: hash, 1 × as many",
        "wiki, decoder, 1 ahead: gate, 1 × as many",
    ],
    "hash-routing": ["wiki: hash function", "wiki: perplexity with routers"],
    "hash-hits": ["wiki: hash function", "wiki, k = 8: hits under lru"],
    "hash-speeds": ["wiki: hash function"],
    "beforehand": ["wiki: batches of 8, the next one worked out beforehand, with routers"],
    "large": [
        "olmoe, ssd, 1 GB: moert: decode",
        "qwen3, nvme, 4 GB (persistent routing): moert: decode",
        "olmoe, ssd, 1 GB (own routers): moert to llama.cpp Q4_K",
    ],
    "many": ["6,144 experts: engine ready"],
    "mixed": ["wiki, all at 16: size outside", "wiki, experts at 4: size"],
    "outlook": ["stream, wiki, ssd, 25%: off by", "less, wiki, all in memory: off by, all in memory"],
    "picture": [f"olmoe-shaped (own routers), {each}, 8 MB: moert: decode" for each in ("board", "ssd", "nvme")],
    "promise": ["wiki perplexity 5%: packs"],
    "size": ["OLMoE: bits 4, wall time"],
    "workers": ["OLMoE, 3 bits a weight, 1 layer(s), 1 worker(s): time"],
    "stream": [f"olmoe-shaped (own routers), {each}, 8 MB: moert: decode" for each in ("board", "ssd", "nvme")],
    "sweep": [
        "wiki: wall time",
        "g2p, 2 bits: probes compared",
        "g2p, 2 bits: outputs that differ",
        "wiki, 3 bits: probes compared",
    ],
    "flash-bytes": ["opt: columns, of whole experts", "opt: predictor: size"],
    "flash-speeds": [
        "opt, ssd, steps: naive: decode",
        "opt, board, steps: naive: decode",
        "g2p, ssd: whole experts 50%: decode",
        "OPT-1.3B like opt, ssd, 50%: naive: decode",
    ],
    "flash-curves": [
        "opt: window of 1: loaded",
        "opt: room for 10% of blocks: lru",
        "opt, blocks of 2: as given",
        "opt: neurons that are anyone's closest friend",
    ],
    "plans": ["wiki, all at 2 bits: loss", "wiki, 2.4 bits, sweep: loss", "wiki, 1.7 bits, MC-MoE: loss"],
    "answers": [
        *(f"g2p, gptq at 2: {each}" for each in ("effective", "exact_match", "loss")),
        "g2p, unquantized, gptq: exact_match",
    ],
    "quant": ["wiki against Q4_K, imatrix: bits of the peer", "g2p against hqq 2 bits, axis 1: bits of the peer"],
    "quant_smollm2": ["smollm2 against IQ2_S, imatrix: bits of the peer"],
}
SETTINGS = {"llama_cpp_built": {"as released": "AVX, AVX2"}, "llama_cpp_python": "0.3", "device": "H200"}


@pytest.mark.parametrize("name", BLOCKS)
def test_every_definition_is_filled_and_square(name):
    result = complete(BLOCKS[name].parts, [Row(row, 2.5, "") for row in SEEN.get(name, [])], SETTINGS)
    made = blocks.rendered(BLOCKS[name].parts(result), result)
    assert not set("{}") & set(made)
    for part in made.split("\n\n"):
        if part.startswith("|"):
            assert len({line.count("|") for line in part.splitlines()}) == 1
            assert len(part.splitlines()) > 2
    assert "*Commit 0123456" in made


def test_the_quantizers_stand_in_order_of_the_peers_bits():
    rows = [Row(f"{model} against {peer}: bits of the peer", bits, "") for model in ("wiki", "g2p")
            for peer, bits in (("Q4_K", 4.5), ("IQ2_S", 2.56))]  # fmt: skip
    result = complete(BLOCKS["quant"].parts, rows, {})
    ((head, *lines),) = BLOCKS["quant"].parts(result)
    assert head == ("", "g2p", "wiki")
    assert [line[0] for line in lines] == ["IQ2_S", "Q4_K"]
    assert blocks.filled(lines[0][1], result) == "0.50 (0.40 to 0.60), 0.50 to 2.56 bits"


def test_a_peer_that_failed_on_one_model_leaves_the_others_and_one_that_is_not_for_it_an_empty_cell():
    bits = {"wiki against AutoRound 2 bits": 2.5, "g2p against Q2_K": 2.6, "wiki against Q4_K": 4.5}
    rows = [Row(f"{name}: bits of the peer", value, "") for name, value in bits.items()]
    rows += [Row(f"{name}{end}", 0.5, "") for name in bits for end in (", heldout: divergence", ": bits of ours")]
    failed = ["g2p, Q4_K: its process ended", "wiki, Q2_K: its process ended"]
    result = Result({**WHERE, "settings": {"failed": failed}}, rows)
    ((_, *lines),) = BLOCKS["quant"].parts(result)
    assert [[blocks.filled(each, result) for each in line] for line in lines] == [
        ["AutoRound 2 bits", "", "0.50, 0.50 to 2.50 bits"],
        ["Q2_K", "0.50, 0.50 to 2.60 bits", "failed"],
        ["Q4_K", "failed", "0.50, 0.50 to 4.50 bits"],
    ]


# The tables of `make bench-stream` find every row in what the bench makes of its races; nothing is run here.

OF_A_RACE = {"commit": "0123456789ab", "date": "2026-01-02", "settings": {"failed": []},
         "hardware": {"processor": "Some CPU", "cores": 2, "memory_gib": 24, "isa": "avx2"}}  # fmt: skip
PARTS = ("g2p", "wiki", "olmoe-shaped", "llama")


def raced(device: Device, entries: list[Entry], seconds: float, rounds: int) -> dict[str, Outcome]:
    facts = {"peak_bytes": 100, "cache_bytes": 6, "backbone_bytes": 4}
    segments = [Segment(10, 1.0, 50, 20, 5, 2)] * rounds
    return {entry.name: Outcome(segments, [30] * rounds, Segment(128, 4.0, 0, 0, 0), facts) for entry in entries}


@pytest.fixture
def imitated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = tiny_packs.write_pack(tmp_path / "tiny.pack", tiny_packs.DECODER)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("[1, 2]\n")
    packs = Packs("olmoe-shaped", pack, pack, pack, pack, None, 7)
    monkeypatch.setattr(stream, "shaped", lambda: packs)
    monkeypatch.setattr(stream, "reference", lambda name: replace(packs, name=name, routing=None))
    monkeypatch.setattr(stream, "race", raced)
    monkeypatch.setattr(stream, "texts", lambda spec: texts)
    monkeypatch.setattr(stream, "disk_bytes_per_s", lambda packs: 1e9)
    monkeypatch.setattr(stream.races, "start", lambda *arguments: 2.5)
    monkeypatch.setattr(stream.subprocess, "run", lambda *arguments, **options: None)


def rows_of(parts: tuple[str, ...]) -> list[Row]:
    steps = [(part, device) for part in parts for device in stream.DEVICES]
    rows, failed = stream.all_rows(steps, stream.Sizes())
    assert failed == []
    return rows


@pytest.mark.usefixtures("imitated")
def test_the_tables_find_their_rows() -> None:
    result = Result(OF_A_RACE, rows_of(PARTS))
    shaped, trained = (rendered(parts(result), result) for parts in (tables.shaped, tables.trained))
    assert "failed" not in shaped + trained
    assert "| unthrottled | 75% | 10 |" in shaped
    assert "| wiki | unthrottled | 75% | 10 |" in trained
    assert "| 500 MB/s | 300 MB | 10 | 10 | 1.0 | 4.0 | 4.0 | | 15% | 5e-06 | 5e-06 |" in shaped
    assert "| g2p | 2.5 s | 2.5 s | 2.5 s |" in trained


@pytest.mark.usefixtures("imitated")
def test_what_failed_is_told_in_the_table() -> None:
    result = Result({**OF_A_RACE, "settings": {"failed": ["llama, board"]}}, rows_of(PARTS[:-1]))
    assert "| 100 MB/s | ? MB | failed | failed | failed | failed | failed | | | | |" in rendered(
        tables.shaped(result), result
    )


@pytest.mark.usefixtures("imitated")
def test_a_program_that_ended_is_among_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*arguments: object) -> dict[str, Outcome]:
        outcomes = raced(*arguments)  # type: ignore[arg-type]
        return outcomes | {"STI-like 50%": Outcome(ended="it ended with status -9")}

    monkeypatch.setattr(stream, "race", ended)
    rows, failed = stream.all_rows([("g2p", "ssd")], stream.Sizes())
    assert failed == ["g2p, ssd: STI-like 50%"]
    assert "g2p, ssd: moert 50% to STI-like" not in {row.name for row in rows}
    assert "g2p, ssd: moert 50% to IO-EXP" in {row.name for row in rows}


# The picture of speed by memory, from made-up results.

OF_A_PICTURE = {
    "commit": "0123456789ab",
    "date": "2026-01-02T03:04:05+00:00",
    "hardware": {"processor": "Some <CPU>", "cores": 2, "memory_gib": 24, "isa": "avx2"},
    "settings": {"failed": ["llama, nvme"]},
}


def process(name: str, speed: float, mb: float) -> list[Row]:
    return [Row(f"{name}: decode", speed, "tokens/s"), Row(f"{name}: peak memory of the process", mb, "MB")]


def made() -> Result:
    rows = [Row("olmoe-shaped, board: moert 25% to IO-EXP", 1.0, "× its speed").at_least(6), Row("other", 1.0, "s")]
    for device in ("board", "ssd", "nvme"):
        for at, side in enumerate(("moert 25%", "moert 50%", "moert 75%", "moert, all in memory"), 1):
            rows += process(f"olmoe-shaped, {device}: {side}", 3.0 * at, 300.0 * at)
        if device != "nvme":
            rows += process(f"olmoe-shaped (own routers), {device}, 857 MB: moert", 5.0, 857.0)
            rows += process(f"olmoe-shaped (own routers), {device}, 857 MB: llama.cpp Q2_K", 0.5, 850.0)
    return Result(OF_A_PICTURE, rows)


def texts(drawn: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(drawn).iter() if each.tag.endswith("text")]


def test_it_is_the_same_each_time_and_says_where_it_is_from() -> None:
    drawn = picture.drawn({"stream": made()})
    assert drawn == picture.drawn({"stream": made(), "other": made()})
    assert drawn is not None
    assert any("Commit 0123456, 2026-01-02, Some <CPU>, 2 cores" in text for text in texts(drawn))
    assert picture.drawn({"other": made()}) is None


def test_what_failed_is_named() -> None:
    drawn = picture.drawn({"stream": made()}) or ""
    assert texts(drawn).count("llama.cpp Q2_K: failed") == 1
    assert texts(drawn).count("0.5") == 2


def test_all_rows_that_it_shows_are_kept() -> None:
    result = made()
    needed = picture.needed(result)
    assert "other" not in needed
    assert len(needed) == 2 * (3 * 4 + 2 * 2)
    less = Result(OF_A_PICTURE, [row for row in result.rows if row.name in needed or row.met is False])
    assert picture.drawn({"stream": less}) == picture.drawn({"stream": result})
