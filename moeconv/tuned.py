"""Settings of a conversion that few people change, each described once: --tune NAME=VALUE on the command line."""

from __future__ import annotations

from moert.described import Setting, tuned

_CONVERSION, _PLANS = ("quantize",), ("quantize", "plan")
_LOSS, _WIDTHS, _TEXT, _EXPERTS, _WORK = "The promise", "Ranking and widths", "Text", "Experts", "Machines"

TUNED = (
    Setting(
        "margin", _LOSS, _CONVERSION,
        "Share of --loss to keep in reserve: with --loss 5% and margin=20%, plans must stay below 4% on the "
        "calibration text.",
        default="0%", values="SHARE",
    ),
    Setting(
        "strict", _LOSS, _CONVERSION,
        "End before the sweep if the text has too few documents for --confidence, or if the model does no better on "
        "it than a guess. Without this setting a note says so, and the bound is printed without a confidence.",
        bool, False,
    ),
    Setting(
        "signal", _WIDTHS, _PLANS,
        "How experts are ranked: kl (divergence of the next-token distribution from the unquantized model's), nll "
        "(likelihood of the text), metric (the metric of --metric) or fisher (gradients; no expert is measured "
        "alone).",
        default="kl", choices=("kl", "nll", "metric", "fisher"),
    ),
    Setting(
        "per_projection", _WIDTHS, _CONVERSION,
        "Measure gate, up and down separately, and give each its own width.", bool, False,
    ),
    Setting(
        "allocation", _WIDTHS, _PLANS,
        "How widths are chosen: knapsack (for all experts at once), greedy (least important experts first) or "
        "uniform (one width for all experts).",
        default="knapsack", choices=("knapsack", "greedy", "uniform"),
    ),
    Setting(
        "group_size", _WIDTHS, _CONVERSION,
        "Inputs per scale: 32, 64 or 128. Default: 64 for --quantizer group, all of a channel for gptq.", int,
        values="32|64|128",
    ),
    Setting(
        "heldout", _TEXT, _CONVERSION,
        "Text that only measures the result, given as for --calib. Default: half of --calib.", values="TEXT",
    ),
    Setting(
        "sweep_samples", _TEXT, _CONVERSION,
        "Number of calibration samples that rank experts. Default: a quarter of all.", int,
    ),
    Setting(
        "heldout_samples", _TEXT, _CONVERSION,
        "Number of held-out samples to use. Default: all.",
        int,
    ),
    Setting(
        "max_new_tokens", _TEXT, _CONVERSION,
        "The largest number of tokens to generate. Default: a little above the longest target.", int,
    ),
    Setting(
        "scales", _WIDTHS, _CONVERSION,
        "Scales of experts' codes, and weights of norms: trained (so that the quantized model answers as the original "
        "one does, on the text that ranks experts, where it is long enough) or fitted (to each matrix alone).",
        default="trained", choices=("trained", "fitted"),
    ),
    Setting(
        "route", _EXPERTS, _CONVERSION,
        "How tokens are routed to experts: router (by the model's own routers) or hash (by a function of the tokens "
        "alone, which is trained first, on half of the calibration text). Bits and function together stay within "
        "--loss.",
        default="router", choices=("router", "hash"),
    ),
    Setting(
        "neurons", _EXPERTS, _CONVERSION,
        "Which neurons of experts with ReLU are computed: exact (all that fire) or predicted (those that a predictor "
        "names, which is trained first, on half of the calibration text). Bits and predictor together stay within "
        "--loss.",
        default="exact", choices=("exact", "predicted"),
    ),
    Setting(
        "piece_bytes", _EXPERTS, _CONVERSION,
        "With --layout columns, neuron or auto: the most bytes of one read, a multiple of 512. moert bench --drive "
        "measures the best value for a drive. Default: two neurons or a little more, at most 4096.",
        int,
    ),
    Setting(
        "cluster", _WORK, _CONVERSION,
        "Run the sweep, or the coding of experts layer by layer, on a Ray cluster: auto, host:port or "
        "ray://host:port.", values="ADDRESS",
    ),
)  # fmt: skip
_NAMES = {each.name for each in TUNED}


def said(name: str, value: object = None) -> str:
    """Returns the words of the command line for a setting, or for one with a value."""
    called = name.replace("_", "-")
    if name in _NAMES:
        return tuned(called, value)
    return f"--{called}" if value is None else f"--{called} {value}"
