"""Slabs: groups of large rows lie side by side in blocks of one size."""

import numpy as np
import pytest

from asynctrt.tensors import TensorSpec
from asynctrt.workers.layout import LARGE_ROW_NBYTES_MIN, SYMBOLS, Layouts
from asynctrt.workers.memory import KEPT_NBYTES, Heap, SharedMemory
from asynctrt.workers.slabs import Slabs

INPUTS = (TensorSpec("x", "uint8", ("n",)), TensorSpec("z", "float32", (3,)))
OUTPUTS = (TensorSpec("y", "uint8", (5,)),)
SIZE = LARGE_ROW_NBYTES_MIN


@pytest.fixture
def memory():
    made = SharedMemory.create(64 << 20)
    yield made
    made.close()


def layouts(*sizes):
    known = Layouts(INPUTS, OUTPUTS)
    return [known.of_sizes((size,)) for size in sizes]


def test_only_large_rows_share_blocks():
    small, large = layouts(SIZE - 13, SIZE)
    assert (small.is_large, large.is_large) == (False, True)


def test_groups_lie_side_by_side_until_one_is_full(memory):
    heap = Heap(memory)
    (layout,) = layouts(SIZE)
    slabs = Slabs(heap, memory, rows_max=8, nbytes_max=1 << 30)
    taken = [slabs.take(layout, rows) for rows in (3, 4, 1, 2)]
    assert [start for _, start in taken] == [0, 3, 7, 0]
    assert len({id(slab) for slab, _ in taken[:3]}) == 1
    assert taken[3][0] is not taken[0][0]
    assert heap.blocks == 2
    spans = []
    for rows, (slab, start) in zip((3, 4, 1), taken[:3], strict=True):
        views = layout.arrays(memory, slab.block, rows, start, slab.capacity).inputs
        views |= layout.arrays(memory, slab.block, rows, start, slab.capacity).outputs
        for number, view in enumerate(views.values(), start=1):
            view[...] = 10 * start + number
        spans.append((start, views))
        memory.words[slab.block // 8 + layout.launched(start)] = 1
    for start, views in spans:
        for number, view in enumerate(views.values(), start=1):
            assert (view == 10 * start + number).all()
    assert memory.words[taken[0][0].block // 8 + SYMBOLS] == SIZE
    whole = layout.arrays(memory, taken[0][0].block, 8, 0, 8).inputs
    assert whole["x"][:, 0].tolist() == [1, 1, 1, 31, 31, 31, 31, 71]


def test_a_slab_is_free_with_its_last_group_and_used_again(memory):
    heap = Heap(memory)
    (layout,) = layouts(SIZE)
    slabs = Slabs(heap, memory, rows_max=8, nbytes_max=1 << 30)
    (first, _), (second, start) = slabs.take(layout, 2), slabs.take(layout, 2)
    memory.words[second.block // 8 + layout.launched(start)] = 1
    first.give_back()
    assert heap.blocks == 1
    second.give_back()
    assert heap.blocks == 0
    for expected in (0, 2):
        slab, start = slabs.take(layout, 2)
        assert (slab.block, start) == (first.block, expected)
        assert memory.words[slab.block // 8 + layout.launched(start)] == 0


def test_rows_of_each_shape_have_slabs_of_their_own(memory):
    one, other = layouts(SIZE, 2 * SIZE)
    slabs = Slabs(Heap(memory), memory, rows_max=8, nbytes_max=8 * one.row_nbytes)
    assert slabs.take(one, 1)[0] is not slabs.take(other, 1)[0]
    assert (slabs.capacity(one), slabs.capacity(other)) == (8, 4)


def test_a_caller_by_itself_has_the_same_pages_again_however_much_a_batch_holds():
    memory = SharedMemory.create(8 * KEPT_NBYTES)
    heap = Heap(memory)
    (layout,) = layouts(SIZE)
    slabs = Slabs(heap, memory, rows_max=1 << 20, nbytes_max=2 * KEPT_NBYTES)
    for turn in range(3):
        slab, start = slabs.take(layout, 1)
        row = layout.arrays(memory, slab.block, 1, start, slab.capacity).inputs["x"]
        assert row[0, 0] == turn
        row += 1
        slab.give_back()
    memory.close()


def test_without_room_for_a_slab_a_group_has_what_it_needs():
    memory = SharedMemory.create(4 * SIZE)
    heap = Heap(memory)
    (layout,) = layouts(SIZE)
    slabs = Slabs(heap, memory, rows_max=8, nbytes_max=1 << 30)
    slab, start = slabs.take(layout, 2)
    assert (slab.capacity, start) == (2, 0)
    with pytest.raises(MemoryError):
        slabs.take(layout, 4)
    assert heap.blocks == 1
    slab.give_back()
    assert heap.blocks == 0
    memory.close()


def test_more_rows_than_a_slab_has_are_one_by_themselves(memory):
    (layout,) = layouts(SIZE)
    slabs = Slabs(Heap(memory), memory, rows_max=8, nbytes_max=1 << 30)
    slab, start = slabs.take(layout, 20)
    assert (slab.capacity, start) == (20, 0)


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


def test_rows_of_many_shapes_at_once_leave_room_for_each_other():
    known = layouts(*(SIZE + 64 * number for number in range(100)))
    memory = SharedMemory.create(100 * 2 * SIZE)
    heap = Heap(memory)
    slabs = Slabs(heap, memory, rows_max=16, nbytes_max=1 << 30)
    taken = [slabs.take(layout, 1)[0] for layout in known]
    assert [slab.capacity for slab in taken[:2]] == [16, 16]
    assert taken[-1].capacity == 1
    for slab in taken:
        slab.give_back()
    assert heap.blocks == 0
    assert slabs.take(known[-1], 1)[0].capacity == 16
    memory.close()
