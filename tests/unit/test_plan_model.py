"""`moeconv plan MODEL`: what is said before anything is converted, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from published import DEEPSEEK_V3_FP8, GPT_OSS_20B, MIXTRAL_8X7B, PUBLISHED
from tiny import TINY, tiny_olmoe

from moeconv.artifacts import Target
from moeconv.command import cli, forecast
from moeconv.command.forecast import OF_MODEL, OF_WORK, as_json, expect, is_model, lines, parse_speed, where
from moeconv.command.present import target_text
from moeconv.conversion.host import Timing, timing
from moeconv.errors import SettingsError
from moeconv.plan.forecast import DEFAULT_DRIVE
from moeconv.report.page import many
from moeconv.tuned import said
from tests.still_machine import MACHINE, TIMED


def written(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_person_reads_sizes_speeds_and_what_converting_takes(
    tmp_path: Path, still: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = written(tmp_path / "mixtral", MIXTRAL_8X7B)
    assert cli._exit_code(["plan", model, "--memory", "16GB", "--drive", "500MB/s"]) == 0
    text = capsys.readouterr().out
    assert "mixtral, 46.70 billion parameters, 12.88 billion of them for each token\n" in text
    assert "drive       500 MB/s, as --drive says\n" in text
    assert "like        wiki, whose routing was recorded: decoder, 32 experts a layer, 4 for each token\n" in text
    assert text.count(" bits ") > 10
    assert "without text trellis: " in text
    assert "of it for the exact sweep" in text


def test_what_takes_all_experts_finds_those_that_have_room(
    tmp_path: Path, still: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = written(tmp_path / "opt", PUBLISHED["OPT-6.7B"])
    asked = ["plan", model, "--memory", "4.5GB", "--drive", "3GB/s"]
    assert cli._exit_code(asked) == 0
    text = capsys.readouterr().out
    assert "like        no other: every token takes all experts of a layer, and finds those that have room\n" in text
    assert cli._exit_code([*asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["hit_rates_of"] == {"model": "opt", "kind": "decoder", "experts": 1, "top_k": 1}
    shares = [each["room_share"] for each in said["packs"] if each["room_share"] is not None]
    assert any(0 < share < 1 for share in shares)
    assert [each["hit_rate"] for each in said["packs"] if each["room_share"] is not None] == pytest.approx(
        [min(1.0, share) for share in shares]
    )


def test_json_has_the_same_in_plain_figures(tmp_path: Path, still: None, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path / "mixtral", MIXTRAL_8X7B)
    assert cli._exit_code(["plan", model, "--memory", "16GB", "--drive", "3GB/s", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["memory_bytes"], said["drive"]["bytes_per_s"]) == (16 * 10**9, 3e9)
    assert said["source_bytes"] == 2 * said["parameters"]["total"]
    packs = {(each["bits"], each["bits_per_weight"], each["dense_bits"]): each for each in said["packs"]}
    assert len(packs) == 18
    four = next(each for (bits, _, dense), each in packs.items() if (bits, dense) == (4, 16))
    assert 0 < four["room_share"] < 1
    assert four["tokens_per_s"] > 0
    mixed = [each["bits_per_weight"] for each in said["packs"] if each["bits"] is None]
    assert mixed == [2.0, 4.3, 2.0, 4.3]
    assert said["converting"]["with_text"]["seconds"] > said["converting"]["without_text"]["seconds"]


def test_a_faster_drive_is_expected_to_be_faster(tmp_path: Path) -> None:
    model = written(tmp_path / "mixtral", MIXTRAL_8X7B)
    slow, fast = (
        expect(model, MACHINE, where(MACHINE, 8 * 10**9, drive), TIMED).forecasts for drive in ("100MB/s", "3GB/s")
    )
    both = [(a, b) for a, b in zip(slow, fast, strict=True) if a.room_share is not None and a.room_share < 1]
    pairs = [(a.tokens_per_s, b.tokens_per_s) for a, b in both]
    assert pairs
    assert all(a is not None and b is not None and b > 2 * a for a, b in pairs)


@pytest.mark.parametrize(
    ("config", "bytes_a_parameter"), [(MIXTRAL_8X7B, 2.0), (DEEPSEEK_V3_FP8, 1.0), (GPT_OSS_20B, 0.66)]
)
def test_the_source_is_as_large_as_its_config_says(
    config: dict[str, Any], bytes_a_parameter: float, tmp_path: Path
) -> None:
    model = written(tmp_path / "model", config)
    found = expect(model, MACHINE, where(MACHINE, None, None), TIMED)
    assert found.source_bytes == pytest.approx(bytes_a_parameter * found.parameters.total, rel=0.02)


def test_bytes_are_those_of_trellis_codes_and_their_scales(tmp_path: Path) -> None:
    found = expect(written(tmp_path / "m", MIXTRAL_8X7B), MACHINE, where(MACHINE, None, None), TIMED)
    packs = {each.bits: each.pack_bytes for each in found.forecasts if each.dense_bits == 16}
    weights = 32 * 8 * 3 * 4096 * 14336
    for narrow, wide in ((1, 1.5), (1.5, 2), (2, 2.5), (2.5, 3), (3, 4)):
        assert packs[wide] - packs[narrow] == pytest.approx((wide - narrow) * weights / 8, rel=0.001)
    bits = {each.bits: each.bits_per_weight for each in found.forecasts}
    assert bits[1.5] == pytest.approx(1.5 + 16 / 4096, abs=0.005)  # a scale for each row
    assert found.efforts["without_text"].disk_bytes == packs[4]


def test_the_source_is_as_large_as_it_lies_there(tmp_path: Path) -> None:
    source = tiny_olmoe(tmp_path / "hf")
    found = expect(str(source), MACHINE, where(MACHINE, None, None), TIMED)
    assert found.source_bytes == (source / "model.safetensors").stat().st_size
    index = {"metadata": {"total_size": 10**12}, "weight_map": {}}
    model = written(tmp_path / "fetched", MIXTRAL_8X7B)
    (tmp_path / "fetched" / "model.safetensors.index.json").write_text(json.dumps(index))
    outline, _ = forecast.opened(Path(model) / "config.json")
    assert forecast.source_bytes(Path(model), outline, found.parameters) == 10**12


@pytest.mark.parametrize("family", TINY)
def test_every_family_has_an_answer(family: str, tmp_path: Path) -> None:
    source = TINY[family][0](tmp_path / "hf")
    found = expect(str(source), MACHINE, where(MACHINE, None, None), TIMED)
    assert all(each.tokens_per_s is not None and each.tokens_per_s > 0 for each in found.forecasts)
    assert json.loads(json.dumps(as_json(found)))["family"] == found.spec.family
    assert all(len(line) <= 160 for line in lines(found))


def test_the_drive_is_what_is_said_or_known_or_guessed() -> None:
    known = {"bytes_per_s": 3e9, "alone_bytes_per_s": 1e9, "piece_bytes": 2 << 20}
    of_known = where({**MACHINE, "drive": known}, 1, None)
    assert (of_known.drive.bytes_per_s, of_known.drive.alone_bytes_per_s) == (3e9, 1e9)
    assert where({**MACHINE, "drive": known}, 1, "100MB/s").drive.bytes_per_s == 1e8
    for drive in (None, {**known, "piece_bytes": 4096}):
        guessed = where({**MACHINE, "drive": drive}, 1, None)
        assert guessed.drive.bytes_per_s == DEFAULT_DRIVE
        assert "say --drive" in guessed.drive_from


def test_without_kernels_there_are_sizes_and_no_speeds(tmp_path: Path) -> None:
    machine = {**MACHINE, "kernel_bytes_per_s": None, "native_kernels": {"missing": "was not built"}}
    found = expect(written(tmp_path / "m", MIXTRAL_8X7B), machine, where(machine, 10**12, None), TIMED)
    assert {each.tokens_per_s for each in found.forecasts} == {None}
    assert any("no native kernels, so no speed can be expected" in line for line in lines(found))


def test_speeds_as_people_write_them() -> None:
    assert [parse_speed(text) for text in ("500MB/s", "3GB/s", "1 GiB/s", "250MB")] == [5e8, 3e9, 2**30, 2.5e8]
    for text in ("fast", "", "500", "MB/s"):
        with pytest.raises(SettingsError, match="expected one like 500MB/s or 3GB/s"):
            parse_speed(text)


# Which is a model, and what goes with it ------------------------------------------------------------------------------


def test_a_model_and_a_work_directory_are_told_apart(tmp_path: Path) -> None:
    model = written(tmp_path / "model", MIXTRAL_8X7B)
    assert is_model(model, [])
    assert is_model(str(tmp_path / "model" / "config.json"), ["memory", "drive"])
    assert is_model("mistralai/Mixtral-8x7B-v0.1", [])
    (tmp_path / "work").mkdir()
    for work in (str(tmp_path / "work"), "model.pack.work", "some/model.pack.work"):
        assert not is_model(work, ["loss"]), work


@pytest.mark.parametrize("name", sorted(OF_WORK | OF_MODEL))
def test_what_does_not_go_with_it_is_refused_in_one_line(
    name: str, tmp_path: Path, still: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = written(tmp_path / "model", MIXTRAL_8X7B)
    (tmp_path / "work").mkdir()
    option = {"whole_curve": "--curve", "purpose": "--for"}.get(name, said(name))
    value = {"loss": ["5%"], "size": ["1GB"], "bits_per_weight": ["3"], "memory": ["4GB"], "drive": ["1GB/s"],
             "allocation": ["knapsack"], "signal": ["kl"], "bits": ["2,4"]}.get(name, [])  # fmt: skip
    what = model if name in OF_WORK else str(tmp_path / "work")
    assert (
        cli._exit_code(
            [
                "plan",
                what,
                *(said(name, value[0]) if value else f"{option} size" if name == "purpose" else option).split(),
            ]
        )
        == cli.EXIT_USER
    )
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"moeconv: {option} asks what ")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--memory", "lots"], "--memory 'lots' is not a size"), (["--memory", "4"], "did you mean 4GB"),
     (["--drive", "quick"], "--drive 'quick' is not the speed")],
)  # fmt: skip
def test_a_mistake_is_one_line_and_comes_before_anything_is_timed(
    options: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forecast, "facts", lambda: pytest.fail("the machine was looked at"))
    assert cli._exit_code(["plan", written(tmp_path / "model", MIXTRAL_8X7B), *options]) == cli.EXIT_USER
    printed = capsys.readouterr()
    assert named in printed.err
    assert printed.err.count("\n") == 1


def test_what_can_not_be_converted_is_one_line(tmp_path: Path, still: None, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path / "model", {**MIXTRAL_8X7B, "model_type": "mamba"})
    assert cli._exit_code(["plan", model]) == cli.EXIT_USER
    assert "model_type 'mamba' is not supported" in capsys.readouterr().err


@pytest.mark.slow
def test_this_machine_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._exit_code(["plan", written(tmp_path / "mixtral", MIXTRAL_8X7B), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["converting"]["with_text"]["seconds"] > said["converting"]["without_text"]["seconds"] > 0


def test_what_is_timed_is_weights_over_seconds() -> None:
    now = iter(range(100))
    found = timing(lambda: float(next(now)))
    small = 256 * 1024.0
    assert found == Timing({"group": 1024 * 2048.0, "gptq": small, "trellis": small}, 2 * 512 * 1024.0**2)


def test_a_small_model_is_counted_in_small_units(tmp_path: Path) -> None:
    source = tiny_olmoe(tmp_path / "hf")
    found = expect(str(source), MACHINE, where(MACHINE, None, None), TIMED)
    said = "\n".join(lines(found))
    assert f"olmoe, {found.parameters.total:,} parameters, {found.parameters.active:,} of them for each token" in said
    assert not re.search(r"\b0[. ]\S* ?(billion|million|GB|MB|kB)", said), said
    assert (many(999_999), many(1_500_000), many(2 * 10**9)) == ("999,999", "1.50 million", "2.00 billion")
    assert target_text(Target("size", 30_000.0)) == "30 kB"
