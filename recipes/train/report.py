"""Tables that are printed and written to build/report/NAME.json.

``python -m recipes.train.report`` gathers those of all models in build/bench/models.json, as benches leave theirs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipes.bench.result import Row, context, write
from recipes.train import loop

MODELS = ("g2p", "wiki", "marks", "wikids")
TABLES = ("baselines", "routing")
UPCYCLED = "smollm2_experts"
"""The model of `make upcycle`; it stays under build/train."""


def model_folder(name: str) -> Path:
    """Folder of a trained model; ends with a clear line when there is none."""
    for folder in (loop.MODEL_DIR / name, loop.TRAIN_DIR / "models" / name):
        if (folder / "model.safetensors").is_file():
            return folder
    command = "make upcycle" if name == UPCYCLED else f"python -m recipes.train.train {name}"
    raise SystemExit(f"error: no trained model in recipes/models/{name}; train it with: {command}")


def publish(name: str, table: list[dict[str, Any]], extra: dict[str, Any], root: Path) -> None:
    """Print rows of name and value, and write them with ``extra`` to build/report/NAME.json."""
    width = max(len(row["name"]) for row in table)
    for row in table:
        value = f"{row['value']:.4f}" if isinstance(row["value"], float) else str(row["value"])
        print(f"{row['name']:<{width}}  {value:>12}")
    path = root / "build" / "report" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": table, **extra}, indent=2) + "\n", encoding="utf-8")


def gathered(root: Path) -> list[Row]:
    """The rows of every model's tables, each named after its model. Raises FileNotFoundError where one was not made."""
    rows = []
    for name in MODELS:
        for table in TABLES:
            found = json.loads((root / "build" / "report" / f"{table}_{name}.json").read_text(encoding="utf-8"))
            rows += [Row(f"{name}: {row['name']}", row["value"], "") for row in found["rows"]]
    return rows


if __name__ == "__main__":
    print(f"written to {write('models', context({'models': MODELS}), gathered(loop.ROOT))}")
