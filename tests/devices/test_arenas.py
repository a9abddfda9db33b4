"""Arenas: as many as asked, as large as the most demanding engine needs, closed when nobody uses them."""

import numpy as np
import pytest

from asynctrt.devices.arenas import Arena, Arenas
from asynctrt.devices.base import ALIGNMENT
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceMemoryError, OptionsError, UsageError

BYTES = np.dtype("uint8")


class Failing(HostDevice):
    """A device that refuses the allocation of that number, though there seemed to be room."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def allocate(self, nbytes):
        self.left -= 1
        if not self.left:
            raise DeviceMemoryError("somebody else was quicker")
        return super().allocate(nbytes)


def held(device):
    return device.memory().held_nbytes


@pytest.mark.parametrize(("count", "nbytes"), [(0, 0), (-1, 0), (1, -1)])
def test_impossible_numbers_are_refused(count, nbytes):
    with pytest.raises(OptionsError, match=f"count must be at least 1 .* not {count} and {nbytes}"):
        Arenas(HostDevice(), count, nbytes=nbytes)


def test_each_is_a_block_of_its_own_aligned_and_large_enough():
    device = HostDevice()
    with Arenas(device, 3, nbytes=1000) as arenas:
        assert len(arenas) == len(arenas.arenas) == len(arenas.users) == 3
        assert arenas.nbytes == held(device) == 3 * 1024
        assert repr(arenas) == "<Arenas host count=3 nbytes=1024 of each>"
        for value, arena in enumerate(arenas.arenas):
            assert arena.memory.address % ALIGNMENT == 0
            assert arena.memory.nbytes == 1024
            arena.memory.array(BYTES, (1024,), 0)[...] = value
        for value, arena in enumerate(arenas.arenas):
            assert set(arena.memory.array(BYTES, (1024,), 0).tolist()) == {value}
    assert held(device) == 0


def test_without_a_size_they_hold_nothing_until_an_engine_needs_some():
    device = HostDevice()
    arenas = Arenas(device, 2)
    assert arenas.nbytes == held(device) == 0
    with pytest.raises(AssertionError, match="reserved before it is used"):
        Arena().memory
    arenas.reserve(1)
    assert arenas.nbytes == held(device) == 2 * ALIGNMENT
    arenas.close()


def test_they_grow_and_never_shrink():
    device = HostDevice()
    arenas = Arenas(device, 2, nbytes=1024)
    first = [arena.memory for arena in arenas.arenas]
    for nbytes in (0, 1, 1024):
        arenas.reserve(nbytes)
        assert [arena.memory for arena in arenas.arenas] == first
    arenas.reserve(1025)
    assert all(arena.memory.nbytes == 1280 for arena in arenas.arenas)
    assert not set(first) & {arena.memory for arena in arenas.arenas}
    arenas.close()


def test_what_they_were_before_stays_for_who_still_uses_it():
    """A captured graph writes to the addresses that it was captured with."""
    device = HostDevice()
    arenas = Arenas(device, 2, nbytes=1024)
    before = arenas.arenas[0].memory
    seen = before.array(BYTES, (1024,), 0)
    arenas.reserve(4096)
    assert before.nbytes == 1024
    assert arenas.nbytes == held(device) == 2 * 4096 + 2 * 1024
    after = arenas.arenas[0].memory
    seen[...] = 1
    assert after.array(BYTES, (4096,), 0).sum() == 0
    arenas.close()
    assert arenas.nbytes == held(device) == 0


def test_what_does_not_fit_is_refused_with_the_arithmetic():
    device = HostDevice(memory_nbytes=4096)
    with pytest.raises(DeviceMemoryError) as caught:
        Arenas(device, 3, nbytes=2000)
    assert str(caught.value).startswith(
        "3 arenas of 2048 bytes need 6,144 bytes on host, and there is room for 4,096 bytes ("
    )
    assert "0 bytes held here out of a budget of 4,096 bytes" in str(caught.value)
    assert "fewer arenas" in str(caught.value)
    assert held(device) == 0


@pytest.mark.parametrize("at", [1, 2, 3])
def test_growing_that_fails_changes_nothing(at):
    device = Failing(at + 3)
    arenas = Arenas(device, 3, nbytes=1024)
    before = [arena.memory for arena in arenas.arenas]
    with pytest.raises(DeviceMemoryError, match="somebody else"):
        arenas.reserve(4096)
    assert [arena.memory for arena in arenas.arenas] == before
    assert arenas.nbytes == held(device) == 3 * 1024
    arenas.reserve(4096)
    assert arenas.nbytes == held(device) == 3 * (4096 + 1024)
    arenas.close()
    assert held(device) == 0


def test_they_are_not_closed_while_an_engine_uses_them():
    device = HostDevice()
    arenas = Arenas(device, 1, nbytes=256)
    arenas.engines = 2
    with pytest.raises(UsageError, match="still used by 2 engines. Close those first"):
        arenas.close()
    assert arenas.nbytes == held(device) == 256
    arenas.engines = 0
    arenas.close()
    arenas.close()
    assert arenas.nbytes == held(device) == 0


def test_after_closing_they_may_serve_again():
    device = HostDevice()
    arenas = Arenas(device, 2, nbytes=256)
    arenas.arenas[0].last_use = device.create_event()
    arenas.close()
    assert arenas.arenas[0].last_use is None
    arenas.reserve(256)
    assert arenas.nbytes == held(device) == 512
    arenas.close()


def test_they_belong_to_the_engines_of_one_loop():
    arenas = Arenas(HostDevice(), 2, nbytes=256)
    arenas.claim(1)
    arenas.claim(2)  # Nobody uses them yet.
    arenas.engines = 1
    arenas.claim(2)
    with pytest.raises(UsageError, match="another event loop"):
        arenas.claim(1)
    arenas.engines = 0
    arenas.claim(1)
    arenas.close()
