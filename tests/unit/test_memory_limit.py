"""The proof that --memory bounds the whole process: `moert run` in a control group of exactly that much memory."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from moeconv.writer import add_to_pack
from moert.pack.reader import Pack
from recipes.bench.shaped import OLMOE_SHAPE, write_pack
from tests.cgroups import Group, missing
from tests.pairs import OTHERS
from tests.shapes import every

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@dataclass(frozen=True)
class Outcome:
    status: int
    answer: dict
    error: str
    oom_kills: int
    swapped_bytes: int
    peak_bytes: int
    kernel_bytes: int


def small_pack(out: Path, layers: int, experts: int) -> Path:
    """Experts of 0.9 MB each; a token for each letter."""
    spec = OLMOE_SHAPE.but(
        vocab_size=64, d_model=512, n_heads=8, n_kv_heads=8, head_dim=64, num_experts=experts, top_k=4, d_ff=512,
        decoder=every(layers), scale=64**-0.5,
    ).spec  # fmt: skip
    write_pack(out, 8, {"attention": 4}, spec)
    letters = {chr(ord("a") + i): i for i in range(26)} | {chr(ord("A") + i): 26 + i for i in range(26)}
    tokenizer = Tokenizer(models.WordLevel({**letters, **{f"<{i}>": i for i in range(52, 64)}}, unk_token="<52>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    add_to_pack(out, Pack.open(out).manifest, "tokenizer.json", tokenizer.to_str().encode())
    return out


def run(
    pack: Path, limit_bytes: int, prompt_tokens: int, new_tokens: int, seed: int = 0, memory: str | None = None
) -> Outcome:
    """In a group of `limit_bytes`, which --memory says too unless it is given otherwise; limits that are too small for
    Python itself get a larger group."""
    command = [
        sys.executable, "-m", "moert", "run", str(pack), "abcdefghij" * (prompt_tokens // 10), "--json",
        "--max-new-tokens", str(new_tokens), "--memory", memory or str(limit_bytes), "--temperature", "1",
        "--seed", str(seed),
    ]  # fmt: skip
    root = Path(__file__).resolve().parents[2]
    with Group(memory_bytes=max(limit_bytes, 10**9) if limit_bytes < 10**6 else limit_bytes) as group:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, preexec_fn=lambda: group.add(0), cwd=root
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else {}
        return Outcome(
            done.returncode, answer, done.stderr, group.oom_kills, group.swapped_bytes, group.peak_bytes,
            group.kernel_bytes,
        )  # fmt: skip


def run_in_the_smallest(pack: Path, prompt_tokens: int, new_tokens: int, seed: int) -> tuple[int, Outcome]:
    """The limit that refusals lead to, one before the weights are loaded and one for the request, and a run in it."""
    limit = 900_000
    for _ in range(3):
        outcome = run(pack, limit, prompt_tokens, new_tokens, seed)
        if outcome.status == 0:
            return limit, outcome
        assert (outcome.status, outcome.oom_kills) == (2, 0), outcome.error
        assert "too small" in outcome.error
        limit = int(outcome.error.split("--memory ")[1].split()[0])
    raise AssertionError(f"refused again and again, at last: {outcome.error}")


def check(outcome: Outcome, limit_bytes: int, prompt_tokens: int, new_tokens: int) -> None:
    assert outcome.status == 0, outcome.error
    assert outcome.oom_kills == outcome.swapped_bytes == 0
    stats = outcome.answer["stats"]
    print(
        f"limit {limit_bytes}: charged {outcome.peak_bytes}, of it kernel {outcome.kernel_bytes}, resident "
        f"{stats['peak_rss_bytes']}, cache at the end {stats['cache_bytes']}, {stats['tokens_per_s']:.1f} tokens/s, "
        f"first token {stats['time_to_first_token_s']:.2f} s"
    )
    assert (outcome.answer["prompt_tokens"], len(outcome.answer["tokens"])) == (prompt_tokens, new_tokens)
    assert stats["peak_rss_bytes"] + outcome.kernel_bytes <= limit_bytes
    assert stats["evictions"] > 0
    assert stats["cache_bytes"] < stats["expert_bytes"] / 2


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_pack(tmp_path_factory.mktemp("limit") / "small.pack", layers=2, experts=32)


def test_a_process_stays_within_its_limit(pack: Path) -> None:
    """The smallest limit that a refusal names works, where the system would end whoever takes more; the answer is that
    of a process with plenty."""
    limit, outcome = run_in_the_smallest(pack, 300, 150, 1)
    check(outcome, limit, 300, 150)
    assert outcome.answer["tokens"] == run(pack, 4 * 10**9, 300, 150, 1).answer["tokens"]


def test_what_info_says_is_enough(pack: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "moert", "info", str(pack), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    limit = json.loads(told.stdout)["smallest_memory"]["bytes"]
    check(run(pack, limit, 130, 128, 1), limit, 130, 128)


@pytest.mark.parametrize("memory", ["auto", "90%"])
def test_what_is_free_is_what_the_group_leaves(pack: Path, memory: str) -> None:
    limit = 400_000_000
    outcome = run(pack, limit, 50, 20, memory=memory)
    assert (outcome.status, outcome.oom_kills) == (0, 0), outcome.error
    assert 250_000_000 < outcome.answer["stats"]["memory_bytes"] < limit


def test_a_group_ends_what_takes_more() -> None:
    """So that the other tests here mean something."""
    with Group(memory_bytes=100_000_000) as group:
        greedy = [sys.executable, "-c", "print(len(bytearray(300_000_000)))"]
        done = subprocess.run(greedy, capture_output=True, check=False, preexec_fn=lambda: group.add(0))
        assert (done.returncode, group.oom_kills) == (-9, 1)
        assert group.peak_bytes > 90_000_000


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "more"), [(3, 15_000_000), *(pytest.param(seed, 0, marks=OTHERS) for seed in (1, 2))])
def test_a_long_prompt_and_a_long_answer_stay_within_the_limit(tmp_path: Path, seed: int, more: int) -> None:
    pack = small_pack(tmp_path / "larger.pack", layers=4, experts=32)
    limit, outcome = run_in_the_smallest(pack, 2000, 2000, seed)
    check(outcome, limit, 2000, 2000)
    if more:
        check(run(pack, limit + more, 2000, 2000, seed), limit + more, 2000, 2000)
