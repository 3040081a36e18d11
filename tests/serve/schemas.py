"""Real JSON schemas on the server: `tests/serve/schemas.py FOLDER SOURCE`. SOURCE is the repository of
JSONSchemaBench, of which one commit is fetched into FOLDER where it is not there.

Each of COUNT schemas binds an answer of random weights, whose tokens that close something are preferred: else a text
or a list would seldom end. Each answer that has ended must be JSON that the package jsonschema finds valid; a schema
that can't be followed must be refused before anything runs. Prints counts, and ends with 1 where an answer is wrong.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from grammar_packs import byte_level, write_grammar_pack
from serving import Running, serving
from tiny_packs import EOS

COMMIT = "ba103c73756198dd9b149ddc7db7867da7a077f6"
COUNT, AT_ONCE, MOST_TOKENS, PER_SCHEMA = 300, 16, 2000, 2
TEMPLATE = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
CLOSING = {'"': 9.0, "}": 12.0, '"}': 12.0, "]": 12.0, ",": -4.0, "\n": -9.0, "\n\n": -9.0, " ": -9.0, "  ": -9.0}
DIGITS = dict.fromkeys("0123456789", -3.0)


def fetch(folder: Path, source: str) -> None:
    git = ["git", "-C", str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    if subprocess.run([*git, "cat-file", "-e", COMMIT], capture_output=True).returncode != 0:
        subprocess.run([*git, "init", "--quiet"], check=True)
        got = subprocess.run([*git, "fetch", "--quiet", "--depth", "1", source, COMMIT])
        if got.returncode != 0:
            sys.exit(f"schemas.py: no schemas from {source}: name another copy of that repository, SCHEMAS=FOLDER")


def schemas(folder: Path, count: int) -> Iterator[tuple[str, Any]]:
    """Yields the names of schemas and these: of each collection as many, at random, but always the same."""
    git = ["git", "-C", str(folder)]
    listed = subprocess.check_output([*git, "ls-tree", "-r", "--name-only", COMMIT, "data"], text=True).split("\n")
    names = sorted(filter(None, listed), key=lambda name: hashlib.sha256(name.encode()).digest())
    seen = Counter[str]()
    rank = {}
    for name in names:
        rank[name] = seen[name.split("/")[1]]
        seen[name.split("/")[1]] += 1
    for name in sorted(names, key=lambda name: (rank[name], name))[:count]:
        yield name, json.loads(subprocess.check_output([*git, "show", f"{COMMIT}:{name}"]))


def bias() -> dict[str, float]:
    tokenizer = byte_level()
    made = {str(EOS): 30.0}
    for text, more in {**CLOSING, **DIGITS}.items():
        (token,) = tokenizer.encode(text).ids
        made[str(token)] = more
    return made


def fault(schema: Any, text: str) -> str | None:
    """Returns the fault of an answer; None for one that the schema allows."""
    try:
        found = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    wrong = jsonschema.exceptions.best_match(kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(found))
    return None if wrong is None else f"{wrong.json_path}: {wrong.message[:200]}"


def ask(client: httpx.Client, schema: Any, seed: int) -> tuple[str, str]:
    """Returns how an answer went, and its text or the error."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {
        "messages": [{"role": "user", "content": "hello"}], "response_format": form, "max_tokens": MOST_TOKENS,
        "temperature": 1.0, "seed": seed, "logit_bias": bias(),
    }  # fmt: skip
    found = client.post("/v1/chat/completions", json=body)
    if found.status_code != 200:
        return f"status {found.status_code}", found.json()["error"]["message"]
    (choice,) = found.json()["choices"]
    return choice["finish_reason"], choice["message"]["content"]


def main(folder: Path, count: int, running: Running) -> int:
    kinds, wrong = Counter[str](), list[str]()
    asked = [(name, schema, seed) for name, schema in schemas(folder, count) for seed in range(PER_SCHEMA)]
    with httpx.Client(base_url=running.url, timeout=600) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda one: ask(client, *one[1:]), asked)
        for (name, schema, seed), (how, text) in zip(asked, answers, strict=True):
            kind = {"stop": "valid", "length": "cut", "status 400": "refused"}.get(how, "wrong")
            found = fault(schema, text) if kind == "valid" else text
            kind = "wrong" if kind == "valid" and found is not None else kind
            kinds[kind] += 1
            if kind == "wrong":
                wrong.append(f"{name} with seed {seed}: {how}: {found} of {text[:300]}")
            elif kind == "refused" and seed == 0:
                print(f"{name}: {text}")
    print("\n".join(wrong))
    print(f"{len(asked) // PER_SCHEMA} schemas, {len(asked)} answers: {dict(kinds.most_common())}")
    return bool(wrong)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]), sys.argv[2])
    with tempfile.TemporaryDirectory() as place:
        pack = write_grammar_pack(Path(place) / "tiny.pack", byte_level(), TEMPLATE)
        with serving(pack) as server:
            sys.exit(main(Path(sys.argv[1]), COUNT, server))
