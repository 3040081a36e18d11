"""Trivial baselines beside a trained reference model: ``python -m recipes.train.baselines NAME``.

Prints a table and writes build/report/baselines_NAME.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from tokenizers import Tokenizer

from calib_data import manifest
from calib_data.marks import plain
from recipes.train import loop, report, train
from recipes.train.kneser_ney import KneserNey

Rows = list[dict[str, str]]
END_OF_LINE = "\n"


def rouge2(targets: list[str], outputs: list[str]) -> float:
    """Mean ROUGE-2 F1."""
    from recipes.train import switch

    return sum(switch.rouge2(o, t) for t, o in zip(targets, outputs, strict=True)) / len(targets)


def scores(name: str, rows: Rows, outputs: list[str]) -> list[dict[str, Any]]:
    """Table rows for one set of outputs: ROUGE-2 and share of exact ones."""
    targets = [row["target"] for row in rows]
    exact = sum(t == o for t, o in zip(targets, outputs, strict=True)) / len(rows)
    return [
        {"name": f"{name} rouge2", "value": rouge2(targets, outputs)},
        {"name": f"{name} exact", "value": exact},
    ]


def generate(name: str, inputs: list[str], batch: int = 128) -> list[str]:
    """Greedy outputs of the exported model, loaded in fp32, in the order of the inputs."""
    from transformers import SwitchTransformersForConditionalGeneration

    from recipes.train.switch import PAD_ID, pad

    folder = report.model_folder(name)
    model = SwitchTransformersForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [item.ids for item in tokenizer.encode_batch(inputs)]  # cut where the model's tokenizer.json says so
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    outputs = [""] * len(ids)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        source = pad([ids[i] for i in chosen])
        with torch.no_grad():
            made = model.generate(source, attention_mask=(source != PAD_ID).long())
        for i, text in zip(chosen, tokenizer.decode_batch(made.tolist()), strict=True):
            outputs[i] = text
    return outputs


def edit_distances(word: str, words: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Levenshtein distance from ``word`` to each of words [n, longest] (character codes, 0-padded); [n]."""
    previous = np.tile(np.arange(words.shape[1] + 1, dtype=np.int8), (len(words), 1))
    for row, letter in enumerate(word, start=1):
        current = np.empty_like(previous)
        current[:, 0] = row
        differs = words != ord(letter)
        for column in range(1, words.shape[1] + 1):
            skip = np.minimum(previous[:, column], current[:, column - 1]) + 1
            current[:, column] = np.minimum(skip, previous[:, column - 1] + differs[:, column - 1])
        previous = current
    return previous[np.arange(len(words)), lengths]


def nearest_words(rows: Rows, known: Rows) -> list[str]:
    """For each row the target of the known word at the smallest edit distance; the first one wins a tie."""
    longest = max(len(row["input"]) for row in known)
    words = np.zeros((len(known), longest), dtype=np.int16)
    for i, row in enumerate(known):
        words[i, : len(row["input"])] = [ord(letter) for letter in row["input"]]
    lengths = np.array([len(row["input"]) for row in known])
    return [known[int(edit_distances(row["input"], words, lengths).argmin())]["target"] for row in rows]


def g2p(sample: int) -> list[dict[str, Any]]:
    """Model on all held-out words; model and nearest-neighbour copy on a sample of them."""
    rows, known = train.rows_of("g2p", "heldout"), train.rows_of("g2p", "train")
    outputs = generate("g2p", [row["input"] for row in rows])
    some = rows[: min(sample, len(rows))]
    return [
        *scores("model", rows, outputs),
        *scores(f"model, {len(some)} words", some, outputs[: len(some)]),
        *scores(f"nearest neighbour, {len(some)} words", some, nearest_words(some, known)),
    ]


def finished(text: str) -> str:
    """Text with its first letter in upper case and a full stop at its end."""
    return f"{text[:1].upper()}{text[1:].rstrip('.,;:!?')}."


def commonest_forms(known: Rows) -> dict[str, str]:
    """The most frequent form, with its case and marks, of each plain word of the training targets."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in known:
        for word in row["target"].split():
            counts[plain(word)][word] += 1
    return {word: forms.most_common(1)[0][0] for word, forms in counts.items()}


def restored(rows: Rows, outputs: list[str]) -> dict[str, float]:
    """F1 of the words with capitals or marks, share of exact outputs, and share in which all words are the input's."""
    from calib_data.marked_words import f1

    pairs = list(zip(rows, outputs, strict=True))
    return {
        "f1": sum(f1(output, row["target"]) for row, output in pairs) / len(pairs),
        "exact": sum(output == row["target"] for row, output in pairs) / len(pairs),
        "same words": sum(plain(output) == row["input"] for row, output in pairs) / len(pairs),
    }


def marks(name: str, sample: int) -> list[dict[str, Any]]:
    """Model, first letter and full stop alone, and the commonest form of each word as well, on rows of all articles."""
    rows = train.rows_of("marks", "heldout")
    rows = rows[:: max(1, len(rows) // sample)]
    inputs = [row["input"] for row in rows]
    forms = commonest_forms(train.rows_of("marks", "train"))
    likely = [" ".join(forms.get(word, word) for word in text.split()) for text in inputs]
    ways = {
        "model": generate(name, inputs),
        "first letter and full stop": [finished(text) for text in inputs],
        "commonest forms": [finished(text) for text in likely],
    }
    return [
        {"name": f"{way} {figure}", "value": value}
        for way, outputs in ways.items()
        for figure, value in restored(rows, outputs).items()
    ]


def spellings(words: list[str]) -> np.ndarray:
    """Characters of the words as one stream of codes; each word begins after a 0 and ends with one."""
    return np.array([0] + [code for word in words for code in [*map(ord, word), 0]], dtype=np.int64)


def spelling_probabilities(words: list[str], known: list[str]) -> np.ndarray:
    """Probability of each word's spelling under a character 5-gram of the known words; sums to one over all strings."""
    model = KneserNey(spellings(known), 5)
    stream = spellings(words)
    # 0x110000 characters are possible; all are equally likely below the unigram
    logs = np.log(model.probabilities(stream, np.full(len(stream), 1 / 0x110000)))
    ends = np.flatnonzero(stream == 0)
    sums = np.concatenate([[0.0], np.cumsum(logs)])
    return np.exp(sums[ends[1:] + 1] - sums[ends[:-1] + 1])


def wiki_words(split: str) -> list[str]:
    """Words of a split in order; each line end is a word of its own."""
    text = "".join(row["text"] for row in train.rows_of("wiki", split))
    return text.replace("\n", f" {END_OF_LINE} ").split(" ")


def five_gram() -> tuple[float, dict[str, Any]]:
    """Word-level perplexity of the 5-gram on the held-out text, and what it rests on."""
    training = [word for word in wiki_words("train") if word]
    heldout = [word for word in wiki_words("heldout") if word]
    numbers: dict[str, int] = {}
    ids = np.array([numbers.setdefault(word, len(numbers)) for word in training])
    known = list(numbers)
    unknown = sum(word not in numbers for word in heldout)
    test = np.array([numbers.setdefault(word, len(numbers)) for word in heldout])
    distinct = sorted(set(heldout))
    spelt = dict(zip(distinct, spelling_probabilities(distinct, known), strict=True))
    base = np.array([spelt[word] for word in heldout])
    total = -float(np.log(KneserNey(ids, 5).probabilities(test, base)).sum())
    words = sum(word != END_OF_LINE for word in heldout)
    facts = {
        "training_words": len(training),
        "vocabulary": len(known),
        "heldout_words": words,
        "unknown": unknown,
    }
    return math.exp(total / words), facts


def kept_five_gram() -> tuple[float, dict[str, Any]]:
    """``five_gram``, computed once for the built splits: it takes minutes and does not depend on the model."""
    path = loop.ROOT / "build" / "report" / "five_gram.json"
    splits = manifest.load(loop.ROOT / "calib_data" / "wiki.toml")["splits"]
    key = [splits[name]["sha256"] for name in ("train", "heldout")]
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if kept.get("key") != key:
        perplexity, facts = five_gram()
        kept = {"key": key, "perplexity": perplexity, "facts": facts}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    return kept["perplexity"], kept["facts"]


def model_perplexity(folder: Path) -> float:
    """Word-level perplexity of an exported model (fp32) on the whole held-out text.

    Windows of the context length advance by half of it; only tokens not scored before count, so that all but the first
    have at least half of the context before them. exp(total negative log-likelihood / words).
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = "".join(row["text"] for row in train.rows_of("wiki", "heldout"))
    ids = torch.tensor(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)
    span, total, scored = model.config.max_position_embeddings, math.log(model.config.vocab_size), 1
    stride = span // 2
    starts = range(0, max(len(ids) - span, 0) + stride, stride)
    for batch in (starts[i : i + 16] for i in range(0, len(starts), 16)):
        windows = [ids[start : start + span] for start in batch]
        padded = torch.nn.utils.rnn.pad_sequence(windows, batch_first=True)
        with torch.no_grad():
            logs = model(padded).logits.log_softmax(-1)
        for row, start in enumerate(batch):
            first, last = scored - start, min(span, len(ids) - start)
            if last > first:
                labels = windows[row][first:last]
                total -= float(logs[row, first - 1 : last - 1].gather(-1, labels[:, None]).sum())
                scored = start + last
    return math.exp(total / len(text.split()))


def wiki(name: str, sample: int) -> list[dict[str, Any]]:
    """A model of the wiki data and the 5-gram on the WikiText-2 test text, both per whitespace-separated word."""
    perplexity, facts = kept_five_gram()
    rows = [{"name": "kneser-ney 5-gram word perplexity", "value": perplexity}]
    rows += [{"name": name, "value": value} for name, value in facts.items()]
    return [{"name": "model word perplexity", "value": model_perplexity(report.model_folder(name))}, *rows]


BASELINES = {
    "g2p": (g2p, 400),
    "marks": (partial(marks, "marks"), 1000),
    "marks_sparse": (partial(marks, "marks_sparse"), 1000),
    "opt": (partial(wiki, "opt"), 0),
    "wiki": (partial(wiki, "wiki"), 0),
    "wikids": (partial(wiki, "wikids"), 0),
}


def main(argv: list[str] | None = None) -> int:
    """Compare one model with its baselines."""
    parser = argparse.ArgumentParser(description="Trivial baselines beside a trained reference model.")
    parser.add_argument("name", choices=sorted(BASELINES))
    parser.add_argument("--sample", type=int, help="held-out rows for the slow comparisons")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    run, sample = BASELINES[args.name]
    report.publish(f"baselines_{args.name}", run(args.sample or sample), {"model": args.name}, loop.ROOT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
