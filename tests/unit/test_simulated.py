"""A card that is not there: its clock, its memory, and that it computes what the processor does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moert.beside.gpu.device import STAGING_BUFFERS, DeviceFull, DeviceMissing, Held
from moert.beside.gpu.opening import device_named, known_devices, open_device
from moert.beside.gpu.simulated import PROFILES, SimulatedDevice
from moert.experts.store import DEFAULT_THREADS, ExpertStore, IoSettings
from moert.kernels import open_backend
from moert.kernels.backend import Backend, ExpertView
from moert.pack.reader import Pack
from moert.stats import ExpertCounters
from tests.tiny_packs import DECODER, write_pack

FFN = DECODER.moe.ffn
ROWS = 5


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> list[ExpertView]:
    """Of three experts of mixed widths."""
    pack = Pack.open(write_pack(tmp_path_factory.mktemp("simulated") / "tiny.pack", DECODER, paths=False))
    store = ExpertStore(pack, open_backend(threads=1), ExpertCounters(), IoSettings(False, DEFAULT_THREADS))
    found = []
    for key in DECODER.expert_keys()[:3]:
        room = np.empty(store.nbytes(key) + 4096, np.uint8)
        start = -room.ctypes.data % 4096
        found.append(ExpertView(store.read(key, room[start : start + store.nbytes(key)]), store.projections(key)))
    store.close()
    return found


@pytest.fixture
def backend() -> Iterator[Backend]:
    opened = open_backend(threads=1)
    yield opened
    opened.close()


def card(backend: Backend, capacity_bytes: int | None = None, name: str = "t4") -> SimulatedDevice:
    return SimulatedDevice(f"sim:{name}", PROFILES[name], capacity_bytes, backend)


def x_of(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, DECODER.d_model)).astype(np.float32)


def test_it_computes_what_the_processor_does(backend: Backend, views: list[ExpertView]) -> None:
    device, x = card(backend), x_of(ROWS)
    counts, tokens = [2, 4, 1], np.array([0, 3, 1, 2, 3, 4, 2], np.int32)
    weights = np.linspace(0.1, 0.9, 7).astype(np.float32)
    expected = np.ones((ROWS, DECODER.d_model), np.float32)
    experts = [backend.expert(view) for view in views]
    backend.mixture(experts, counts, tokens, weights, x, expected, FFN)
    held = [device.copy(view) for view in views]
    parts, found = np.empty((7, DECODER.d_model), np.float32), np.ones((ROWS, DECODER.d_model), np.float32)
    device.finish(device.begin(held, counts, tokens, x, FFN), parts)
    backend.add_parts(parts, weights, found, tokens)
    if backend.name == "reference":
        assert np.allclose(found, expected, atol=1e-5)
    else:
        assert np.array_equal(found, expected)


def test_copies_queue_and_computing_waits_for_them(backend: Backend, views: list[ExpertView]) -> None:
    device = card(backend)
    costs, clock = device.costs(), device.clock
    each = [costs.copy_s + view.buffer.nbytes / costs.copy_bytes_per_s for view in views]
    held = [device.copy(view) for view in views]
    assert clock.now() == 0
    assert not device.has(held[0])
    device.wait(held[2])
    assert clock.now() == pytest.approx(sum(each))
    assert all(map(device.has, held))
    late = device.copy(views[0])
    began = clock.now()
    running = device.begin([held[0], late], [1, 1], np.zeros(2, np.int32), x_of(1), FFN)
    assert clock.now() == began
    device.finish(running, np.empty((2, DECODER.d_model), np.float32))
    assert clock.now() > began + each[0] + costs.launch_s


def test_the_processor_works_beside_the_device(backend: Backend, views: list[ExpertView]) -> None:
    device, parts = card(backend), np.empty((1, DECODER.d_model), np.float32)
    held = device.copy(views[0])
    device.wait(held)
    began = device.clock.now()
    running = device.begin([held], [1], np.zeros(1, np.int32), x_of(1), FFN)
    device.clock.host(1.0)
    device.finish(running, parts)
    assert device.clock.now() == began + 1.0


def test_a_copy_waits_for_a_staging_buffer(backend: Backend, views: list[ExpertView]) -> None:
    device = card(backend)
    for _ in range(STAGING_BUFFERS):
        device.copy(views[0])
    assert device.clock.now() == 0
    device.copy(views[0])
    costs = device.costs()
    assert device.clock.now() == pytest.approx(costs.copy_s + views[0].buffer.nbytes / costs.copy_bytes_per_s)


def test_memory_is_counted_and_ends(backend: Backend, views: list[ExpertView]) -> None:
    size = views[0].buffer.nbytes
    device = card(backend, 2 * size + size // 2)
    held = [device.copy(views[0]) for _ in range(2)]
    assert device.used_bytes == 2 * size
    with pytest.raises(DeviceFull):
        device.copy(views[0])
    device.free(held[0])
    device.free(held[0])
    assert device.used_bytes == size
    again: Held = device.copy(views[0])
    with pytest.raises(DeviceFull):
        device.begin([again], [4000], np.zeros(4000, np.int32), x_of(1), FFN)
    assert device.used_bytes == 2 * size


def test_what_it_was_copied_from_may_change(backend: Backend, views: list[ExpertView]) -> None:
    device, x = card(backend), x_of(1)
    copied = ExpertView(views[0].buffer.copy(), views[0].projections)
    parts, expected = np.empty((2, 1, DECODER.d_model), np.float32)
    held = device.copy(copied)
    device.wait_left(held)
    copied.buffer[:] = 0
    device.finish(device.begin([held], [1], np.zeros(1, np.int32), x, FFN), parts)
    backend.parts([backend.expert(views[0])], x, expected, FFN)
    assert np.array_equal(parts, expected)


def test_more_than_the_card_has_is_what_it_has(backend: Backend) -> None:
    assert card(backend, 10**15).capacity_bytes == PROFILES["t4"].memory_bytes
    assert "simulated" in card(backend).title


@pytest.mark.parametrize("name", ["none", "cpu"])
def test_no_device(backend: Backend, name: str) -> None:
    assert open_device(name, None, backend) is None


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_every_profile_opens_by_its_name(backend: Backend, name: str) -> None:
    device = open_device(f"sim:{name}", None, backend)
    assert device is not None
    assert device.simulated
    assert f"sim:{name}" in known_devices()


def test_names() -> None:
    assert all(map(device_named, ("auto", "cuda", "cuda:3", "torch:cpu", "sim:a100")))
    assert not any(map(device_named, ("gpu", "cuda:x", "sim:", "sim:4090", "")))


def test_a_card_of_torch_without_torch(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moert.beside.gpu.opening.find_spec", lambda name: None)
    with pytest.raises(DeviceMissing, match="needs torch"):
        open_device("cuda:0", None, backend)


def test_without_a_driver_auto_is_none(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moert.beside.gpu.opening.has_nvidia_driver", lambda: False)
    assert open_device("auto", None, backend) is None


def test_profiles_do_what_their_figures_say() -> None:
    """An expert of 100 MB at 4 bits is read in 1/288 of a second and copied in 1/240 on the way of an RTX 3060."""
    costs = PROFILES["rtx3060"].device()
    weights = int(100e6 * 8 / 4.5)
    assert costs.widths[4].seconds(weights, 1) == pytest.approx(100e6 / (0.8 * 360e9), rel=0.01)
    assert 100e6 / costs.copy_bytes_per_s == pytest.approx(1 / 239.4, rel=0.01)


def test_costs_are_remembered_beside_the_drives(tmp_path: Path) -> None:
    from moert.beside.gpu.device import known_costs, remembered_costs

    cache, measured = tmp_path / "drives.json", []

    def measure() -> object:
        measured.append(1)
        return PROFILES["t4"].device()

    first = remembered_costs("a card", measure, cache)  # type: ignore[arg-type]
    assert remembered_costs("a card", measure, cache) == first  # type: ignore[arg-type]
    assert measured == [1]
    assert known_costs(cache) == {"a card": first}
    cache.write_text('{"version": 1, "devices": {"a card": {"widths": {}}, "another": 7}}')
    assert known_costs(cache) == {}
    assert remembered_costs("a card", measure, cache) == first  # type: ignore[arg-type]


def test_costs_of_this_processor(backend: Backend) -> None:
    from moert.beside.gpu.device import COSTED, host_costs

    costs = host_costs(backend, 1e9)
    assert set(costs.widths) == set(COSTED)
    assert all(0 < each.weight_s < 1e-6 and 0 < each.row_s < 1e-6 for each in costs.widths.values())
    assert costs.read_bytes_per_s == 1e9
