"""Records what a change of structure must leave alone, and compares two records: `make unchanged`.

A record maps names to hashes: the bytes of packs of every family, the tokens, log probabilities and beams that packs
answer with under every setting, and the messages of errors in tests/hostile. Answers depend on the instruction set:
both records must come from one machine.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Record = dict[str, str]
PROMPTS = (
    [3], [3, 4, 5, 6, 7, 8, 9, 3, 4], list(range(2, 10)) * 5, random.Random(41).choices(range(2, 11), k=30),
)  # fmt: skip
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"kernels": "reference", "cache": "50%"},
    {"kernels": "avx2", "cache": "40%", "predict": "gate", "threads": 2},
    {"kernels": "scalar", "cache": "60%", "predict": "transitions", "eviction": "lru", "io": "buffered,2"},
    {"kernels": "avx512", "cache": "30%", "predict": "none", "eviction": "lfu", "io": "direct,1"},
    {"kv": 8, "cache": "50%", "eviction": "paper"},
    {"device": "sim:t4", "cache": "50%"},
    {"routing": "exact", "cache": "50%", "eviction": "expected"},
)
NEURONS: tuple[dict[str, Any], ...] = ({"neurons": "predicted", "cache": "50%"}, {"neurons": "exact", "cache": "30%"})
HASH: tuple[dict[str, Any], ...] = (
    {"routing": "hash"}, {"routing": "hash", "device": "sim:t4", "cache": "50%"}, {"predict": "hash", "cache": "40%"},
)  # fmt: skip
RECIPES = ("g2p", "wiki", "marks", "wikids")


def digest(value: Any) -> str:
    body = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return sha256(body).hexdigest()[:20]


def packs(root: Path) -> Iterator[Path]:
    """One of each family, of every part that the format has, and of each layout."""
    from tests import sanitized
    from tests.tiny import TINY

    sanitized.packs(root)
    for name, (write, _) in TINY.items():
        _converted(write(root / f"{name}.source"), root / f"family-{name}")
    yield from sorted(path for path in root.iterdir() if (path / "manifest.json").is_file())


def _converted(source: Path, out: Path) -> None:
    from moeconv.packing.emit import Label, emit
    from moeconv.quantizers import QUANTIZERS
    from moeconv.quantizers.coder import ExpertCoder
    from moeconv.routes import build
    from moeconv.source.checkpoint import Checkpoint
    from moeconv.writer import add_to_pack
    from moert.pack.paths import PATHS
    from tests.tiny_packs import record_routes

    checkpoint = Checkpoint.open(source)
    spec, widths = checkpoint.spec, (2, 4, 8, 16, 3)
    bits = {key: (widths[at % 5],) * len(spec.moe.ffn.projections) for at, key in enumerate(spec.expert_keys())}
    manifest = emit(ExpertCoder(checkpoint, QUANTIZERS["group"](32), None), bits, out, seed=0, label=Label("tests"))
    if spec.moe.n > 1:
        routes = record_routes(out, ("some words", "and others"))
        add_to_pack(out, manifest, PATHS, build(spec.moe.n, routes).to_bytes())


def bytes_of(pack: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(pack.rglob("*")):
        if path.is_file():
            yield f"bytes {pack.name}/{path.relative_to(pack)}", digest(path.read_bytes())


def answers(pack: Path) -> Iterator[tuple[str, str]]:
    more = NEURONS if pack.name.startswith("neurons") else HASH if pack.name.startswith("hash") else ()
    for chosen in (*SETTINGS, *more):
        yield f"answers {pack.name} {json.dumps(chosen)}", digest(_answers(pack, chosen))


def _answers(pack: Path, chosen: dict[str, Any]) -> Any:
    """Answers one by one, together and as beams, or the error."""
    from moert.errors import BudgetTooSmall, RunError

    try:
        return _run(pack, chosen)
    except BudgetTooSmall as error:
        return _run(pack, {**chosen, "cache": error.smallest_bytes})
    except RunError as error:
        return type(error).__name__


def _run(pack: Path, chosen: dict[str, Any]) -> Any:
    from moert import Engine

    def plain(answer: Any) -> list[Any]:
        told = [[each.chosen, *each.likeliest] for each in answer.logprobs or ()]
        return [answer.tokens, answer.stop_reason, answer.text, told]

    with Engine.open(pack, notify=lambda note: None, **chosen) as engine:
        prompts = [[token % engine.spec.vocab_size for token in prompt] for prompt in PROMPTS]
        sampled: dict[str, Any] = {
            "max_new_tokens": 8,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": 3,
            "logprobs": 3,
        }
        found = [plain(engine.generate(prompt, max_new_tokens=8, logprobs=5)) for prompt in prompts]
        found += [plain(answer) for answer in engine.generate_many(prompts, **sampled)]
        beams = engine.generate(prompts[1], max_new_tokens=6, beams=3, n_return=2)
        return [found, beams.tokens, [other.tokens for other in beams.others]]


def recipes(root: Path, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Bytes of what the recipes convert into, but for times."""
    for name in names:
        out = root / f"{name}.pack"
        command = [sys.executable, "-m", "moeconv", "recipe", "run", f"recipes/{name}.toml", "--out", str(out)]
        subprocess.run(command, cwd=ROOT, check=True)
        for path in sorted(out.rglob("*")):
            if path.is_file() and path.name not in ("report.json", "manifest.json"):
                yield f"recipe {name}/{path.relative_to(out)}", digest(path.read_bytes())
        document = json.loads((out / "manifest.json").read_bytes())
        yield f"recipe {name}/experts", digest(document["experts"])


def messages(root: Path) -> Iterator[tuple[str, str]]:
    """Of errors that the hostile suite expects, without folders."""
    out = root / "messages.json"
    suite = ["-q", "-p", "tests.unchanged_messages", "-p", "no:randomly", "tests/hostile"]
    command = [sys.executable, "-m", "pytest", *suite]
    subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, "UNCHANGED_MESSAGES": str(out)})
    said = {line for part in root.glob("messages.json*") for line in part.read_text("utf-8").splitlines()}
    for line in said:
        yield f"message {line}", ""


def record(out: Path, parts: set[str]) -> None:
    found: Record = {}
    with tempfile.TemporaryDirectory(prefix="unchanged-") as made:
        root = Path(made)
        if "packs" in parts:
            for pack in packs(root):
                found.update(bytes_of(pack))
                found.update(answers(pack))
                print(f"{len(found)} facts, {pack.name}", file=sys.stderr)
        if "messages" in parts:
            found.update(messages(root))
        found.update(recipes(root, tuple(name for name in RECIPES if name in parts)))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=0, sort_keys=True), encoding="utf-8")
    print(f"{len(found)} facts in {out}")


def compare(before: Path, after: Path) -> int:
    old, new = json.loads(before.read_text("utf-8")), json.loads(after.read_text("utf-8"))
    differ = [f"changed: {name}" for name in sorted(old.keys() & new.keys()) if old[name] != new[name]]
    differ += [f"gone: {name}" for name in sorted(old.keys() - new.keys())]
    added = [f"new: {name}" for name in sorted(new.keys() - old.keys())]
    print("\n".join([*differ, *added]))
    print(f"{len(old)} facts: {len(differ)} changed or gone, {len(added)} new")
    return 1 if differ else 0


def main(arguments: list[str]) -> int:
    """`record FILE PART ...` (packs, messages, names of recipes) or `compare BEFORE AFTER`."""
    if arguments[:1] == ["record"]:
        record(Path(arguments[1]), set(arguments[2:]))
        return 0
    return compare(Path(arguments[1]), Path(arguments[2]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
