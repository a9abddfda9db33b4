"""How requests are grouped, and groups taken apart."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynctrt.runtime.spans import spans_of
from asynctrt.scheduling.key import FIXED_SHAPE
from asynctrt.scheduling.request import Request, State
from asynctrt.tensors import TensorSpec
from asynctrt.workers.groups import PIECES, RequestGroup, formed
from asynctrt.workers.layout import LAUNCHED, Layouts
from asynctrt.workers.memory import Heap, SharedMemory

SPEC = (TensorSpec("x", "float32", (2,)),)
LAYOUT = Layouts(SPEC, SPEC).of_sizes(())


def request(rows=1, value=0.0):
    return Request(rows, FIXED_SHAPE, 0, 0, payload=(np.full((rows, 2), value, np.float32),))


@given(st.lists(st.integers(1, 70), min_size=1, max_size=60), st.integers(1, 64), st.integers(1, 9))
def test_groups_keep_the_order_and_are_no_larger_than_they_may_be(rows, rows_max, parts):
    requests = [request(count) for count in rows]
    groups = formed(requests, rows_max, alone=False, parts=parts)
    assert [one for group in groups for one in group] == requests
    left = sum(rows)
    for group in groups:
        size = sum(one.rows for one in group)
        limit = min(rows_max if left >= rows_max else max(rows_max // PIECES, 1), -(-sum(rows) // parts))
        assert len(group) == 1 or size <= limit
        left -= size


def test_enough_for_a_batch_goes_as_one_and_the_rest_in_pieces():
    sizes = [len(group) for group in formed([request() for _ in range(150)], 64, alone=False)]
    assert sizes == [64, 64, 16, 6]
    assert len(formed([request() for _ in range(5)], 64, alone=True)) == 5


@pytest.mark.parametrize(
    ("requests", "parts", "sizes"),
    [(64, 1, [64]), (64, 2, [32, 16, 16]), (10, 4, [3, 3, 3, 1]), (2, 8, [1, 1]), (200, 2, [64, 64, 64, 8])],
)
def test_there_is_a_group_for_each_batch_that_can_compute_meanwhile(requests, parts, sizes):
    groups = formed([request() for _ in range(requests)], 64, alone=False, parts=parts)
    assert [len(group) for group in groups] == sizes


@pytest.fixture
def heap():
    memory = SharedMemory.create(1 << 20)
    yield Heap(memory)
    memory.close()


def test_each_who_still_waits_has_its_rows_in_a_group_of_its_own(heap):
    requests = [request(count, value) for value, count in enumerate((1, 3, 2, 1, 4), start=1)]
    group = RequestGroup(requests, LAYOUT)
    group.allocate(heap)
    group.write(heap.memory, [request.payload for request in group.requests])
    group.deaths, group.hangs = 2, True
    heap.memory.words[group.block // 8 + LAUNCHED] = 1
    requests[1].state = State.CANCELLED
    singles = group.singles(heap)
    assert (group.requests, group.left) == ([], 0)
    group.free(heap)
    assert [single.requests for single in singles] == [[one] for one in (requests[0], *requests[2:])]
    for single in singles:
        (one,) = single.requests
        rows = single.layout.arrays(heap.memory, single.block, single.rows).inputs["x"]
        assert rows.shape == (one.rows, 2)
        assert (rows == 1 + requests.index(one)).all()
        assert one.payload is single
        assert (single.deaths, single.hangs, single.left) == (2, True, 1)
        assert heap.memory.words[single.block // 8 + LAUNCHED] == 0
    assert heap.blocks == 4
    for single in singles:
        single.free(heap)
        single.free(heap)
    assert heap.blocks == 0


def test_a_block_that_is_used_again_was_not_launched(heap):
    group = RequestGroup([request()], LAYOUT)
    for _ in range(2):
        group.allocate(heap)
        assert heap.memory.words[group.block // 8 + LAUNCHED] == 0
        heap.memory.words[group.block // 8 + LAUNCHED] = 1
        group.free(heap)
    assert heap.blocks == 0


def test_without_room_for_all_of_them_nothing_changes():
    memory = SharedMemory.create(8192)
    heap = Heap(memory)
    requests = [request(200, value) for value in (1, 2)]
    group = RequestGroup(requests, LAYOUT)
    group.allocate(heap)
    group.write(memory, [request.payload for request in group.requests])
    with pytest.raises(MemoryError):
        group.singles(heap)
    assert heap.blocks == 1
    assert group.block >= 0
    memory.close()


def test_rows_that_cannot_be_copied_are_told_apart(heap):
    """What runs in their place are the rows of another: not what lay in the block before."""
    requests = [request(count, count) for count in (2, 1, 3)]
    group = RequestGroup(requests, LAYOUT)
    group.allocate(heap)
    (view,) = LAYOUT.arrays(heap.memory, group.block, group.rows).inputs.values()
    for wrong, left in (((1,), 3), ((0, 2), 1), ((0, 1, 2), None)):
        view[...] = 77
        payloads = [request.payload for request in requests]
        for number in wrong:
            payloads[number] = (np.ones((1, 3), np.float32),)
        refused = group.write(heap.memory, payloads)
        assert [one for one, _ in refused] == [requests[number] for number in wrong]
        assert all("Leave arrays alone" in str(error) for _, error in refused)
        assert left is None or (view == 77).sum() == 0
        if left is not None:
            assert (view[spans_of(requests)[wrong[0]].start] == left).all()
    assert group.write(heap.memory, [request.payload for request in requests]) == []
    assert view[:, 0].tolist() == [2, 2, 1, 3, 3, 3]
    # As many rows as before, of which one would be taken for another caller's.
    payloads = [(np.full((count, *view.shape[1:]), count, np.float32),) for count in (3, 1, 2)]
    refused = group.write(heap.memory, payloads)
    assert [one for one, _ in refused] == [requests[0], requests[2]]
    assert (view[2] == 1).all()


def test_a_group_says_which_pages_its_block_has(monkeypatch):
    """A worker that knows the block would copy from the pages that it had before."""
    monkeypatch.setattr("asynctrt.workers.memory.KEPT_NBYTES", 0)
    spec = (TensorSpec("x", "uint8", (1 << 20,)),)
    memory = SharedMemory.create(8 << 20)
    heap = Heap(memory)
    group = RequestGroup([request()], Layouts(spec, spec).of_sizes(()))
    seen = []
    for _ in range(2):
        group.allocate(heap)
        seen.append((group.block, group.generation))
        group.free(heap)
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] != seen[1][1]
    memory.close()
