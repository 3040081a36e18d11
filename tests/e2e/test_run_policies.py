"""A checkpoint on disk, converted, profiled and run from the command line: no policy changes what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import tiny_olmoe, tiny_switch
from tiny_packs import record_routes

from moeconv.checkpoint import Checkpoint
from moeconv.coder import ExpertCoder
from moeconv.emit import emit
from moeconv.quantizers import QUANTIZERS
from moert import cli
from moert.experts.eviction import EVICTION
from moert.pack.paths import PATHS, build
from moert.pack.writer import add_to_pack
from moert.predict import PREDICTORS

PROMPTS = ("small", "of experts", "the router decides")
WIDTHS = (2, 4, 8, 16)
CHECKPOINTS = {"switch": tiny_switch, "olmoe": tiny_olmoe}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    checkpoint = Checkpoint.open(CHECKPOINTS[request.param](root / "checkpoint"))
    spec = checkpoint.spec
    widths = {key: (WIDTHS[index % 4],) * len(spec.moe.projections) for index, key in enumerate(spec.expert_keys())}
    out = root / "model.pack"
    coder = ExpertCoder(checkpoint, QUANTIZERS["channel"](None), None)
    manifest = emit(coder, widths, out, seed=0, creator="tests")
    add_to_pack(out, manifest, PATHS, build(spec.moe.num_experts, record_routes(out, PROMPTS)).to_bytes())
    return out


def run(capsys: pytest.CaptureFixture[str], pack: Path, source: Path, *flags: str) -> tuple[list, dict]:
    """(answers, figures) of `moert run --input`."""
    capsys.readouterr()
    arguments = ["run", str(pack), "--input", str(source), "--json", "--stats", "--max-new-tokens", "12", *flags]
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert end.value.code == 0, err
    answers = [json.loads(line) for line in out.splitlines()]
    return [(answer["tokens"], answer["output"]) for answer in answers], json.loads(err.splitlines()[-1])


def test_every_policy_prediction_and_budget_writes_the_same(pack, tmp_path, capsys) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS * 2))
    expected, figures = run(capsys, pack, source, "--predict", "none")
    assert len({tuple(tokens) for tokens, _ in expected}) == len(PROMPTS)
    assert figures["reads"] == figures["expert_requests"] - figures["expert_hits"]
    assert figures["evictions"] == 0
    used = 0
    for eviction in EVICTION:
        for predict in PREDICTORS:
            for memory in ("50%", "100%"):
                flags = ("--eviction", eviction, "--predict", predict, "--memory", memory)
                answers, figures = run(capsys, pack, source, *flags)
                assert answers == expected
                assert figures["evictions"] == 0 if memory == "100%" else figures["evictions"] > 0
                assert 0 < figures["hit_rate"] < 1 or figures["prefetch_used_bytes"] > 0
                assert figures["prefetch_issued_bytes"] <= figures["bytes_read"]
                assert predict != "none" or figures["prefetch_issued_bytes"] == 0
                used += figures["prefetch_used_bytes"]
    assert used > 0
