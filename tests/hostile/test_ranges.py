"""Every number of a model has a range, said beside its field; what is outside is one line, and on what is inside
kernels agree."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from damaged import resealed
from hypothesis import given, settings
from hypothesis import strategies as st
from random_packs import SPECS
from tiny_packs import DECODER_SHAPE, write_pack

from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.errors import NotFinite
from moert.pack.documents import Within, plain, read
from moert.pack.errors import ManifestInvalid, PackError
from moert.pack.model_spec import ModelSpec

Rule = Within
Place = tuple[Any, ...]


def parts(kind: type, seen: set[type] | None = None) -> Iterator[tuple[type, str, Any, Any]]:
    """(part, field, what it holds, its rule or None) of all fields of a model that are numbers."""
    seen = set() if seen is None else seen
    if kind in seen:
        return
    seen.add(kind)
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        annotation, rule = hints[field.name], None
        if get_origin(annotation) is Annotated:
            annotation, rule = get_args(annotation)
        for inner in flat(annotation):
            if dataclasses.is_dataclass(inner):
                yield from parts(inner, seen)
            elif inner in (int, float):
                yield kind, field.name, inner, rule


def flat(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        for inner in get_args(annotation):
            yield from flat(inner)
    else:
        yield annotation


FIELDS = list(parts(ModelSpec))


def test_every_number_has_a_range_beside_it() -> None:
    assert len(FIELDS) > 60
    assert [(kind.__name__, name) for kind, name, inner, rule in FIELDS if not isinstance(rule, Within)] == []
    assert [(kind.__name__, name) for kind, name, inner, rule in FIELDS if inner is float and rule.high > 1e9] == []


def places(document: Any, part: Any, at: Place = ()) -> Iterator[tuple[Place, Any, Any]]:
    """(where, what it holds, its rule) of the numbers of a model's document."""
    rules = {name: (inner, rule) for kind, name, inner, rule in FIELDS if kind is type(part)}
    for field in dataclasses.fields(part):
        value, where = getattr(part, field.name), (*at, field.name)
        if field.name in rules and isinstance(value, (int, float)):
            yield (where, *rules[field.name])
        elif dataclasses.is_dataclass(value):
            yield from places(document, value, where)
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if dataclasses.is_dataclass(item):
                    yield from places(document, item, (*where, index))
                elif field.name in rules:
                    yield ((*where, index), *rules[field.name])


CASES = [(name, *case) for name, spec in SPECS.items() for case in places(plain(spec), spec)]


def changed(name: str, where: Place, value: Any) -> dict[str, Any]:
    document = json.loads(json.dumps(plain(SPECS[name])))
    at: Any = document
    for step in where[:-1]:
        at = at[step]
    at[where[-1]] = value
    return document


def model(document: dict[str, Any]) -> ModelSpec:
    return read(ModelSpec, document, "model", closed=True)


def test_the_cases_are_all_fields() -> None:
    """But for those that no small model here has."""
    seen = {where[-1] if isinstance(where[-1], str) else where[-2] for _, where, _, _ in CASES}
    assert {name for _, name, _, _ in FIELDS} - seen == {"bos"}


@pytest.mark.parametrize("family", SPECS)
def test_what_is_outside_is_refused_by_name(family: str) -> None:
    for name, where, inner, rule in CASES:
        if name != family:
            continue
        beyond = [rule.low - 1, -math.inf, rule.high * 2, math.inf, math.nan, 1e31, True, "1", [1]]
        if inner is float:
            beyond += [math.nextafter(rule.low, -math.inf), math.nextafter(rule.high, math.inf), 5e-324 - 1e9]
        else:
            beyond += [rule.high + 1, 1.5, 10**400]
        if rule.low > 0:
            beyond += [0, -0.0, 5e-324, -1]
        for value in beyond:
            with pytest.raises(PackError) as caught:
                model(changed(name, where, value))
            field = where[-1] if isinstance(where[-1], str) else where[-2]
            assert field in str(caught.value), (where, value)
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 300


def test_what_is_at_the_ends_is_read() -> None:
    for name, where, _, rule in CASES:
        for value in (rule.low, rule.high):
            model(changed(name, where, value))


@settings(max_examples=200)
@given(st.sampled_from(CASES), st.floats() | st.integers())
def test_any_number_is_refused_or_what_the_model_has(case: tuple[str, Place, Any, Rule], value: float) -> None:
    name, where, inner, rule = case
    try:
        found = model(changed(name, where, value))
    except ManifestInvalid as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    at: Any = found
    for step in where:
        at = at[step] if isinstance(step, int) else getattr(at, step)
    assert at == value
    assert type(at) is inner
    assert rule.low <= at <= rule.high
    list(found.contradictions())


# Both kernels on what passes.

KIND = ("model", "decoder", "kinds", 0)
EXTREMES: dict[str, tuple[Place, float]] = {
    f"{where[-2]}.{where[-1]} {value:g}": ((*KIND, *where) if where[0] != "model" else where, value)
    for where, ends in {
        ("mixer", "scale"): (1e-6, 1e6), ("mixer", "clip"): (1e-3, 1e9), ("mixer", "softcap"): (1e-3, 1e9),
        ("norm", "eps"): (1e-30, 1.0), ("mixer_join", "add"): (1e-6, 1e6), ("ffn_join", "add"): (1e-6, 1e6),
        ("ffn", "router", "factor"): (1e-6, 1e6), ("ffn", "ffn", "act", "limit"): (1e-3, 1e9),
        ("ffn", "ffn", "act", "slope"): (1e-6, 1e6), ("ffn", "ffn", "act", "plus"): (-1e3, 1e3),
        ("model", "head", "scale"): (1e-6, 1e6), ("model", "head", "softcap"): (1e-3, 1e9),
        ("model", "embed_scale"): (1e-6, 1e6), ("model", "ropes", 0, "factor"): (1e-6, 1e6),
    }.items()
    for value in ends
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("ranges") / "tiny.pack", DECODER_SHAPE.but(eos=()).spec, paths=False)


def logits_of(pack: Path, kernels: str) -> np.ndarray | None:
    """After the prompt; None where the run says that they are no numbers."""
    with Engine.open(pack, predict="none", kernels=kernels) as engine:
        try:
            engine.generate("hello", GenerationSettings(max_new_tokens=2))
        except NotFinite:
            return None
        engine.reserve(5, 1)
        found: np.ndarray = engine.model.prefill(engine.encode("hello"))[1]
        return found


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_agree_on_what_passes(tiny: Path, name: str) -> None:
    """That there are numbers, or none; on numbers as far as roundings of activations to 8 bits let them."""
    where, value = EXTREMES[name]
    before = (tiny / "manifest.json").read_bytes()

    def change(document: dict[str, Any]) -> None:
        at: Any = document
        for step in where[:-1]:
            at = at.setdefault(step, {}) if isinstance(at, dict) else at[step]
        at[where[-1]] = value

    try:
        resealed(tiny, change)
        plainly, natively = logits_of(tiny, "reference"), logits_of(tiny, "auto")
    finally:
        (tiny / "manifest.json").write_bytes(before)
    assert (plainly is None) == (natively is None)
    if plainly is not None and natively is not None:
        assert np.isfinite(plainly).all()
        assert np.isfinite(natively).all()
