"""What the README shows to Python programs, and how mistakes are called there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tiny_packs

import moert
from moert.command import cli
from moert.errors import RunError
from moert.machine.memory import held_bytes


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_packs.write_pack(tmp_path_factory.mktemp("api") / "some.pack", tiny_packs.DECODER, paths=False)


def test_sizes_are_strings_or_numbers_as_on_the_command_line(pack: Path) -> None:
    texts, enough = set(), held_bytes() + 10**9
    for memory in (f"{enough / 1e9:.3f}GB", enough, "90%", "auto", None):
        with moert.load(pack, memory=memory, predict="none") as model:
            texts.add(model.generate("hello", max_new_tokens=6).text)
    for cache in ("50%", 10**6):
        with moert.load(str(pack), cache=cache, predict="none") as model:
            texts.add("".join(model.stream("hello", max_new_tokens=6)))
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memry": "1GB"}, "memry is no setting: did you mean memory? There are memory, cache, eviction, predict, "
                           "io, threads, kernels, kv, "),
        ({"memory": "1.5XB"}, "memory '1.5XB' is not a size: expected one like 1.5GB"),
        ({"memory": "1GB", "cache": "1GB"}, "memory and cache exclude each other"),
        ({"eviction": "best"}, "eviction 'best' is none of auto, "),
        ({"predict": "popularity"}, "predict='popularity' needs path tables"),
        ({"kv": 4}, "kv is 4: it should be 8 or 16"),
        ({"threads": 0}, "threads 0 can't compute anything"),
        ({"io": "fast"}, "io='fast' is none of auto, direct, buffered"),
        ({"memory": "1MB"}, "memory="),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_name_arguments(pack: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(RunError) as error:
        moert.load(pack, **settings)
    assert message in str(error.value)
    assert "--" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", "1.5XB"), "moert: --memory '1.5XB' is not a size"),
        (("--predict", "popularity"), "moert: --predict popularity needs path tables"),
        (("--io", "fast"), "moert: --io fast is none of"),
        (("--top-p", "2"), "moert: --top-p is 2.0: it should be above 0 and at most 1"),
        (("--stop", ""), "moert: --stop has an empty stop string"),
        (("--memory", "1GB", "--cache", "1GB"), "moert: --memory and --cache exclude each other"),
    ],
)
def test_the_command_line_names_options(
    pack: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", str(pack), "hello", *options])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(message)


def test_importing_it_is_cheap() -> None:
    command = (
        "import sys, moert; print(sorted(name for name in sys.modules if name in ('numpy', 'typer', 'tokenizers')))"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
