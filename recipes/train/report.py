"""Tables that are printed and written to build/report/NAME.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipes.train import loop

SOURCE_LIMIT = 96  # tokens of an encoder's input that are read


def model_folder(name: str) -> Path:
    """Folder of a trained model; ends with a clear line when there is none."""
    folder = loop.MODEL_DIR / name
    if not (folder / "model.safetensors").is_file():
        command = f"python -m recipes.train.train {name}"
        raise SystemExit(f"error: no trained model in recipes/models/{name}; train it with: {command}")
    return folder


def publish(name: str, table: list[dict[str, Any]], extra: dict[str, Any], root: Path) -> None:
    """Print rows of name and value, and write them with ``extra`` to build/report/NAME.json."""
    width = max(len(row["name"]) for row in table)
    for row in table:
        value = f"{row['value']:.4f}" if isinstance(row["value"], float) else str(row["value"])
        print(f"{row['name']:<{width}}  {value:>12}")
    path = root / "build" / "report" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": table, **extra}, indent=2) + "\n", encoding="utf-8")
