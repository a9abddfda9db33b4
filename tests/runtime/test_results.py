"""Memory for large results: used again once nothing refers to it, and never before."""

import gc
import sys
import threading

import numpy as np
import pytest

from asynctrt.runtime import results
from asynctrt.runtime.results import KEPT_NBYTES_MAX, RECYCLED_NBYTES_MIN, ResultMemory
from asynctrt.runtime.spans import fills

LARGE = np.arange(RECYCLED_NBYTES_MIN // 8, dtype=np.float64).reshape(1, -1)


def address(array):
    return array.__array_interface__["data"][0]


def test_what_was_dropped_is_used_again():
    memory = ResultMemory()
    first = memory.copy(LARGE)
    at = address(first)
    np.testing.assert_array_equal(first, LARGE)
    del first
    again = memory.copy(-LARGE)
    assert address(again) == at
    np.testing.assert_array_equal(again, -LARGE)
    assert memory.nbytes == LARGE.nbytes


@pytest.mark.parametrize(
    "keep",
    [
        lambda array: array,
        lambda array: array[:, 5:6],
        lambda array: array.reshape(-1).view(np.uint8),
        lambda array: array.base,
        memoryview,
        lambda array: np.frombuffer(array),
        lambda array: np.from_dlpack(array),
        lambda array: {"a": [array.T]},
        lambda array: lambda: array,
    ],
    ids=["itself", "a part", "bytes", "its base", "memoryview", "frombuffer", "dlpack", "nested", "closure"],
)
def test_what_anything_refers_to_is_not_used_again(keep):
    memory = ResultMemory()
    kept = keep(memory.copy(LARGE))
    gc.collect()
    others = [memory.copy(-LARGE) for _ in range(10)]
    assert len({address(other) for other in others}) == 10
    while callable(kept) or isinstance(kept, dict):
        kept = kept() if callable(kept) else kept["a"][0]
    assert all(not np.may_share_memory(np.asarray(kept), other) for other in others)


def test_callers_may_change_what_they_got():
    """Whatever they do to their array, the next one has the shape and the type that it should."""
    memory = ResultMemory()
    first = memory.copy(LARGE)
    first.shape = -1
    first.dtype = np.int64
    first.flags.writeable = False
    del first
    again = memory.copy(LARGE)
    assert (again.shape, again.dtype) == (LARGE.shape, LARGE.dtype)
    again[...] = 1


def test_a_debugger_that_comes_and_goes_changes_nothing():
    """One in Python holds the variables of what it traces."""
    memory = ResultMemory()
    sys.settrace(lambda *_: lambda *_: None)
    try:
        kept = [memory.copy(LARGE)]
    finally:
        sys.settrace(None)
    kept += [memory.copy(LARGE) for _ in range(10)]
    assert len({address(array) for array in kept}) == len(kept)


def test_a_result_in_use_does_not_hide_those_behind_it():
    memory = ResultMemory()
    kept = memory.copy(LARGE)
    for _ in range(100):
        memory.copy(LARGE)
    assert memory.nbytes <= 2 * LARGE.nbytes
    assert kept is not None


def test_what_is_kept_is_bounded():
    memory = ResultMemory()
    held = [memory.copy(LARGE) for _ in range(2 * KEPT_NBYTES_MAX // LARGE.nbytes)]
    assert KEPT_NBYTES_MAX - LARGE.nbytes < memory.nbytes <= KEPT_NBYTES_MAX
    at = {address(array) for array in held}
    del held
    assert address(memory.copy(LARGE)) in at, "many in use at once do not drive out what is kept"
    for count in range(1, 200):
        memory.empty_like(np.empty((count, RECYCLED_NBYTES_MIN), np.uint8))
        assert memory.nbytes <= KEPT_NBYTES_MAX


@pytest.mark.parametrize(
    "array",
    [
        np.ones(4),
        np.array(["a", None] * RECYCLED_NBYTES_MIN, object),
        np.empty(KEPT_NBYTES_MAX + 1, np.uint8),
    ],
    ids=["small", "objects", "larger than all that is kept"],
)
def test_what_has_memory_of_its_own(array):
    memory = ResultMemory()
    assert (memory.copy(array) == array).all()
    assert memory.empty_like(array).base is None
    assert memory.nbytes == 0


def test_without_a_gil_nothing_is_used_again(monkeypatch):
    monkeypatch.setattr(results, "GIL", False)
    memory = ResultMemory()
    assert memory.copy(LARGE).base is None
    assert memory.nbytes == 0


def test_copies_have_the_order_of_c():
    copied = ResultMemory().copy(np.asfortranarray(np.ones((300, 300))))
    assert copied.flags.c_contiguous


def test_threads_never_get_the_same_memory():
    memory, wrong = ResultMemory(), []

    def use(number):
        for _ in range(2000):
            mine = memory.empty_like(LARGE)
            mine[...] = number
            if not (mine == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("width", [2, RECYCLED_NBYTES_MIN])
def test_what_another_thread_copies_is_reserved_before(width):
    memory, slab = ResultMemory(), np.arange(8.0 * width).reshape(8, width)
    views = [{"y": slab[5:7]}, {"y": slab[:1], "z": slab[7:]}]
    reserved = memory.reserved(views)
    for part in fills(reserved, views, 1, 1):
        part()
    for arrays, copied, own in zip(reserved, memory.copied(views), views, strict=True):
        assert list(arrays) == list(copied) == list(own)
        for name, view in own.items():
            np.testing.assert_array_equal(arrays[name], view)
            np.testing.assert_array_equal(copied[name], view)
            assert not np.shares_memory(arrays[name], slab)
