"""Rows that a worker is asked for stand for the future of their request of the engine."""

from types import SimpleNamespace

import pytest

from asynctrt.tensors import TensorSpec
from asynctrt.workers.blocks import Where
from asynctrt.workers.child import Work
from asynctrt.workers.layout import LAUNCHED, Layouts

SPECS = (TensorSpec("x", "float32", (4,)),)


class Desk:
    """Keeps the answers."""

    def __init__(self):
        self.words = memoryview(bytearray(1024)).cast("Q")
        self.answers = []

    def answer(self, work, result):
        assert work.done()
        self.answers.append((work, result))

    fail_soon = answer


def make():
    desk = Desk()
    return Work(desk, 1, Where(64, 2, 0), Layouts(SPECS, SPECS).of_sizes(())), desk


@pytest.mark.parametrize("end", [Work.set_result, Work.set_exception])
def test_an_answer_is_its_end(end):
    work, desk = make()
    assert not work.done()
    end(work, "the answer")
    assert desk.answers == [(work, "the answer")]


def test_to_cancel_it_cancels_its_request_and_answers_nothing():
    work, desk = make()
    cancelled = []
    desk.intake = SimpleNamespace(cancel=cancelled.append)
    work.requests = ("the request",)
    work.cancel()
    assert work.done()
    assert (cancelled, desk.answers) == (["the request"], [])


def test_a_launch_is_noted_in_the_block():
    work, desk = make()
    work.on_launch()
    assert [at for at, value in enumerate(desk.words) if value] == [64 // 8 + LAUNCHED]
