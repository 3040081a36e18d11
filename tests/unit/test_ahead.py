"""Reading ahead: order, what is touched, and errors that wait for the one who reads."""

from __future__ import annotations

import io
import threading

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from moeconv.source.tensors import Part, read_ahead, write_tensors

TYPES = [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.int64]


@given(st.lists(st.integers()))
def test_every_item_in_its_order(items: list[int]) -> None:
    touched: list[int] = []
    assert list(read_ahead(items, touched.append)) == items
    assert touched == items[1:]


def test_the_next_is_touched_before_the_present_is_done_with() -> None:
    touched = threading.Event()
    for item in read_ahead([1, 2], lambda item: touched.set()):
        if item == 1:
            assert touched.wait(10)


def test_an_error_is_left_to_the_reader() -> None:
    def fails(item: int) -> None:
        raise OSError(item)

    assert list(read_ahead([1, 2, 3], fails)) == [1, 2, 3]


@given(st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=6))
def test_tensors_are_written_as_the_library_does(about: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors = {f"t{place}": torch.ones(shape, dtype=dtype) * place for place, (dtype, shape) in enumerate(about)}
    parts = [Part(name, one.dtype, tuple(one.shape), lambda one=one: one) for name, one in tensors.items()]  # type: ignore[misc]
    file = io.BytesIO()
    write_tensors(file, parts)
    assert file.getvalue() == save(tensors)
