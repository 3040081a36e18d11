"""What transformers 4.57.6 gives for tiny models that version 5 runs otherwise or not at all, kept beside this file.

`make golden-old` writes it anew: `checkpoints DIR` with the present transformers, then `outputs DIR` with the old one.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VERSION = "4.57.6"
KEPT = HERE / "transformers_4_57_6.json"
CASES = [
    ("gptsan-japanese", "causal"), ("gptsan-japanese", "a prefix"), ("gptsan-japanese", "small capacity"),
    ("gptsan-japanese", "all of it"), ("nllb-moe", "plain"), ("nllb-moe", "other heads"),
    ("switch_transformers", "every second layer sparse"), ("switch_transformers", "small capacity"),
]  # fmt: skip
PROMPTS, NEW, TARGET, EVERY = 20, 12, 10, 6
"""Prompts of a case, tokens that are written, tokens that a decoder behind an encoder is given, and which logits are
kept of the last and the middle row: each so many."""


def prompts_of(name: str, vocab: int) -> list[list[int]]:
    """Of 1 to 134 tokens."""
    chance = random.Random(name)
    return [[chance.randrange(2, vocab) for _ in range(1 + 7 * place)] for place in range(PROMPTS)]


def target_of(ids: list[int], start: int) -> list[int]:
    return [start, *(2 + token % 90 for token in (ids * TARGET)[: TARGET - 1])]


def digest(checkpoint: Path) -> str:
    """Of the weights by name, however a file orders them."""
    import torch
    from safetensors.torch import load_file

    found = hashlib.sha256()
    for name, weight in sorted(load_file(checkpoint / "model.safetensors").items()):
        found.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        found.update(weight.contiguous().view(torch.int16).numpy().tobytes())
    return found.hexdigest()


def kept_of(logits: Any) -> list[list[float]]:
    """Of rows [tokens, vocab], some numbers of the middle and the last one."""
    return [[round(float(value), 6) for value in row[::EVERY]] for row in (logits[len(logits) // 2], logits[-1])]


def write_checkpoints(root: Path) -> None:
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
    from tiny import TINY

    for place, (family, name) in enumerate(CASES):
        make, variants = TINY[family]
        make(root / str(place), **variants[name])


def outputs(checkpoint: Path, name: str) -> dict[str, Any]:
    import torch

    config = json.loads((checkpoint / "config.json").read_text())
    model, loaded = _class(config).from_pretrained(
        checkpoint, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    assert not loaded["unexpected_keys"], loaded
    assert not loaded["missing_keys"] or config.get("tie_word_embeddings", True), loaded
    model.eval()
    answers = []
    with torch.inference_mode():
        for ids in prompts_of(name, config["vocab_size"]):
            given = torch.tensor([ids])
            if config["model_type"] == "gptsan-japanese":
                types = _token_types(ids, config["separator_token_id"])
                logits, tokens = model(given, token_type_ids=types).logits[0], _written(model, given, types, config)
            else:
                target = torch.tensor([target_of(ids, config["decoder_start_token_id"])])
                logits = model(given, decoder_input_ids=target).logits[0]
                rows = model.generate(given, do_sample=False, num_beams=1, max_new_tokens=NEW)
                tokens = rows[0, 1:].tolist()
            answers.append({"tokens": _ended(tokens, config["eos_token_id"]), "logits": kept_of(logits)})
    return {"weights": digest(checkpoint), "answers": answers}


def _class(config: dict[str, Any]) -> Any:
    import transformers

    if config["model_type"] != "gptsan-japanese":
        return getattr(transformers, config["architectures"][0])
    from transformers.models.deprecated.gptsan_japanese import modeling_gptsan_japanese

    return modeling_gptsan_japanese.GPTSanJapaneseForConditionalGeneration


def _token_types(ids: list[int], separator: int) -> Any:
    """Those of its tokenizer [1, tokens]."""
    import torch

    prefix = ids.index(separator) if separator in ids else 0
    return torch.tensor([[1] * prefix + [0] * (len(ids) - prefix)])


class _Pasts(tuple):  # type: ignore[type-arg]
    """What the model returns of each layer, as it wants it back: 4.57.6 asks it for its length, and has lost the
    generate() that once put it together."""

    def get_seq_length(self) -> int:
        return int(self[0][0].shape[2])


def _written(model: Any, ids: Any, types: Any, config: dict[str, Any]) -> list[int]:
    """As generate() fed it: the prompt, then one token after the other with what was kept."""
    found = model(ids, token_type_ids=types, use_cache=True)
    tokens = [int(found.logits[0, -1].argmax())]
    while len(tokens) < NEW and tokens[-1] != config["eos_token_id"]:
        last = ids.new_tensor([[tokens[-1]]])
        found = model(
            last, attention_mask=last.new_ones((1, ids.shape[1] + len(tokens))), token_type_ids=types[:, -1:],
            past_key_values=_Pasts(found.past_key_values), use_cache=True,
        )  # fmt: skip
        tokens.append(int(found.logits[0, -1].argmax()))
    return tokens


def _ended(tokens: list[int], eos: int) -> list[int]:
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


def main() -> int:
    what, root = sys.argv[1], Path(sys.argv[2])
    if what == "checkpoints":
        write_checkpoints(root)
        return 0
    import transformers

    if transformers.__version__ != VERSION:
        sys.stderr.write(f"this is transformers {transformers.__version__}, and {VERSION} is asked for\n")
        return 1
    found = {f"{family}: {name}": outputs(root / str(place), name) for place, (family, name) in enumerate(CASES)}
    lines = [f"{json.dumps(name)}: {json.dumps(case, separators=(',', ':'))}" for name, case in found.items()]
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
