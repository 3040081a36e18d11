"""Options and recipes: what is taken, and the one line for what is not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from moeconv.artifacts import Target
from moeconv.conversion.material import plain_note
from moeconv.conversion.settings import (
    Settings,
    check_counts,
    parse_bits,
    parse_bytes,
    parse_confidence,
    parse_dense_bits,
    parse_fields,
    parse_share,
    parse_target,
)
from moeconv.errors import SettingsError
from moeconv.quantizers import codes_of
from moert.pack.manifest import WIDTHS_OF


@pytest.mark.parametrize(("text", "value"), [("5%", 0.05), ("0.05", 0.05), (" 2.5 % ", 0.025), ("0", 0), (".1", 0.1)])
def test_a_share(text: str, value: float) -> None:
    assert parse_share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["5", "five", "-1%", "100%", "1.0", "", "nan", "5%%"])
def test_no_share(text: str) -> None:
    with pytest.raises(SettingsError, match="--loss"):
        parse_share(text)


def test_a_percent_sign_that_was_forgotten_is_guessed() -> None:
    with pytest.raises(SettingsError, match="did you mean 5%"):
        parse_share("5", "--tune margin")


def test_one_target_at_a_time() -> None:
    assert parse_target(None, None, None) == Target("loss", 0.05)
    assert parse_target("2%", None, None) == Target("loss", 0.02)
    assert parse_target(None, "1.5MB", None) == Target("size", 1_500_000)
    assert parse_target(None, None, 2.8) == Target("bits", 2.8)
    for given, says in (
        (("5%", "1MB", None), "--loss and --size"),
        (("5%", None, 3.0), "--loss and --bits-per-weight"),
        (("5%", "1MB", 3.0), "--loss and --size and --bits-per-weight"),
    ):
        with pytest.raises(SettingsError, match=f"{says}: one target"):
            parse_target(*given)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("120MB", 120_000_000),
        ("1.5 gib", 3 << 29),
        ("1234567", 1234567),
        ("7b", 7),
        ("2G", 2 * 10**9),
        ("512m", 512 * 10**6),
        ("1TB", 10**12),
        (".5KB", 500),
        ("2GB", 2 * 10**9),
        ("1KiB", 1024),
    ],
)
def test_a_size(text: str, value: int) -> None:
    assert parse_bytes(text, "--memory") == value


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1PB", "7", "1234", "1.5", "1 2MB", "1IB", "nan", "9" * 400 + "GB"])
def test_no_size(text: str) -> None:
    with pytest.raises(SettingsError, match=r"^--memory .*(expected one like 1.5GB|did you mean)"):
        parse_bytes(text, "--memory")


def test_confidence() -> None:
    assert parse_confidence("95%") == 0.95
    assert parse_confidence(" None ") is None
    with pytest.raises(SettingsError, match="--confidence"):
        parse_confidence("certain")


def test_bits() -> None:
    assert parse_bits("8,2,2") == (2, 8)
    assert list(map(str, parse_bits("2, 1.5, 16"))) == ["1.5", "2", "16"]
    for text in ("5", "", "2;4", "2,x", "1.25", "2.0", "nan"):
        with pytest.raises(SettingsError, match="--bits"):
            parse_bits(text)


def test_a_quantizer_has_the_widths_of_its_codes() -> None:
    assert settings(quantizer="gptq").bits == (2, 3, 4, 8, 16)
    assert settings().bits == settings(quantizer="trellis").bits == (1, 1.5, 2, 2.5, 3, 4, 8, 16)
    with pytest.raises(SettingsError, match=r"--bits 1.5,2: expected widths among 2, 3, 4, 8, 16 with"):
        settings(bits=(1.5, 2), quantizer="gptq")


@pytest.mark.parametrize(
    ("changes", "coded_by", "plain_for"),
    [
        ({}, "trellis", None),
        ({"bits": (2, 8)}, "trellis", None),
        ({"target": Target("bits", 2.0)}, "trellis", None),
        ({"calib": None, "bits": (2,)}, "trellis", None),
        ({"calib": None, "target": Target("bits", 2.0)}, "trellis", None),
        ({"bits": (8, 16)}, "gptq", None),
        ({"calib": None, "bits": (8,)}, "group", None),
        ({"calib": None, "bits": (16,)}, "group", None),
        ({"layout": "layer"}, "trellis", None),
        ({"layout": "columns"}, "gptq", "--layout columns"),
        ({"layout": "auto"}, "gptq", "--layout auto"),
        ({"layout": "neuron", "calib": None, "bits": (4,)}, "group", "--layout neuron"),
        ({"neurons": "predicted"}, "gptq", "--tune neurons=predicted"),
        ({"group_size": 64}, "gptq", "--tune group-size=64"),
        ({"layout": "columns", "quantizer": "group"}, "group", None),
    ],
)
def test_without_a_quantizer_it_is_trellis_where_its_codes_can_be(
    changes: dict[str, Any], coded_by: str, plain_for: str | None
) -> None:
    found = settings(**changes)
    note = f"note: {plain_for} needs plain codes: --quantizer {coded_by} in place of trellis"
    assert (found.coded_by, plain_note(found)) == (coded_by, note if plain_for else None)
    assert set(found.bits) <= set(WIDTHS_OF[codes_of(coded_by)])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layout": "columns"}, "--layout columns is for blocks of neurons, which have plain codes: leave it out"),
        ({"neurons": "predicted"}, "--tune neurons=predicted is for blocks of neurons, which have plain codes: leave"),
        ({"group_size": 64}, "--tune group-size has no effect on the trellis quantizer: leave it out, or use group"),
    ],
)
def test_trellis_codes_refuse_what_they_lack(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings(quantizer="trellis", **changes)
    assert str(caught.value).startswith(says)


def test_fields() -> None:
    assert parse_fields(None) is None
    assert parse_fields(" input = question, target=answer") == {"input": "question", "target": "answer"}
    assert parse_fields("text=a=b") == {"text": "a=b"}
    for text in ("", "input", "input=", "=x", "input=a,,target=b"):
        with pytest.raises(SettingsError, match=r"--fields .*expected pairs"):
            parse_fields(text)


def test_dense_bits() -> None:
    assert parse_dense_bits("8") == 8
    assert parse_dense_bits("attention=4, head = 8") == {"attention": 4, "head": 8}
    for text in ("", "x", "head", "head=", "head=x", "=8", "8,8", "head=8,", "a=1=2", "8bits"):
        with pytest.raises(SettingsError, match=r"--dense-bits .*expected") as caught:
            settings(dense_bits=parse_dense_bits(text))
        assert "\n" not in str(caught.value)
    with pytest.raises(SettingsError, match="each role once"):
        parse_dense_bits("head=8,head=4")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("head=8, =4", "--dense-bits 'head=8, =4': '=4' has no role: expected a width such as 8, or attention=4"),
        ("=4", "--dense-bits '=4': '=4' has no role"),
        ("head=8,embed", "--dense-bits 'head=8,embed': 'embed' has no width"),
        ("head=,embed=4", "--dense-bits 'head=,embed=4': 'head=' has no width"),
        ("head=8,embed=x", "--dense-bits 'head=8,embed=x': 'embed=x' has no whole number as its width"),
        ("head=8,router=5", "--dense-bits head=8,router=5: router can't have 5 bits: expected a width among 2, 3, 4"),
        ("head=8,tail=4", "--dense-bits head=8,tail=4: there is no role tail: expected roles among attention, mixer"),
    ],
)
def test_dense_bits_say_which_piece_is_wrong(text: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings(dense_bits=parse_dense_bits(text))
    assert str(caught.value).startswith(says)


def settings(**change: object) -> Settings:
    return Settings(**{"model": "m", "out": Path("o"), "work": Path("w"), "calib": "c", **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layout": "shelf"}, "--layout shelf: expected one of expert, layer"),
        ({"quantizer": "magic"}, "--quantizer magic: expected one of channel, group, gptq"),
        ({"allocation": "magic"}, "--tune allocation=magic"),
        ({"signal": "magic"}, "--tune signal=magic: expected one of metric, nll, kl"),
        ({"metric": "bleu"}, "--metric bleu"),
        ({"group_size": 48, "quantizer": "group"}, "--tune group-size=48"),
        ({"group_size": 32, "quantizer": "channel"}, "--tune group-size has no effect"),
        ({"bits": ()}, "--bits"),
        ({"bits": (2, 5)}, "--bits"),
        ({"calib": None}, "--calib is missing"),
        ({"calib": None, "bits": (16,), "metric": "rouge2"}, "--metric has no effect"),
        ({"calib": None, "bits": (16,), "sweep_samples": 3}, "--tune sweep-samples has no effect"),
        ({"calib": None, "bits": (16,), "fields": {"text": "a"}}, "--fields has no effect"),
        ({"calib": None, "bits": (16,), "target": Target("loss", 0.02)}, "--loss is measured on text"),
        ({"calib": None, "bits": (16,), "target": Target("size", 1e6)}, "--size has no effect on --bits 16"),
        ({"calib": None, "bits": (16,), "target": Target("bits", 3)}, "--bits-per-weight has no effect on --bits"),
        ({"calib": None, "bits": (16,), "margin": 0.1}, "--tune margin has no effect without --calib"),
        ({"calib": None, "bits": (16,), "confidence": 0.9}, "--confidence has no effect without --calib"),
        ({"calib": None, "bits": (16,), "confidence": None}, "--confidence has no effect without --calib"),
        ({"calib": None, "bits": (16,), "quantizer": "group"}, "--quantizer has no effect on --bits 16"),
        ({"calib": None, "bits": (4,), "quantizer": "gptq"}, "--quantizer gptq looks at text"),
        ({"calib": None, "bits": (4,), "target": Target("loss", 0.05)}, "--loss is measured on text"),
        ({"calib": None, "bits": (16,), "group_size": 64}, "--tune group-size has no effect on --bits 16"),
        ({"calib": None, "bits": (4,), "allocation": "greedy"}, "--tune allocation has no effect on one width"),
        ({"calib": None, "bits": (16,), "signal": "nll"}, "--tune signal has no effect without --calib"),
        ({"calib": None, "bits": (16,), "per_projection": True}, "--tune per-projection has no effect without --calib"),
        ({"calib": None, "bits": (16,), "cluster": "auto"}, "--tune cluster has no effect without --calib"),
        ({"calib": None, "bits": (16,), "memory_bytes": 1 << 20}, "--memory has no effect without --calib"),
        ({"dense_bits": 5}, "--dense-bits 5: expected a width among 2, 3, 4, 8, 16"),
        ({"dense_bits": {"head": 12}}, "--dense-bits head=12: head can't have 12 bits: expected a width among"),
        ({"dense_bits": {"tail": 8}}, "tail=8: there is no role tail: expected roles among attention, mixer"),
        ({"out": Path("/")}, "expected new directories"),
        ({"samples": 0}, "--samples 0"),
        ({"sweep_samples": 0}, "--tune sweep-samples=0"),
        ({"heldout_samples": -1}, "--tune heldout-samples=-1"),
        ({"max_new_tokens": 0}, "--tune max-new-tokens=0"),
        ({"context": 1}, "--context 1"),
        ({"seed": -1}, "--seed -1"),
        ({"seed": 1 << 32}, "--seed 4294967296"),
        ({"margin": 1.0}, "--tune margin=1: expected a share"),
        ({"memory_bytes": 0}, "--memory 0: expected more than 0 bytes"),
        ({"confidence": 0.4}, "--confidence 0.4: expected 50%"),
        ({"confidence": 1.0}, "--confidence 1"),
        ({"target": Target("loss", 1.0)}, "--loss 1: expected a share"),
        ({"target": Target("loss", math.nan)}, "--loss nan"),
        ({"target": Target("size", 0.0)}, "--size 0: expected a number of bytes above 0"),
        ({"target": Target("size", math.inf)}, "--size inf"),
        ({"target": Target("bits", -2.0)}, "--bits-per-weight -2"),
        ({"target": Target("bits", math.nan)}, "--bits-per-weight nan"),
        ({"target": Target("bits", math.inf)}, "--bits-per-weight inf: expected more than 0, at most 16"),
        ({"target": Target("bits", 16.1)}, "--bits-per-weight 16.1"),
        ({"target": Target("bits", 2.0), "margin": 0.1}, "--tune margin has no effect without --loss"),
    ],
)
def test_bad_settings(change: dict[str, object], says: str) -> None:
    with pytest.raises(SettingsError, match=says) as caught:
        settings(**change)
    assert "\n" not in str(caught.value)


def test_good_settings() -> None:
    assert settings(target=Target("loss", 0.04), margin=0.25).planned_loss == pytest.approx(0.03)
    assert settings(confidence=None).confidence is None
    assert settings(calib=None, bits=(16,)).bits == (16,)
    assert settings(calib=None, bits=(16,), seed=3, context=64).context == 64, "the pack keeps both"
    assert settings(target=Target("bits", 16.0)).target.value == 16
    assert settings(group_size=64, quantizer="gptq").group_size == 64
    assert settings(target=Target("size", 1.0)).target.kind == "size"


def test_counts() -> None:
    check_counts(context=2, seed=0, samples=None, limit=1)
    with pytest.raises(SettingsError, match="--limit 0: expected 1 or more"):
        check_counts(limit=0)
