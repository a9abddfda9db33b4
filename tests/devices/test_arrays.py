"""Arrays in the memory of a device: what they say of themselves, and how they come back."""

import numpy as np
import pytest

from asynctrt.devices.base import DeviceArray
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceLostError, UsageError
from asynctrt.testing import LatchDevice

FLOAT = np.dtype("float32")


def array_on(device, values):
    values = np.asarray(values, FLOAT)
    buffer = device.allocate(values.nbytes)
    buffer.array(FLOAT, values.shape, 0)[...] = values
    return DeviceArray(device, buffer.address, FLOAT, values.shape, owner=buffer)


def test_what_it_says_of_itself():
    held = array_on(HostDevice(), [[1, 2], [3, 4], [5, 6]])
    assert (len(held), held.ndim, held.shape, held.nbytes, held.row_nbytes) == (3, 2, (3, 2), 24, 8)
    assert repr(held) == "<DeviceArray float32[3, 2] on host>"


def test_rows_are_taken_without_a_copy_and_keep_the_memory():
    held = array_on(HostDevice(), [[1, 2], [3, 4], [5, 6]])
    last = held[1:]
    assert last.address == held.address + 8
    del held
    np.testing.assert_array_equal(last.numpy(), [[3, 4], [5, 6]])
    assert len(last[5:]) == 0
    assert last[::1].shape == last[None:None].shape == last.shape


@pytest.mark.parametrize("rows", [0, -1, (0, 1), slice(None, None, -1), slice(0, 2, 2), "x", None])
def test_rows_that_cannot_be_taken_without_a_copy(rows):
    held = array_on(HostDevice(), [[1, 2], [3, 4]])
    with pytest.raises(UsageError, match=r"by consecutive rows, array\[start:stop\], not by .*numpy\(\)"):
        held[rows]
    with pytest.raises(UsageError):
        list(held)


def test_the_copy_on_the_host_is_ones_own():
    held = array_on(HostDevice(unified=False), [[1, 2]])
    copied = held.numpy()
    copied[...] = 0
    np.testing.assert_array_equal(held.numpy(), [[1, 2]])


def test_the_copy_is_made_after_whoever_writes_it():
    device = HostDevice(in_place="never", unified=False)
    held = array_on(device, [[1, 2]])
    stream, source = device.create_stream(), array_on(device, [[7, 8]])
    stream.copy_bytes(held.address, source.address, held.nbytes)
    written = device.create_event()
    stream.record(written)
    later = DeviceArray(device, held.address, FLOAT, held.shape, owner=held, ready=written)
    np.testing.assert_array_equal(later.numpy(), [[7, 8]])
    assert later[:1].ready is written
    assert stream.close(10)


def test_a_copy_that_does_not_end(monkeypatch):
    monkeypatch.setattr("asynctrt.devices.base.COPY_S", 0.05)
    device = LatchDevice(unified=False)
    held = array_on(device, [[1, 2]])
    with pytest.raises(DeviceLostError, match="did not end within 0.05 s"):
        held.numpy()
    device.open()


def test_only_on_cuda_it_offers_cudas_interface():
    assert not hasattr(array_on(HostDevice(), [[1]]), "__cuda_array_interface__")

    class Gpu(HostDevice):
        name = "cuda:0"

    held = array_on(Gpu(), [[1, 2]])
    assert held.__cuda_array_interface__ == {
        "version": 3,
        "shape": (1, 2),
        "typestr": "<f4",
        "data": (held.address, False),
        "strides": None,
        "stream": None,
    }
