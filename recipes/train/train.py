"""Train one reference model: ``python -m recipes.train.train NAME --minutes M --threads N``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from tokenizers import Tokenizer

from recipes.train import loop, vocabulary

DATA_DIR = loop.ROOT / "build" / "data"
MINUTES = {"g2p": 16.0, "wiki": 90.0, "docline": 80.0}


def rows_of(name: str, split: str, limit: int | None = None) -> list[dict[str, str]]:
    """Rows of one built split, at most ``limit``; ends with a clear line when it was not built."""
    path = DATA_DIR / name / f"{split}.jsonl"
    if not path.is_file():
        command = f"python calib_data/{name}.py --splits train calibration heldout"
        raise SystemExit(f"error: {path} is missing; build it with: {command}")
    return list(vocabulary.read_rows(path))[:limit]


def kept_tokenizer(name: str, make: object) -> Tokenizer:
    """The tokenizer under build/train/NAME, made on first use, so that a resumed run has the same one."""
    path: Path = loop.TRAIN_DIR / name / "tokenizer.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        make().save(str(path))  # type: ignore[operator]
    return Tokenizer.from_file(str(path))


def g2p(seed: int) -> loop.Task:
    """Spelling to phonemes: 4 + 4 layers of 16 experts."""
    from recipes.train.switch import SwitchSettings, SwitchTask

    settings = SwitchSettings(
        d_model=128, d_ff=256, d_kv=32, layers=4, heads=4, experts=16, batch=512, max_input=20, max_target=24
    )
    train = rows_of("g2p", "train")
    tokenizer = kept_tokenizer("g2p", lambda: vocabulary.letters_and_phonemes(train))
    return SwitchTask("g2p", settings, tokenizer, train, rows_of("g2p", "heldout", 1000), seed)


def wiki_streams(rows: list[dict[str, str]], tokenizer: Tokenizer) -> list[tuple[torch.Tensor, int]]:
    """Token streams with repeats an epoch: long WikiText articles twice, the short HotpotQA paragraphs once."""
    path = loop.TRAIN_DIR / "wiki" / "tokens.pt"
    if not path.is_file():
        first = next(i for i, row in enumerate(rows) if row["text"].startswith(" \n = ") and i > 0)
        parts = []
        for part in (rows[:first], rows[first:]):
            encoded = tokenizer.encode_batch([row["text"] for row in part])
            parts.append(torch.tensor([i for item in encoded for i in item.ids], dtype=torch.int16))
        torch.save(parts, path)
    long, short = torch.load(path, weights_only=True)
    return [(long, 2), (short, 1)]


def wiki(seed: int) -> loop.Task:
    """Wikipedia text: 8 layers of 32 experts, 4 a token."""
    from recipes.train.olmoe import OlmoeSettings, OlmoeTask

    settings = OlmoeSettings(d_model=192, d_expert=96, layers=8, heads=6, experts=32, top_k=4, context=256, batch=12)
    train = rows_of("wiki", "train")
    texts = (row["text"] for row in train)
    tokenizer = kept_tokenizer("wiki", lambda: vocabulary.byte_pairs(texts, 8192, eos=False))
    heldout = "".join(row["text"] for row in rows_of("wiki", "heldout"))
    return OlmoeTask("wiki", settings, tokenizer, wiki_streams(train, tokenizer), heldout, seed)


def docline(seed: int) -> loop.Task:
    """Docstring to summary line: 4 + 4 layers of 8 experts."""
    from recipes.train.switch import SwitchSettings, SwitchTask

    settings = SwitchSettings(
        d_model=192, d_ff=384, d_kv=32, layers=4, heads=6, experts=8, batch=48, max_input=96, max_target=28
    )
    train = rows_of("docline", "train")
    texts = (text for row in train for text in row.values())
    tokenizer = kept_tokenizer("docline", lambda: vocabulary.byte_pairs(texts, 8192, eos=True))
    return SwitchTask("docline", settings, tokenizer, train, rows_of("docline", "heldout", 300), seed)


TASKS = {"g2p": g2p, "wiki": wiki, "docline": docline}
EMBEDDINGS = {"g2p": ["shared"], "docline": ["shared"], "wiki": ["embed_tokens", "lm_head"]}
RATES = {"g2p": (2e-3, 2e-2), "docline": (2e-3, 2e-2), "wiki": (4e-3, 3e-3)}


MUON = {"wiki", "docline"}


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train one reference model; a second start resumes.")
    parser.add_argument("name", choices=sorted(TASKS))
    parser.add_argument("--minutes", type=float, help="time budget; the schedule is stretched over it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--snapshot-minutes", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=2026)
    args = parser.parse_args(argv)
    rate, embedding_rate = RATES[args.name]
    settings = loop.Settings(
        minutes=args.minutes or MINUTES[args.name],
        threads=args.threads,
        rate=rate,
        embedding_rate=embedding_rate,
        snapshot_minutes=args.snapshot_minutes,
        muon=args.name in MUON,
        seed=args.seed,
    )
    loop.prepare(args.threads, args.seed)
    loop.run(TASKS[args.name](args.seed), settings, EMBEDDINGS[args.name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
