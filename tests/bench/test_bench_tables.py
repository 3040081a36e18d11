"""Tables and sentences of the text from result files: made-up results, made-up text."""

from __future__ import annotations

import pytest

from recipes.bench import blocks, figures, kept
from recipes.bench.result import Result, Row, read, write
from recipes.bench.tables import Block
from recipes.bench.tables.catalogue import BLOCKS

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
    assert figures.filled(template, RESULT) == text


def test_what_was_measured_several_times_has_its_spread():
    rows = [Row("a", 0.4321, "", 0.02, 5), Row("b", 1234.5, "s", 20.0, 5), Row("c", 4.4, "s", 0.001, 5)]
    said = figures.filled("{a} {a|%} {b} {c|.1f} {a|.1f}", Result(WHERE, [*rows, Row("d", 1.0, "")]))
    assert said == "0.432 ± 0.01 43% ± 1% 1,234 ± 10 4.4 0.4"


def test_a_row_that_is_not_there_is_an_error_unless_its_part_failed():
    with pytest.raises(figures.RowMissing, match="no row 'spee'; nearest: 'speed'"):
        figures.filled("{spee}", RESULT)
    failed = Result({**WHERE, "settings": {"failed": ["llama"]}}, ROWS)
    assert figures.filled("{spee}", failed) == "failed"
    assert figures.filled("{speed}", failed) == "12.3"


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
    with pytest.raises(figures.RowMissing, match="no row 'ratio'"):
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
    names = set(figures.names(str(list(parts(result))))) - set(result.by_name)
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
    "large": ["olmoe, ssd, 1 GB: moert: decode", "olmoe, ssd, 1 GB (own routers): moert to llama.cpp Q4_K"],
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
    "plans": ["wiki, all at 2 bits: loss", "wiki, 2.4 bits, sweep: loss"],
    "quant": ["wiki against Q4_K, imatrix: bits of the peer", "g2p against hqq 2 bits, axis 1: bits of the peer"],
}
SETTINGS = {"llama_cpp_built": {"as released": "AVX, AVX2"}, "llama_cpp_python": "0.3"}


@pytest.mark.parametrize("name", BLOCKS)
def test_every_definition_is_filled_and_square(name):
    result = complete(BLOCKS[name].parts, [Row(row, 2.5, "") for row in SEEN.get(name, [])], SETTINGS)
    made = blocks.rendered(BLOCKS[name].parts(result), result)
    assert not set("{}") & set(made)
    for table in made.split("\n\n"):
        if table.startswith("|"):
            assert len({line.count("|") for line in table.splitlines()}) == 1
            assert len(table.splitlines()) > 2
    assert "*Commit 0123456" in made


def test_the_quantisers_stand_in_order_of_the_peers_bits():
    rows = [Row(f"{model} against {peer}: bits of the peer", bits, "") for model in ("wiki", "g2p")
            for peer, bits in (("Q4_K", 4.5), ("IQ2_S", 2.56))]  # fmt: skip
    result = complete(BLOCKS["quant"].parts, rows, {})
    ((head, *lines),) = BLOCKS["quant"].parts(result)
    assert head == ("", "g2p", "wiki")
    assert [line[0] for line in lines] == ["IQ2_S", "Q4_K"]
    assert figures.filled(lines[0][1], result) == "0.50 (0.40 to 0.60), 0.50 to 2.56 bits"


def test_a_peer_that_failed_on_one_model_leaves_the_others():
    rows = [Row("wiki against Q4_K: bits of the peer", 4.5, ""), Row("g2p against Q2_K: bits of the peer", 2.6, "")]
    names = ("wiki against Q4_K", "g2p against Q2_K")
    rows += [Row(f"{name}{end}", 0.5, "") for name in names for end in (", heldout: divergence", ": bits of ours")]
    result = Result({**WHERE, "settings": {"failed": ["g2p, Q4_K"]}}, rows)
    ((_, *lines),) = BLOCKS["quant"].parts(result)
    assert [[figures.filled(each, result) for each in line] for line in lines] == [
        ["Q2_K", "0.50, 0.50 to 2.60 bits", "failed"],
        ["Q4_K", "failed", "0.50, 0.50 to 4.50 bits"],
    ]
