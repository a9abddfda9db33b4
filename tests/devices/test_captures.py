"""What a capture holds that cannot be launched again, and what it copies from the host. Needs a GPU."""

import ctypes

import numpy as np
import pytest

from asynctrt.errors import DeviceError
from tests.gpu.support import gpu_is_here

pytestmark = [pytest.mark.skipif(not gpu_is_here(), reason="needs a GPU"), pytest.mark.timeout(60)]
COUNT = 1000


@pytest.fixture
def device():
    from asynctrt.devices.cuda import CudaDevice

    device = CudaDevice(0)
    yield device
    device.close()


@pytest.fixture
def stream(device):
    made = device.create_stream()
    yield made
    assert made.close(10)


def read(device, stream, buffer):
    """Return what a buffer on the GPU holds, as bytes."""
    staging = device.allocate_staging(buffer.nbytes)
    stream.copy(staging, buffer, offset=0, nbytes=buffer.nbytes)
    assert stream.drain(10)
    return staging.array(np.dtype("uint8"), (buffer.nbytes,), 0).copy()


@pytest.mark.parametrize("kind", ["pinned", "pageable"])
def test_a_graph_that_owns_its_sources_copies_what_was_there_when_it_was_captured(device, stream, kind):
    target = device.allocate(COUNT)
    pinned = device.allocate_staging(COUNT)
    source = pinned.array(np.dtype("uint8"), (COUNT,), 0) if kind == "pinned" else np.zeros(COUNT, np.uint8)
    graphs = []
    for owns in (True, False):
        source[...] = 7
        stream.begin_capture()
        stream.copy_bytes(target.address, source.ctypes.data, COUNT // 2)
        stream.copy_bytes(target.address + COUNT // 2, source.ctypes.data + 3, COUNT // 2)
        if owns:
            stream.own_sources()
        graphs.append(stream.end_capture())
    source[...] = 9
    for graph, expected in zip(graphs, (7, 9), strict=True):
        graph.launch(stream=stream)
        np.testing.assert_array_equal(read(device, stream, target), expected)
        graph.close()
    target.close()


def test_what_was_asked_for_one_capture_does_not_hold_for_the_next(device, stream):
    target, source = device.allocate(COUNT), np.full(COUNT, 1, np.uint8)
    stream.begin_capture()
    stream.own_sources()
    stream.end_capture().close()
    stream.begin_capture()
    stream.copy_bytes(target.address, source.ctypes.data, COUNT)
    graph = stream.end_capture()
    source[...] = 2
    graph.launch(stream=stream)
    np.testing.assert_array_equal(read(device, stream, target), 2)
    graph.close()
    target.close()


def test_what_cannot_be_launched_again_is_named(device, stream):
    from asynctrt.devices.cuda.bindings import driver
    from asynctrt.devices.cuda.captures import outside_of_capture

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def nothing(_):
        pass

    on_gpu, host = device.allocate(COUNT), np.zeros(COUNT, np.uint8)
    stream.begin_capture()
    stream.copy_bytes(on_gpu.address, host.ctypes.data, COUNT)
    stream.copy_bytes(on_gpu.address, on_gpu.address + COUNT // 2, COUNT // 2)
    assert outside_of_capture(stream.handle) == ""
    stream.copy_bytes(host.ctypes.data, on_gpu.address, COUNT)
    assert outside_of_capture(stream.handle) == "a copy to the host"
    address = ctypes.cast(nothing, ctypes.c_void_p).value
    code = driver.cuLaunchHostFunc(stream.handle, driver.CUhostFn(address), 0)[0]
    assert code == driver.CUresult.CUDA_SUCCESS
    assert outside_of_capture(stream.handle) == "a copy to the host, host"
    stream.end_capture().close()


def test_memory_that_is_allocated_has_to_be_freed_in_the_same_graph(device, stream):
    from asynctrt.devices.cuda.bindings import driver
    from asynctrt.devices.cuda.captures import outside_of_capture

    stream.begin_capture()
    code, address = driver.cuMemAllocAsync(1 << 20, stream.handle)
    assert code == driver.CUresult.CUDA_SUCCESS
    assert outside_of_capture(stream.handle) == "mem_alloc"
    driver.cuMemFreeAsync(address, stream.handle)
    assert outside_of_capture(stream.handle) == ""
    graph = stream.end_capture()
    for _ in range(3):
        graph.launch(stream=stream)
    assert stream.drain(10)
    graph.close()


def test_a_capture_that_failed_is_told_and_leaves_the_stream_and_the_device_as_they_were(device, stream):
    from asynctrt.devices.cuda.bindings import driver
    from asynctrt.devices.cuda.captures import CAPTURING, outside_of_capture

    stream.begin_capture()
    assert driver.cuStreamSynchronize(stream.handle)[0] != driver.CUresult.CUDA_SUCCESS
    stream.check("a capture")
    assert device.lost is None
    assert "failed" in outside_of_capture(stream.handle)
    with pytest.raises(DeviceError, match="a capture"):
        stream.end_capture()
    assert device.lost is None
    assert CAPTURING.acquire(blocking=False), "whoever waits for the end of the capture may go on"
    CAPTURING.release()
    buffer = device.allocate(16)
    assert read(device, stream, buffer).sum() == 0
    buffer.close()
