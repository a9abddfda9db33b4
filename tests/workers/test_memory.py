"""Shared memory and the allocator of the front."""

import errno
import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynctrt.errors import DeviceUnavailableError
from asynctrt.workers.memory import ALIGNMENT, KEPT_NBYTES, Heap, SharedMemory, rounded


@pytest.fixture
def memory():
    made = SharedMemory.create(64 << 20)
    yield made
    made.close()


@given(st.integers(0, 1 << 40))
def test_sizes_are_rounded_up_to_powers_of_two(nbytes):
    size = rounded(nbytes)
    assert nbytes <= size <= max(2 * nbytes, 256)
    assert rounded(size) == size


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 << 20)), max_size=60))
def test_blocks_never_overlap(steps):
    memory = SharedMemory.create(32 << 20)
    heap = Heap(memory)
    blocks = {}
    for frees, nbytes in steps:
        if frees and blocks:
            offset = sorted(blocks)[nbytes % len(blocks)]
            heap.free(offset, blocks.pop(offset))
            continue
        try:
            offset = heap.allocate(nbytes)
        except MemoryError:
            continue
        assert offset % ALIGNMENT == 0
        assert offset + nbytes <= memory.nbytes
        assert all(offset + nbytes <= other or other + size <= offset for other, size in blocks.items())
        blocks[offset] = nbytes
    assert heap.blocks == len(blocks)
    memory.close()


def test_a_full_heap_is_whole_again_when_all_is_free(memory):
    heap = Heap(memory)
    offsets = []
    with pytest.raises(MemoryError, match="shared memory"):
        while True:
            offsets.append(heap.allocate(1 << 20))
    assert len(offsets) == 64
    for offset in offsets:
        heap.free(offset, 1 << 20)
    assert heap.allocate(40 << 20) == 0  # Another size: nothing was split or joined, all begins anew.


def test_a_sandbox_may_refuse_shared_memory(monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(DeviceUnavailableError, match="refused: Operation not permitted.*memfd_create"):
        SharedMemory.create(1 << 20)


def test_large_free_blocks_give_their_pages_back(monkeypatch):
    # A limit that is reached with few pages.
    kept_nbytes = 16 << 20
    monkeypatch.setattr("asynctrt.workers.memory.KEPT_NBYTES", kept_nbytes)
    memory = SharedMemory.create(2 * kept_nbytes)
    heap = Heap(memory)
    nbytes = kept_nbytes // 4
    offsets = [heap.allocate(nbytes) for _ in range(6)]
    for offset in offsets:
        np.ndarray(nbytes, np.uint8, memory.buffer, offset)[::4096] = 7
    for offset in offsets:
        heap.free(offset, nbytes)
    kept = [offset for offset in offsets if memory.buffer[offset] == 7]
    assert kept == offsets[2:]  # What was freed last is used next.
    assert heap.allocate(nbytes) == offsets[5]
    memory.close()


def test_a_block_that_is_used_again_and_again_keeps_its_pages_whatever_else_is_free():
    memory = SharedMemory.create(8 * KEPT_NBYTES)
    heap = Heap(memory)
    sizes = [KEPT_NBYTES // 8 * number for number in (3, 4, 5, 6)]
    for block in [(heap.allocate(nbytes), nbytes) for nbytes in sizes]:
        heap.free(*block)
    for _ in range(3):
        offset = heap.allocate(sizes[0])
        memory.buffer[offset] += 1
        heap.free(offset, sizes[0])
    assert memory.buffer[offset] == 3
    memory.close()


def test_a_block_with_other_pages_has_another_generation(monkeypatch):
    # A limit that is reached with few pages.
    kept_nbytes = 16 << 20
    monkeypatch.setattr("asynctrt.workers.memory.KEPT_NBYTES", kept_nbytes)
    memory = SharedMemory.create(2 * kept_nbytes)
    heap = Heap(memory)
    nbytes = kept_nbytes // 2
    offsets = [heap.allocate(nbytes) for _ in range(3)]
    before = [heap.generation(offset) for offset in offsets]
    for offset in offsets:
        np.ndarray(nbytes, np.uint8, memory.buffer, offset)[::4096] = 7
    for offset in offsets:
        heap.free(offset, nbytes)
    gone = [memory.buffer[offset] == 0 for offset in offsets]
    assert gone == [True, False, False]
    after = [heap.generation(offset) for offset in offsets]
    assert [one != other for one, other in zip(before, after, strict=True)] == gone
    # All begins anew, with blocks that have pages of several others.
    assert heap.allocate(2 * kept_nbytes - kept_nbytes // 8) == 0
    assert heap.generation(0) not in {*before, *after}
    memory.close()


def test_nobody_can_make_it_smaller(memory):
    import os

    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 4096)


def test_arrays_outlive_the_descriptor():
    memory = SharedMemory.create(4096)
    array = np.ndarray(10, np.int64, memory.buffer, 0)
    memory.close()
    memory.close()
    del memory
    array[:] = 5
    assert array.sum() == 50
    assert mmap.PAGESIZE >= 4096
