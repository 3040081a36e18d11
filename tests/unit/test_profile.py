from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Moert
from tiny_packs import DECODER, PROMPTS, SPECS, write_pack

from moert.beside import profile
from moert.beside.profile import PARTS, Figures
from moert.engine.engine import Engine
from moert.errors import SettingInvalid
from moert.experts.store import ExpertStore
from moert.kernels import library
from moert.pack.layout import Neurons
from moert.pack.model_spec import LayerKey, ModelSpec
from moert.pack.reader import Pack
from tests.calls import fewest_calls
from tests.refusing import one_line

TOKENS = 6
READS = {"cache": "40%", "io": "direct,2", "predict": "gate"}
Event = dict[str, Any]


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("profile")
    return {name: write_pack(root / f"{name}.pack", spec) for name, spec in SPECS.items()}


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which each look takes a microsecond."""
    ticks = itertools.count(0, 1000)
    monkeypatch.setattr(profile.time, "perf_counter_ns", lambda: next(ticks))


def profiled(pack: Path, out: Path, **settings: Any) -> tuple[Figures, list[Event]]:
    """Returns the figures and the events of a request."""
    with Engine.open(pack, profile=str(out), notify=lambda note: None, **READS | settings) as engine:
        engine.generate(PROMPTS[1], max_new_tokens=TOKENS, ignore_eos=True)
        figures = engine.stats().profile
    assert isinstance(figures, Figures)
    return figures, events_of(out)


def events_of(out: Path) -> list[Event]:
    """Returns the spans of a trace, with times in nanoseconds."""
    trace = json.loads(out.read_text())
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    return [
        {**each, "ts": round(1000 * each["ts"]), "dur": round(1000 * each["dur"])}
        for each in trace["traceEvents"]
        if each["ph"] == "X"
    ]


def nested(events: list[Event]) -> Iterator[tuple[Event, list[Event]]]:
    """Yields each event of the model's track with the events around it, the outermost first; they have to be in
    order, and one inside the other."""
    around: list[Event] = []
    for event in (each for each in events if each["tid"] == 0):
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        if around:
            assert around[-1]["ts"] <= event["ts"]
            assert event["ts"] + event["dur"] <= around[-1]["ts"] + around[-1]["dur"]
        yield event, list(around)
        around.append(event)


def spent(events: list[Event], single: set[str]) -> Counter[str]:
    """Returns the time of each name that no event inside takes [ns], in the passes of these names."""
    found = Counter[str]()
    for event, around in nested(events):
        if (around[0] if around else event)["name"] in single:
            found[event["name"]] += event["dur"]
            if around:
                found[around[-1]["name"]] -= event["dur"]
    return found


def written(events: list[Event]) -> list[Event]:
    """Returns the passes of one token that follow the first pass."""
    return [each for each in events if each["tid"] == 0 and ":" in each["name"]][1:]


@pytest.mark.parametrize("name", SPECS)
def test_the_parts_of_a_token_are_all_of_its_time(packs, tmp_path, ticking, name) -> None:
    figures, events = profiled(packs[name], tmp_path / "trace.json")
    passes = written(events)
    assert (figures.passes, figures.tokens) == (TOKENS - 1, TOKENS - 1) == (len(passes), len(passes))
    for earlier, later in itertools.pairwise(passes):
        assert earlier["ts"] + earlier["dur"] == later["ts"]
    assert sum(figures.parts.values()) * len(passes) * 1e9 == pytest.approx(sum(each["dur"] for each in passes))
    by_name = spent(events, {each["name"] for each in passes})
    for part in PARTS[:-2]:
        assert figures.parts[part] * len(passes) * 1e9 == pytest.approx(by_name.pop(part, 0)), part
    assert figures.parts["experts"] == 0  # nothing is left undivided
    assert figures.parts["other"] * len(passes) * 1e9 == pytest.approx(by_name.total())
    assert min(figures.parts[part] for part in ("mixer", "router", "deciding", "products", "head")) > 0


@pytest.mark.parametrize("name", SPECS)
def test_each_layer_of_each_token_has_its_name_and_its_parts(packs, tmp_path, name) -> None:
    spec: ModelSpec = SPECS[name]
    _, events = profiled(packs[name], tmp_path / "trace.json")
    inside: dict[str, dict[str, Counter[str]]] = {}
    for event, around in nested(events):
        if len(around) == 1 and event["name"] not in PARTS:
            inside.setdefault(around[0]["name"], {})[event["name"]] = Counter()
        elif len(around) == 2:
            inside[around[0]["name"]][around[1]["name"]][event["name"]] += 1
    decoder = [str(LayerKey("decoder", layer)) for layer in range(len(spec.stacks["decoder"]))]
    encoder = [str(LayerKey("encoder", layer)) for layer in range(len(spec.stack("encoder") or ()))]
    first, *others = inside.values()
    assert list(first) == encoder + decoder
    assert all(list(layers) == decoder for layers in others)
    routed = {str(at) for at in spec.moe_layers()}
    for layers in inside.values():
        for at, parts in layers.items():
            assert parts["router"] == parts["experts"] == (at in routed)
            assert parts["networks"] >= (at not in routed and spec.stacks["decoder"][int(at[1:])].ffn is not None)


def test_reads_have_tracks_of_their_own_and_are_all_there(packs, tmp_path) -> None:
    out = tmp_path / "trace.json"
    with Engine.open(packs["decoder"], profile=str(out), notify=lambda note: None, **READS) as engine:
        engine.generate(PROMPTS[1], max_new_tokens=TOKENS, ignore_eos=True)
        counters = engine.counters
    events = events_of(out)
    passes = [each for each in events if each["tid"] == 0 and ":" in each["name"]]
    reads = [each for each in events if each["tid"] > 0]
    for track in {each["tid"] for each in reads}:
        times = [(each["ts"], each["ts"] + each["dur"]) for each in reads if each["tid"] == track]
        assert all(early[1] <= late[0] for early, late in itertools.pairwise(times))
    assert {each["name"].split("/")[0] for each in reads} <= {str(at) for at in DECODER.moe_layers()}
    assert all(each["args"]["queued_us"] >= 0 for each in reads)
    assert counters.reads - sum(each["args"]["experts"] for each in reads) <= 2  # read ahead for a pass that never came
    assert sum(each["args"]["experts"] for each in passes) == counters.requests
    assert sum(each["args"]["hits"] for each in passes) == counters.hits


@pytest.mark.parametrize("settings", [{"device": "sim:rtx3060"}, {"kernels": "reference"}], ids=str)
def test_experts_of_other_packages_are_one_part(packs, tmp_path, ticking, settings) -> None:
    figures, events = profiled(packs["decoder"], tmp_path / "trace.json", **settings)
    assert (figures.parts["experts"] > 0) == ("device" in settings)
    assert (figures.parts["products"] > 0) == ("device" not in settings)
    whole = sum(each["dur"] for each in written(events))
    assert sum(figures.parts.values()) * figures.passes * 1e9 == pytest.approx(whole)


def test_blocks_of_neurons_are_profiled_too(tmp_path) -> None:
    pack = write_pack(tmp_path / "neurons.pack", SPECS["switch"], neurons=Neurons(512, bundled=True), bits=[4])
    figures, _ = profiled(pack, tmp_path / "trace.json", cache="80%")
    assert figures.parts["experts"] > 0
    assert figures.parts["products"] == 0


def test_answers_are_the_same_and_a_batch_is_one_pass(packs, tmp_path) -> None:
    out = tmp_path / "trace.json"
    asked = {"max_new_tokens": TOKENS, "ignore_eos": True}
    with Engine.open(packs["decoder"], **READS, notify=lambda note: None) as engine:
        plain = [answer.tokens for answer in engine.generate_many(PROMPTS[:3], **asked)]
    with Engine.open(packs["decoder"], **READS, notify=lambda note: None, profile=str(out)) as engine:
        assert [answer.tokens for answer in engine.generate_many(PROMPTS[:3], **asked)] == plain
        figures = engine.stats().profile
    assert (figures.passes, figures.tokens) == (TOKENS - 1, 3 * (TOKENS - 1))


def test_the_time_between_two_requests_is_no_tokens(packs, tmp_path, ticking) -> None:
    with Engine.open(packs["decoder"], profile=str(tmp_path / "trace.json"), **READS) as engine:
        for _ in range(2):
            engine.generate([5], max_new_tokens=2, ignore_eos=True)
            for _ in range(10_000):
                profile.time.perf_counter_ns()
        engine.generate([5], max_new_tokens=2, ignore_eos=True)
    of_model = [each for each in events_of(tmp_path / "trace.json") if each["tid"] == 0]  # reads ahead may go on
    assert max(each["dur"] for each in of_model) < 10_000_000


@pytest.mark.parametrize("when", ["between tokens", "in a layer"])
def test_an_interrupted_run_leaves_whole_passes(packs, tmp_path, when) -> None:
    out, heard = tmp_path / "trace.json", itertools.count()
    last = 2 if when == "between tokens" else 2 * len(DECODER.moe_layers()) + 1

    def stop(heard_of: object) -> None:
        if next(heard) == last:
            raise KeyboardInterrupt

    with Engine.open(packs["decoder"], profile=str(out), **READS) as engine:
        if when == "in a layer":
            engine.runner.listeners.append(stop)
        on_text = stop if when == "between tokens" else None
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[1], max_new_tokens=TOKENS, ignore_eos=True, on_text=on_text)
    events = events_of(out)
    assert len(written(events)) == (2 if when == "between tokens" else 1)
    assert all(around or ":" in event["name"] for event, around in nested(events))
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]


def test_a_pass_whose_writing_was_cut_short_is_left_out(packs, tmp_path) -> None:
    out, parts, made = tmp_path / "trace.json", itertools.count(), profile.TemporaryFile

    class Torn:
        """A file whose third write is cut short."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: bytes) -> int:
            if next(parts) == 2:
                self._file.write(data[:100])
                raise KeyboardInterrupt
            return int(self._file.write(data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(profile, "TemporaryFile", lambda **where: Torn(made(**where)))
        engine = Engine.open(packs["decoder"], profile=str(out), **READS)
    with engine:
        with pytest.raises(KeyboardInterrupt):
            engine.generate([5, 6], max_new_tokens=TOKENS, ignore_eos=True)
        engine.generate([5, 6], max_new_tokens=3, ignore_eos=True)
    assert len([each for each in events_of(out) if ":" in each["name"]]) == 2 + 3


def test_a_full_disk_is_said_of_the_trace(packs, tmp_path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        made = lambda dir, **how: open("/dev/full", "w+b", **how)  # noqa: E731, SIM115
        patched.setattr(profile, "TemporaryFile", made)
        engine = Engine.open(packs["decoder"], profile=str(tmp_path / "trace.json"), **READS)
    with one_line(SettingInvalid, "can't be written .No space left on device.: choose another place"), engine:
        engine.generate([5, 6], max_new_tokens=3, ignore_eos=True)
    assert list(tmp_path.iterdir()) == []


def test_without_a_token_there_is_no_file(packs, tmp_path, monkeypatch) -> None:
    out = tmp_path / "trace.json"
    with Engine.open(packs["decoder"], profile=str(out)):
        pass
    with monkeypatch.context() as patched:
        patched.setattr(ExpertStore, "read_all", _broken)
        with pytest.raises(OSError, match="broken"), Engine.open(packs["decoder"], profile=str(out)) as engine:
            engine.generate(PROMPTS[1], max_new_tokens=2)
    assert list(tmp_path.iterdir()) == []


def _broken(*arguments: object) -> None:
    raise OSError("broken")


def test_no_file_is_replaced(packs, tmp_path) -> None:
    out = tmp_path / "trace.json"
    out.write_text("mine")
    with one_line(SettingInvalid, "is there already"):
        Engine.open(packs["decoder"], profile=str(out))
    out.unlink()
    with one_line(SettingInvalid, "is there already"), Engine.open(packs["decoder"], profile=str(out)) as engine:
        engine.generate(PROMPTS[1], max_new_tokens=2)
        out.write_text("mine")
    assert out.read_text() == "mine"
    for place, said in ((packs["decoder"] / "trace.json", "lies in the pack"), (tmp_path / "no/t", "can't be written")):
        with one_line(SettingInvalid, said):
            Engine.open(packs["decoder"], profile=str(place))
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]


def test_the_command_writes_the_file_and_prints_the_table(packs, tmp_path, capsys, monkeypatch) -> None:
    moert, out = Moert(capsys, monkeypatch), tmp_path / "trace.json"
    run = ["run", packs["decoder"], "abc", "--max-new-tokens", 4, "--tune", f"profile={out}"]
    assert moert(*run, "--stats") == 0
    assert "\nprofile          3 tokens, " in moert.err
    assert "\n  products " in moert.err
    assert len(written(events_of(out))) == 3
    assert "--tune profile" in moert.refuses(*run)


def test_nothing_of_it_is_loaded_for_a_run_without(packs) -> None:
    program = "import sys, moert; moert.load(sys.argv[1]).generate([3], max_new_tokens=2); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, packs["decoder"]], capture_output=True, text=True, check=True)
    assert "moert.engine.registry" in done.stdout
    assert "moert.beside.profile" not in done.stdout


@pytest.mark.skipif(library.load() is None, reason=f"{library.missing()}")
def test_a_profiled_token_makes_few_calls_more(packs, tmp_path) -> None:
    layers = len(Pack.open(packs["decoder"]).manifest.model.moe_layers())
    traced = {"profile": str(tmp_path / "trace.json")}
    plain, timed = (fewest_calls(packs["decoder"], settings) for settings in ({}, traced))
    assert plain < timed <= plain + 20 + 20 * layers
