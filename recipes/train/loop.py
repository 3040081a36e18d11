"""The training loop that all reference models share: time budget, schedule, checkpoints, log and snapshots."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from moert.pack.files import atomic_write
from recipes.train.muon import Muon

ROOT = Path(__file__).resolve().parents[2]
TRAIN_DIR = ROOT / "build" / "train"
MODEL_DIR = ROOT / "recipes" / "models"
Optimizers = list[torch.optim.Optimizer]
BAR = "{l_bar}{bar}| {elapsed}<{remaining}"


class Task(Protocol):
    """What the loop needs to know of a model and its data."""

    name: str
    model: nn.Module
    kept: dict[str, float]  # what else a stopped run goes on with

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Training loss of the batch that belongs to this step, and figures for the log."""

    def evaluate(self) -> dict[str, float]:
        """Figures on held-out data."""

    def export(self, folder: Path) -> None:
        """Write the model in the Hugging Face layout."""


@dataclass(frozen=True)
class Settings:
    """How to train. Times in minutes of every thread's processor time; rates are AdamW's at the schedule's peak."""

    minutes: float
    threads: int
    rate: float
    embedding_rate: float
    weight_decay: float = 0.05
    warmup_steps: int = 100
    decay_from: float = 0.3  # share of the time budget after which the rate falls linearly to zero
    clip: float = 1.0
    snapshot_minutes: float = 4.0
    log_seconds: float = 20.0
    muon: bool = False  # for matrices; embeddings and vectors stay with AdamW
    thrifty: bool = False  # Adafactor for everything, whose state is small; rates are shares of weights
    steps: int | None = None  # in place of the time budget: runs that are compared take as many
    models: Path | None = None  # where models are put under their names; none: recipes/models
    seed: int = 2026


def make_optimizers(model: nn.Module, settings: Settings, embeddings: Iterable[str]) -> list[torch.optim.Optimizer]:
    """AdamW or Adafactor for all, or Muon for matrices beside AdamW for embeddings and vectors; each group names its
    peak rate. Frozen parameters are left out.

    Parameters whose name contains a word of ``embeddings`` get the embedding rate and no weight decay.
    """
    words = tuple(embeddings)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    table = [p for n, p in named if any(word in n for word in words)]
    known = {id(p) for p in table}
    rest = [(n, p) for n, p in named if id(p) not in known]
    vectors = [p for _, p in rest if p.ndim <= 1]
    double = [p for n, p in rest if n.endswith("gate_up_proj")]
    single = [p for n, p in rest if p.ndim > 1 and not n.endswith("gate_up_proj")]
    adam = [
        {"params": table, "peak": settings.embedding_rate, "weight_decay": 0.0},
        {"params": vectors, "peak": settings.rate, "weight_decay": 0.0},
    ]
    matrices = [
        {"params": group, "peak": settings.rate, "weight_decay": settings.weight_decay, "parts": parts}
        for group, parts in ((single, 1), (double, 2))
        if group
    ]
    if settings.thrifty:
        groups = [{k: v for k, v in group.items() if k != "parts"} for group in (*adam, *matrices) if group["params"]]
        return [torch.optim.Adafactor(groups, lr=settings.rate, foreach=False)]
    extra = [Muon(matrices, lr=settings.rate)] if settings.muon else []
    adam += [] if settings.muon else matrices
    return [torch.optim.AdamW(adam, lr=settings.rate, betas=(0.9, 0.98), fused=True), *extra]


def rate_factor(step: int, progress: float, settings: Settings) -> float:
    """Share of the peak rate: linear warm-up in steps, then flat, then linear to zero in time (progress in 0..1)."""
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    fall = min(1.0, (1.0 - progress) / (1.0 - settings.decay_from))
    return warm * max(fall, 0.0)


def append_log(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line and print it."""
    line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in record.items()})
    with path.open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")
    with tqdm.external_write_mode():
        print(line, flush=True)


def save_checkpoint(path: Path, task: Task, optimizers: Optimizers, step: int, elapsed: float) -> None:
    """Write model, optimisers, step and elapsed seconds atomically."""
    state = {
        "model": task.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
        "elapsed": elapsed,
        "kept": task.kept,
    }
    with atomic_write(path) as fresh:
        torch.save(state, fresh)


def load_checkpoint(path: Path, task: Task, optimizers: Optimizers) -> tuple[int, float]:
    """Restore a checkpoint if there is one; returns the next step and the seconds already spent."""
    if not path.is_file():
        return 0, 0.0
    state = torch.load(path, map_location="cpu", weights_only=True)
    task.model.load_state_dict(state["model"])
    task.kept.update(state.get("kept", {}))
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        peaks = [group["peak"] for group in optimizer.param_groups]
        optimizer.load_state_dict(saved)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["peak"] = peak  # a changed setting wins over the saved one
    return state["step"], state["elapsed"]


def thin_log(source: Path, target: Path, keep: int = 200) -> None:
    """Copy evaluations and an even selection of about ``keep`` other lines of the training log."""
    lines = source.read_text(encoding="utf-8").splitlines()
    every = max(1, len(lines) // keep)
    chosen = [line for i, line in enumerate(lines) if i % every == 0 or '"heldout' in line]
    target.write_text("\n".join(chosen) + "\n", encoding="utf-8")


def snapshot(task: Task, log: Path, step: int, elapsed: float, models: Path) -> None:
    """Evaluate, log the figures, and put model and thinned log into ``models``/NAME file by file."""
    task.model.eval()
    append_log(log, {"step": step, "seconds": round(elapsed), **task.evaluate()})
    staging = TRAIN_DIR / task.name / "export"
    staging.mkdir(parents=True, exist_ok=True)
    task.export(staging)
    thin_log(log, staging / "training_log.jsonl")
    final = models / task.name
    final.mkdir(parents=True, exist_ok=True)
    for path in sorted(staging.iterdir()):
        path.chmod(0o644)
        os.replace(path, final / path.name)
    task.model.train()


def update(task: Task, optimizers: Optimizers, step: int, factor: float, clip: float) -> dict[str, float]:
    """One optimiser step; returns the figures for the log."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = group["peak"] * factor
    loss, figures = task.loss(step)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(task.model.parameters(), clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"loss": float(loss.detach()), **figures, "norm": float(norm)}


def _worked(settings: Settings) -> float:
    """Seconds of processor time that a thread has had: other work on the machine costs a training nothing but time."""
    return time.process_time() / settings.threads


def run(task: Task, settings: Settings, embeddings: Iterable[str]) -> None:
    """Train until the time budget is spent; resumes from the last checkpoint when there is one."""
    folder = TRAIN_DIR / task.name
    folder.mkdir(parents=True, exist_ok=True)
    log, checkpoint = folder / "log.jsonl", folder / "checkpoint.pt"
    models = settings.models or MODEL_DIR
    optimizers = make_optimizers(task.model, settings, embeddings)
    step, spent = load_checkpoint(checkpoint, task, optimizers)
    budget, begun = settings.minutes * 60, _worked(settings) - spent

    def progress() -> float:
        """Share of the budget that is spent."""
        return step / settings.steps if settings.steps else (_worked(settings) - begun) / budget

    next_log, next_snapshot, last_step, last_time = spent, spent + settings.snapshot_minutes * 60, step, spent
    task.model.train()
    with tqdm(desc=task.name, total=1.0, initial=progress(), bar_format=BAR, disable=None) as shown:
        while (done := progress()) < 1:
            shown.update(done - shown.n)
            elapsed = _worked(settings) - begun
            factor = rate_factor(step, done, settings)
            figures = update(task, optimizers, step, factor, settings.clip)
            step += 1
            if elapsed >= next_log:
                pace = (step - last_step) / max(elapsed - last_time, 1e-9)
                left = round(elapsed * (1 - done) / done) if done else None
                record = {"step": step, "seconds": round(elapsed), "left": left, "rate": factor, "steps_per_s": pace}
                append_log(log, {**record, **figures})
                next_log, last_step, last_time = elapsed + settings.log_seconds, step, elapsed
            if elapsed >= next_snapshot:
                save_checkpoint(checkpoint, task, optimizers, step, elapsed)
                snapshot(task, log, step, elapsed, models)
                next_snapshot = elapsed + settings.snapshot_minutes * 60
    elapsed = _worked(settings) - begun
    save_checkpoint(checkpoint, task, optimizers, step, elapsed if settings.steps else max(elapsed, budget))
    snapshot(task, log, step, elapsed, models)


def keep_freed_memory() -> None:
    """Stop glibc from returning large blocks to the system: fresh pages cost more than the arithmetic here."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        print("note: glibc not found, memory settings unchanged", flush=True)


def prepare(threads: int, seed: int) -> None:
    """Set threads, memory settings and seeds for one run."""
    keep_freed_memory()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
