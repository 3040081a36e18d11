"""Packs of which only the neurons are run that a predictor names: compared with the same in plain numpy, and with
itself under every way of running it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Moert
from random_predictor import NAMES_ALL, add_predictor, random_predictor
from tiny_packs import DECODER_SHAPE, LATE, PROMPTS, SWITCH_SHAPE, run_greedy, write_pack

from moeconv.matrices import biases_of, matrices_of, projection_weights, read_expert
from moert.beside.flash.keeping import KEEPING
from moert.engine.engine import Engine
from moert.errors import PredictorMissing, SettingInvalid
from moert.experts import store
from moert.kernels.backend import I64
from moert.pack.codec import F32
from moert.pack.errors import FileTruncated, HashMismatch, HeaderInvalid
from moert.pack.layout import Neurons
from moert.pack.learnt import PREDICTOR, NeuronPredictor, PredictedLoss, load_predictor
from moert.pack.model_spec import LayerKey
from moert.pack.reader import Pack
from recipes.bench import sweeps
from tests.alone import alone
from tests.little_memory import smallest_memory
from tests.pairs import each, thinned, thinned_fixture

GATED = DECODER_SHAPE.but(activation="relu", d_ff=150).spec
SPECS = {"switch": SWITCH_SHAPE.but(d_ff=150).spec, "late": LATE, "gated": GATED}
"""The last has several experts for a token."""
LAYOUTS = {"bundled": Neurons(512, True), "apart": Neurons(512, False), "together": Neurons(512, False, together=True)}
NEW = 6
ROOMY = "100%"
HALF = "50%"

Answers = list[tuple[list[int], F32]]


def predicted_pack(path: Path, spec: str, layout: str, predictor: NeuronPredictor | None = None, **how: Any) -> Path:
    return add_predictor(write_pack(path, SPECS[spec], neurons=LAYOUTS[layout], **how), predictor)


@thinned_fixture(SPECS, LAYOUTS)
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return predicted_pack(tmp_path_factory.mktemp("predicted") / "m.pack", *request.param)


def answers(pack: Path, **settings: Any) -> Answers:
    asked = {"neurons": "predicted", "io": "direct,2", "notify": lambda note: None, **settings}
    with Engine.open(pack, **asked) as engine:
        return [run_greedy(engine, engine.encode(prompt), NEW) for prompt in PROMPTS]


def same(found: Answers, expected: Answers) -> bool:
    return all(
        tokens == others and logits.tobytes() == rows.tobytes()
        for (tokens, logits), (others, rows) in zip(found, expected, strict=True)
    )


@pytest.fixture(scope="module")
def expected(pack: Path) -> Answers:
    return answers(pack, cache=ROOMY)


class Plainly:
    """The mode as SPEC.md has it: for each token and each of its experts, scores, blocks, and what these give."""

    def __init__(self, pack: Pack) -> None:
        predictor = load_predictor(pack)
        assert predictor is not None
        self._pack, self._predictor = pack, predictor

    def run(self, at: LayerKey, hidden: F32, experts: I64, weights: F32, out: F32, x: F32) -> None:
        for token, chosen in enumerate(experts):
            for number, weight in zip(chosen.tolist(), weights[token].tolist(), strict=True):
                if number >= 0:
                    out[token] += np.float32(weight) * self._expert(at, number, hidden[token])

    def _expert(self, at: LayerKey, number: int, x: F32) -> F32:
        key, layer = at.expert(number), self._predictor.layers[at]
        scores = layer.heads[number].astype(np.float32) @ (layer.compress.astype(np.float32) @ x) + layer.bias[number]
        named, layout = scores >= layer.threshold[number], self._pack.neurons(key)
        file = read_expert(self._pack, key)
        of = {name: projection_weights(one) for name, one in matrices_of(self._pack, key, file).items()}
        biases = biases_of(self._pack, key, file)
        made = {name: of[name] @ x + biases.get(name, np.float32(0)) for name in of if name != "down"}
        fired = np.maximum(made["gate"], 0) * made["up"] if "gate" in made else np.maximum(made["up"], 0)
        for block in range(layout.n_blocks):
            neurons = list(layout.block(block))
            if not named[neurons].any():
                fired[neurons] = 0
        result: F32 = of["down"] @ fired + biases.get("down", np.float32(0))
        return result


@thinned("spec, layout", SPECS, LAYOUTS, facts=each)
def test_it_is_what_the_format_says(spec: str, layout: str, tmp_path: Path) -> None:
    path = predicted_pack(tmp_path / "m.pack", spec, layout)
    quiet = {"kernels": "reference", "notify": lambda note: None}
    found = answers(path, cache=HALF, kernels="reference")
    with Engine.open(path, cache=ROOMY, **quiet) as engine:
        engine.runner.run = Plainly(engine.pack).run  # type: ignore[method-assign]
        plain = [run_greedy(engine, engine.encode(prompt), NEW) for prompt in PROMPTS]
    exact = answers(path, cache=ROOMY, kernels="reference", neurons="exact")
    for (tokens, logits), (others, rows), (_, whole) in zip(found, plain, exact, strict=True):
        assert tokens == others
        np.testing.assert_allclose(logits, rows, rtol=2e-4, atol=2e-4)
        assert np.abs(logits[0] - whole[0]).max() > 1e-2, "what is not named would be missed"


@pytest.mark.parametrize("keep", KEEPING)
def test_no_room_and_no_policy_changes_an_answer(pack: Path, expected: Answers, keep: str) -> None:
    with Engine.open(pack, notify=lambda note: None) as engine:
        smallest = engine.budget.layer_bytes
    for cache in (smallest, HALF):
        assert same(answers(pack, cache=cache, keep_neurons=keep), expected), cache


@pytest.mark.parametrize("how", [{"threads": 1}, {"io": "buffered,1"}, {"io": None}, {"cache": None}], ids=str)
def test_no_way_of_running_changes_an_answer(pack: Path, expected: Answers, how: dict[str, Any]) -> None:
    assert same(answers(pack, **{"cache": HALF, **how}), expected)


def test_reading_without_a_ring_or_without_c_brings_the_same(
    pack: Path, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = store.open_reader

    def by_threads(threads: int) -> store.Reader:
        return usual(threads, by_ring=False)

    for opened in (by_threads, lambda threads: store.PlainReader()):
        monkeypatch.setattr(store, "open_reader", opened)
        assert same(answers(pack, cache=HALF), expected)


@pytest.mark.parametrize("spec", SPECS)
def test_all_layouts_say_the_same(spec: str, tmp_path: Path) -> None:
    bundled, *others = (answers(predicted_pack(tmp_path / layout, spec, layout), cache=HALF) for layout in LAYOUTS)
    assert [same(found, bundled) for found in others] == [True, True]


def test_several_prompts_at_once_are_answered_as_alone(pack: Path) -> None:
    with Engine.open(pack, cache=HALF, neurons="predicted", notify=lambda note: None) as engine:
        alone = [engine.generate(prompt, max_new_tokens=NEW).result.tokens for prompt in PROMPTS]
        together = [answer.result.tokens for answer in engine.generate_many(PROMPTS, max_new_tokens=NEW)]
    assert together == alone


def test_a_prompt_reads_what_its_tokens_would_one_by_one(tmp_path: Path) -> None:
    """None gets a neuron that only another token names, however many there are."""
    path = predicted_pack(tmp_path / "m.pack", "late", "bundled")
    with Engine.open(path, cache=HALF, neurons="predicted", notify=lambda note: None) as engine:
        runner, at = engine.runner, engine.spec.moe_layers()[0]
        random = np.random.default_rng(0)
        engine.reserve(600, 1)
        hidden = random.standard_normal((600, engine.spec.expert_width)).astype(np.float32)
        experts = random.integers(-1, engine.spec.moe.n, (600, 1))
        weights = random.random((600, 1), np.float32)
        together = np.zeros_like(hidden)
        runner.run(at, hidden, experts, weights, together, hidden)
        for token in range(600):
            alone = np.zeros_like(hidden[:1])
            here = slice(token, token + 1)
            runner.run(at, hidden[here], experts[here], weights[here], alone, hidden[here])
            assert alone.tobytes() == together[here].tobytes()


def test_one_that_names_all_gives_what_all_neurons_give(pack: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(pack, tmp_path / "m.pack"))
    add_predictor(whole, random_predictor(Pack.open(whole).manifest.model, NAMES_ALL))
    assert same(answers(whole, cache=HALF), answers(pack, cache=HALF, neurons="exact"))


def test_it_counts_in_memory(tmp_path: Path) -> None:
    spec = SPECS["switch"]
    path = predicted_pack(tmp_path / "m.pack", "switch", "bundled", random_predictor(spec, rank=1500))
    nbytes = (path / PREDICTOR).stat().st_size
    assert nbytes > 12e6
    assert alone(smallest_memory, path, "predicted") - alone(smallest_memory, path, "exact") > 0.6 * nbytes


def test_one_that_names_nothing_reads_nothing(tmp_path: Path) -> None:
    spec = SPECS["switch"]
    path = predicted_pack(tmp_path / "m.pack", "switch", "bundled", random_predictor(spec, -NAMES_ALL))
    with Engine.open(path, cache=HALF, neurons="predicted", notify=lambda note: None) as engine:
        engine.generate(PROMPTS[0], max_new_tokens=NEW)
        found = engine.stats()
    assert (found.neurons_computed, found.bytes_read, found.block_requests) == (0, 0, 0)


def test_with_memory_for_all_nothing_is_read_twice(tmp_path: Path) -> None:
    """Also of widths with which blocks in slots of one size take more than the files."""
    path = add_predictor(
        write_pack(tmp_path / "m.pack", GATED, neurons=LAYOUTS["bundled"], bits=(2, 2, 8, 8)),
        random_predictor(GATED, NAMES_ALL),
    )
    with Engine.open(path, neurons="predicted", notify=lambda note: None) as engine:
        assert engine.budget.expert_bytes > sum(entry.file_bytes for entry in engine.pack.manifest.experts)
        for prompt in 2 * PROMPTS:
            engine.generate(prompt, max_new_tokens=NEW)
        before = engine.stats().bytes_read
        for prompt in PROMPTS:
            engine.generate(prompt, max_new_tokens=NEW)
        assert engine.stats().bytes_read == before


def test_what_is_not_named_is_not_read(pack: Path) -> None:
    with Engine.open(pack, cache=HALF, neurons="predicted", notify=lambda note: None) as engine:
        streaming = engine._streaming
        for prompt in PROMPTS:
            engine.generate(prompt, max_new_tokens=NEW)
            assert streaming.held_bytes <= streaming.capacity_bytes
        stats = engine.stats()
    assert 0 < stats.neurons_named < stats.neurons_computed < 0.9
    assert 0 < stats.neurons_fired < stats.neurons_computed
    assert 0 < stats.block_hits < stats.block_requests
    assert 0 < stats.expert_hits < stats.expert_requests


@pytest.mark.parametrize("where", ["rows", "columns"])
def test_a_damaged_piece_is_named(damaged: Path, where: str) -> None:
    opened = Pack.open(damaged)
    for entry in opened.manifest.experts:
        layout, file = opened.neurons(entry.key), damaged / entry.path
        at, step = (layout.rows_at, layout.rows_step) if where == "rows" else (layout.columns_at, layout.columns_step)
        body = bytearray(file.read_bytes())
        for block in range(layout.n_blocks):
            body[entry.offset + at + block * step + 7] ^= 16
        file.write_bytes(body)
    with pytest.raises(HashMismatch, match=r"experts/.*: a checksum differs from neurons\.safetensors"):
        answers(damaged, cache=HALF)


def test_a_file_cut_short_while_it_runs_is_named(damaged: Path) -> None:
    whole = {file: file.read_bytes() for file in damaged.glob("experts/*/*")}
    with Engine.open(damaged, cache=HALF, neurons="predicted", notify=lambda note: None) as engine:
        for file, body in whole.items():
            file.write_bytes(body[:4096])
        with pytest.raises(FileTruncated, match=r"experts/.* ends before its neurons do"):
            run_greedy(engine, engine.encode(PROMPTS[0]), NEW)
        for file, body in whole.items():
            file.write_bytes(body)
        again = run_greedy(engine, engine.encode(PROMPTS[0]), NEW)
    assert same([again], answers(damaged, cache=HALF)[:1])


def test_what_can_not_be_predicted_is_said(damaged: Path, tmp_path: Path) -> None:
    add_predictor(damaged, random_predictor(SPECS["late"] if "switch" in str(damaged) else SWITCH_SHAPE.spec))
    with pytest.raises(HeaderInvalid, match="train the predictor of this pack's neurons again"):
        answers(damaged)
    blocks = write_pack(tmp_path / "blocks.pack", SPECS["switch"], neurons=LAYOUTS["bundled"])
    with pytest.raises(PredictorMissing, match="moeconv train-neurons adds it"):
        answers(blocks)
    with pytest.raises(SettingInvalid, match="moeconv quantize --layout neuron"):
        answers(write_pack(tmp_path / "whole.pack", SPECS["switch"]))
    for name, value in (("predict", "gate"), ("eviction", "lru"), ("eviction", "paper")):
        with pytest.raises(SettingInvalid, match=f"'{value}' is about experts"):
            answers(blocks, **{name: value})


def test_the_commands(pack: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    moert = Moert(capsys, monkeypatch)
    flags = ["run", pack, PROMPTS[0], "--tune", f"cache={HALF}", "--max-new-tokens", "4"]
    assert moert(*flags, "--tune", "neurons=predicted", "--stats") == 0
    assert "what that loses was not measured" in moert.err
    assert "% named, " in moert.err
    assert moert(*flags, "--tune", "neurons=predicted", "--json") == 0
    stats = json.loads(moert.out)["stats"]
    assert stats["neurons"] == "predicted"
    assert 0 < stats["neurons_named"] < 1
    assert "reads no whole experts" in moert.refuses(*flags, "--tune", "neurons=predicted", "--tune", "predict=gate")
    assert moert("info", pack) == 0
    assert "names 25.0% of held-out neurons, 75.0% of those that fire, and so 50.0% of blocks; loss not" in moert.out
    assert moert("info", pack, "--json") == 0
    told = json.loads(moert.out)
    assert told["predictor"]["kept"] == {"firing": 0.75, "neurons": 0.25, "blocks": 0.5}
    assert told["bytes"]["predictor"] == (pack / PREDICTOR).stat().st_size


def test_what_it_loses_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    predictor = random_predictor(SPECS["late"], loss=PredictedLoss(0.0213, 0.01, 0.032))
    path = predicted_pack(tmp_path / "m.pack", "late", "bundled", predictor)
    moert = Moert(capsys, monkeypatch)
    assert moert("run", path, PROMPTS[0], "--max-new-tokens", "2", "--tune", "neurons=predicted") == 0
    assert "held-out loss 2.1% [1.0%, 3.2%], that of the widths included" in moert.err
    assert moert("info", path) == 0
    assert "loss 2.13% [1.00%, 3.20%]" in moert.out


def test_bench_measures_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack = predicted_pack(tmp_path / "m.pack", "gated", "bundled")
    flags = [
        str(pack),
        "--tune",
        f"cache={HALF}",
        "--max-new-tokens",
        "2",
        "--tune",
        "io=buffered,1",
        "--tune",
        "neurons=predicted",
    ]
    assert sweeps.exit_code(flags) == 0
    out = capsys.readouterr().out
    assert ", neurons predicted" in out
    assert "knowing the future" not in out
    told = json.loads(out.splitlines()[-1])
    assert (told["settings"]["neurons"], told["settings"]["predict"]) == ("predicted", "none")
    assert sweeps.exit_code([*flags, "--plot", "pictures"]) == 2
    assert "--plot draws" in capsys.readouterr().err
