"""Long texts: refused by their bytes where the model can't take so many, and made into tokens within --memory."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from tiny_packs import DECODER_SHAPE, write_pack
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from moeconv.writer import add_to_pack
from moert.command.prompts import Longest, Source, read_prompt, read_records
from moert.engine import text as texts
from moert.engine.engine import Engine
from moert.errors import BudgetTooSmall, InputInvalid, PromptTooLong
from moert.machine import held_bytes, return_freed
from moert.pack.reader import Pack
from moert.pack.tensors import TEXT_BYTES
from moert.pack.text import CHAT, ChatFormat, check_tokenizer, dump_chat
from tests.alone import alone
from tests.cgroups import Group, missing
from tests.pairs import each, thinned

ROOT = Path(__file__).resolve().parents[2]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
LETTERS = {chr(code): code - 32 for code in range(32, 127)} | {"<unk>": 95, "▁": 96}
MANY = Longest(1 << 30, "memory")


def made(model: Any, normalizer: Any = None, pre_tokenizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def byte_level() -> Tokenizer:
    return made(models.BPE({c: i for i, c in enumerate(BYTES)}, []), None, pre_tokenizers.ByteLevel(False))


def write(out: Path, tokenizer: Tokenizer, **changes: Any) -> Path:
    write_pack(out, DECODER_SHAPE.but(vocab_size=256, **changes).spec, paths=False, tokenizer=False)
    add_to_pack(out, Pack.open(out).manifest, "tokenizer.json", tokenizer.to_str().encode())
    return out


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Takes 400 tokens."""
    return write(tmp_path_factory.mktemp("long") / "bounded", byte_level())


@pytest.fixture(scope="module")
def unbounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Takes any number of tokens."""
    return write(tmp_path_factory.mktemp("long") / "unbounded", byte_level(), max_positions=None)


@pytest.fixture(scope="module")
def cut_apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Takes 400 tokens, of which one may stand for any number of letters."""
    return write(tmp_path_factory.mktemp("long") / "apart", COUNTED["letters cut apart"])


# Bytes that positions can't stand for ---------------------------------------------------------------------------------


def test_a_text_of_more_bytes_than_positions_can_stand_for_is_no_work(
    bounded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.open(bounded) as engine:
        assert len(engine.encode("a" * 399)) == 399
        monkeypatch.setattr(texts, "fenced", lambda *_: pytest.fail("made into tokens"))
        for ask in (engine.encode, engine.generate, lambda text: engine.check(text, 1)):
            with pytest.raises(PromptTooLong, match="has 26,000 bytes, the model can take 399 tokens of at most 64 by"):
                ask("a" * 26_000)


@pytest.mark.parametrize(("tokenizer", "stands"), {
    "byte level": (byte_level(), 64),
    "NFC before it": (made(byte_level().model, normalizers.NFC(), pre_tokenizers.ByteLevel(False)), 256),
    "spaces marked": (made(models.BPE(LETTERS, [], unk_token="<unk>"), normalizers.Replace(" ", "▁")), 64),
    "unknown letters in one token": (made(models.BPE(LETTERS, [], unk_token="<unk>", fuse_unk=True)), float("inf")),
    "unknown letters left out": (made(models.BPE(LETTERS, [])), float("inf")),
    "words": (made(models.WordLevel(LETTERS, unk_token="<unk>")), float("inf")),
    "spaces left out": (made(byte_level().model, None, pre_tokenizers.WhitespaceSplit()), float("inf")),
    "ends left out": (made(byte_level().model, normalizers.Strip()), float("inf")),
    "a part removed": (made(byte_level().model, None, pre_tokenizers.Split("a", "removed")), float("inf")),
    "a letter replaced": (made(byte_level().model, normalizers.Replace("a", "")), float("inf")),
}.values())  # fmt: skip
def test_what_a_token_stands_for_at_most(tmp_path: Path, tokenizer: Tokenizer, stands: float) -> None:
    found = texts.Text(Pack.open(write(tmp_path / "p", tokenizer)))
    _ = found.tokenizer
    assert found._growth.stands == stands


def test_the_longest_token_counts_and_spaces_beside_an_added_one_have_no_bound() -> None:
    document = json.loads(byte_level().to_str())
    document["model"]["vocab"]["a" * 100] = 256
    assert check_tokenizer(json.dumps(document).encode()).stands == 100
    added = {"id": 257, "content": "b" * 300, "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    document["added_tokens"] = [added]
    assert check_tokenizer(json.dumps(document).encode()).stands == 300
    added["lstrip"] = True
    assert check_tokenizer(json.dumps(document).encode()).stands == float("inf")


UNIGRAM = models.Unigram([("?", 0.0), *((c, -2.0 - i / 50) for i, c in enumerate("▁abcdefgXé")), ("abcab", -1.0)], 0)
COUNTED = {
    "letters cut apart": made(
        models.WordLevel(LETTERS, unk_token="<unk>"), None,
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("[a-z]"), "isolated")]),
    ),
    "pieces of words": made(
        models.WordPiece({**LETTERS, "ab": 97, "##c": 98}, unk_token="<unk>"), normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    ),
    "Unigram": made(UNIGRAM, normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), "▁")]),
                    pre_tokenizers.Metaspace()),
    "unknown letters in one": made(models.BPE(LETTERS, [], unk_token="<unk>", fuse_unk=True), normalizers.NFC()),
    "unknown letters left out, others too": made(models.BPE(LETTERS, []), normalizers.Replace("ab", "")),
}  # fmt: skip
UNSURE = {
    "text removed by an expression": made(UNIGRAM, normalizers.Replace(Regex("a.*z"), "")),
    "words that end far away": made(
        models.WordLevel(LETTERS, unk_token="<unk>"), None, pre_tokenizers.Split(Regex("a.*z|."), "isolated")
    ),
    "a part removed": made(UNIGRAM, None, pre_tokenizers.Split("b", "removed")),
}


@pytest.mark.parametrize("name", [*COUNTED, *UNSURE])
def test_slices_count_no_more_tokens_than_a_text_has(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = {**COUNTED, **UNSURE}[name]
    text = texts.Text(Pack.open(write(tmp_path / "p", tokenizer)))
    _ = text.tokenizer
    rng, counted = random.Random(name), 0
    for alphabet in ("abcdefg", "abcabcabc  z", "aé e\u0301\u0323?X", "☃☃?  \u200b", "ab\n \t<unk>", "dog.  (Cat)"):
        for length in (500, 3000):
            said = "".join(rng.choice(alphabet) * rng.choice((1, 1, 2, 9)) for _ in range(length))
            found, normalizer = len(text.encoded(said, bounded=False).ids), text.tokenizer.normalizer
            slices = (said[at : at + 300] for at in range(0, len(said), 300))
            least = sum(text._least(each if normalizer is None else normalizer.normalize_str(each)) for each in slices)
            assert least <= found
            counted += least > 0
    assert (counted > 0) == (name in COUNTED)


@pytest.mark.parametrize("name", list(COUNTED))
def test_a_text_of_more_tokens_than_positions_is_refused_before_it_is_made_into_them(tmp_path: Path, name: str) -> None:
    text = texts.Text(Pack.open(write(tmp_path / "p", COUNTED[name])), lambda _: pytest.fail("made into tokens"))
    said = "a b.cabc dé " * 5000
    started = time.process_time()
    with pytest.raises(PromptTooLong, match="has 60,000 letters, which make over 399 tokens, and the model can take"):
        text.encode(said)
    assert time.process_time() - started < 5


# Memory ---------------------------------------------------------------------------------------------------------------


def _peak(kind: str, text: str) -> tuple[int, int]:
    """Bytes that making tokens of it takes, and that are reckoned for it."""
    tokenizer = made(*{
        "letters": (models.WordLevel(LETTERS, unk_token="<unk>"), None, pre_tokenizers.Split("", "isolated")),
        "words": (
            models.WordPiece(LETTERS, unk_token="<unk>"), normalizers.BertNormalizer(),
            pre_tokenizers.BertPreTokenizer(),
        ),
        "pieces": (
            models.Unigram([(each, -1.0) for each in LETTERS], 95), normalizers.NFKC(), pre_tokenizers.Metaspace()
        ),
    }[kind])  # fmt: skip
    normalised = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else ""
    nbytes = max(len(text.encode()), len(normalised.encode()))
    del normalised
    return_freed()
    before = held_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    _ = list(tokenizer.encode_batch([text])[0].ids)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024 - before, TEXT_BYTES * nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("pieces", "\ufdfa"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("letters", "a"), ("words", "a."), ("pieces", " "))),
    ],
)
def test_what_is_reckoned_for_tokens_is_enough(kind: str, text: str) -> None:
    taken, reckoned = alone(_peak, kind, text * (300_000 // len(text.encode())))
    assert taken < reckoned


def test_room_for_tokens_is_made_and_asked_for(unbounded: Path) -> None:
    alone(_room_for_tokens, unbounded)


def _room_for_tokens(unbounded: Path) -> None:
    with Engine.open(unbounded, memory=held_bytes() + (90 << 20)) as engine:
        engine.generate("a", max_new_tokens=1)
        assert len(engine.encode("a" * 40_000)) == 40_000
        with engine.session() as session:
            with pytest.raises(BudgetTooSmall, match="too small to make tokens of so long a text beside the model"):
                session.add("a" * 1_000_000)
            request = session.add("abc", max_new_tokens=2)
            for _ in session:
                pass
        assert len(request.answer.result.tokens) == 2
        with pytest.raises(BudgetTooSmall) as refused:
            engine.encode("a" * 1_000_000)
    with Engine.open(unbounded, memory=refused.value.smallest_bytes) as engine:
        assert len(engine.encode("a" * 1_000_000)) == 1_000_000


GROUP_BYTES = 300_000_000
BY_PYTHON = """
import sys
from moert.engine.engine import Engine
from moert.errors import RunError
try:
    Engine.open(sys.argv[1], memory=int(sys.argv[2])).generate("a" * 2_000_000)
except RunError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@thinned("way, takes", ["file", "input", "stdin", "chat", "python"], ["bounded", "unbounded", "cut_apart"], facts=each)
def test_two_megabytes_of_text_are_one_line_in_a_group_of_300_mb(
    request: pytest.FixtureRequest, tmp_path: Path, way: str, takes: str
) -> None:
    pack, word = request.getfixturevalue(takes), "a" * 2_000_000
    (tmp_path / "text").write_text(json.dumps({"prompt": word}) if way == "input" else word)
    if way == "chat":
        pack = write(tmp_path / "p", byte_level(), max_positions=400 if takes == "bounded" else None)
        template = "{% for each in messages %}{{ each.content }}{% endfor %}"
        add_to_pack(pack, Pack.open(pack).manifest, CHAT, dump_chat(ChatFormat(template, {})))
    more = {"file": ["--file", tmp_path / "text"], "input": ["--input", tmp_path / "text"]}.get(way, [])
    command = ["-m", "moert", "chat" if way == "chat" else "run", pack, *more, "--memory", "300MB"]
    if way == "python":
        command = ["-c", BY_PYTHON, pack, GROUP_BYTES]
    used_s = sum(os.times()[2:4])
    with Group(memory_bytes=GROUP_BYTES) as group, (tmp_path / "text").open() as stdin:
        done = subprocess.run(
            [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False, stdin=stdin,
            preexec_fn=lambda: group.add(0),
        )  # fmt: skip
        assert group.oom_kills == 0
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert sum(os.times()[2:4]) - used_s < 20


# Reading --------------------------------------------------------------------------------------------------------------


def test_no_more_is_read_than_memory_has_room_for(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    try:
        os.truncate(path, 1 << 40)
    except OSError:
        pytest.skip("this file system has no files so large")
    few = Longest(100_000, "a memory budget of 64000000 bytes")
    refused = "has more than 100,000 letters, which is all that a memory budget of 64000000 bytes leaves room to make"
    tracemalloc.start()
    with pytest.raises(InputInvalid, match=refused):
        read_prompt(None, path, sys.stdin, few)
    with pytest.raises(InputInvalid, match=f"line of .*{refused}"):
        list(read_records(Source(path, few), sys.stdin, lambda text: None))
    with path.open() as stdin, pytest.raises(InputInvalid, match=f"stdin {refused}"):
        read_prompt(None, None, stdin, few)
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()


def test_of_many_lines_no_more_than_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(json.dumps({"prompt": "a" * 1000 + str(at)}) + "\n" for at in range(5000)))
    seen = list[str]()
    tracemalloc.start()
    count = sum(1 for _ in read_records(Source(path, MANY), io.StringIO(), lambda text: seen.append(text[:1])))
    assert (count, len(seen)) == (5000, 5000)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f'printf \'{{"prompt": "abc"}}\\n\' > {pipe}']):
        assert [each.prompt for each in read_records(Source(pipe, MANY), io.StringIO(), lambda text: None)] == ["abc"]
