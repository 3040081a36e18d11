"""Settings of a conversion that few people change, each described once: --tune NAME=VALUE on the command line."""

from __future__ import annotations

from moert.described import Setting, tuned

_CONVERSION, _PLANS = ("quantize",), ("quantize", "plan")
_LOSS, _WIDTHS, _TEXT, _EXPERTS, _WORK = "The promise", "Ranking and widths", "Text", "Experts", "Machines"

TUNED = (
    Setting(
        "margin", _LOSS, _CONVERSION,
        "Share of --loss to keep in reserve: with --loss 5% and margin=20%, plans must stay under 4% on the "
        "calibration text.",
        default="0%", values="SHARE",
    ),
    Setting(
        "strict", _LOSS, _CONVERSION,
        "End before the sweep if the text has too few documents for --confidence, or the model does no better on it "
        "than a guess. Otherwise a note says so, and the bound is printed without a confidence.",
        bool, False,
    ),
    Setting(
        "signal", _WIDTHS, _PLANS,
        "What experts are ranked by: kl (divergence of the next-token distribution from the unquantized model's), nll "
        "(likelihood of the text), metric (that of --metric) or fisher (gradients, which measure no expert alone).",
        default="kl", choices=("kl", "nll", "metric", "fisher"),
    ),
    Setting(
        "racing", _WIDTHS, _CONVERSION,
        "Stop measuring experts whose place in the ranking is settled, with this error probability, such as 5%.",
        values="SHARE",
    ),
    Setting(
        "per_projection", _WIDTHS, _CONVERSION,
        "Measure gate, up and down apart, and give each its own width.", bool, False,
    ),
    Setting(
        "allocation", _WIDTHS, _PLANS,
        "knapsack: all experts and widths at once. greedy: least important experts first. uniform: one width for all.",
        default="knapsack", choices=("knapsack", "greedy", "uniform"),
    ),
    Setting(
        "group_size", _WIDTHS, _CONVERSION,
        "Inputs per scale: 32, 64 or 128. Default: 64 for --quantizer group, all of a channel for gptq.", int,
        values="32|64|128",
    ),
    Setting(
        "sweep_samples", _TEXT, _CONVERSION,
        "Calibration samples that experts are ranked by. Default: a quarter of all.", int,
    ),
    Setting("heldout_samples", _TEXT, _CONVERSION, "Held-out samples to use. Default: all.", int),
    Setting(
        "max_new_tokens", _TEXT, _CONVERSION,
        "Longest generated output. Default: a little above the longest target.", int,
    ),
    Setting(
        "route", _EXPERTS, _CONVERSION,
        "What sends tokens to experts: router, the model's own, or hash, a function of the tokens alone that is "
        "trained first, on half of the calibration text. Widths and function keep --loss together.",
        default="router", choices=("router", "hash"),
    ),
    Setting(
        "neurons", _EXPERTS, _CONVERSION,
        "Which neurons of experts with ReLU are computed: exact, all that fire, or predicted, those that a predictor "
        "names, which is trained first, on half of the calibration text. Widths and predictor keep --loss together.",
        default="exact", choices=("exact", "predicted"),
    ),
    Setting(
        "piece_bytes", _EXPERTS, _CONVERSION,
        "With --layout columns, neuron or auto: most bytes of what is read at once, a multiple of 512. moert bench "
        "--drive says what a drive likes. Default: two neurons or a little more, at most 4096.",
        int,
    ),
    Setting(
        "cluster", _WORK, _CONVERSION,
        "Sweep, or code layer by layer, on a Ray cluster: auto, host:port or ray://host:port.", values="ADDRESS",
    ),
)  # fmt: skip
_NAMES = {each.name for each in TUNED}


def said(name: str, value: object = None) -> str:
    """Returns the words of the command line for a setting, or for one with a value."""
    called = name.replace("_", "-")
    if name in _NAMES:
        return tuned(called, value)
    return f"--{called}" if value is None else f"--{called} {value}"
