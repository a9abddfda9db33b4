"""The memory that TensorRT asks for: counted, bounded, and refused with the numbers."""

import threading
from types import SimpleNamespace

import pytest

from asynctrt.backends.tensorrt import memory as memory_module
from asynctrt.backends.tensorrt.memory import (
    DeviceMemory,
    describe_refusals,
    make_allocator,
    make_temporary_allocator,
)
from asynctrt.devices.base import MemoryFigures
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceLostError, DeviceMemoryError
from tests.backends.tensorrt.helpers import WAIT_S, in_threads

MIB = 2**20


@pytest.fixture
def device():
    return HostDevice()


def memory(device, budget=None):
    return DeviceMemory(device, budget=budget)


def test_what_is_held_is_counted(device):
    held = memory(device)
    first, second = held.take(1000), held.take(2000)
    assert first != second
    statistics = held.statistics()
    assert (statistics.held_nbytes, statistics.blocks) == (3000, 2)
    assert device.memory().held_nbytes == 3000
    assert held.give_back(first)
    assert held.give_back(second)
    statistics = held.statistics()
    assert (statistics.held_nbytes, statistics.blocks) == (0, 0)
    assert device.memory().held_nbytes == 0
    assert repr(held) == "<DeviceMemory blocks=0 held=0>"


@pytest.mark.parametrize("alignment", [0, 1, 256, 512, 4096])
def test_addresses_are_aligned(device, alignment):
    held = memory(device)
    for nbytes in (1, 100, 1000):
        address = held.take(nbytes, alignment)
        assert address % max(alignment, 256) == 0
        assert held.give_back(address)
    assert device.memory().held_nbytes == 0


def test_what_is_not_ours_is_not_freed(device):
    held = memory(device)
    address = held.take(100)
    assert held.give_back(address)
    assert not held.give_back(address)
    assert not held.give_back(12345)


def test_a_budget_is_hard_and_a_refusal_has_the_arithmetic(device, caplog):
    held = memory(device, budget=3 * MIB)
    assert held.take(2 * MIB)
    assert held.take(MIB + 1) is None
    assert held.take(MIB)
    (refusal,) = held.take_refusals()
    assert (refusal.asked_nbytes, refusal.held_nbytes, refusal.budget_nbytes) == (MIB + 1, 2 * MIB, 3 * MIB)
    assert "asked for 1.0 MiB while it held 2.0 MiB" in str(refusal)
    assert "budget 3.0 MiB" in str(refusal)
    assert "memory_budget" in str(refusal)
    assert str(refusal) in caplog.text
    assert held.take_refusals() == ()


class TestRoomForAContext:
    """What TensorRT must never be refused: it would end the process."""

    @pytest.fixture(autouse=True)
    def _little(self, monkeypatch):
        monkeypatch.setattr(memory_module, "RESERVE_NBYTES", 1024)
        monkeypatch.setattr(memory_module, "CODE_NBYTES", 1024)

    def create(self, held, *sizes):
        """Take memory as a context does; return it, and whether the context has to be dropped."""
        with held.room_for_context() as reserve:
            taken = [held.take(nbytes) for nbytes in sizes]
        assert None not in taken
        return taken, reserve.is_overdrawn

    @pytest.mark.parametrize(
        ("limits", "free_nbytes"),
        [({"budget": 2047}, 100_000), ({}, 3000)],
    )
    def test_without_room_for_one_like_the_last_nothing_is_tried(
        self, device, monkeypatch, limits, free_nbytes
    ):
        free = [100_000]
        monkeypatch.setattr(
            device, "memory", lambda: MemoryFigures(free_nbytes=free[-1], total_nbytes=100_000, held_nbytes=0)
        )
        held = memory(device, **limits)
        assert not self.create(held, 1024)[1]
        free.append(free_nbytes)
        with pytest.raises(DeviceMemoryError, match="another execution context"), held.room_for_context():
            pytest.fail("it was tried")
        assert held.take_refusals() == ()

    def test_what_the_budget_refuses_is_granted_until_the_context_is_dropped(self, device, monkeypatch):
        figures = MemoryFigures(free_nbytes=52_000, total_nbytes=100_000, held_nbytes=0)
        monkeypatch.setattr(device, "memory", lambda: figures)
        held = memory(device, budget=3000)
        taken, is_overdrawn = self.create(held, 1500, 2100)
        assert is_overdrawn
        assert "that would exceed" in describe_refusals(held.take_refusals())
        assert all(held.give_back(address) for address in taken)
        assert held.statistics().held_nbytes == 0

    def test_what_the_device_refuses_comes_from_the_reserve(self):
        device = HostDevice(memory_nbytes=4096)
        held = memory(device)
        taken, is_overdrawn = self.create(held, 2900, 500, 300)
        assert is_overdrawn
        assert len(set(taken)) == 3
        assert all(address % 256 == 0 for address in taken)
        assert device.memory().held_nbytes == 2900 + 1024
        for address in taken:
            assert held.give_back(address)
        assert device.memory().held_nbytes == 0

    def test_beyond_the_reserve_there_is_nothing(self):
        held = memory(HostDevice(memory_nbytes=2048))
        with held.room_for_context() as reserve:
            assert held.take(2000) is None
        assert reserve.is_overdrawn
        assert held.take(2000), "the reserve is free again"

    def test_one_that_fails_leaves_no_reserve(self, device):
        held = memory(device, budget=1000)
        with pytest.raises(ZeroDivisionError), held.room_for_context():
            raise ZeroDivisionError
        assert device.memory().held_nbytes == 0
        assert held.take(1001) is None


def test_a_device_without_room_refuses_too():
    held = memory(HostDevice(memory_nbytes=1000))
    assert held.take(1001) is None
    assert "the device refused" in describe_refusals(held.take_refusals())


def test_a_lost_device_refuses_too(device, monkeypatch):
    def lost(nbytes):
        raise DeviceLostError("an illegal address")

    monkeypatch.setattr(device, "allocate", lost)
    held = memory(device)
    assert held.take(10) is None
    assert "an illegal address" in describe_refusals(held.take_refusals())


def test_of_several_refusals_the_last_is_told():
    assert describe_refusals(()) == ""
    held = memory(HostDevice(memory_nbytes=100))
    held.take(200)
    held.take(300)
    said = describe_refusals(held.take_refusals())
    assert "300 bytes" in said
    assert "2 refusals" in said


def test_many_threads_at_once(device):
    held = memory(device, budget=50 * 1024)
    failures = []

    def work():
        for _ in range(300):
            address = held.take(1024)
            if address is not None and not held.give_back(address):
                failures.append(address)

    in_threads(work)
    assert not failures
    assert held.statistics().held_nbytes == 0


def test_the_allocator_that_tensorrt_calls(device, module):
    held = memory(device, budget=1000)
    allocator = make_allocator(module, held)
    asynchronous, plain = allocator.allocate_async(500, 256, 0, 7), allocator.allocate(400, 0, 0)
    assert asynchronous % 256 == 0
    assert held.statistics().held_nbytes == 900
    assert allocator.reallocate(plain, 256, 450) == 0
    assert allocator.allocate_async(101, 256, 0, 7) == 0
    assert allocator.allocate(0, 256, 0) == 0
    assert allocator.allocate_async(0, 256, 0, 7) == 0
    assert allocator.deallocate_async(asynchronous, 7)
    assert allocator.deallocate(plain)
    assert allocator.deallocate(0)
    assert allocator.deallocate_async(0, 7)
    assert not allocator.deallocate(plain)
    assert held.statistics().held_nbytes == 0


def test_the_allocator_of_temporary_storage_works_in_the_order_of_streams(module):
    device = HostDevice(in_place="never")
    held = memory(device, budget=1000)
    allocator = make_temporary_allocator(module, held)
    stream, go = device.create_stream(), threading.Event()
    stream.launch(lambda: go.wait(WAIT_S), label="before")
    address = allocator.allocate_async(500, 256, 0, stream.handle)
    assert address % 256 == 0
    plain = allocator.allocate(500, 256, 0)
    assert allocator.allocate_async(1, 256, 0, stream.handle) == 0, "the budget holds for both"
    assert allocator.deallocate_async(address, stream.handle)
    assert held.statistics().held_nbytes == 500
    assert device.memory().held_nbytes == 1000, "work before on the stream may still use it"
    go.set()
    assert stream.close(WAIT_S)
    assert device.memory().held_nbytes == 500
    assert allocator.deallocate(plain)
    assert not allocator.deallocate(plain)
    assert not allocator.deallocate_async(address, stream.handle)
    assert allocator.reallocate(plain, 256, 100) == 0
    assert (allocator.allocate(0, 256, 0), allocator.allocate_async(0, 256, 0, 1)) == (0, 0)
    assert allocator.deallocate(0)
    assert allocator.deallocate_async(0, 1)
    assert device.memory().held_nbytes == 0


def test_a_library_without_asynchronous_allocators(device):
    assert make_temporary_allocator(SimpleNamespace(), memory(device)) is None
