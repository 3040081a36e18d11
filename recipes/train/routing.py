"""How skewed the routing of a reference model is: ``python -m recipes.train.routing NAME``.

A path is the sequence of experts of one token through the MoE layers of one stack. Prints coverage of the most
frequent held-out paths, how often the next layer's expert is guessed right from the two layers before, from one and
from none (commonest expert on the calibration split), and the balance of each layer; writes
build/report/routing_NAME.json.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from recipes.train import loop, report, train

Choices = np.ndarray  # [tokens, layers, k], experts in descending order of probability


def top_share(paths: np.ndarray, share: float = 0.2) -> float:
    """Share of tokens on the ``share`` most frequent of the distinct paths; paths [tokens, layers]."""
    counts = sorted(Counter(map(bytes, np.ascontiguousarray(paths.astype(np.int16)))).values(), reverse=True)
    kept = max(1, round(share * len(counts)))
    return sum(counts[:kept]) / len(paths)


def commonest(first: np.ndarray, layer: int, known: int) -> dict[bytes, int]:
    """Commonest expert of ``layer`` for each context of ``known`` layers before it; first [tokens, layers]."""
    table: dict[bytes, Counter[int]] = {}
    context = np.ascontiguousarray(first[:, layer - known : layer].astype(np.int16))
    for key, expert in zip(context, first[:, layer].tolist(), strict=True):
        table.setdefault(key.tobytes(), Counter())[expert] += 1
    return {key: counter.most_common(1)[0][0] for key, counter in table.items()}


def next_accuracy(fit: np.ndarray, test: np.ndarray, known: int) -> float:
    """Share of right guesses of the next layer's expert given ``known`` layers before, mean over layers ≥ 2.

    The guess is the commonest expert in ``fit`` after the same context; a context unseen there is shortened.
    """
    means = []
    for layer in range(2, test.shape[1]):
        tables = [commonest(fit, layer, n) for n in range(known, -1, -1)]
        right = 0
        for row in test.astype(np.int16):
            keys = [np.ascontiguousarray(row[layer - n : layer]).tobytes() for n in range(known, -1, -1)]
            guess = next(table[key] for table, key in zip(tables, keys, strict=True) if key in table)
            right += guess == row[layer]
        means.append(right / len(test))
    return float(np.mean(means))


def balance(choices: Choices, experts: int) -> list[dict[str, float]]:
    """For each layer: share of the busiest expert, of the idlest, and entropy over that of an even split."""
    rows = []
    for layer in range(choices.shape[1]):
        share = np.bincount(choices[:, layer].ravel(), minlength=experts) / choices[:, layer].size
        positive = share[share > 0]
        even = float(-(positive * np.log(positive)).sum() / np.log(experts))
        rows.append({"max_share": float(share.max()), "min_share": float(share.min()), "evenness": even})
    return rows


def describe(fit: Choices, choices: Choices, experts: int) -> dict[str, Any]:
    """All figures of one stack: guesses learnt on ``fit`` (calibration), everything measured on ``choices``."""
    first, learnt = choices[:, :, 0], fit[:, :, 0]
    return {
        "tokens": len(choices),
        "distinct_paths": len({row.tobytes() for row in first.astype(np.int16)}),
        "top20_share": top_share(first),
        "next_given_2": next_accuracy(learnt, first, 2),
        "next_given_1": next_accuracy(learnt, first, 1),
        "next_given_0": next_accuracy(learnt, first, 0),
        "layers": balance(choices, experts),
    }


def likeliest(logits: Tensor, k: int) -> Tensor:
    """The ``k`` experts of the largest logits [..., experts] for each token: [tokens, k]."""
    return logits.reshape(-1, logits.shape[-1]).topk(k, dim=-1).indices


def by_weight(weights: Tensor, index: Tensor) -> Tensor:
    """Chosen experts [tokens, k] in descending order of their weights [tokens, k]."""
    return index.gather(1, weights.argsort(dim=-1, descending=True))


class Recorder:
    """Collects the choices of a model's MoE layers through forward hooks; ``chosen`` takes a router's output."""

    def __init__(self, routers: list[nn.Module], chosen: Callable[[Any], Tensor]):
        self.rows: list[list[np.ndarray]] = [[] for _ in routers]
        self.mask: Tensor | None = None
        for number, router in enumerate(routers):
            router.register_forward_hook(self._hook(number, chosen))

    def _hook(self, number: int, chosen: Callable[[Any], Tensor]) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            index = chosen(output)
            self.rows[number].append(index[self.mask.reshape(-1)].numpy() if self.mask is not None else index.numpy())

        return keep

    def choices(self) -> Choices:
        """[tokens, layers, k]."""
        return np.stack([np.concatenate(rows) for rows in self.rows], axis=1)


def trace_switch(folder: Path, rows: list[dict[str, str]]) -> tuple[dict[str, Choices], int]:
    """Choices of encoder and decoder with the reference targets as decoder input (teacher forcing)."""
    from transformers import SwitchTransformersForConditionalGeneration

    from recipes.train.switch import PAD_ID, pad

    model = SwitchTransformersForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    limit = model.generation_config.max_new_tokens
    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    recorders = {
        name: Recorder(
            [block.layer[-1].mlp.router for block in stack.block if block.is_sparse],
            lambda output: likeliest(output[2], 1),
        )
        for name, stack in stacks.items()
    }
    for start in range(0, len(rows), 100):
        part = rows[start : start + 100]
        source = pad([tokenizer.encode(row["input"]).ids for row in part])
        target = pad([tokenizer.encode(row["target"]).ids[:limit] for row in part])
        shifted = torch.nn.functional.pad(target[:, :-1], (1, 0), value=PAD_ID)
        recorders["encoder"].mask, recorders["decoder"].mask = source != PAD_ID, target != PAD_ID
        with torch.no_grad():
            model(input_ids=source, attention_mask=(source != PAD_ID).long(), decoder_input_ids=shifted)
    return {name: recorder.choices() for name, recorder in recorders.items()}, model.config.num_experts


def trace_decoder(folder: Path, text: str, tokens: int) -> tuple[dict[str, Choices], int]:
    """Choices of the decoder on the first ``tokens`` tokens of a text, in windows of the context length."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:tokens])
    span = min(model.config.max_position_embeddings, 512)
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    recorder = Recorder(routers, lambda output: by_weight(output[1], output[2]))
    for window in ids[: len(ids) // span * span].view(-1, span).split(8):
        with torch.no_grad():
            model.model(window)
    return {"decoder": recorder.choices()}, routers[0].num_experts


def main(argv: list[str] | None = None) -> int:
    """Trace one model, print the table and write the report."""
    parser = argparse.ArgumentParser(description="Routing skew of one trained reference model.")
    data = {name: plan.data for name, plan in train.PLANS.items() if plan.routed} | {report.UPCYCLED: "wiki"}
    parser.add_argument("name", choices=sorted(data))
    parser.add_argument("--rows", type=int, default=4000, help="rows a split (encoder–decoder models)")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens a split (language model)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    folder = report.model_folder(args.name)
    traces = {}
    for split in ("calibration", "heldout"):
        rows = train.rows_of(data[args.name], split)
        if "text" in rows[0]:
            traces[split], experts = trace_decoder(folder, "".join(row["text"] for row in rows), args.tokens)
        else:
            traces[split], experts = trace_switch(folder, rows[: args.rows])
    stacks = {
        name: describe(traces["calibration"][name], choices, experts) for name, choices in traces["heldout"].items()
    }
    table = [
        {"name": f"{stack} {figure}", "value": value}
        for stack, figures in stacks.items()
        for figure, value in figures.items()
        if figure != "layers"
    ]
    table += [
        {"name": f"{stack} layer {number} max share", "value": layer["max_share"]}
        for stack, figures in stacks.items()
        for number, layer in enumerate(figures["layers"])
    ]
    report.publish(f"routing_{args.name}", table, {"experts": experts, "stacks": stacks}, loop.ROOT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
