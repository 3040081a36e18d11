"""`make demo`: convert the g2p and wiki models at a 5% loss target and run the packs in little memory.

Writes build/demo/summary.json, and build/bench/demo.json as benches do (recipes/bench/result.py). `make report` has the
other reference models in the same way, under another name.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moert.pack.files import write_atomically
from moert.stats import size
from recipes.bench.blocks import rendered
from recipes.bench.program import as_program, own_recipe
from recipes.bench.result import Result, Row, context, row_of_runs, write
from recipes.bench.sized import sized
from recipes.bench.tables import speed as table
from recipes.bench.tables.speed import EVICTIONS, SHARES

if TYPE_CHECKING:
    from moeconv.artifacts import ConversionReport

AS_IT_IS = "as it is"
"""Run without options of its own, as users run it."""
RUNS, SHOWN = sized(5, 1), 3
ROOT = Path(__file__).absolute().parent.parent


@dataclass(frozen=True)
class Part:
    """One model of the demo: which recipe, of which data, how many prompts for the runs, how many new tokens for each,
    and the folder of what is made."""

    name: str
    data: str
    prompts: int
    new_tokens: int
    prompt_words: int | None  # of running text; None takes the whole input
    out: Path


def parts(out: Path) -> dict[str, Part]:
    """All that can be shown, by name."""
    known = (
        Part("g2p", "g2p", sized(100, 2), 24, None, out), Part("wiki", "wiki", sized(20, 2), sized(100, 8), 16, out),
        Part("marks", "marks", 10, 128, None, out), Part("wikids", "wiki", 20, 100, 16, out),
    )  # fmt: skip
    return {part.name: part for part in known}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Convert reference models and run the packs in little memory.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="of recipes/ (default: g2p and wiki)")
    parser.add_argument("--name", default="demo", help="of the folder in build/ and the result in build/bench/")
    arguments = parser.parse_args(argv)
    known = parts(Path("build") / arguments.name)
    if unknown := [name for name in arguments.models if name not in known]:
        parser.error(f"no model {unknown[0]!r}: there are {', '.join(known)}")
    return show([known[name] for name in arguments.models or ("g2p", "wiki")], arguments.name)


def show(chosen: Sequence[Part], name: str) -> int:
    os.chdir(ROOT)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded; see recipes/LOG.md
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    started = time.monotonic()
    out = chosen[0].out
    out.mkdir(parents=True, exist_ok=True)
    for data in dict.fromkeys(part.data for part in chosen):
        subprocess.run([sys.executable, f"calib_data/{data}.py"], check=True)
    summary = {"models": {part.name: run_part(part) for part in chosen}}
    write_atomically(out / "summary.json", f"{json.dumps(summary, indent=1)}\n".encode())
    settings = {part.name: {k: v for k, v in asdict(part).items() if k != "out"} for part in chosen}
    result = Result(context({"models": settings}), result_rows(summary))
    path = write(name, result.context, result.rows)
    print(rendered(table.demo_parts(result), result))
    print("\n" + "\n".join(shown(summary["models"])))
    print(f"{out}/summary.json and {path} written; the {name} took {time.monotonic() - started:.0f} s")
    missed = [model for model, found in summary["models"].items() if found["heldout"]["loss"] > found["target_loss"]]
    for model in missed:
        print(f"{name}: the held-out loss of {model} is above its target", file=sys.stderr)
    for model, found in summary["models"].items():
        if found["heldout"]["loss"] > found["upper_bound"]:
            print(f"{name}: the held-out loss of {model} is above the bound that was promised", file=sys.stderr)
    return 1 if missed else 0


def run_part(part: Part) -> dict[str, Any]:
    """Converts one model, profiles its paths, runs the pack at each budget and eviction policy."""
    from moeconv.conversion.additions import profile_paths
    from moeconv.conversion.conversion import Conversion
    from moeconv.progress import bar
    from moert.pack.reader import Pack

    print(f"\n== {part.name}: converting", file=sys.stderr, flush=True)
    recipe = own_recipe(part.name, part.out)
    _, report = Conversion(recipe.settings, say, bar, profiled_next=True).run()
    settings = recipe.settings
    figures, _ = profile_paths(
        Pack.open(settings.out), calib=None, heldout=None, seed=None, samples=settings.samples, context=None, say=say,
    )  # fmt: skip
    prompts = write_prompts(part)
    print(f"== {part.name}: running", file=sys.stderr, flush=True)
    whole = [
        *((share, AS_IT_IS) for _ in range(RUNS) for share in SHARES),
        *((share, each) for share in SHARES for each in EVICTIONS if share < 100),  # with room for all none is evicted
    ]
    runs = [run_pack(part, settings.out, prompts, share, asked) for share, asked in whole]
    show_samples(part, [dict(sample) for sample in report.samples], prompts)
    result = conversion_summary(report)
    result["paths"] = {
        **dict(zip(("top1", "top2", "top3"), figures.accuracy[2], strict=True)),
        "coverage20": figures.coverage20["decoder"],
        "coverage20_by_stack": dict(figures.coverage20),
    }
    first = (part.out / f"{part.name}-outputs.jsonl").read_text(encoding="utf-8").splitlines()[0]
    return {**result, "runs": runs, "answer": json.loads(first)["output"]}


def shown(models: dict[str, Any]) -> list[str]:
    """Returns the outcome in words, four lines a model: size, loss, speed in the least room, and an answer."""
    lines = []
    for name, model in models.items():
        sizes, heldout = model["expert_bytes"], model["heldout"]
        run = min((run for run in model["runs"] if run["asked"] == AS_IT_IS), key=lambda run: run["share"])
        lines += [
            f"{name}: its experts take {size(sizes['pack'])}, those of the source in FP16 {size(sizes['fp16'])}",
            f"  loss: {model['target_loss']:.1%} allowed, under {model['upper_bound']:.1%} promised, "
            f"{heldout['loss']:.1%} on held-out text",
            f"  with room for {run['share']:.0%} of its experts ({size(run['cache_bytes'])}): "
            f"{run['tokens_per_s']:,.0f} tokens/s, {run['hit_rate']:.0%} of the experts found there, "
            f"{size(run['peak_rss_bytes'])} in all",
            f"  an answer: {one_line(model['answer'])}",
        ]
    return lines


def conversion_summary(report: ConversionReport) -> dict[str, Any]:
    return {
        "metric": report.metric,
        "reference": report.heldout.reference if report.heldout else None,
        "per_token": report.heldout.per_token() if report.heldout else None,
        "target_loss": report.target.value,
        "upper_bound": report.upper_bound,
        "calibration": measured(report.calibration),
        "heldout": measured(report.heldout),
        "bits_histogram": {str(bits): count for bits, count in report.bits_histogram.items()},
        "expert_bytes": dict(report.expert_bytes),
        "effective_bits": report.effective_bits,
        "sweep": None if report.sweep_cost is None else asdict(report.sweep_cost),
        "evaluations": report.evaluations,
        "seconds": report.seconds,
    }


def measured(found: Any) -> dict[str, Any] | None:
    if found is None:
        return None
    fields = asdict(found)
    return {"value": fields["value"], "loss": fields["loss"], "interval": [fields["low"], fields["high"]]}


def write_prompts(part: Part) -> Path:
    """The first held-out samples as prompts, one JSON object a line."""
    path = part.out / f"{part.name}-prompts.jsonl"
    lines = Path(f"build/data/{part.data}/heldout.jsonl").read_text(encoding="utf-8").splitlines()
    prompts: list[str] = []
    for row in map(json.loads, lines):
        text = row.get("input") or row["text"]
        words = text.split()
        if part.prompt_words is not None:
            if len(words) < 4 * part.prompt_words:
                continue
            text = " ".join(words[: part.prompt_words])
        prompts.append(text)
        if len(prompts) == part.prompts:
            break
    write_atomically(path, "".join(json.dumps({"prompt": text}) + "\n" for text in prompts).encode())
    return path


def run_pack(part: Part, pack: Path, prompts: Path, share: int, asked: str) -> dict[str, Any]:
    """One `moert run` in a process of its own, with room for `share` percent of the experts: AS_IT_IS, or under an
    eviction policy and without reading ahead."""
    command = [
        sys.executable, "-m", "moert", "run", str(pack), "--input", str(prompts),
        "--output", str(part.out / f"{part.name}-outputs.jsonl"), "--overwrite", "--tune", f"cache={share}%",
        *(() if asked == AS_IT_IS else ("--tune", f"eviction={asked}", "--tune", "predict=none")),
        "--max-new-tokens", str(part.new_tokens), "--json", "--stats",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"demo: {' '.join(command)} failed: {done.stderr.strip()}")
    stats = json.loads(done.stderr.strip().splitlines()[-1])
    names = (
        "cache_bytes", "tokens_per_s", "hit_rate", "bytes_read", "peak_rss_bytes", "eviction", "belady_hit_rate",
    )  # fmt: skip
    return {"share": share / 100, "asked": asked, **{name: stats[name] for name in names}}


def show_samples(part: Part, samples: list[dict[str, str]], prompts: Path) -> None:
    """Reference and pack side by side, for a person to read."""
    if not samples:
        samples = continuations(part, prompts)
    print(f"\n{part.name}: what reference and pack write (held-out samples)")
    for sample in samples:
        print(f"  input      {one_line(sample['input'])}")
        if sample.get("target"):
            print(f"  target     {one_line(sample['target'])}")
        print(f"  reference  {one_line(sample['reference'])}\n  pack       {one_line(sample['pack'])}\n")


def continuations(part: Part, prompts: Path) -> list[dict[str, str]]:
    """What the unquantized model, run by transformers, and the pack make of the same prompts."""
    import torch
    from tokenizers import Tokenizer

    from moeconv.source.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(f"recipes/models/{part.name}")
    model = checkpoint.model(torch.float32)
    tokenizer = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
    outputs = (part.out / f"{part.name}-outputs.jsonl").read_text(encoding="utf-8").splitlines()
    samples = []
    for line, output in zip(prompts.read_text(encoding="utf-8").splitlines()[:SHOWN], outputs, strict=False):
        prompt = json.loads(line)["prompt"]
        ids = tokenizer.encode(prompt).ids
        with torch.inference_mode():
            written = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=part.new_tokens)  # type: ignore[operator]
        reference = tokenizer.decode(written[0, len(ids) :].tolist(), skip_special_tokens=True)
        samples.append({"input": prompt, "reference": reference, "pack": json.loads(output)["output"]})
    return samples


def one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 150 else text[:147] + "..."


def result_rows(summary: dict[str, Any]) -> list[Row]:
    """What each conversion came to, and how its pack ran."""
    models = summary["models"].items()
    return [row for name, model in models for row in (*conversion_rows(name, model), *run_rows(name, model["runs"]))]


def conversion_rows(name: str, model: dict[str, Any]) -> list[Row]:
    heldout, sizes, target = model["heldout"], model["expert_bytes"], 100 * model["target_loss"]
    low, high = heldout["interval"]
    by_tokens = zip(("reference", "pack"), model.get("per_token") or (), strict=False)
    return [
        Row(f"{name}: target", target, "%"),
        Row(f"{name}: reference", model["reference"], model["metric"]),
        Row(f"{name}: pack", heldout["value"], model["metric"]),
        *(Row(f"{name}: {which} per token", value, "token_perplexity") for which, value in by_tokens),
        Row(f"{name}: promised", 100 * model["upper_bound"], "%").at_most(target),
        Row(f"{name}: held-out loss", 100 * heldout["loss"], "%")
        .within(100 * low, 100 * high)
        .at_most(100 * model["upper_bound"]),
        *(Row(f"{name}: matrices at {bits} bits", count, "") for bits, count in model["bits_histogram"].items()),
        Row(f"{name}: expert bytes", sizes["pack"] / 1e6, "MB"),
        Row(f"{name}: expert bytes of FP16", sizes["pack"] / sizes["fp16"], "of FP16"),
        Row(f"{name}: expert bytes of INT4", sizes["pack"] / sizes["int4"], "of INT4"),
    ]


def run_rows(name: str, runs: list[dict[str, Any]]) -> list[Row]:
    """Hit rates without reading ahead; speed and memory as `moert` runs by itself."""
    rows, alone = list[Row](), dict[str, list[dict[str, Any]]]()
    for run in runs:
        what = f"{name}, {run['share']:.0%}"
        if run["asked"] == AS_IT_IS:
            alone.setdefault(what, []).append(run)
            continue
        rows.append(Row(f"{what}: hit rate, {run['asked']}", run["hit_rate"], "of requests"))
        if run["asked"] == "auto":
            rows.append(Row(f"{what}: hit rate, knowing the future", run["belady_hit_rate"], "of requests"))
    for what, same in alone.items():
        rows += [
            Row(f"{what}: room for experts", same[0]["cache_bytes"] / 1e6, "MB"),
            row_of_runs(f"{what}: decode", [run["tokens_per_s"] for run in same], "tokens/s"),
            row_of_runs(f"{what}: process", [run["peak_rss_bytes"] / 1e6 for run in same], "MB"),
        ]
    return rows


def say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    as_program(main)
