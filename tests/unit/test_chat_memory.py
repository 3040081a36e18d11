"""--memory bounds a conversation too: what renders its template, and the keys and values that are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_memory_limit import small_pack

from moeconv.writer import add_to_pack
from moert.pack.reader import Pack
from moert.pack.text import CHAT, ChatFormat, dump_chat
from tests.cgroups import Group, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

ROOT = Path(__file__).resolve().parents[2]
GREEDY = "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}"
LARGE = "{% set x = messages[0].role * 1500000 %}{{ x|length }}"  # about as much as a template may have
BY_PYTHON = """
import sys
from moert import Engine

with Engine.open(sys.argv[1], memory=int(4e8), notify=lambda note: None) as engine:
    print(engine.smallest_chat_memory(128, int(sys.argv[2])))
"""
NEAR_BYTES = 3 * 10**6  # between the memory of two processes of one command
LETTERS = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_pack(tmp_path_factory.mktemp("chat") / "p", layers=4, experts=16)


def chat(
    pack: Path, template: str, limit_bytes: int, turns: int, said: str = "abcdefghij" * 20,
    more: tuple[str, ...] = ("--max-new-tokens", "40"),
) -> tuple[int, list[dict], str, int]:  # fmt: skip
    """Status, answers, errors and processes killed, in a group of so many bytes, which --memory says too."""
    add_to_pack(pack, Pack.open(pack).manifest, CHAT, dump_chat(ChatFormat(template, {})))
    command = [sys.executable, "-m", "moert", "chat", str(pack), "--json", "--memory", str(limit_bytes), *more]
    with Group(memory_bytes=max(limit_bytes, 60_000_000)) as group:
        done = subprocess.run(
            command, input=(said + "\n") * turns, capture_output=True, text=True, check=False,
            preexec_fn=lambda: group.add(0), cwd=ROOT,
        )  # fmt: skip
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr, group.oom_kills


def smallest(pack: Path, template: str, turns: int) -> tuple[int, list[dict]]:
    """The memory that refusals name, until a conversation of so many turns runs, and its answers: a refusal knows
    nothing of turns that come after it, so that another run of them may be refused there."""
    limit = 10_000_000
    for _ in range(8):
        status, answers, errors, killed = chat(pack, template, limit, turns)
        assert killed == 0
        if status == 0:
            return limit, answers
        last = errors.splitlines()[-1]
        assert "too small" in last, errors
        limit = int(last.split("--memory ")[1].split()[0])
    raise AssertionError("refused again and again")


def test_a_conversation_runs_in_the_smallest_memory_that_refusals_name(pack: Path) -> None:
    _, answers = smallest(pack, LETTERS + LARGE, 4)
    assert [answer["kept_tokens"] >= 200 * turn for turn, answer in enumerate(answers)] == [True] * 4
    assert answers[-1]["stats"]["cache_bytes"] < answers[-1]["stats"]["expert_bytes"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'ab' * 300 }}" + LETTERS,
        pytest.param(LETTERS, marks=pytest.mark.slow),
        pytest.param(LETTERS + "{# " + "x" * 60_000 + " #}", marks=pytest.mark.slow),
    ],
    ids=["a prefix", "plain", "long"],
)
def test_a_first_message_runs_in_the_smallest_memory_that_info_says(pack: Path, template: str) -> None:
    """Told with the defaults of moert chat; much less is refused, and names no more: the memory of a process differs
    from one to the next."""
    add_to_pack(pack, Pack.open(pack).manifest, CHAT, dump_chat(ChatFormat(template, {})))
    told = subprocess.run(
        [sys.executable, "-m", "moert", "info", str(pack), "--json"], capture_output=True, check=True, cwd=ROOT
    )
    facts = json.loads(told.stdout)
    found = facts["smallest_chat_memory"]
    before = 600 if "ab" in template else 0
    assert (found["prompt_tokens"], found["new_tokens"]) == (before + 129, 1024)
    assert found["bytes"] > facts["smallest_memory"]["bytes"]
    status, answers, errors, killed = chat(pack, template, found["bytes"], 1, "a" * 129, ())
    assert (status, killed, len(answers)) == (0, 0, 1), errors
    assert answers[0]["prompt_tokens"] == found["prompt_tokens"]
    _, _, errors, _ = chat(pack, template, 20_000_000, 1, "a" * 129, ())
    first = int(errors.splitlines()[-1].split("--memory ")[1].split()[0])
    assert abs(first - found["bytes"]) <= NEAR_BYTES, "the first refusal names as much"
    command = [sys.executable, "-c", BY_PYTHON, str(pack), str(found["new_tokens"])]
    by_python = int(subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout)
    assert abs(by_python - found["bytes"]) <= NEAR_BYTES
    status, _, errors, killed = chat(pack, template, found["bytes"] - 18_000_000, 1, "a" * 129, ())
    assert (status, killed) == (2, 0)
    assert int(errors.splitlines()[-1].split("--memory ")[1].split()[0]) <= found["bytes"] + NEAR_BYTES


def test_a_greedy_template_is_refused_and_the_system_kills_nothing(pack: Path) -> None:
    limit, _ = smallest(pack, LETTERS, 1)
    status, answers, errors, killed = chat(pack, GREEDY, limit, 1)
    assert (status, [list(answer) for answer in answers], killed) == (2, [["error"]], 0)
    assert errors.splitlines()[-1].startswith("moert: the model's chat template takes too much memory")
