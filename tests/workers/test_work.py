"""Rows that a worker is asked for stand for the future of their request of the engine."""

import asyncio

import pytest

from asynctrt.errors import ExecutionError
from asynctrt.tensors import TensorSpec
from asynctrt.workers.blocks import Where
from asynctrt.workers.layout import LARGE_ROW_NBYTES_MIN, LAUNCHED, Layouts
from asynctrt.workers.work import Work

pytestmark = pytest.mark.anyio

SMALL = (TensorSpec("x", "float32", (4,)),)
LARGE = (TensorSpec("x", "uint8", (LARGE_ROW_NBYTES_MIN,)),)


class Desk:
    """Keeps the answers."""

    def __init__(self):
        self.words = memoryview(bytearray(1024)).cast("Q")
        self.answers = []

    def answer(self, work, result):
        assert work.done()
        self.answers.append((work, result))


def make(specs=SMALL, *, start=0, capacity=None):
    desk = Desk()
    work = Work(desk, 1, Where(64, 2, start, capacity, 0), Layouts(specs, specs).of_sizes(()))
    work.future = asyncio.get_running_loop().create_future()
    return work, desk


async def test_a_result_is_answered_at_once_and_is_its_end():
    work, desk = make()
    future = work.future
    assert not work.done()
    work.set_result("the result")
    assert desk.answers == [(work, "the result")]
    assert work.future is None
    assert not future.done(), "its callback would answer once more"


async def test_an_error_is_left_to_the_future():
    work, desk = make()
    work.set_exception(ExecutionError("it failed"))
    assert work.done()
    with pytest.raises(ExecutionError, match="it failed"):
        await work.future
    assert not desk.answers


async def test_one_that_was_cancelled_is_over():
    work, _ = make()
    work.future.cancel()
    assert work.done()


@pytest.mark.parametrize(
    ("specs", "start", "capacity", "word"),
    [(SMALL, 0, None, LAUNCHED), (LARGE, 0, 8, LAUNCHED), (LARGE, 3, 8, 3)],
)
async def test_a_launch_is_noted_in_the_block(specs, start, capacity, word):
    work, desk = make(specs, start=start, capacity=capacity)
    work.on_launch()
    assert [at for at, value in enumerate(desk.words) if value] == [64 // 8 + word]
