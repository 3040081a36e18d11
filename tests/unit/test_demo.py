"""The demo hands over its figures as benches do, and its tables show them."""

from __future__ import annotations

from recipes.bench.blocks import filled
from recipes.bench.result import Result
from recipes.bench.tables import speed as table
from recipes.demo import AS_IT_IS, result_rows, shown

RUN = {"cache_bytes": 1_550_000, "tokens_per_s": 973.2, "peak_rss_bytes": 274e6, "belady_hit_rate": 0.7371}


def model(loss: float, per_token: tuple[float, float] | None = None) -> dict:
    runs = [
        {**RUN, "share": share / 100, "asked": asked, "hit_rate": 0.1 + number / 100, "tokens_per_s": 973.2 + number}
        for share in table.SHARES
        for number, asked in enumerate([AS_IT_IS, *table.EVICTIONS, AS_IT_IS])
        if share < 100 or asked == AS_IT_IS
    ]
    return {
        "metric": "rouge2", "target_loss": 0.05, "reference": 0.80812, "per_token": per_token, "upper_bound": 0.0049,
        "heldout": {"value": 0.8047, "loss": loss, "interval": [0.001, 0.0071]},
        "bits_histogram": {"2": 702, "3": 66}, "expert_bytes": {"pack": 2_290_000, "fp16": 16e6, "int4": 4.4e6},
        "runs": runs, "answer": "a\nb",
    }  # fmt: skip


def lines(loss: float) -> list[list[str]]:
    result = Result(
        {"settings": {}}, result_rows({"models": {"g2p": model(loss), "wiki": model(0.0, (65.643, 67.32))}})
    )
    return [[filled(each, result) for each in line] for part in table.demo_parts(result) for line in part]


def test_the_tables_show_what_was_measured() -> None:
    shown = lines(0.004)
    assert shown[1] == [
        "g2p", "5%", "rouge2", "0.8081", "0.8047", "under 0.5%", "0.4% (0.1% to 0.7%)", "702×2, 66×3", "2.29 MB",
        "14%", "52%",
    ]  # fmt: skip
    assert shown[2][3:5] == ["0.8081 (per token 65.64)", "0.8047 (per token 67.32)"]
    assert shown[4] == ["g2p", "100% (1.6 MB)", "", "", "", "", "", "976 ± 1", "274 MB"]
    assert shown[5] == [
        "g2p", "50% (1.6 MB)", "11.0%", "12.0%", "13.0%", "14.0%", "73.7%", "976 ± 1", "274 MB",
    ]  # fmt: skip


def test_a_loss_above_its_bound_is_told_in_the_table_though_below_the_target() -> None:
    assert lines(0.006)[1][6] == "0.6% (0.1% to 0.7%), above the promise"


def test_what_was_shown_is_said_in_at_most_ten_lines() -> None:
    said = shown({"g2p": model(0.004), "wiki": model(-0.002)})
    assert len(said) <= 9  # and one with the files
    assert said[:2] == [
        "g2p: its experts take 2.29 MB, those of the source in FP16 16.00 MB",
        "  loss: 5.0% allowed, under 0.5% promised, 0.4% on held-out text",
    ]
    least = min(table.SHARES)
    assert said[2].startswith(
        f"  with room for {least}% of its experts (1.55 MB): 973 tokens/s, 10% of the experts found"
    )
    assert said[3] == "  an answer: a b"
    assert said[5].endswith("-0.2% on held-out text")
