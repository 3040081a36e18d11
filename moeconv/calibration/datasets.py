"""Rows of a data set of the `datasets` library: by its name on the hub, or from a folder made by `save_to_disk`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from moeconv.calibration.rows import MAX_ROWS, Rows
from moeconv.errors import CalibrationError

HUB = "hf:"


def is_dataset(named: str) -> bool:
    return named.startswith(HUB) or _folder(named) is not None


def read_dataset(named: str, wanted: Collection[str]) -> Rows:
    """`hf:OWNER/NAME`, `hf:OWNER/NAME/CONFIG` or a folder, each with `@SPLIT` behind it where there are several
    splits. One column of class labels gives the names of its classes as `choices`, where rows have none. Fields that
    are not `wanted` are there, and empty.

    Raises CalibrationError.
    """
    data = _split_of(named, _loaded(named))
    classes = [kind.names for kind in data.features.values() if type(kind).__name__ == "ClassLabel"]
    extra = {"choices": classes[0]} if len(classes) == 1 else {}
    names = list(data.column_names)
    if len(data) > MAX_ROWS:
        raise CalibrationError(f"{named}: has {len(data)} rows, at most {MAX_ROWS} are read: give a part of it")
    read = [name for name in names if name in wanted]
    rows = data.select_columns(read) if read else ({} for _ in range(len(data)))
    for number, row in enumerate(rows, 1):
        yield f"{named}: row {number}", {**extra, **{name: row.get(name, "") for name in names}}


def _folder(named: str) -> Path | None:
    """The folder that is meant; a name may have a split behind it."""
    for path in (Path(named), Path(named.rpartition("@")[0] or named)):
        if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            return path
    return None


def _loaded(named: str) -> Any:
    parts = named.removeprefix(HUB).partition("@")[0].split("/")
    if _folder(named) is None and not all(parts):
        raise CalibrationError(
            f"{named}: expected hf:OWNER/NAME or hf:OWNER/NAME/CONFIG, with @SPLIT if it has several"
        )
    import datasets

    try:
        folder = _folder(named)
        if folder is not None:
            return datasets.load_from_disk(str(folder))
        return datasets.load_dataset("/".join(parts[:2]), *parts[2:3])
    except Exception as error:  # no network, no such name, a damaged file: the library has a type for each
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CalibrationError(f"{named}: the data set can't be loaded ({reason[:200]})") from None


def _split_of(named: str, loaded: Any) -> Any:
    if not isinstance(loaded, dict):
        return loaded
    split = named.rpartition("@")[2] if "@" in named else ""
    if len(loaded) == 1 and not split:
        return next(iter(loaded.values()))
    if split not in loaded:
        known = ", ".join(loaded)
        raise CalibrationError(f"{named}: there are the splits {known}: name one as {named.partition('@')[0]}@SPLIT")
    return loaded[split]
