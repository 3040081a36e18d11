"""Draws figures with matplotlib, of the extra `report`."""

from __future__ import annotations

import io
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moert.bench.figures import Figure
from moert.errors import DrawingImpossible
from moert.pack.files import write_atomically
from moert.pack.reader import pack_around

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CAPTION_COLUMNS = 112
_SOFTWARE = "moert bench"  # as pictures name it


def check_drawing(folder: Path, packs: Sequence[Path], overwrite: bool = False) -> None:
    """Raises DrawingImpossible, before anything runs, without matplotlib, a folder to write to, or a name for each
    pack, and without `overwrite` for a folder with pictures that were drawn elsewhere. Makes the folder."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise DrawingImpossible("--plot needs matplotlib: pip install 'moert[report]'") from None
    names = [pack.resolve().name for pack in packs]
    if len(set(names)) < len(names):
        raise DrawingImpossible(f"--plot tells packs apart by their names, and two have the same: {', '.join(names)}")
    if (pack := pack_around(folder / "picture")) is not None:
        raise DrawingImpossible(f"--plot {folder} lies in the pack {pack}: give another folder")
    strange = () if overwrite else (path.name for path in sorted(folder.glob("*.png")) if not _is_ours(path))
    if (other := next(iter(strange), None)) is not None:
        raise DrawingImpossible(
            f"--plot {folder} holds {other}, which moert bench did not draw: give another folder, or --overwrite"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DrawingImpossible(f"--plot {folder} can't be made a folder: {error.strerror or error}") from None
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DrawingImpossible(f"--plot {folder} can't be written to: {error.strerror or error}") from None


def draw(figure: Figure, folder: Path) -> Path:
    """Writes folder/NAME.png, whole or not at all. Raises DrawingImpossible."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):  # a pack's name may have a $
        png = _png(figure)
    path = folder / f"{figure.name}.png"
    try:
        write_atomically(path, png)
    except OSError as error:
        raise DrawingImpossible(f"{path} can't be written: {error.strerror or error}") from None
    return path


def _is_ours(picture: Path) -> bool:
    try:
        with picture.open("rb") as file:
            return _SOFTWARE.encode() in file.read(1024)  # before the pixels
    except OSError:
        return False


def _png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(7, 4.6), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    for number, (name, points) in enumerate(figure.series.items()):
        places, values = [place for place, _ in points], [value for _, value in points]
        if figure.kind == "bars":
            width = 0.8 / len(figure.series)
            left = [at - 0.4 + width * (number + 0.5) for at in range(len(places))]
            axes.bar(left, values, width, label=name)
            axes.set_xticks(range(len(places)), places)
        elif figure.kind == "shares":
            axes.step(values, [_percent(place) for place in places], where="post", marker="o", label=name)
        elif figure.kind == "counts":
            axes.plot([int(place) for place in places], values, marker="o", label=name)
        else:
            axes.plot([_percent(place) for place in places], values, marker="o", label=name)
    x, y = figure.places, figure.values
    if figure.kind == "counts":
        _count_in_powers(axes, figure)
    elif figure.kind != "bars":
        x = f"{x} (%)"
    if figure.kind == "shares":
        x, y = y, x
    axes.set(title=figure.title, xlabel=x, ylabel=y)
    axes.set_ylim(bottom=0)
    if figure.kind == "shares":
        axes.set_xlim(left=0)
    if len(figure.series) > 1:
        axes.legend()
    if figure.caption:
        canvas.supxlabel("\n".join(textwrap.wrap(figure.caption, _CAPTION_COLUMNS)), fontsize=8, x=0.01, ha="left")
    drawn = io.BytesIO()
    canvas.savefig(drawn, dpi=120, metadata={"Software": _SOFTWARE})
    return drawn.getvalue()


def _count_in_powers(axes: Axes, figure: Figure) -> None:
    """Twice as many tokens lie as far apart everywhere; all places are named."""
    places = sorted({int(place) for points in figure.series.values() for place, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, map(str, places))
    axes.minorticks_off()


def _percent(place: str) -> float:
    return float(place.removesuffix("%"))
