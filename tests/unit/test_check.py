"""`moeconv check`: what it says of a pack is what the pack takes, and what moert then asks for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published import GLM_4_5_AIR, MIXTRAL_8X7B
from tiny import TINY, rewrite, tiny_olmoe, tiny_switch

from moeconv.artifacts import uniform
from moeconv.command import cli
from moeconv.command.check import Checked, as_json, check, lines
from moeconv.conversion.settings import BY_NEURONS, DEFAULT_QUANTIZER, PLAIN_QUANTIZER, neurons_of
from moeconv.dense import dense_of
from moeconv.errors import SettingsError
from moeconv.packing.emit import Label, emit
from moeconv.plan.outlook import Host, Outlook, table_numbers
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import DenseCoder, ExpertCoder
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import CheckpointError
from moert.pack.layout import Neurons
from moert.pack.manifest import BACKBONE, Manifest
from tests.pairs import each, thinned
from tests.refusing import one_line

WIDTHS = (1, 1.5, 2, 2.5, 3, 4, 8)
HOST = Host(held_bytes=45_000_000, thread_bytes=1 << 20, widened=False)
ASKED = """
import sys
from moert.engine.engine import Engine
from moert.errors import BudgetTooSmall
from moert.kernels import REFERENCE

path, smallest = sys.argv[1], int(sys.argv[2])
fits = []
for nbytes in (smallest, smallest - 25_000_000):
    try:
        with Engine.open(path, memory=nbytes) as engine:
            engine.check([3] * 512, 256)
            fits.append(True)
    except BudgetTooSmall:
        fits.append(False)
print(fits)
"""


def pack_of(
    source: Path, out: Path, bits: int, dense_bits: int | None, neurons: Neurons | None = None
) -> Manifest:  # fmt: skip
    """Experts as `moeconv quantize` would store them: without groups."""
    checkpoint, name = Checkpoint.open(source), DEFAULT_QUANTIZER if neurons is None else PLAIN_QUANTIZER
    coder = ExpertCoder(checkpoint, QUANTIZERS[name](None), None, neurons=neurons)
    dense = DenseCoder(checkpoint, dense_of(checkpoint.spec, dense_bits))
    return emit(coder, uniform(checkpoint.spec, bits), out, seed=0, label=Label("tests"), dense=dense)


def outlook(found: Checked, bits: int, dense_bits: int = 16) -> Outlook:
    return next(each for each in found.outlooks if (each.bits, each.dense_bits) == (bits, dense_bits))


@thinned("family, bits, dense_bits", TINY, [(3, None), (4, 8)], facts=each)
def test_a_pack_has_the_size_that_was_said(
    family: str, bits: int, dense_bits: int | None, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tiny_model(family)
    said = outlook(check(str(source), HOST), bits, dense_bits or 16)
    written = pack_of(source, tmp_path / "model.pack", bits, dense_bits)
    assert {entry.file_bytes for entry in written.experts} == {said.expert_bytes}
    assert written.files[BACKBONE].nbytes == pytest.approx(said.backbone_bytes, abs=512)  # names in another order
    of_tables = 2 * table_numbers(written.model)
    assert said.pack_bytes - said.backbone_bytes == of_tables + sum(entry.file_bytes for entry in written.experts)


@pytest.mark.parametrize("layout", BY_NEURONS)
def test_of_another_layout_too(tmp_path: Path, layout: str) -> None:
    source = tiny_switch(tmp_path / "hf", d_ff=600)
    found = check(str(source), HOST, layout)
    neurons = neurons_of(layout, Checkpoint.open(source).spec, mxfp4=False)
    written = pack_of(source, tmp_path / "model.pack", 3, None, neurons)
    assert {entry.file_bytes for entry in written.experts} == {outlook(found, 3).expert_bytes}
    assert found.outlooks != check(str(source), HOST).outlooks
    assert as_json(found)["layout"] == layout
    assert f"with the quantizer gptq and --layout {layout}; memory for" in "\n".join(lines(found))
    with pytest.raises(SettingsError, match="--layout shelf: expected one of expert, layer, neuron, columns, auto"):
        check(str(source), HOST, "shelf")


@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.slow)])  # trellis codes take most of a minute
def test_moert_takes_the_memory_that_was_said(bits: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_olmoe(tmp_path / "hf", hidden_size=256, intermediate_size=512, max_position_embeddings=2048)
    pack_of(source, tmp_path / "model.pack", bits, None)
    assert cli._exit_code(["check", str(source), "--json"]) == 0
    outlooks = json.loads(capsys.readouterr().out)["outlooks"]
    (said,) = [each for each in outlooks if (each["bits"], each["dense_bits"]) == (bits, 16)]
    asked = [sys.executable, "-c", ASKED, str(tmp_path / "model.pack"), str(said["smallest_memory"])]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == "[True, False]\n"


WITHOUT_TORCH = """
import sys
from moeconv.command.check import Host, check
from moeconv.source.checkpoint import Checkpoint

loaded, *folders = sys.argv[1:]
for folder in folders:
    check(folder, Host(0, 0, False))
assert "torch" not in sys.modules, "torch"
import torch
for folder in folders[:int(loaded)]:
    Checkpoint.open(folder).model(torch.float32)
print(len(folders))
"""


@pytest.mark.parametrize("loaded", [3, pytest.param(len(TINY), marks=pytest.mark.slow)])
def test_no_family_needs_torch_to_be_looked_at(loaded: int, tiny_model: Callable[[str], Path]) -> None:
    """And all can be loaded afterwards in the same process; Gemma 4's class of settings imports torch by itself."""
    folders = [str(tiny_model(family)) for family in sorted(TINY) if not family.startswith("gemma4")]
    asked = [sys.executable, "-c", WITHOUT_TORCH, str(loaded), *folders]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (f"{len(folders)}\n", 0), done.stderr[-2000:]


def test_of_a_dense_model_each_token_reads_all(tiny_model: Callable[[str], Path]) -> None:
    dense, routed = ("\n".join(lines(check(str(tiny_model(family)), HOST))) for family in ("llama", "mixtral"))
    assert "note        a dense model: each token reads all of it" in dense
    assert "dense model" not in routed


@pytest.mark.parametrize("dtype", ["float99", "cuda", 16, ["bfloat16"]])
def test_a_type_that_is_none_is_refused(dtype: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"dtype is .*, it should be one of bfloat16"):
        check(str(written(tmp_path, {**MIXTRAL_8X7B, "dtype": dtype})), HOST)


def test_more_memory_where_weights_are_widened(tmp_path: Path) -> None:
    file = written(tmp_path, MIXTRAL_8X7B)
    narrow, wide = (check(str(file), Host(45_000_000, 1 << 20, widened)) for widened in (False, True))
    for bits in WIDTHS:
        assert outlook(wide, bits).smallest_memory > outlook(narrow, bits).smallest_memory + 3e9
        assert outlook(wide, bits).pack_bytes == outlook(narrow, bits).pack_bytes


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    file = written(tmp_path, MIXTRAL_8X7B)
    alone, folder = check(str(file), HOST), check(str(tmp_path), HOST)
    assert alone.outlooks == folder.outlooks
    text = "\n".join(lines(alone))
    assert "mixtral, supported" in text
    assert "256: 8 a layer, 2 for each token; 176,160,768 weights each" in text
    assert "46.70 billion, of them 12.88 billion for each token" in text
    facts = json.loads(json.dumps(as_json(alone)))
    assert facts["supported"] is True
    assert facts["layers"] == {"decoder": {"all": 32, "with_experts": 32}}
    assert [each["bits"] for each in facts["outlooks"]] == [*WIDTHS, *WIDTHS]
    four = outlook(alone, 4)
    assert four.token_bytes == 32 * 2 * four.expert_bytes, "a token reads all that it chooses once"
    assert four.expert_bytes == pytest.approx(176_160_768 / 2, rel=0.01)


def test_notes_are_of_a_config_alone_too(tmp_path: Path) -> None:
    (note,) = [line for line in lines(check(str(written(tmp_path, GLM_4_5_AIR)), HOST)) if "left out" in line]
    assert note.endswith("several tokens at once are left out, if the checkpoint has them")
    found = check(str(written(tmp_path, {**MIXTRAL_8X7B, "unsloth_fixed": True})), HOST)
    said = "transformers gives these settings of config.json no effect on the model: unsloth_fixed"
    assert as_json(found)["notes"] == [said]
    assert f"  note        {said}" in lines(found)


def test_with_weights_only_what_is_there_is_left_out(tmp_path: Path) -> None:
    source = TINY["glm4_moe"][0](tmp_path / "hf")
    assert check(str(source), HOST).left_out == []
    rewrite(source, lambda stored: stored | {"model.layers.2.eh_proj.weight": torch.ones(24).bfloat16()})
    assert list(check(str(source), HOST).left_out) == Checkpoint.open(source).notes != []
    rewrite(source, lambda stored: stored | {"model.layers.1.mlp.extra.weight": torch.ones(24).bfloat16()})
    with pytest.raises(CheckpointError, match=r"mlp\.extra\.weight"):
        check(str(source), HOST)


def test_a_conversion_says_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = TINY["glm4_moe"][0](tmp_path / "hf")
    rewrite(source, lambda stored: stored | {"model.layers.2.eh_proj.weight": torch.ones(24).bfloat16()})
    assert cli._exit_code(["quantize", str(source), "--bits", "16", "--out", str(tmp_path / "model.pack")]) == 0
    assert "note: the layers that predict several tokens at once are left out\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported: like it are jamba, "),
        ({"model_type": "minimax_m3"}, "model_type 'minimax_m3' is not supported: transformers knows MiniMax-M3 as "),
        ({"model_type": "bailing_moe_v2"}, "model_type 'bailing_moe_v2' is not supported: transformers lacks it, so "),
        ({"is_causal": False}, "sets is_causal False"),
        ({"num_experts_per_tok": 9}, "a token goes to 9 of 8 experts"),
    ],
)
def test_what_is_not_supported_is_one_line(
    change: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, {**MIXTRAL_8X7B, **change})
    assert cli._exit_code(["check", str(file)]) == cli.EXIT_USER
    printed = capsys.readouterr()
    assert printed.out == ""
    assert named in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "W4A8_AWQ", "MIXED_PRECISION"])
def test_a_coding_that_another_file_names_is_refused(algorithm: str, tmp_path: Path) -> None:
    file = written(tmp_path, MIXTRAL_8X7B)
    for asked in (file, tmp_path):
        (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null}}')
        check(str(asked), HOST)
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
        with one_line(CheckpointError, f"coded by 'modelopt', which can't be read .its quant_algo '{algorithm}'"):
            check(str(asked), HOST)


def test_no_such_model(tmp_path: Path) -> None:
    for asked, named in ((tmp_path, "has no config.json"), (tmp_path / "no", "there is no directory")):
        with one_line(CheckpointError, named):
            check(str(asked), HOST)


SHELL = {
    "closed pipe": ("check {model} | true", 141, ""),
    "stdout closed": ("check {model} >&-", 2, "moeconv: stdout: Bad file descriptor\n"),
    "stdout full": ("check {model} >/dev/full", 2, "moeconv: stdout: No space left on device\n"),
    "help full": ("--help >/dev/full", 2, "moeconv: stdout: No space left on device\n"),
    "stderr full": ("quantize {model} --bits 2 --out {out} >/dev/null 2>/dev/full", 0, ""),
    "stderr without reader": ("quantize {model} --bits 2 --out {out} 2>&1 >/dev/null | true", 0, ""),
    "mistake that nobody reads": ("check {model}/config 2>/dev/full", 2, ""),
}


@pytest.mark.parametrize("case", SHELL)
def test_streams_that_are_closed_or_full(case: str, tmp_path: Path) -> None:
    asked, code, errors = SHELL[case]
    words = {"model": tiny_olmoe(tmp_path / "model"), "out": tmp_path / "model.pack"}
    shell = ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m moeconv {asked.format(**words)}"]
    done = subprocess.run(shell, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, errors)
