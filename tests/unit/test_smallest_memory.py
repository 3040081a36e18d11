"""The smallest memory is one number: what `moert info` says, what refusals name, and what Python gives; it is enough,
also in a control group, and a megabyte less is not."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from test_memory_limit import small_pack
from tiny_packs import DECODER_SHAPE, SWITCH, write_pack
from tokenizers import Tokenizer, models, pre_tokenizers

from moeconv.writer import add_to_pack
from moert.engine.regulator import TYPICAL
from moert.machine import held_bytes, return_freed
from moert.pack.reader import Pack
from moert.pack.tensors import tokenizer_takes
from tests.alone import alone
from tests.cgroups import Group, missing
from tests.random_hash import add_hash

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("decoder", "no text", "encoder and decoder", "large vocabulary", "pieces", "hash function")
FAST = ("decoder", "large vocabulary")
LETTERS = [chr(ord("a") + place) for place in range(26)]
BY_PYTHON = """
import json, sys
from moert.engine.engine import Engine
from moert.errors import BudgetTooSmall

path, (limit, prompt, new), said = sys.argv[1], map(int, sys.argv[2:]), []
try:
    with Engine.open(path, memory=limit or None, notify=lambda note: None) as engine:
        said.append(engine.smallest_memory(prompt, new))
        engine.generate([3] * prompt, max_new_tokens=new)
        said.append(engine.smallest_memory(prompt, new))
except BudgetTooSmall as error:
    said.append(error.smallest_bytes)
    said.append("refused")
print(json.dumps(said))
"""


def vocabulary(kind: str, count: int) -> Tokenizer:
    """A token for each letter, and many others that no text has."""
    words = [f"{place * 2654435761 % (1 << 32):08x}" for place in range(count)]
    if kind == "pieces":
        model = models.Unigram([(each, -1.0) for each in (*LETTERS, *words)], 25)
    else:
        tokens = [*LETTERS, *"0123456789"]
        pairs = [(one, other) for one in map(str, range(10)) for other in (f"{place:05d}" for place in range(count))]
        made = dict.fromkeys([*tokens, *(other for _, other in pairs), *(one + other for one, other in pairs)])
        model = models.BPE({name: number for number, name in enumerate(made)}, pairs, unk_token="a")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[pytest.mark.slow] * (kind not in FAST)) for kind in KINDS],
)
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, out = request.param, tmp_path_factory.mktemp("smallest") / "p"
    if kind == "hash function":
        return add_hash(small_pack(out, layers=2, experts=8))
    if kind in ("encoder and decoder", "no text"):
        return write_pack(out, SWITCH, paths=False, tokenizer=kind != "no text")
    path = write_pack(out, DECODER_SHAPE.but(eos=()).spec, paths=False, tokenizer=kind == "decoder")
    if kind != "decoder":
        body = vocabulary(kind, 40_000 if kind == "pieces" else 10_000).to_str().encode()
        add_to_pack(path, Pack.open(path).manifest, "tokenizer.json", body)
    return path


def process(*command: object, within: AbstractContextManager[Group | None]) -> subprocess.CompletedProcess[str]:
    with within as group:
        done = subprocess.run(
            [sys.executable, *map(str, command)], capture_output=True, text=True, cwd=ROOT, check=False,
            preexec_fn=None if group is None else lambda: group.add(0),
        )  # fmt: skip
        assert group is None or group.oom_kills == 0
    return done


def moert(*command: object, within: AbstractContextManager[Group | None] | None = None) -> tuple[int, str, str]:
    done = process("-m", "moert", *command, within=within or nullcontext())
    return done.returncode, done.stdout, done.stderr


def usual(pack: Path, *more: object) -> tuple[object, ...]:
    """The usual request: a token for each letter of its prompt."""
    return "run", pack, "a" * TYPICAL.prompt_tokens, "--max-new-tokens", TYPICAL.max_new_tokens, "--json", *more


def by_python(pack: Path, limit: int = 0) -> list[object]:
    """What Python says before and after the usual request."""
    asked = ("-c", BY_PYTHON, pack, limit, TYPICAL.prompt_tokens, TYPICAL.max_new_tokens)
    done = process(*asked, within=nullcontext())
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


def named(errors: str) -> int:
    """The number in a refusal."""
    assert errors.count("\n") == 1
    return int(errors.split("--memory ")[1].split()[0])


def test_it_is_one_number_that_is_enough_and_a_megabyte_less_is_not(pack: Path) -> None:
    code, out, errors = moert("info", pack, "--json")
    assert code == 0, errors
    smallest, has_tokenizer = json.loads(out)["smallest_memory"]["bytes"], json.loads(out)["has_tokenizer"]
    code, out, errors = moert("run", pack, "abc", "--memory", "1MB")
    assert (code, out, named(errors)) == (2, "", smallest)
    assert by_python(pack) == by_python(pack, smallest) == [smallest] * 2
    assert by_python(pack, smallest - 10**6)[-2:] == [smallest, "refused"]
    assert by_python(pack, 10**6) == [smallest, "refused"]
    if has_tokenizer:
        code, out, errors = moert(*usual(pack, "--memory", smallest))
        assert code == 0, errors
        assert json.loads(out)["prompt_tokens"] == TYPICAL.prompt_tokens
        assert json.loads(out)["stats"]["peak_rss_bytes"] < smallest
        code, _, errors = moert(*usual(pack, "--memory", smallest - 10**6))
        assert (code, named(errors)) == (2, smallest)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_it_is_enough_in_a_control_group_of_its_size(pack: Path) -> None:
    code, out, errors = moert("info", pack, "--json")
    smallest, has_tokenizer = json.loads(out)["smallest_memory"]["bytes"], json.loads(out)["has_tokenizer"]
    if not has_tokenizer:
        pytest.skip("the command needs a text")
    for limit in ("auto", smallest):
        group = Group(memory_bytes=smallest + (smallest // 5 if limit == "auto" else 0))
        code, out, errors = moert(*usual(pack, "--memory", limit), within=group)
        assert code == 0, errors


def _taken(kind: str, count: int) -> tuple[int, int, int, int]:
    body = vocabulary(kind, count).to_str().encode()
    return_freed()
    before = held_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    tokenizer = Tokenizer.from_buffer(body)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return_freed()
    kept, foreseen = held_bytes() - before, tokenizer_takes([body[:1000], body[1000:]])
    assert tokenizer.get_vocab_size() > count
    return int(peak.split()[1]) * 1024 - before + len(body), foreseen.peak_bytes, kept, foreseen.kept_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.parametrize("kind", ["large vocabulary", "pieces"])
def test_what_is_reckoned_for_a_tokenizer_is_enough_and_not_much_more(kind: str) -> None:
    peak, most, kept, reckoned = alone(_taken, kind, 20_000)
    assert peak < most < 3 * peak
    assert kept < reckoned < 3 * kept
