"""Units of the matrices outside the experts: which there are, their bytes, and what bytes count for each purpose."""

from __future__ import annotations

import pytest

from moeconv.artifacts import DenseUnit, SensitivityTable, Summary
from moeconv.dense import (
    TRELLIS_WIDTHS,
    UNIT_GROUP_SIZE,
    UNQUANTIZED,
    dense_of_units,
    dense_units,
    unit_bytes,
)
from moeconv.plan.dense import Beside
from moeconv.plan.problem import Option, Problem, Unit
from moert.pack.codec import n_groups, row_bytes, stream_bytes
from tests.random_packs import RICH
from tests.tiny_packs import DECODER, SWITCH

SPECS = {"decoder": DECODER, "switch": SWITCH, "rich": RICH}


@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_every_matrix_with_a_role_but_a_routers_is_in_one_unit(name: str, by_layer: bool) -> None:
    spec = SPECS[name]
    units = dense_units(spec, by_layer)
    found = [matrix for unit in units for matrix in units[unit]]
    wanted = [name for name, tensor in spec.tensors.items() if tensor.role not in ("", None, "router")]
    assert sorted(found) == sorted(wanted)
    assert len(units) > len(dense_units(spec, by_layer=False)) or not by_layer


@pytest.mark.parametrize("bits", [2, 3, 4, 8, UNQUANTIZED])
def test_a_units_bytes_are_those_of_its_tensors(bits: int) -> None:
    for unit, nbytes in unit_bytes(DECODER, dense_units(DECODER), bits).items():
        shapes = [DECODER.tensors[name].shape for name in dense_units(DECODER)[unit]]
        if bits == UNQUANTIZED:
            assert nbytes == sum(2 * rows * cols for rows, cols in shapes)
        else:
            each = (rows * (row_bytes(cols, bits) + 4 * n_groups(cols, UNIT_GROUP_SIZE)) for rows, cols in shapes)
            assert nbytes == sum(each)


def test_a_role_has_the_width_of_most_and_others_their_own() -> None:
    units = dense_units(DECODER)
    first = next(unit for unit in units if unit.role == "attention")
    dense = dense_of_units(DECODER, {unit: 8 if unit == first else 4 for unit in units})
    assert dense is not None
    assert dense.bits["attention"] == 4
    assert dense.matrices == dict.fromkeys(dense_units(DECODER)[first], 8)
    assert dense_of_units(DECODER, {}) is None


def test_keys_and_values_and_down_are_units_of_their_own() -> None:
    """Of latent attention too."""
    units = dense_units(RICH)
    keys = [unit for unit in units if unit.part == "keys and values"]
    assert [str(unit) for unit in keys] == [f"keys and values of D0{layer}" for layer in range(3)]
    assert [name.split(".")[3] for name in dense_units(RICH)[keys[0]]] == ["kv_a", "k_turn", "keys", "values"]
    assert [name.split(".")[3] for name in dense_units(RICH)[keys[1]]] == ["k", "v"]
    down = next(unit for unit in units if unit.part == "down")
    assert [*map(str, (down, down._replace(part="")))] == ["down of D00", "ffn of D00"]
    assert all(name.endswith(".down.weight") for name in dense_units(RICH)[down])


def test_widths_below_0_are_trellis_codes() -> None:
    head, embed = DenseUnit("head"), DenseUnit("embed")
    for bits in TRELLIS_WIDTHS:
        rows, cols = DECODER.tensors["head.weight"].shape
        assert unit_bytes(DECODER, [head], bits)[head] == stream_bytes(-bits, rows, cols) + 2 * rows
    first, *others = (unit for unit in dense_units(DECODER) if unit.role == "attention")
    dense = dense_of_units(DECODER, {head: -3, embed: 4, first: 8, **dict.fromkeys(others, -2)})
    assert dense is not None
    assert dict(dense.bits) == {"head": 3, "embed": 4, "attention": 2}
    assert dense.trellis == ("attention", "head")
    assert dense.matrices == dict.fromkeys(dense_units(DECODER)[first], 8)


def test_plans_choose_the_codes_that_were_measured_where_it_is_the_others_that_they_want() -> None:
    unit, table = DenseUnit("head"), SensitivityTable(16, Summary(0.0, 0.0, 0.0, 0.0), {}, {})
    for purpose, widths in (("size", {2, 3, 4, 8}), ("speed", {-2, -4, 8})):
        costs = {bits: (1 / abs(bits),) * 3 for bits in widths}
        found = Beside({unit: costs}, purpose).joined(Problem({}), DECODER, table, "kl").units[Unit(unit, ())]
        assert {option.bits for option in found} == {*widths, 16}


@pytest.mark.parametrize(
    ("purpose", "role", "widths"),
    [
        ("size", "attention", {-2, -4, 8, 16}), ("memory", "head", {-2, -4, 8, 16}), ("speed", "ffn", {4, 8, 16}),
        ("speed", "embed", {-2, -4, 8, 16}),
    ],
)  # fmt: skip
def test_plans_choose_trellis_codes_but_where_products_count(purpose: str, role: str, widths: set[int]) -> None:
    """Their products may take longer than those of plain codes of as many bits; of an embedding rows are read."""
    unit, table = DenseUnit(role), SensitivityTable(16, Summary(0.0, 0.0, 0.0, 0.0), {}, {})
    costs = {bits: (cost,) * 3 for bits, cost in {-4: 0.1, -2: 0.9, 4: 0.09, 8: 0.01}.items()}
    found = Beside({unit: costs}, purpose).joined(Problem({}), DECODER, table, "kl").units[Unit(unit, ())]
    assert {option.bits for option in found} == widths
    sizes = [option.nbytes for option in found]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("purpose", "expert", "embed"), [("size", 1.0, 1.0), ("memory", 2 / 8 / 3, 1.0), ("speed", 0.5, 1e-3)]
)
def test_bytes_count_by_purpose(purpose: str, expert: float, embed: float) -> None:
    """In memory stays what one layer needs of its experts; a token reads an embedding's row, and half of all tokens go
    to this expert."""
    key, *others = (key for key in DECODER.expert_keys() if key.at == DECODER.expert_keys()[0].at)
    coverage = {key: 35, **dict.fromkeys(others, 15)}
    table = SensitivityTable(16, Summary(0.0, 0.0, 0.0, 0.0), {}, coverage)
    experts = Problem({Unit(key, (0,)): (Option(2, 10**6, 0.5), Option(16, 8 * 10**6, 0.0))})
    unit = DenseUnit("embed")
    found = Beside({unit: {4: (0.1, 0.1, 0.1)}}, purpose).joined(experts, DECODER, table, "kl").units
    assert found[Unit(key, (0,))][0].nbytes == pytest.approx(expert * 10**6, rel=1e-3)
    whole = unit_bytes(DECODER, [unit], UNQUANTIZED)[unit]
    assert found[Unit(unit, ())][-1].nbytes == max(1, round(embed * whole))
