"""Rows in shared memory: what is run from where it lies, what is copied from there, what is gathered."""

import ctypes
import mmap

import numpy as np
import pytest

from asynctrt.devices.host import HostDevice
from asynctrt.runtime.shared import SharedBlock, SharedBuffer, SharedRows, SharedSource, are_shared
from asynctrt.runtime.staging import Slab, StagingBuffers, lay_out
from asynctrt.tensors import TensorSpec
from tests.runtime.support import make_batch, make_request

SPECS = [TensorSpec("a", "float32", (64,)), TensorSpec("b", "int64", (32,))]
CAPACITY = 8
ENDED = []


class Stream:
    """Does copies at once, and counts them."""

    def __init__(self):
        self.copies = []

    def copy_bytes(self, target, source, nbytes):
        self.copies.append(nbytes)
        ctypes.memmove(target, source, nbytes)

    def copy(self, target, source, *, offset, nbytes):
        self.copy_bytes(target.address + offset, source.address + offset, nbytes)


@pytest.fixture
def memory():
    return SharedBuffer(mmap.mmap(-1, 1 << 16))


def block_at(memory, begin, *, is_pinned=False):
    """A block of 8 rows, each of which has its number."""
    block = SharedBlock(memory, begin, 2 * CAPACITY * 256, None)
    for spec, offset in zip(SPECS, offsets_in(block, 0), strict=True):
        view = memory.array(spec.dtype, (CAPACITY, *spec.dims), offset)
        view[...] = begin + np.arange(CAPACITY)[:, None]
    if is_pinned:
        block.address = memory.address
    return block


def offsets_in(block, start):
    return block.start + 256 * start, block.start + 256 * (CAPACITY + start)


def request_at(block, start, count):
    offsets = offsets_in(block, start)
    arrays = [
        block.buffer.array(spec.dtype, (count, *spec.dims), offset)
        for spec, offset in zip(SPECS, offsets, strict=True)
    ]
    request = make_request(*arrays)
    request.payload = SharedRows.at(block, offsets, arrays, ENDED.append)
    return request


def slab_on(device):
    layout = lay_out(SPECS, [TensorSpec("y", "float32")], {}, CAPACITY)
    return Slab(layout, StagingBuffers(device, layout.nbytes))


def numbers(block, start, count):
    return list(range(block.start + start, block.start + start + count))


@pytest.mark.parametrize("start", [0, 3])
def test_a_request_that_is_a_batch_runs_where_it_lies(memory, start):
    slab, block = slab_on(HostDevice()), block_at(memory, 1024)
    source = SharedSource(make_batch(request_at(block, start, 2)), slab, is_captured=False)
    source.stage()
    assert source.staged_nbytes == 0
    assert source.inputs is not slab
    for view in source.inputs.inputs:
        assert view[:2, 0].tolist() == numbers(block, start, 2)
    assert source.inputs.inputs[0].ctypes.data == memory.address + block.start + 256 * start
    again = SharedSource(make_batch(request_at(block, start, 2)), slab, is_captured=False)
    assert again.inputs is source.inputs


@pytest.mark.parametrize("why", ["several", "padded", "captured"])
def test_other_batches_are_gathered(memory, why):
    slab, block = slab_on(HostDevice()), block_at(memory, 1024)
    requests = [request_at(block, 0, 2), *([request_at(block, 5, 2)] if why == "several" else [])]
    rows = 2 * len(requests)
    batch = make_batch(*requests, rows_run=rows + (why == "padded"))
    source = SharedSource(batch, slab, is_captured=why == "captured")
    source.stage()
    assert source.inputs is slab
    assert source.staged_nbytes == batch.rows_run * (256 + 256)
    firsts = numbers(block, 0, 2) + (numbers(block, 5, 2) if why == "several" else [])
    for view in slab.inputs:
        assert view[:rows, 0].tolist() == firsts
        assert view[rows : batch.rows_run, 0].tolist() == firsts[:1] * (batch.rows_run - rows)


def test_a_device_copies_from_where_rows_lie_what_follows_as_one(memory):
    slab = slab_on(HostDevice(unified=False))
    first, second = block_at(memory, 1024, is_pinned=True), block_at(memory, 32768, is_pinned=True)
    loose = block_at(memory, 8192)
    places = [(first, 0, 2), (first, 2, 1), (second, 4, 1), (loose, 3, 1), (loose, 6, 1)]
    requests = [request_at(*place) for place in places]
    batch = make_batch(*requests, rows_run=CAPACITY)
    source = SharedSource(batch, slab, is_captured=False)
    assert source.staged_nbytes == (2 + CAPACITY - 6) * (256 + 256)
    source.stage()
    stream = Stream()
    source.put_in(stream)
    # Of each input: three rows, one, two from the slab, and the padding.
    assert stream.copies == [768, 256, 512, 512] * 2
    wanted = [number for place in places for number in numbers(*place)]
    for span in slab.layout.inputs:
        there = slab.buffers.device_buffer.array(span.dtype, (CAPACITY, *span.dims), span.offset)
        assert there[:, 0].tolist() == wanted + wanted[:1] * 2


def test_nothing_is_copied_from_memory_that_the_device_does_not_know(memory):
    slab, block = slab_on(HostDevice(unified=False)), block_at(memory, 1024)
    source = SharedSource(make_batch(request_at(block, 1, 3)), slab, is_captured=False)
    block.address = memory.address  # Known by now, and what was decided stays so.
    source.stage()
    assert slab.inputs[0][:3, 0].tolist() == numbers(block, 1, 3)
    stream = Stream()
    source.put_in(stream)
    assert stream.copies == [768, 768]


def test_those_whose_rows_are_used_are_told(memory):
    slab, block = slab_on(HostDevice()), block_at(memory, 1024)
    requests = [request_at(block, 0, 2), request_at(block, 2, 2)]
    source = SharedSource(make_batch(*requests), slab, is_captured=False)
    source.launched()
    assert (block.batches, requests[0].payload.batches) == (2, 1)
    ENDED.clear()
    source.ended()
    assert (block.batches, requests[0].payload.batches) == (0, 0)
    assert [block, block] == ENDED


def test_parts_of_a_request_are_arrays_like_any_others(memory):
    block = block_at(memory, 1024)
    shared, part = request_at(block, 0, 2), make_request(np.zeros((1, 64), np.float32), np.zeros((1, 32)))
    assert are_shared([shared])
    assert not are_shared([shared, part])
