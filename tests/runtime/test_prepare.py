"""Batch sizes that are run before the first caller comes, where the first batch of each takes long."""

import asyncio
import logging
import threading

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.base import ModelBase
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceMemoryError
from asynctrt.runtime.prepare import FIRST_EXTRA_NS_MIN, sizes_up_to
from asynctrt.tensors import TensorSpec
from tests.models import rows as rows_of

pytestmark = pytest.mark.anyio
SLOW_S = 3 * FIRST_EXTRA_NS_MIN / 1e9


class Learner(ModelBase):
    """``output = 2 * input``; in each context the first batch of a size takes ``first_s`` longer."""

    def __init__(self, first_s=SLOW_S, batch_sizes=None, rows_max=None, fails_at=None):
        self.name = "learner"
        self.inputs = (TensorSpec("input", "float32", (4,)),)
        self.outputs = (TensorSpec("output", "float32", (4,)),)
        self.first_s, self.batch_sizes, self.rows_max, self.fails_at = (
            first_s,
            batch_sizes,
            rows_max,
            fails_at,
        )
        self.contexts = []

    def create_context(self, device):
        self.contexts.append(LearnerContext(self))
        return self.contexts[-1]

    def close(self):
        """Do nothing: it holds nothing."""


class LearnerContext:
    """A context, and the rows of each batch that it ran."""

    def __init__(self, model):
        self.model, self.ran = model, []

    def bind(self, inputs, outputs):
        return LearnerBinding(self, inputs[0].array, outputs[0].array)

    def close(self):
        """Do nothing: it holds nothing."""


class LearnerBinding:
    """A context with its memory."""

    def __init__(self, context, source, target):
        self.context, self.source, self.target = context, source, target

    def enqueue(self, rows, *, profile, stream, arena):
        if rows == self.context.model.fails_at:
            raise DeviceMemoryError(f"no room for {rows} rows")
        stream.launch(lambda: self.compute(rows), label=rows)

    def compute(self, rows):
        context = self.context
        if rows not in context.ran:
            threading.Event().wait(context.model.first_s)
        context.ran.append(rows)
        np.multiply(self.source[:rows], 2, out=self.target[:rows])

    def unbound_outputs(self, rows):
        return {}


def test_sizes_are_close_to_each_other():
    assert sizes_up_to(1) == (1,)
    assert sizes_up_to(3) == (1, 2, 3)
    assert sizes_up_to(64) == (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
    for rows_max in range(2, 300):
        sizes = sizes_up_to(rows_max)
        assert sizes[-1] == rows_max
        for rows in range(1, rows_max + 1):
            padded = min(size for size in sizes if size >= rows)
            assert padded - rows <= padded / 5, (rows, padded)


async def run(model, counts, **options):
    """Open an engine, send a batch of each of these numbers of rows, and check the answers."""
    device = HostDevice(in_place="never", threads=1)
    async with asynctrt.open(model, device=device, **{"contexts": 2, **options}) as engine:
        prepared = [list(context.ran) for context in model.contexts]
        for count in counts:
            sent = rows_of(*range(count))
            answer = await engine.infer(sent)
            np.testing.assert_array_equal(answer["output"], 2 * sent)
        statistics = engine.statistics()
    ran = [
        size
        for context, before in zip(model.contexts, prepared, strict=True)
        for size in context.ran[len(before) :]
    ]
    return prepared, sorted(ran), statistics


async def test_a_model_that_learns_sizes_is_run_at_some_of_them():
    prepared, ran, statistics = await run(Learner(), [9, 11, 16, 3], max_rows=16)
    assert all(set(sizes) == set(sizes_up_to(16)) for sizes in prepared)
    assert ran == [3, 10, 12, 16]
    assert statistics.rows_padded == 2
    assert statistics.rows == 39


async def test_a_model_that_does_not_is_run_as_it_is():
    prepared, ran, statistics = await run(Learner(first_s=0), [9, 11, 16, 3], max_rows=16)
    assert sorted(map(len, prepared)) == [0, 7]  # The largest, and three others twice.
    assert ran == [3, 9, 11, 16]
    assert statistics.rows_padded == 0


async def test_sizes_that_are_given_are_those():
    prepared, ran, _ = await run(Learner(first_s=0, batch_sizes=(4, 8, 32)), [1, 5, 9, 16], max_rows=16)
    assert [sorted(sizes) for sizes in prepared] == [[4, 8, 16]] * 2
    assert ran == [4, 8, 16, 16]
    prepared, ran, _ = await run(Learner(batch_sizes=()), [5], max_rows=16)
    assert prepared == [[], []]
    assert ran == [5]


async def test_batches_of_one_size_are_not_prepared():
    prepared, ran, _ = await run(Learner(), [5], max_rows=16, contexts=1, deterministic=True)
    assert prepared == [[]]
    assert ran == [16]


async def test_what_fails_beforehand_is_logged_and_nothing_is_padded(caplog):
    with caplog.at_level(logging.WARNING, logger="asynctrt"):
        prepared, ran, _ = await run(Learner(fails_at=12), [9, 11], max_rows=16)
    assert "could not be run beforehand" in caplog.text
    assert "no room for 12 rows" in caplog.text
    assert ran == [9, 11]


async def test_rows_of_many_callers_are_padded_together():
    model = Learner(batch_sizes=(8, 16))
    async with asynctrt.open(model, device=HostDevice(in_place="never"), max_rows=16, contexts=1) as engine:
        sent = [rows_of(1, number) for number in range(21)]
        answers = await asyncio.gather(*map(engine.infer, sent))
        for one, answer in zip(sent, answers, strict=True):
            np.testing.assert_array_equal(answer["output"], 2 * one)
    assert set(model.contexts[0].ran) <= {8, 16}
