"""`make bench-smoke`: runs every bench of the Makefile once with `--smoke`, to check that it still runs with its peers.

The runs are too short for figures that mean anything. The exit status is 1 if a bench does not run.

Everything happens in build/smoke, in two folders with links to this checkout and with recipes that convert on a little
text, so that no result and no pack of a whole run is touched; a bench runs in each. If only the environment of
llama.cpp is built and not its library, as in continuous integration, its programs start in their own Python and must
reach that library. A bench whose other peers were not built, or that can do nothing without llama.cpp, is skipped,
with a line that says so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from recipes.bench.program import as_program
from tests.cgroups import missing

ROOT = Path(__file__).absolute().parents[2]
FOLDER = ROOT / "build/smoke"
PACK = ROOT / "tests/golden/tiny.pack"
LLAMA_FOLDER = ROOT / "build/peers/llama"
SHARED = ("data", "peers")  # of build
AT_ONCE = 2
SMALL = {
    "samples": 8, "sweep_samples": 2, "heldout_samples": 8, "context": 32, "loss": '"95%"', "bits": "[2, 4]",
    "quantizer": '"channel"',
}  # fmt: skip
"""Settings of all recipes, in the place of their own and of the defaults."""
NO_LIBRARY = "Shared library with base name 'llama' not found"
WITHOUT_PEER = "build/peers/llama/bin/python missing"
PEER = re.compile(r"llama|Q[24]_K")
MOST_S = 900
"""Of one bench: several times what it takes beside another one on two quiet cores."""


def benches(makefile: str) -> dict[str, str]:
    """Returns target → module of all benches of a Makefile."""
    found = dict(re.findall(r"^(bench-[a-z]+):.*\n\t\$\(PY\) -m (recipes\.bench\.\w+)$", makefile, re.MULTILINE))
    return {target: module for target, module in found.items() if module != "recipes.bench.smoke"}


def unbuilt(makefile: str, target: str) -> list[str]:
    """Returns which of a bench's peers were not built, llama.cpp left out."""
    asked = re.findall(rf"^{target}:.*$", makefile, re.MULTILINE)[0]
    wanted = [each for each in re.findall(r"\$\(PEERS_DIR\)/(\S*\.built)", asked) if "llama" not in each]
    return [each for each in wanted if not (LLAMA_FOLDER.parent / each).exists()]


def needs_demo(makefile: str, target: str) -> bool:
    """Returns whether a bench reads the packs of the demo."""
    return re.search(rf"^{target}:.*build/demo/", makefile, re.MULTILINE) is not None


def prepare(folder: Path) -> None:
    """Fills a folder."""
    (folder / "build").mkdir(parents=True)
    (folder / "recipes").mkdir()
    for path in [each for each in ROOT.iterdir() if each.name not in ("build", "recipes", ".venv")]:
        (folder / path.name).symlink_to(path)
    for name in SHARED:
        (folder / "build" / name).symlink_to(ROOT / "build" / name)
    for path in (ROOT / "recipes").iterdir():
        if path.suffix == ".toml":
            (folder / "recipes" / path.name).write_text(smaller(path.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            (folder / "recipes" / path.name).symlink_to(path)


def smaller(recipe: str) -> str:
    """Returns a recipe with SMALL in the place of its own values, and without what it expects."""
    recipe = recipe.partition("[expect]")[0]
    for name in SMALL:
        recipe = re.sub(rf"^{name} = .*\n", "", recipe, flags=re.MULTILINE)
    return "".join(f"{name} = {value}\n" for name, value in SMALL.items()) + recipe


def ran(module: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a module of the checkout in a folder."""
    command = [sys.executable, "-m", module, "--smoke"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=MOST_S)


def faults(module: str, folder: Path, without_library: bool) -> list[str]:
    """Runs a bench in a folder and returns what was wrong with it, in lines."""
    before = set((folder / "build/bench").glob("*.json"))
    try:
        done = ran(module, folder)
    except subprocess.TimeoutExpired:
        return [f"still runs after {MOST_S} s"]
    results = set((folder / "build/bench").glob("*.json")) - before
    failed = [
        each for path in results for each in json.loads(path.read_text())["context"]["settings"].get("failed", [])
    ]
    if not results:
        return [f"exit status {done.returncode}, no result: {done.stderr.strip()[-2000:]}"]
    if without_library:
        failed = [each for each in failed if not PEER.search(each)]
    elif done.returncode:
        failed.append(f"exit status {done.returncode}: {done.stderr.strip()[-2000:]}")
    return failed


def peer_faults() -> Iterator[str]:
    """Starts llama.cpp's programs in its own Python, which must lack nothing but the library."""
    for arguments in (["make"], ["built"], ["like", str(PACK), "Q2_K", "any.gguf"], ["any.gguf"]):
        done = subprocess.run(
            [str(LLAMA_FOLDER / "bin/python"), "-m", "recipes.bench.llama", *arguments], capture_output=True, text=True
        )
        if NO_LIBRARY not in done.stderr:
            yield f"recipes.bench.llama {' '.join(arguments)}: {done.stderr.strip()[-1000:]}"


def main(asked: Sequence[str]) -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the demo has it: threads that wait take no core
    without_library = not (LLAMA_FOLDER / ".built").exists()
    found = list(peer_faults()) if without_library and LLAMA_FOLDER.exists() else []
    makefile, started = (ROOT / "Makefile").read_text(encoding="utf-8"), time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    folders = [FOLDER / str(number) for number in range(AT_ONCE)]
    for folder in folders:
        prepare(folder)
    lacking, free = missing(reads=FOLDER), SimpleQueue[Path]()
    for folder in folders:
        free.put(folder)

    def demo_faults() -> list[str]:
        """Runs the demo in a folder that is free, copies its packs to the other one, and returns what was wrong."""
        folder, begun = free.get(), time.monotonic()
        done = ran("recipes.demo", folder)
        if not done.returncode:
            for other in set(folders) - {folder}:
                shutil.copytree(folder / "build" / "demo", other / "build" / "demo")
        free.put(folder)
        say("the demo", begun)
        return [f"the demo: {done.stderr.strip()[-2000:]}"] if done.returncode else []

    def lines(target: str, module: str) -> list[str]:
        """Runs a bench in a folder that is free, prints how it went, and returns what was wrong with it."""
        if lacking and "tests.cgroups" in (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"):
            print(f"{target}: skipped, {lacking}", flush=True)
            return []
        if peers := unbuilt(makefile, target):
            print(f"{target}: skipped, its peers are not built ({', '.join(peers)})", flush=True)
            return []
        if needs_demo(makefile, target) and demo.result():
            return []
        folder, begun = free.get(), time.monotonic()
        wrong = faults(module, folder, without_library)
        free.put(folder)
        if not LLAMA_FOLDER.exists() and any(WITHOUT_PEER in line for line in wrong):
            print(f"{target}: skipped, llama.cpp is not built", flush=True)
            return []
        say(f"{target}: {'; '.join(wrong) or 'runs'}", begun)
        return [f"{target}: {line}" for line in wrong]

    wanted = [(target, module) for target, module in benches(makefile).items() if not asked or target in asked]
    wanted.sort(key=lambda bench: needs_demo(makefile, bench[0]))  # what needs it comes after it
    with ThreadPoolExecutor(AT_ONCE) as pool:
        demo = pool.submit(demo_faults)
        for some in pool.map(lambda bench: lines(*bench), wanted):
            found += some
        found += demo.result()
    say(f"all; llama.cpp {'as far as to its library, which is not built' if without_library else 'too'}", started)
    for line in found:
        print(f"make bench-smoke: {line}", file=sys.stderr)
    return 1 if found else 0


def say(what: str, since: float) -> None:
    print(f"{what} ({time.monotonic() - since:.0f} s)", flush=True)


if __name__ == "__main__":
    as_program(lambda: main(sys.argv[1:]), __doc__, "[TARGET...]")
