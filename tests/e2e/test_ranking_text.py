"""The text that plans are judged on decides nothing before: other words there leave all that ranks as it was."""

from __future__ import annotations

import json
import random
from pathlib import Path

from conversions import settings_for, words

from moeconv.conversion.choosing import Bonuses
from moeconv.conversion.material import Coding, Material
from moeconv.conversion.measuring import Account, Bench
from moeconv.measure.workdir import Journal
from moeconv.progress import unseen
from moeconv.quantizers.moments import Moments

ROWS, RANKING = 80, 20


def bench_on(sources: dict[str, Path], folder: Path, *, ranking: int, judging: int) -> Bench:
    """With text of which these seeds make the part that ranks and all the rest."""
    folder.mkdir()
    texts = [random.Random(ranking), random.Random(judging)]
    rows = [f"{words(texts[at >= RANKING], 12)} {at:02d}" for at in range(2 * ROWS)]
    for name, part in (("calib", rows[:ROWS]), ("heldout", rows[ROWS:])):
        lines = (json.dumps({"text": row.ljust(80, "."), "document": str(at)}) for at, row in enumerate(part))
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    settings = settings_for(
        sources, "olmoe", folder, loss=0.3, quantizer="gptq", calib=str(folder / "calib.jsonl"),
        heldout=str(folder / "heldout.jsonl"),
    )  # fmt: skip
    coding = Coding.open(settings)
    material = Material.read(settings, coding.checkpoint)
    assert len(material.ranking) == RANKING
    return Bench(coding, material, Journal(folder / "journal.jsonl", "a subject"), coding.moments_in(folder))


def test_moments_bonuses_and_firing_are_of_the_ranking_text_alone(sources: dict[str, Path], tmp_path: Path) -> None:
    found = []
    for name, ranking, judging in (("first", 1, 2), ("judged otherwise", 1, 3), ("ranked otherwise", 4, 2)):
        bench = bench_on(sources, tmp_path / name, ranking=ranking, judging=judging)
        assert bench.moments is not None
        bench.collect_moments(bench.moments)
        moments = Moments.load(bench.moments).digest
        tried = Bonuses(bench, 0.5, Account(lambda line: None, unseen))._tried
        counts = {key: count.tolist() for key, count in bench.ordered_neurons(2).counts.items()}
        found.append((moments, {step: one.kl for step, one in tried.items()}, counts))
    first, judged, ranked = found
    assert first == judged
    assert all(one != other for one, other in zip(first, ranked, strict=True))
