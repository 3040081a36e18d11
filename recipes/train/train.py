"""Train one reference model: ``python -m recipes.train.train NAME --minutes M --threads N``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from tokenizers import Tokenizer

from recipes.train import loop, vocabulary

if TYPE_CHECKING:
    from recipes.train.decoder import Text
    from recipes.train.opt import OptTask
    from recipes.train.restraint import Restraint
    from recipes.train.switch import SwitchTask

DATA_DIR = loop.ROOT / "build" / "data"


def rows_of(data: str, split: str, limit: int | None = None) -> list[dict[str, str]]:
    """Rows of one built split, at most ``limit``; ends with a clear line when it was not built."""
    path = DATA_DIR / data / f"{split}.jsonl"
    if not path.is_file():
        command = f"python calib_data/{data}.py --splits train calibration heldout"
        raise SystemExit(f"error: {path} is missing; build it with: {command}")
    return list(vocabulary.read_rows(path))[:limit]


def kept_tokenizer(data: str, make: Callable[[], Tokenizer]) -> Tokenizer:
    """The tokenizer under build/train/DATA, made on first use, so that a resumed run has the same one."""
    path: Path = loop.TRAIN_DIR / data / "tokenizer.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        make().save(str(path))
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


def wiki_text() -> Text:
    """What wiki and wikids are trained on: the same tokens."""
    from recipes.train.decoder import Text

    train = rows_of("wiki", "train")
    tokenizer = kept_tokenizer("wiki", lambda: vocabulary.byte_pairs((row["text"] for row in train), 8192, eos=False))
    heldout = "".join(row["text"] for row in rows_of("wiki", "heldout"))
    return Text(tokenizer, wiki_streams(train, tokenizer), heldout)


def wiki(seed: int) -> loop.Task:
    """Wikipedia text: 8 layers of 32 experts, 4 a token."""
    from recipes.train import olmoe

    settings = olmoe.OlmoeSettings(
        d_model=192, d_expert=96, layers=8, heads=6, experts=32, top_k=4, context=256, batch=12
    )
    return olmoe.task("wiki", settings, wiki_text(), seed)


def opt_task(name: str, seed: int, restraint: Restraint | None) -> OptTask:
    """Wikipedia text: 6 dense layers of 1,280 ReLU neurons."""
    from recipes.train.opt import OptSettings, OptTask

    settings = OptSettings(d_model=320, d_ff=1280, layers=6, heads=5, context=512, batch=6, restraint=restraint)
    return OptTask(name, settings, wiki_text(), seed)


def opt(seed: int) -> loop.Task:
    """Few of its neurons are to fire."""
    from recipes.train.restraint import Restraint

    return opt_task("opt", seed, Restraint(share=0.09, since=210, pace=0.015))


def opt_free(seed: int) -> loop.Task:
    """The same with no regard to how many do."""
    return opt_task("opt_free", seed, None)


def wikids(seed: int) -> loop.Task:
    """Wikipedia text: a dense layer, then 6 of 64 experts, 6 a token beside a shared one."""
    from recipes.train import deepseek

    settings = deepseek.DeepseekSettings(
        d_model=192, d_expert=64, d_dense=512, layers=7, dense_layers=1, heads=6, query_rank=96, latent=64,
        d_head=32, d_turn=16, experts=64, top_k=6, context=256, batch=12,
    )  # fmt: skip
    return deepseek.task("wikids", settings, wiki_text(), seed)


def marks_task(name: str, seed: int, **changes: Any) -> SwitchTask:
    """Case and punctuation restored: 6 + 6 layers, 3 + 3 of them of 64 experts."""
    from calib_data.marked_words import f1
    from recipes.train.switch import SwitchSettings, SwitchTask

    settings = SwitchSettings(
        d_model=192, d_ff=160, d_kv=32, layers=6, heads=6, experts=64, batch=64, max_input=112, max_target=128,
        sparse_every=2, smoothing=0.0, **changes,
    )  # fmt: skip
    train = rows_of("marks", "train")
    texts = (row[side] for row in train for side in ("input", "target"))
    tokenizer = kept_tokenizer("marks", lambda: vocabulary.byte_pairs(texts, 4096, eos=True))
    some = rows_of("marks", "heldout")[::25]  # of all articles
    return SwitchTask(name, settings, tokenizer, train, some, seed, f1)


def marks(seed: int) -> loop.Task:
    """From nothing, short examples first."""
    return marks_task("marks", seed, short_steps=600)


def marks_sparse(seed: int) -> loop.Task:
    """Goes on from marks, until few of the experts' neurons fire."""
    from recipes.train.restraint import Restraint

    task = marks_task("marks_sparse", seed + 1, restraint=Restraint(share=0.09, first=0.02, pace=0.02))
    task.begin_with(loop.MODEL_DIR / "marks")
    return task


@dataclass(frozen=True)
class Plan:
    """How one model is trained. Rates are those at the peak of the schedule, see ``loop.make_optimizers``."""

    data: str  # its name in calib_data
    task: Callable[[int], loop.Task]
    minutes: float
    rate: float
    embedding_rate: float
    embeddings: tuple[str, ...]
    muon: bool
    routed: bool = True  # it has experts
    compared: bool = False  # only trained to compare another with: it stays under build/train


PLANS = {
    "g2p": Plan("g2p", g2p, 16, 2e-3, 2e-2, ("shared",), muon=False),
    "wiki": Plan("wiki", wiki, 90, 4e-3, 3e-3, ("embed_tokens", "lm_head"), muon=True),
    "opt": Plan("wiki", opt, 20, 4e-3, 3e-3, ("embed_",), muon=True, routed=False),
    "opt_free": Plan("wiki", opt_free, 20, 4e-3, 3e-3, ("embed_",), muon=True, routed=False, compared=True),
    "wikids": Plan("wiki", wikids, 100, 4e-3, 3e-3, ("embed_tokens", "lm_head"), muon=True),
    "marks": Plan("marks", marks, 100, 4e-3, 2e-2, ("shared",), muon=True),
    "marks_sparse": Plan("marks", marks_sparse, 15, 1.5e-3, 5e-3, ("shared",), muon=True),
}


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train one reference model; a second start resumes.")
    parser.add_argument("name", choices=sorted(PLANS))
    parser.add_argument("--minutes", type=float, help="time budget; the schedule is stretched over it")
    parser.add_argument("--steps", type=int, help="budget in steps in place of time; the schedule likewise")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--snapshot-minutes", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=2026)
    args = parser.parse_args(argv)
    plan = PLANS[args.name]
    settings = loop.Settings(
        minutes=args.minutes or plan.minutes,
        threads=args.threads,
        rate=plan.rate,
        embedding_rate=plan.embedding_rate,
        snapshot_minutes=args.snapshot_minutes,
        muon=plan.muon,
        steps=args.steps,
        models=loop.TRAIN_DIR / "models" if plan.compared else None,
        seed=args.seed,
    )
    loop.prepare(args.threads, args.seed)
    loop.run(plan.task(args.seed), settings, plan.embeddings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
