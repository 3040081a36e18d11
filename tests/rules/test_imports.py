"""Imports go one way. A module that is in no room here is new: give it one, on purpose."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Rooms from the bottom up: a module may import from its own room and from rooms below.
MOERT = [
    ("moert.pack", "moert.machine", "moert.described", "moert.built"),
    ("moert.errors",),
    ("moert.stats",),
    ("moert.kernels", "moert.hub"),
    ("moert.experts",),
    ("moert.models",),
    ("moert.engine.seams", "moert.engine.constraint"),
    ("moert.beside",),
    ("moert.engine.generation", "moert.engine.session", "moert.engine.text", "moert.engine.scoring"),
    ("moert.chat",),
    ("moert.engine.budget", "moert.engine.regulator"),
    ("moert.engine.registry",),
    ("moert.engine.settings",),
    ("moert.engine",),
    ("moert.serve",),
    ("moert.command", "moert.bench"),
    ("moert.__main__",),
]  # fmt: skip
# Here rooms of one floor do not import each other either.
MOECONV = [
    ("moert.pack", "moert.machine", "moert.described", "moert.built"),
    ("moeconv.errors", "moeconv.progress", "moeconv.tuned"),
    ("moeconv.strict_json", "moeconv.sentencepiece", "moeconv.matrices"),
    (
        "moeconv.artifacts",
        "moeconv.tokenizers",
        "moeconv.writer",
        "moeconv.order",
        "moeconv.routes",
        "moeconv.eviction",
    ),
    ("moeconv.dense",),
    ("moeconv.source", "moeconv.calibration", "moeconv.plan", "moeconv.report"),
    ("moeconv.quantizers",),
    ("moeconv.measure",),
    ("moeconv.sweep", "moeconv.promise", "moeconv.packing", "moeconv.foresight"),
    ("moeconv.conversion",),
    ("moeconv.command",),
    ("moeconv.__main__",),
]
# What moert would say of a budget is asked of moert: of its own arithmetic, which is pure, by this module alone. So is
# what a chat template may do, what its library does of a quantizer, which eviction policy finds most on a trace, and
# how described settings become options.
ASKS = {
    "moeconv.quantizers.coding": {"moert.kernels.backend", "moert.kernels.library"},
    "moeconv.eviction": {"moert.experts.policy", "moert.experts.replay"},
    "moeconv.measure.passes": {"moert.kernels.library"},
    "moeconv.calibration.rendering": {"moert.chat.sandbox"},
    "moeconv.plan.outlook": {"moert.engine.budget", "moert.models.footprint"},
    "moeconv.command.options": {"moert.command.tuning"},
    "moeconv.command.cli": {"moert.command.tuning"},
}
# They hand over artefacts.
STAGES = ("moeconv.sweep", "moeconv.plan", "moeconv.promise", "moeconv.packing", "moeconv.report")
# Inside a room: what stands above the rest of it, from the bottom up; each may import from below itself. The room's
# __init__ may show all of it.
INSIDE = {
    "moeconv.source": [
        ("outline", "decoders"), ("hub", "tensors"), ("decoded", "gguf"), ("checkpoint", "experts", "skeleton"),
    ],
    "moeconv.source.gguf": [
        ("container",), ("facts",), ("settings",), ("families", "tokenizer"), ("names",), ("tensors",), ("folder",),
    ],
    "moeconv.calibration": [("samples",), ("apart",), ("rendering",), ("load",)],
    "moeconv.quantizers": [("quantizer",), ("group", "moments"), ("gptq", "source"), ("trellis",), ("coder",)],
    "moeconv.measure": [
        ("metrics", "workdir"), ("scorers",), ("scoring",), ("firing",), ("passes",), ("trial", "codes"),
    ],
    "moeconv.sweep": [("probes", "cluster", "fisher"), ("sensitivity",)],
    "moeconv.plan": [("problem",), ("knapsack", "dense"), ("outlook", "search"), ("forecast",)],
    "moeconv.promise": [("bound",), ("judging",)],
    "moeconv.packing": [("emit", "packed", "paths")],
    "moeconv.foresight": [("examples",), ("network",), ("training",), ("neurons",)],
    "moeconv.report": [("page",), ("curves",), ("sections",), ("writer",), ("published",)],
    "moeconv.conversion": [
        ("settings",), ("host",), ("material",), ("room", "planning"), ("measuring",), ("choosing", "taught", "dense"),
        ("scales", "additions", "delivery"), ("conversion",),
    ],
    "moeconv.command": [("recipe", "check"), ("forecast",), ("packs",), ("cli",)],
}  # fmt: skip
# Pairs that the order would allow and that are still forbidden.
FORBIDDEN = [
    (here, room)
    for here in ("moert.models", "moert.engine.generation", "moert.engine.session")
    for room in ("moert.experts", "moert.beside")
] + [(stage, other) for stage in STAGES for other in STAGES if stage != other]

# What needs torch is imported by nothing but each other and, inside of functions, by who opens a device by name.
TORCH = ["moert.beside.gpu.torch_matrices", "moert.beside.gpu.torch_backend", "moert.beside.gpu.torch_device"]
# What speaks HTTP is imported where a server starts.
SERVER = ["answers", "anthropic", "host", "ollama", "openai", "openapi", "responses", "server"]
# One is run by an installation, never by moert; one is a program of its own; others go
# with the extras gpu and serve.
OTHER_PACKAGES = {
    "moert.kernels.build": {"setuptools"}, "moert.chat.sandbox": {"jinja2"}, "moert.hub.client": {"huggingface_hub"},
    **{f"moert.serve.{name}": {"starlette", "uvicorn"} for name in SERVER},
    **{name: {"torch"} for name in TORCH}, "moert.beside.gpu.triton_kernel": {"torch", "triton"},
    "moert.beside.grammar": {"llguidance"}, "moert.beside.compiling": {"llguidance"},
}  # fmt: skip
RUNTIME_PACKAGES = {"numpy", "tokenizers", "tqdm", "typer", "click", "rich"}
FOR_TYPES = "typing_extensions"
"""Type checkers have it by themselves: never imported where a program runs."""
HEAVY = {
    "torch",
    "transformers",
    "datasets",
    "evaluate",
    "pandas",
    "pyarrow",
    "matplotlib",
    "rouge_score",
    "tokenizers",
    "scipy",
    "ray",
    "jinja2",
    "triton",
    "llguidance",
}
COMMAND_LINES = [
    "moert/command/cli.py",
    "moert/command/console.py",
    "moert/command/cli.py",
    "moeconv/command/cli.py",
    "moeconv/command/packs.py",
    "moert/__init__.py",
    "moeconv/__init__.py",
]
PURE = [
    "moert/pack",
    "moert/beside/sida",
    "moert/experts/policy.py",
    "moert/experts/predictors.py",
    "moert/experts/replay.py",
    "moeconv/eviction.py",
    "moert/beside/flash/keeping.py",
    "moert/engine/budget.py",
    "moert/beside/gpu/placement.py",
    "moert/beside/gpu/device.py",
    "moert/beside/gpu/simulated.py",
    "moert/beside/gpu/residents.py",
    "moeconv/plan",
    "moeconv/promise/bound.py",
]

# The one module of the core that names packages beside it, and imports them, inside of its functions.
REGISTRY = "moert.engine.registry"
BESIDE_CORE = ("moert.beside", "moert.bench", "moert.hub", "moert.pack", "moert.kernels", REGISTRY)
"""Where neurons, hash functions and devices may be named: the format and the arithmetic have them too."""
NAMING = re.compile("neuron|hash|device", re.IGNORECASE)
# Lines of the core that name them all the same: settings, options and their texts, figures, errors by name, and what
# has nothing to do with them (checksums, drives). A number may only fall.
NAMED = {
    "moert.command.cli": 1, "moert.command.description": 35, "moert.command.settings": 20, "moert.engine.engine": 1,
    "moert.engine.settings": 17, "moert.errors": 4, "moert.experts.drive": 1, "moert.experts.store": 3,
    "moert.models.backbone": 4, "moert.stats": 15,
}  # fmt: skip


def sources(*where: str) -> list[Path]:
    paths = [ROOT / place for place in where]
    return sorted(
        found for path in paths for found in ([path] if path.suffix else path.rglob("*.py")) if found.exists()
    )


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(nodes: Iterator[ast.AST], module: str) -> set[str]:
    """Full names of what these nodes import; `from a import b` counts as a.b if that is a module of ours."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import: write the full name"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = any((ROOT / full.replace(".", "/")).with_suffix(end).exists() for end in (".py", ""))
                names.add(full if is_module else node.module)
    return names


@cache
def imports_of(path: Path) -> set[str]:
    return imported(ast.walk(ast.parse(path.read_text(encoding="utf-8"))), module_name(path))


def modules(*where: str) -> Iterator[tuple[str, set[str]]]:
    """Names, and the modules that each imports."""
    for path in sources(*where):
        yield module_name(path), imports_of(path)


def top_level(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: not inside functions, not under `if TYPE_CHECKING`."""
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def imported_at_once(path: Path) -> set[str]:
    """What a module imports when it is imported itself."""
    return imported(top_level(ast.parse(path.read_text(encoding="utf-8"))), module_name(path))


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


def floor(name: str, rooms: list[tuple[str, ...]]) -> int:
    for height, group in enumerate(rooms):
        if any(within(name, room) for room in group):
            return height
    raise AssertionError(f"{name} has no room in tests/rules/test_imports.py: say where it stands in the order")


def room_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def ours(names: set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] in ("moert", "moeconv") and "." in name}


def test_moert_imports_one_way() -> None:
    for name, found in modules("moert"):
        barred = {"moeconv", "torch", "transformers", "datasets"} - OTHER_PACKAGES.get(name, set())
        assert not {other for other in found if other.split(".")[0] in barred}, name
        if name != "moert":
            assert [other for other in ours(found) if floor(other, MOERT) > floor(name, MOERT)] == [], name


def test_the_core_imports_nothing_beside_it_but_in_the_registry() -> None:
    for path in sources("moert"):
        name = module_name(path)
        if within(name, REGISTRY):
            assert not {other for other in imported_at_once(path) if within(other, "moert.beside")}, name
        elif not any(within(name, place) for place in ("moert.beside", "moert.bench")):
            assert not {other for other in imports_of(path) if within(other, "moert.beside")}, name


def test_the_core_names_ever_less_of_the_packages_beside_it() -> None:
    found = {
        module_name(path): sum(NAMING.search(line) is not None for line in path.read_text("utf-8").splitlines())
        for path in sources("moert")
        if not any(within(module_name(path), place) for place in BESIDE_CORE)
    }
    assert {name: count for name, count in found.items() if count > NAMED.get(name, 0)} == {}, "see REGISTRY"
    assert {name: count for name, count in NAMED.items() if found.get(name, 0) < count} == {}, "lower the numbers"


def test_a_plain_pack_runs_without_packages_beside_the_core(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom tiny_packs import SPECS, write_pack\n"
        "from moert.command.cli import main\n"
        f"path = write_pack(Path({str(tmp_path)!r}) / 'plain.pack', SPECS['decoder'])\n"
        "try:\n    main(['run', str(path), 'abc', '--max-new-tokens', '3', '--tune', 'cache=60%'])\n"
        "except SystemExit as ended:\n    assert not ended.code, ended.code\n"
        "print('\\nbeside:', sorted(name for name in sys.modules if name.startswith('moert.beside')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT / "tests", capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["beside: []"], done.stderr[-2000:]


def test_moeconv_imports_one_way() -> None:
    for name, imports in modules("moeconv"):
        found = ours(imports) - ASKS.get(name, set())
        lent = ("moert.pack", "moert.machine", "moert.described", "moert.built")
        assert [each for each in found if within(each, "moert") and not any(within(each, one) for one in lent)] == [], (
            name
        )
        if name != "moeconv":
            height, room = floor(name, MOECONV), room_of(name)
            above = [other for other in found if floor(other, MOECONV) >= height and room_of(other) != room]
            assert above == [], name


def test_rooms_of_moeconv_import_one_way_inside() -> None:
    def height(name: str, room: str) -> tuple[int, str]:
        """Above how many groups it stands; and which of its group it is."""
        part = name.removeprefix(f"{room}.").split(".")[0]
        return next((at for at, group in enumerate(INSIDE[room], 1) if part in group), 0), part

    for room in INSIDE:
        for name, imports in modules(room.replace(".", "/")):
            here, part = height(name, room)
            found = [(other, *height(other, room)) for other in imports if within(other, room) and other != room]
            above = [other for other, at, its_part in found if at > here or (at == here > 0 and its_part != part)]
            assert name == room or above == [], name


def test_forbidden_pairs() -> None:
    for name, found in modules("moert", "moeconv"):
        barred = [room for here, room in FORBIDDEN if within(name, here)]
        assert [other for other in found if any(within(other, room) for room in barred)] == [], name


def test_no_circles() -> None:
    graph = {name: ours(found) for name, found in modules("moert", "moeconv")}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, "imports go in a circle: " + " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for other in graph.get(name, set()) - {name}:
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_moert_needs_only_the_base_dependencies() -> None:
    for path in sources("moert"):
        name = module_name(path)
        roots = (
            {other.split(".")[0] for other in imports_of(path)} - set(sys.stdlib_module_names) - {"moert", FOR_TYPES}
        )
        assert FOR_TYPES not in imported_at_once(path), name
        assert roots <= RUNTIME_PACKAGES | OTHER_PACKAGES.get(name, set()), name


@pytest.mark.parametrize("alone", ["moert.kernels.build", "moert.chat.sandbox", "moert.beside.compiling"])
def test_nothing_imports_what_runs_by_itself(alone: str) -> None:
    """Another process that runs by itself may."""
    importing = [module_name(path) for path in sources("moert", "moeconv") if alone in imports_of(path)]
    assert [name for name in importing if alone not in ASKS.get(name, set())] == []


def test_command_lines_and_policies_start_without_heavy_imports() -> None:
    for path in sources(*COMMAND_LINES, *PURE):
        assert not {name.split(".")[0] for name in imported_at_once(path)} & HEAVY, module_name(path)


def test_format_and_policies_are_free_of_torch() -> None:
    for name, found in modules(*PURE):
        assert "torch" not in {other.split(".")[0] for other in found}, name


def test_plans_are_made_without_torch() -> None:
    """Nor does anything that they import bring it."""
    names = [module_name(path) for path in sources("moeconv/plan")]
    script = f"import sys, {', '.join(names)}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_torch_stays_out_of_what_is_loaded_without_it() -> None:
    """What else imports these modules does so when a device is asked for by name."""
    needing = {*TORCH, "moert.beside.gpu.triton_kernel"}
    for path in sources("moert"):
        if module_name(path) not in needing:
            assert not needing & imported_at_once(path), module_name(path)


def is_module(name: str) -> bool:
    """A file or a folder of ours has this name."""
    place = ROOT / name.replace(".", "/")
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def test_rules_are_about_places_that_are_there() -> None:
    rooms = [room for group in [*MOERT, *MOECONV] for room in group]
    named = {
        *rooms,
        *OTHER_PACKAGES,
        *ASKS,
        *(asked for modules in ASKS.values() for asked in modules),
        *(name for pair in FORBIDDEN for name in pair),
    }
    named |= {f"{room}.{part}" for room, groups in INSIDE.items() for group in groups for part in group}
    assert sorted(name for name in named if not is_module(name)) == []
    assert [place for place in (*PURE, *COMMAND_LINES) if not sources(place)] == []
    assert not is_module("moert.attic")
    assert not sources("moert/attic.py")
    assert not sources("moert/attic")


def test_the_rules_see_what_they_should(tmp_path: Path) -> None:
    text = "def late() -> None:\n    import torch\n    from moert.pack import reader\n"
    tree = ast.parse(text)
    assert imported(ast.walk(tree), "x") == {"torch", "moert.pack.reader"}
    assert imported(top_level(tree), "x") == set()
    assert floor("moert.models.model", MOERT) > floor("moert.kernels.reference", MOERT)
    with pytest.raises(AssertionError, match="has no room"):
        floor("moert.attic", MOERT)


def test_programs_outside_the_packages_import_what_there_is() -> None:
    """No test imports all of the benches; what was renamed is missed here and not after minutes of one. They run from
    the root, where nothing else is on the path than there is for make."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in ("recipes", "calib_data")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert len(names) > 40
    names += re.findall(r" -m ((?:tests|recipes)\.[\w.]+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert "tests.wheels" in names
    script = f"import importlib\nfor name in {names}:\n    importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
