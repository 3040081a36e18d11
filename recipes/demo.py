"""`make demo`: convert the g2p and wiki models at a 5% loss target and run the packs in little memory.

Writes build/demo/summary.json and, with --write-readme, the result table into README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moeconv.artifacts import ConversionReport

ROOT = Path(__file__).resolve().parent.parent
OUT = Path("build/demo")
SHARES = (100, 50, 25)
EVICTIONS = ("auto", "paper", "lru", "lfu", "fifo")


@dataclass(frozen=True)
class Part:
    """One model of the demo: which recipe, how many prompts for the runs, how many new tokens for each."""

    name: str
    prompts: int
    new_tokens: int
    prompt_words: int | None  # of running text; None takes the whole input


PARTS = (Part("g2p", 30, 24, None), Part("wiki", 3, 32, 16))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-readme", action="store_true", help="put the result table into README.md")
    options = parser.parse_args()
    os.chdir(ROOT)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded; see recipes/LOG.md
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    started = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        subprocess.run([sys.executable, f"calib_data/{part.name}.py"], check=True)
    summary = {"models": {part.name: run_part(part) for part in PARTS}}
    (OUT / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    table = result_table(summary)
    print(table)
    if options.write_readme:
        write_readme(table)
    print(f"\nbuild/demo/summary.json written; the demo took {time.monotonic() - started:.0f} s")
    missed = [name for name, model in summary["models"].items() if model["heldout"]["loss"] > model["target_loss"]]
    for name in missed:
        print(f"demo: the held-out loss of {name} is above its target", file=sys.stderr)
    return 1 if missed else 0


def run_part(part: Part) -> dict[str, Any]:
    """Converts one model, profiles its paths, runs the pack at each budget and eviction policy."""
    from moeconv.conversion import Conversion
    from moeconv.profile import profile_paths
    from moeconv.progress import bar
    from moeconv.recipe import Recipe
    from moert.pack.reader import Pack

    print(f"\n== {part.name}: converting", file=sys.stderr, flush=True)
    recipe = Recipe.load(Path(f"recipes/{part.name}.toml"), OUT)
    _, report = Conversion(recipe.settings, say, bar).run()
    settings = recipe.settings
    figures, _ = profile_paths(
        Pack.open(settings.out), calib=None, heldout=None, seed=None, samples=settings.samples, context=None, say=say,
    )  # fmt: skip
    prompts = write_prompts(part)
    print(f"== {part.name}: running", file=sys.stderr, flush=True)
    runs = [
        run_pack(part, settings.out, prompts, share, eviction, predict)
        for share in SHARES
        for eviction, predict in [
            ("auto", "gate"),
            *((each, "none") for each in EVICTIONS if share < 100),  # with room for all, nothing is ever evicted
        ]
    ]
    show_samples(part, [dict(sample) for sample in report.samples], prompts)
    result = conversion_summary(report)
    result["paths"] = {
        **dict(zip(("top1", "top2", "top3"), figures.accuracy[2], strict=True)),
        "coverage20": figures.coverage20["decoder"],
        "coverage20_by_stack": dict(figures.coverage20),
    }
    return {**result, "runs": runs}


def conversion_summary(report: ConversionReport) -> dict[str, Any]:
    return {
        "metric": report.metric,
        "reference": report.heldout.reference if report.heldout else None,
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
    path = OUT / f"{part.name}-prompts.jsonl"
    lines = Path(f"build/data/{part.name}/heldout.jsonl").read_text(encoding="utf-8").splitlines()
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
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts), encoding="utf-8")
    return path


def run_pack(part: Part, pack: Path, prompts: Path, share: int, eviction: str, predict: str) -> dict[str, Any]:
    """One `moert run` in a process of its own, with room for `share` percent of the experts."""
    command = [
        sys.executable, "-m", "moert.cli", "run", str(pack), "--input", str(prompts),
        "--output", str(OUT / f"{part.name}-outputs.jsonl"), "--cache", f"{share}%", "--eviction", eviction,
        "--predict", predict, "--max-new-tokens", str(part.new_tokens), "--json", "--stats",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"demo: {' '.join(command)} failed: {done.stderr.strip()}")
    stats = json.loads(done.stderr.strip().splitlines()[-1])
    names = (
        "cache_bytes", "tokens_per_s", "hit_rate", "bytes_read", "peak_rss_bytes", "eviction", "belady_hit_rate",
    )  # fmt: skip
    asked = {"share": share / 100, "asked": eviction, "predict": predict}
    return {**asked, **{name: stats[name] for name in names}}


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
    """What the unquantised model, run by transformers, and the pack make of the same prompts."""
    import torch
    from tokenizers import Tokenizer

    from moeconv.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(f"recipes/models/{part.name}")
    model = checkpoint.arch.load(checkpoint.path, torch.float32)
    tokenizer = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
    outputs = (OUT / f"{part.name}-outputs.jsonl").read_text(encoding="utf-8").splitlines()
    samples = []
    for line, output in zip(prompts.read_text(encoding="utf-8").splitlines(), outputs, strict=True):
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


def result_table(summary: dict[str, Any]) -> str:
    """Two Markdown tables: what the conversions came to, and how the packs ran."""
    lines = [
        "| model | target | metric | reference | pack | promised at 95% | held-out loss (95% interval) "
        "| matrices × bits | expert bytes | of FP16 | of INT4 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    models = summary["models"].items()
    for name, model in models:
        heldout, sizes = model["heldout"], model["expert_bytes"]
        low, high = heldout["interval"]
        widths = ", ".join(f"{count}×{bits}" for bits, count in model["bits_histogram"].items())
        lines.append(
            f"| {name} | {model['target_loss']:.0%} | {model['metric']} | {model['reference']:.4g} "
            f"| {heldout['value']:.4g} | under {model['upper_bound']:.1%} "
            f"| {heldout['loss']:.1%} ({low:.1%} to {high:.1%}) | {widths} | {sizes['pack'] / 1e6:.2f} MB "
            f"| {sizes['pack'] / sizes['fp16']:.0%} | {sizes['pack'] / sizes['int4']:.0%} |"
        )
    policies = " | ".join(EVICTIONS)
    lines += ["", f"| model | room for experts | hit rate: {policies} | best possible | tokens/s | process |"]
    lines.append("|---|---|" + "---|" * (len(EVICTIONS) + 3))
    for name, model in summary["models"].items():
        for share in SHARES:
            runs = [run for run in model["runs"] if run["share"] == share / 100]
            plain = {run["asked"]: run for run in runs if run["predict"] == "none"}
            (usual,) = [run for run in runs if run["predict"] != "none"]
            rates = [f"{plain[policy]['hit_rate']:.1%}" if plain else "" for policy in EVICTIONS]
            rates.append(f"{plain['auto']['belady_hit_rate']:.1%}" if plain else "")
            lines.append(
                f"| {name} | {share}% ({usual['cache_bytes'] / 1e6:.1f} MB) | {' | '.join(rates)} "
                f"| {usual['tokens_per_s']:.0f} | {usual['peak_rss_bytes'] / 1e6:.0f} MB |"
            )
    return "\n".join(lines)


def write_readme(table: str) -> None:
    readme = Path("README.md")
    text = readme.read_text(encoding="utf-8")
    found = re.search(r"(<!-- demo -->\n).*?(<!-- end -->)", text, flags=re.S)
    if found is None:
        raise SystemExit("demo: README.md has no <!-- demo --> … <!-- end --> block")
    text = text[: found.start()] + found[1] + table + "\n" + found[2] + text[found.end() :]
    readme.write_text(text, encoding="utf-8")


def say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
