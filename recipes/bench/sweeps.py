"""`python -m recipes.bench.sweeps PACK...`: `moert bench` with pictures.

With `--plot DIR` the same prompts run over cache sizes and with one part of the engine after the other, and the experts
that tokens go to are counted. Figures of it all are printed as tables and drawn, as EdgeMoE's and SiDA's papers have
them: times of samples, hit rates and times over cache sizes, the engine part by part, idle experts, dependence. One
more shows, as Mixtral-offloading's paper does, the experts of a layer that tokens go to and that a cache holds.
"""

from __future__ import annotations

import io
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeconv.eviction import replay
from moert.bench import command
from moert.bench.command import percentile
from moert.bench.drive import Figure, Points, bench_drives
from moert.bench.drive import figure as drive_figure
from moert.bench.measure import BenchRun, BenchSettings, furthest_first, measure, silent
from moert.beside.flash.runner import PREDICTED
from moert.command import console
from moert.command.description import machine_facts
from moert.command.prompts import longest_text
from moert.command.settings import (
    DriveOption,
    InputOption,
    LinesOption,
    PacksArgument,
    StartOption,
    TokensOption,
    check_unused,
    engine_settings,
    grouped,
    taking,
)
from moert.command.tuning import NOTHING, Asked
from moert.engine.budget import Budget, CacheLimit
from moert.errors import RunError, said
from moert.experts.names import succession_of
from moert.experts.policy import EVICTION
from moert.pack.files import write_atomically
from moert.pack.messages import in_one_line, shown
from moert.pack.model_spec import StackName
from moert.pack.reader import pack_around
from moert.stats import size
from recipes.bench.choices import Choices, Shares, choices, states

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Figures as numbers; each is also printed as a table ------------------------------------------------------------------

CACHE_SHARES = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9)
_LATENCY_STEPS = (10, 25, 50, 75, 90, 95, 100)


class DrawingImpossible(RunError):
    """Pictures can't be made or written here."""


def token_ms(measured: BenchRun) -> float:
    """Mean time of a token after the first, or of the first where there is no other."""
    later = [seconds for sample in measured.samples for seconds in sample.later_s]
    times = later or [sample.first_s for sample in measured.samples]
    return 1000 * sum(times) / len(times)


def label_of(measured: BenchRun) -> str:
    return measured.pack.root.resolve().name


def pack_of(measured: BenchRun) -> str:
    """The pack's name, size and bits, for captions."""
    bits = measured.pack.manifest.effective_bits()
    return f"{label_of(measured)}: {size(measured.expert_bytes)} of experts at {bits:.2f} bits"


def _packs_of(measured: Sequence[BenchRun]) -> str:
    return "; ".join(map(pack_of, measured))


def _work_of(measured: BenchRun) -> str:
    count = len(measured.samples)
    return f"{count} prompt{'s' * (count != 1)}, {measured.settings.new_tokens} tokens written after each"


def target_of(measured: BenchRun) -> str:
    """The loss that the conversion aimed at, or where it aimed at none, the bits."""
    manifest = measured.pack.manifest
    if manifest.quality is not None and manifest.quality.target_loss is not None:
        return f"{100 * manifest.quality.target_loss:g}% loss"
    return f"{manifest.effective_bits():.2f} bits"


def latencies(measured: Sequence[BenchRun]) -> Figure:
    """How long samples take (EdgeMoE Fig. 12)."""
    series = {}
    for each in measured:
        seconds = [sample.total_s for sample in each.samples]
        series[label_of(each)] = [(f"{step}%", percentile(seconds, step)) for step in _LATENCY_STEPS]
    seen = f"Share of samples that were done after so long, prompt and all ({_work_of(measured[0])})"
    caption = f"{seen}. {_packs_of(measured)}."
    return Figure("latencies", "Time of a sample", "share of samples within", "s", "shares", series, caption)


def hit_rates(measured: BenchRun) -> Figure:
    """Hit rates of every policy, and of Belady's rule, which knows the future, over cache sizes (EdgeMoE Fig. 13), by
    replaying the run's demands."""
    order = measured.pack.manifest.model.moe_layers()
    known = succession_of(measured.pack, lambda note: print(in_one_line(note), file=sys.stderr))
    largest, series = max(measured.nbytes.values()), dict[str, list[tuple[str, float]]]()
    for share in CACHE_SHARES:
        room, place = max(largest, int(share * measured.expert_bytes)), f"{100 * share:g}%"
        for name, policy in EVICTION.items():
            found = replay(measured.trace, measured.nbytes, room, policy(order, known))
            series.setdefault(name, []).append((place, 100 * found.hit_rate))
        best = furthest_first(measured.trace, measured.nbytes, room)
        series.setdefault("furthest-first", []).append((place, 100 * best.hit_rate))
    label = label_of(measured)
    caption = (
        "Demands that found their expert in memory, replayed from one run, nothing in memory at first and nothing read "
        f"ahead ({_work_of(measured)}); furthest-first knows the future. {pack_of(measured)}."
    )
    name, title = f"hit-rates-{label}", f"Hit rate, {label}"
    return Figure(name, title, "cache, of the experts' bytes", "% of demands", "lines", series, caption)


def budgets(measured: Sequence[BenchRun], runs: Mapping[str, Points]) -> Figure:
    """Time of a token over cache sizes (EdgeMoE Fig. 14); `runs`: pack → (share, ms)."""
    seen = f"Mean time of a token after the first, by how much room experts have ({_work_of(measured[0])})"
    caption = f"{seen}. {_packs_of(measured)}."
    return Figure("budgets", "Time of a token", "cache, of the experts' bytes", "ms", "lines", runs, caption)


def targets(measured: Sequence[BenchRun]) -> Figure:
    """Returns the time of a token over the targets of the conversions (EdgeMoE Fig. 15)."""
    points = [(f"{target_of(each)} ({label_of(each)})", token_ms(each)) for each in measured]
    seen = f"Mean time of a token after the first, by what the conversion aimed at ({_work_of(measured[0])})"
    caption = f"{seen}. {_packs_of(measured)}."
    return Figure("targets", "Time of a token", "target", "ms", "bars", {"time": points}, caption)


def ablation(measured: Sequence[BenchRun], runs: Mapping[str, Points]) -> Figure:
    """Time of a token as parts of the engine are added one by one (EdgeMoE Fig. 16); `runs`: pack → (step, ms)."""
    seen = f"Mean time of a token after the first, each step with all that comes before it ({_work_of(measured[0])})"
    caption = f"{seen}. {_packs_of(measured)}."
    return Figure("ablation", "Time of a token, part by part", "step", "ms", "bars", runs, caption)


def idle_experts(measured: Sequence[BenchRun], found: Sequence[Choices]) -> Figure:
    """Experts that an input leaves idle, over its length (SiDA Fig. 4)."""
    series = _by_stack(measured, [each.idle for each in found])
    seen = (
        "Experts of a layer that no token of an input goes to, by how many tokens of it are read (prompts; by the "
        "decoder of an encoder-decoder, what it wrote); mean over layers and all inputs that are so long"
    )
    title, caption = "Experts that stay idle", f"{seen}. {_packs_of(measured)}."
    return Figure("idle-experts", title, "tokens read", "% of a layer's experts", "counts", series, caption)


def dependence(measured: Sequence[BenchRun], found: Sequence[Choices]) -> Figure | None:
    """How far a token's experts depend on other tokens (SiDA Fig. 7); None where no token has others."""
    series = _by_stack(measured, [each.same for each in found])
    if not series:
        return None
    seen = (
        "Experts that a token still goes to when all tokens at this distance and beyond are random ones, in a decoder "
        "of those before it; mean over layers and all tokens that have others so far away. At 1 all others are random"
    )
    title, caption = "Experts that stay when tokens further away change", f"{seen}. {_packs_of(measured)}."
    place = "distance from which on tokens are random"
    return Figure("dependence", title, place, "% of a token's experts", "counts", series, caption)


_SHOWN_TOKENS = 64
STATES = ("neither", "cached", "chosen", "chosen and cached")


def chosen_experts(measured: BenchRun, found: Choices) -> Figure:
    """Experts that each token of an input goes to in one layer, and those that are cached then (Mixtral-offloading
    Fig. 1)."""
    spec = measured.pack.manifest.model
    stack, experts = list(found.first.items())[-1]
    layers = spec.moe_layers(stack)
    place, room = len(layers) // 2, max(spec.moe.router.top_k, spec.moe.n // 4)
    rows = states(experts[:_SHOWN_TOKENS, place], spec.moe.n, room)
    series = {
        str(expert): [(str(token), float(state)) for token, state in enumerate(row, 1)]
        for expert, row in enumerate(rows)
    }
    label = label_of(measured)
    caption = (
        f"Experts that the first tokens of an input go to in {layers[place]}, and the {room} used last, which a cache "
        f"holds when the token comes. {pack_of(measured)}."
    )
    title, values = f"Chosen and cached experts, {label}", ", ".join(STATES)
    return Figure(f"chosen-experts-{label}", title, "token", values, "states", series, caption)


def _by_stack(measured: Sequence[BenchRun], found: Sequence[Mapping[StackName, Shares]]) -> dict[str, Points]:
    return {
        f"{label_of(each)}, {name}": [(str(tokens), share) for tokens, share in shares.items()]
        for each, stacks in zip(measured, found, strict=True)
        for name, shares in stacks.items()
        if shares
    }


# Drawing, with matplotlib of the extra `report` -----------------------------------------------------------------------

_CAPTION_COLUMNS = 112
_SOFTWARE = "moert bench"  # as pictures name it, also those of earlier versions


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
            f"--plot {folder} holds {other}, which this program did not draw: give another folder, or --overwrite"
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
    if figure.kind == "states":
        _states(axes, figure)
    else:
        _series(axes, figure)
    if figure.caption:
        canvas.supxlabel("\n".join(textwrap.wrap(figure.caption, _CAPTION_COLUMNS)), fontsize=8, x=0.01, ha="left")
    drawn = io.BytesIO()
    canvas.savefig(drawn, dpi=120, metadata={"Software": _SOFTWARE})
    return drawn.getvalue()


def _states(axes: Axes, figure: Figure) -> None:
    """Draws a row of cells for each series, the first one below."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    names = figure.values.split(", ")
    colours = ("white", "lightgrey", "tab:orange", "tab:blue")[: len(names)]
    cells = [[value for _, value in points] for points in figure.series.values()]
    extent = (0.5, len(cells[0]) + 0.5, -0.5, len(cells) - 0.5)
    axes.imshow(
        cells, ListedColormap(colours), aspect="auto", vmin=0, vmax=len(names) - 1, origin="lower", extent=extent
    )
    axes.set(title=figure.title, xlabel=figure.places, ylabel="expert")
    handles = [Patch(fc=colour, ec="grey", label=name) for name, colour in zip(names, colours, strict=True)]
    axes.legend(handles=handles, ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)


def _series(axes: Axes, figure: Figure) -> None:
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


def _count_in_powers(axes: Axes, figure: Figure) -> None:
    """Twice as many tokens lie as far apart everywhere; all places are named."""
    places = sorted({int(place) for points in figure.series.values() for place, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, map(str, places))
    axes.minorticks_off()


def _percent(place: str) -> float:
    return float(place.removesuffix("%"))


# The runs behind the pictures -----------------------------------------------------------------------------------------

BUDGETS = (0.25, 0.5, 0.75, 1.0)
_HALF = CacheLimit(share=0.5)
PRELOAD = "+ preload"


def all_figures(measured: Sequence[BenchRun], settings: BenchSettings, texts: Sequence[str] | None) -> list[Figure]:
    """Every figure of these packs; `measured` are their runs at `settings`."""
    found = [latencies(measured), *map(hit_rates, measured)]
    over = {}
    for each in measured:
        least, label = Budget.of(each.pack.manifest).layer_bytes, label_of(each)
        over[label] = [
            (
                f"{100 * share:g}%",
                _token_ms(each, with_cache(settings, max(least, int(share * each.expert_bytes))), texts),
            )
            for share in BUDGETS
        ]
    found += [budgets(measured, over), ablation(measured, _steps(measured, settings, texts))]
    if len(measured) > 1:
        found.append(targets(measured))
    return found + _of_choices(measured, texts)


def _of_choices(measured: Sequence[BenchRun], texts: Sequence[str] | None) -> list[Figure]:
    found = [choices(each, texts) for each in measured]
    pictures = [idle_experts(measured, found), *map(chosen_experts, measured, found)]
    dependent = dependence(measured, found)
    if dependent is None:
        print("moert: no picture of how far choices depend on other tokens: no input has any others", file=sys.stderr)
        return pictures
    return [*pictures, dependent]


def with_cache(settings: BenchSettings, nbytes: int) -> BenchSettings:
    return _with(settings, memory=None, cache=nbytes)


def _with(settings: BenchSettings, **changes: Any) -> BenchSettings:
    return replace(settings, engine=settings.engine.but(**changes))


def ablation_steps(settings: BenchSettings, layer_bytes: int) -> dict[str, BenchSettings]:
    """Low-bit experts read on demand; + the next layer's, foretold; + a cache for what comes again.

    `layer_bytes`: what one token can demand of a layer. The last step has the settings' own budget for experts, or half
    of them where there is none.
    """
    on_demand = _with(with_cache(settings, layer_bytes), eviction="lru", predict="none")
    preloading = _with(with_cache(settings, 2 * layer_bytes), eviction="lru")
    caching = _with(settings, memory=None, cache=settings.engine.cache or _HALF)
    return {"low bits, on demand": on_demand, PRELOAD: preloading, "+ cache": caching}


def _steps(
    measured: Sequence[BenchRun], settings: BenchSettings, texts: Sequence[str] | None
) -> dict[str, list[tuple[str, float]]]:  # fmt: skip
    """Returns pack → (step, ms a token); the name of the step that was to read ahead says where nothing was."""
    runs, idle = dict[str, list[tuple[str, float]]](), list[str]()
    for each in measured:
        label, steps = label_of(each), ablation_steps(settings, Budget.of(each.pack.manifest).layer_bytes)
        done = {
            name: measure(each.pack.root, step, texts, each.disk_bytes_per_s, silent) for name, step in steps.items()
        }
        runs[label] = [(name, token_ms(run)) for name, run in done.items()]
        idle += [] if done[PRELOAD].ahead_bytes else [label]
    where = "" if len(idle) == len(measured) else f" of {', '.join(idle)}"
    said = f"{PRELOAD} (nothing{where} was worth it)" if idle else PRELOAD
    return {label: [(said if name == PRELOAD else name, ms) for name, ms in found] for label, found in runs.items()}


def _token_ms(measured: BenchRun, settings: BenchSettings, texts: Sequence[str] | None) -> float:
    return token_ms(measure(measured.pack.root, settings, texts, measured.disk_bytes_per_s, silent))


# The command ----------------------------------------------------------------------------------------------------------


def bench(
    packs: Sequence[Path], settings: BenchSettings, texts: Sequence[str] | None, folder: Path | None, as_json: bool
) -> None:
    """Does all that `moert bench` does; with a folder, prints the figures as tables and draws them there. Raises
    PackError, RunError."""
    measured = command.bench(packs, settings, texts, as_json)
    if folder is not None:
        found = [_on_this_machine(each) for each in all_figures(measured, settings, texts)]
        if not as_json:
            print("", "\n\n".join(shown(each.table()) for each in found), sep="\n", flush=True)
        paths = [draw(each, folder) for each in found]
        if not as_json:
            print("", in_one_line(f"pictures: {', '.join(map(str, paths))}"), sep="\n")


def drives(packs: Sequence[Path], folder: Path | None, as_json: bool) -> None:
    """Does all that `moert bench --drive` does; with a folder, draws each drive there. Raises PackError, RunError."""
    for found in bench_drives(packs, as_json):
        if folder is not None:
            draw(_on_this_machine(drive_figure(found)), folder)


def folder_of(plot: str | None, packs: Sequence[Path], overwrite: bool) -> Path | None:
    """Returns the folder of --plot, checked and made. Raises DrawingImpossible, RunError."""
    if plot is None:
        if overwrite:
            raise RunError("--overwrite goes with --plot: nothing else is replaced")
        return None
    if plot == "":
        raise DrawingImpossible("--plot has no folder: give the name of one, or leave it out")
    check_drawing(Path(plot), packs, overwrite)
    return Path(plot)


def _on_this_machine(figure: Figure) -> Figure:
    facts = machine_facts()
    machine = f"Machine: {facts['processor']}, {facts['cores']['usable']} cores."
    return replace(figure, caption=f"{figure.caption} {machine}")


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(cls=grouped("bench"))
@taking("bench")
def main(
    context: typer.Context,
    packs: PacksArgument,
    prompt: StartOption = None,
    input_path: InputOption = None,
    asked: Asked = NOTHING,
    max_new_tokens: TokensOption = 32,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="DIR",
            help="Also run over cache sizes and with parts of the engine left out, count the experts that tokens go "
            "to, and draw figures of all this into the folder.",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="With --plot: draw into a folder with other pictures too, and replace them."),
    ] = False,
    drive: DriveOption = False,
    as_json: LinesOption = False,
) -> None:
    """Measure packs under every setting of the engine, over cache sizes and part by part, and draw the figures."""
    if drive:
        check_unused(context, {"packs", "drive", "plot", "overwrite", "as_json"}, "--drive: it runs no model")
        drives(packs, folder_of(plot, packs, overwrite), as_json)
        return
    chosen = engine_settings(asked)
    if plot is not None and chosen.neurons == PREDICTED:
        raise DrawingImpossible(
            f"--plot draws what becomes of whole experts, and {said('neurons', PREDICTED)} reads none: leave one out"
        )
    texts = command.texts_of(prompt, input_path, longest_text(chosen))
    bench(packs, BenchSettings(chosen, max_new_tokens), texts, folder_of(plot, packs, overwrite), as_json)


def exit_code(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0, or 2 for a user's mistake, which is one line."""
    name = "recipes.bench.sweeps"
    return console.exit_code(lambda: app(arguments, standalone_mode=False, prog_name=name), arguments)


if __name__ == "__main__":
    console.prepare()
    console.leave(exit_code)
