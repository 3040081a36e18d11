"""What a user asks of a conversion, checked before anything long starts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from moeconv.errors import SettingsError
from moeconv.metrics import METRICS
from moeconv.quantizers import GROUP_SIZES, QUANTIZERS
from moert.pack.codec import WIDTHS

DEFAULT_CONTEXT = 256


@dataclass(frozen=True)
class Settings:
    """`margin` is the share of the target that the calibration text must leave free. `samples`, `sweep_samples` and
    `heldout_samples` bound what is used of each split (None: all of it): samples of input and target, or windows of
    running text. `context` is the length of such a window in tokens."""

    model: str
    out: Path
    work: Path
    target_loss: float = 0.05
    margin: float = 0.0
    calib: str | None = None
    heldout: str | None = None
    metric: str | None = None
    quantizer: str = "channel"
    group_size: int | None = None
    bits: tuple[int, ...] = WIDTHS
    seed: int = 0
    samples: int | None = None
    sweep_samples: int | None = None
    heldout_samples: int | None = None
    context: int = DEFAULT_CONTEXT
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.quantizer not in QUANTIZERS:
            raise SettingsError(f"--quantizer {self.quantizer}: expected one of {', '.join(QUANTIZERS)}")
        if self.metric is not None and self.metric not in METRICS:
            raise SettingsError(f"--metric {self.metric}: expected one of {', '.join(METRICS)}")
        if self.group_size is not None and self.quantizer == "channel":
            raise SettingsError("--group-size has no effect on the channel quantizer: leave it out, or use group")
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise SettingsError(f"--group-size {self.group_size}: expected one of {', '.join(map(str, GROUP_SIZES))}")
        if not self.bits or any(width not in WIDTHS for width in self.bits):
            raise SettingsError(f"--bits {self.bits}: expected widths among {', '.join(map(str, WIDTHS))}")
        if self.calib is None and self.bits != (16,):
            raise SettingsError("--calib is missing: name a set in calib_data/ or a file; only --bits 16 goes without")
        if self.calib is None:
            for name in ("heldout", "metric", "samples", "sweep_samples", "heldout_samples", "max_new_tokens"):
                if getattr(self, name) is not None:
                    raise SettingsError(f"--{name.replace('_', '-')} has no effect without --calib: leave it out")
        counts = {name: getattr(self, name) for name in ("samples", "sweep_samples", "heldout_samples")}
        check_counts(**counts, max_new_tokens=self.max_new_tokens, context=self.context, seed=self.seed)
        if not 0 <= self.margin < 1:
            raise SettingsError(f"a margin of {self.margin:g}: expected a share from 0 to less than 1")
        if not 0 <= self.target_loss < 1:
            raise SettingsError(f"a loss of {self.target_loss:g}: expected a share from 0 to less than 1")
        if not self.out.name or not self.work.name:
            raise SettingsError(f"--out {self.out} and --work {self.work}: expected new directories with names")

    @property
    def planned_loss(self) -> float:
        """What the loss on the calibration text may be at most."""
        return self.target_loss * (1 - self.margin)


def check_counts(context: int | None = None, seed: int | None = None, **counts: int | None) -> None:
    """Raises SettingsError for a number that is out of range; None is not checked."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise SettingsError(f"--{name.replace('_', '-')} {value}: expected 1 or more")
    if context is not None and context < 2:
        raise SettingsError(f"--context {context}: expected at least 2 tokens")
    if seed is not None and not 0 <= seed < 1 << 32:
        raise SettingsError(f"--seed {seed}: expected a whole number from 0 to {(1 << 32) - 1}")


def parse_share(text: str, option: str = "--loss") -> float:
    """'5%' or '0.05' → 0.05. Raises SettingsError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", text)
    if match is None:
        raise SettingsError(f"{option} {text!r}: expected a share such as 5% or 0.05")
    loss = float(match[1]) / (100 if match[2] else 1)
    if loss >= 1:
        hint = f"; did you mean {match[1]}%?" if not match[2] and loss < 100 else ""
        raise SettingsError(f"{option} {text!r}: expected less than 100%{hint}")
    return loss


def parse_bits(text: str) -> tuple[int, ...]:
    """'2,3,4' → (2, 3, 4), sorted, each once. Raises SettingsError."""
    try:
        widths = {int(part) for part in text.split(",")}
    except ValueError:
        raise SettingsError(f"--bits {text!r}: expected widths such as 2,4,8") from None
    if not widths <= set(WIDTHS):
        raise SettingsError(f"--bits {text!r}: expected widths among {', '.join(map(str, WIDTHS))}")
    return tuple(sorted(widths))
