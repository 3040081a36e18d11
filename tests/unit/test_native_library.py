"""The native kernels as Python sees them: declared as in the header, built if there is a compiler, chosen by name."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from setuptools import Distribution, Extension

from moert.kernels import build, library
from moert.kernels.library import ACTIVATIONS, KINDS, SCORES, InstructionSet, InstructionSetInvalid, Library, Matrix

CSRC = Path(library.__file__).with_name("csrc")
HEADER = (CSRC / "moert.h").read_text(encoding="utf-8")
CODE = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def header_functions() -> dict[str, int]:
    """How many arguments each function of the header takes."""
    found = re.findall(r"\b(moert_\w+)\(([^)]*)\);", CODE)
    return {name: 0 if text.strip() == "void" else text.count(",") + 1 for name, text in found}


def test_every_function_of_the_header_is_declared() -> None:
    assert {name: len(arguments) for name, (_, arguments) in library._FUNCTIONS.items()} == header_functions()
    assert re.search(rf"#define MOERT_ABI {library.ABI}\b", HEADER)


STRUCTS = {kind.__name__.lower(): kind for kind in vars(library).values() if isinstance(kind, type(ctypes.Structure))}
del STRUCTS["structure"]


def test_every_struct_of_the_header_is_declared() -> None:
    """With all fields, in order."""
    found = re.findall(r"typedef struct \{(.*?)\} moert_(\w+);", CODE, flags=re.DOTALL)
    names = {name: [field.strip(" *\n") for field in re.split(r"[,;]", text)] for text, name in found}
    fields = {name: [field.split()[-1].strip("*") for field in each if field] for name, each in names.items()}
    assert {name: [field for field, *_ in kind._fields_] for name, kind in STRUCTS.items()} == fields


@needs_compiler
@pytest.mark.parametrize("name", STRUCTS)
def test_structures_lie_as_in_c(tmp_path: Path, name: str) -> None:
    structure = STRUCTS[name]
    fields = [field for field, *_ in structure._fields_]
    places = [f"offsetof(moert_{name}, {field})" for field in fields] + [f"sizeof(moert_{name})"]
    expected = [getattr(structure, field).offset for field in fields] + [ctypes.sizeof(structure)]
    assert said_in_c(tmp_path, places) == expected


@needs_compiler
def test_numbers_are_those_of_c(tmp_path: Path) -> None:
    names = [f"MOERT_{name}" for name in ("F16", "BF16", "F32", "RELU", "SILU", "GELU", "GELU_TANH", "RELU_SQUARED")]
    names += [f"MOERT_{name.upper()}" for name in SCORES]
    acts = [ACTIVATIONS[name] for name in ("relu", "silu", "gelu", "gelu_new", "relu2")]
    assert said_in_c(tmp_path, names) == [KINDS["F16"], KINDS["BF16"], KINDS["F32"], *acts, *SCORES.values()]


def said_in_c(tmp_path: Path, numbers: Sequence[str]) -> list[int]:
    source, program = tmp_path / "numbers.c", tmp_path / "numbers"
    prints = "".join(f'printf("%zu ", (size_t){number});' for number in numbers)
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{CSRC}/moert.h"\nint main(void) {{ {prints} return 0; }}\n'
    )
    subprocess.run(["cc", str(source), "-o", str(program)], check=True)
    found = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    return [int(word) for word in found.split()]


def test_the_best_that_runs_is_chosen() -> None:
    sets = (InstructionSet(0, "wide", False), InstructionSet(1, "middle", True), InstructionSet(2, "scalar", True))
    found = Library(None, sets)  # type: ignore[arg-type]
    assert found.choose() == 1
    assert found.choose("scalar") == 2
    with pytest.raises(InstructionSetInvalid, match="does not run the instruction set wide: use middle, scalar"):
        found.choose("wide")
    with pytest.raises(InstructionSetInvalid, match="no instruction set 'mmx'"):
        found.choose("mmx")


def test_why_there_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PATH", tmp_path / "_native.so")
    assert library.load() is None
    assert library.missing() == "_native.so was not built"
    assert library.missing_note() == (
        "no native kernels: _native.so was not built; computing with numpy, slowly: install a C compiler, then moert "
        "again"
    )
    broken = tmp_path / "broken" / "_native.so"
    broken.parent.mkdir()
    broken.write_bytes(b"no library" * 100)
    monkeypatch.setattr(library, "PATH", broken)
    assert library.load() is None
    note = library.missing_note() or ""
    assert note.startswith("no native kernels: _native.so does not load: ")
    assert note.endswith("; computing with numpy, slowly: install moert again")
    assert note.count("_native.so") == 1


def test_a_file_that_can_not_be_read_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "_native.so"
    folder.mkdir()
    monkeypatch.setattr(library, "PATH", folder)
    assert library.missing() == "_native.so does not load: Is a directory"
    assert library.advice() == "install moert again"


@needs_compiler
@pytest.mark.parametrize("kept", [10, 63, 64, 0.5, -1])
def test_a_library_cut_short_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: float) -> None:
    """To load it could end the process with a bus error."""
    monkeypatch.setattr(build, "HERE", tmp_path)
    make_sources(tmp_path, "char space[100000] = {1};\n")
    whole, cut = tmp_path / "whole.so", tmp_path / "_native.so"
    build.compile_library(whole)
    body = whole.read_bytes()
    cut.write_bytes(body[: int(len(body) * kept) if isinstance(kept, float) else kept])
    monkeypatch.setattr(library, "PATH", cut)
    monkeypatch.setattr(library, "CDLL", lambda path: pytest.fail("it was loaded"))
    if kept == 10:
        assert library._cut_short(cut)
    assert library.missing() == "_native.so is damaged: its end is missing"
    assert library.advice() == "install moert again"
    assert not library._cut_short(whole)


@needs_compiler
def test_libraries_of_other_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "".join(f"void {name}(void) {{}}\n" for name in library._FUNCTIONS if name != "moert_abi")
    for version, expected in ((99, "interface 99"), (None, "moert_abi")):
        folder = tmp_path / str(version)
        make_sources(folder, names + (f"int moert_abi(void) {{ return {version}; }}\n" if version else ""))
        monkeypatch.setattr(build, "HERE", folder)
        build.compile_library(folder / "_native.so")
        monkeypatch.setattr(library, "PATH", folder / "_native.so")
        assert expected in (library.missing() or "")
        assert (library.missing() or "").count("_native.so") == 1
        assert library.advice() == "install moert again"


def make_sources(folder: Path, code: str) -> None:
    (folder / "csrc").mkdir(parents=True, exist_ok=True)
    (folder / "csrc" / "one.c").write_text("#pragma GCC visibility push(default)\n" + code)


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nonexistent -m64")
    with pytest.raises(build.CompilerMissing, match="CC=/nonexistent -m64 is no program"):
        build.find_compiler()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.CompilerMissing, match="found no cc, gcc or clang"):
        build.find_compiler()


def run_build_ext(folder: Path, inplace: bool = False) -> Path:
    """What an installation does; where the library goes."""
    extension = Extension("some.place._native", [], optional=True)
    command = build.BuildNative(Distribution({"ext_modules": [extension], "package_dir": {"": str(folder)}}))
    command.build_lib, command.build_temp = str(folder / "out"), str(folder / "temp")
    command.inplace = inplace
    command.ensure_finalized()
    command.run()
    return folder / "out" / "some" / "place" / "_native.so"


@needs_compiler
def test_an_installation_builds_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "HERE", tmp_path)
    make_sources(tmp_path, "int answer(void) { return 42; }\n")
    target = run_build_ext(tmp_path)
    assert ctypes.CDLL(str(target)).answer() == 42
    assert [path.name for path in target.parent.iterdir()] == ["_native.so"]


@needs_compiler
def test_from_the_sources_it_lies_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what an earlier installation built goes when there is no compiler any more."""
    package = tmp_path / "some" / "place"
    monkeypatch.setattr(build, "HERE", package)
    make_sources(package, "int answer(void) { return 42; }\n")
    run_build_ext(tmp_path, inplace=True)
    assert ctypes.CDLL(str(package / "_native.so")).answer() == 42
    monkeypatch.setenv("CC", "/nonexistent")
    run_build_ext(tmp_path, inplace=True)
    assert not (package / "_native.so").exists()
    assert "moert: the native kernels were not built" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("compiler", "says"),
    [("echo -m64", "echo wrote no library: is it a C compiler?"), ('cc "-O2', 'CC=cc "-O2 is no command: No closing'),
     ("{}/text", "does not run: Exec format error")],
)  # fmt: skip
def test_what_is_no_compiler_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], compiler: str, says: str
) -> None:
    text = tmp_path / "text"
    text.write_text("no program")
    text.chmod(0o755)
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setenv("CC", compiler.format(tmp_path))
    make_sources(tmp_path, "int one;\n")
    (tmp_path / "_native.partial").write_bytes(b"of a build that was killed")
    assert build.main() == 1
    written = capsys.readouterr().err
    assert says in written
    assert written.count("\n") == 1
    assert not (tmp_path / "_native.so").exists()


@pytest.mark.parametrize("compiler", ["/nonexistent", "false", "echo", "'"])
def test_an_installation_without_a_library_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], compiler: str
) -> None:
    """A library that an earlier installation left goes: it would be of other sources."""
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setenv("CC", compiler)
    make_sources(tmp_path, "")
    stale = tmp_path / "out" / "some" / "place" / "_native.so"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"stale")
    assert not run_build_ext(tmp_path).exists()
    assert "moert: the native kernels were not built, moert will be slow" in capsys.readouterr().err


@needs_compiler
def test_for_developers_a_mistake_in_c_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "HERE", tmp_path)
    make_sources(tmp_path, "int broken(\n")
    assert build.main() == 1
    monkeypatch.setenv("CC", "/nonexistent")
    assert build.main() == 0


@needs_compiler
def test_a_library_that_is_newer_than_its_sources_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "HERE", tmp_path)
    make_sources(tmp_path, "int one;\n")
    library = tmp_path / "_native.so"
    library.write_bytes(b"made just now")
    after = (tmp_path / "csrc").stat().st_mtime_ns + 10**9
    os.utime(library, ns=(after, after))
    assert build.main() == 0
    assert library.read_bytes() == b"made just now"
    os.utime(library, ns=(0, 0))
    assert build.main() == 0
    assert library.read_bytes().startswith(b"\x7fELF")


def test_it_is_found_without_torch() -> None:
    code = "import sys; from moert.kernels import library; library.load(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_product_through_every_instruction_set() -> None:
    """Whole numbers: 4-bit codes 3 1 2, scale 2, minimum -1."""
    loaded = library.load()
    if loaded is None:
        pytest.skip(f"no native kernels: {library.missing()}")
    codes, scale, minimum = np.array([0x13, 0x02], np.uint8), np.array([2], np.float16), np.array([-1], np.float16)
    x, y = np.array([127, -5, 1], np.float32), np.zeros(1, np.float32)
    matrix = Matrix(codes.ctypes.data, scale.ctypes.data, minimum.ctypes.data, None, 4, 1, 3, 3)
    functions = loaded.functions
    for each in loaded.instruction_sets:
        if not each.runs:
            continue
        pool = functions.moert_pool_open(each.number, 2)
        y[:] = 0
        matrices, outputs = (ctypes.POINTER(Matrix) * 1)(ctypes.pointer(matrix)), (ctypes.c_void_p * 1)(y.ctypes.data)
        assert functions.moert_linear(pool, 1, matrices, x, 1, outputs) == 0
        functions.moert_pool_close(pool)
        assert y[0] == 5 * 127 - 5 + 3
