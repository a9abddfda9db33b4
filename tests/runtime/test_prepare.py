"""Batch sizes that are run before the first request, for a model that names them."""

import asyncio
import logging
import threading
from itertools import chain

import numpy as np
import pytest

import asynctrt
from asynctrt._util.cancellation import current
from asynctrt.backends.base import Capabilities, ModelBase
from asynctrt.devices.host import HostDevice
from asynctrt.runtime.prepare import few_sizes, sizes_up_to
from asynctrt.tensors import TensorSpec
from tests.helpers import WAIT_S, until
from tests.models import rows as rows_of

pytestmark = pytest.mark.anyio


class Noting(ModelBase):
    """``output = 2 * input``; its contexts note the rows of each batch that they ran."""

    def __init__(self, batch_sizes, fails_at=None):
        self.name = "noting"
        self.inputs = (TensorSpec("input", "float32", (4,)),)
        self.outputs = (TensorSpec("output", "float32", (4,)),)
        self.capabilities = Capabilities(batch_sizes=batch_sizes, rows_max=batch_sizes[-1])
        self.fails_at = fails_at
        self.contexts = []

    def create_context(self, device):
        self.contexts.append(NotingContext(self))
        return self.contexts[-1]

    def hold(self):
        """Let each batch go on."""

    def close(self):
        """Do nothing: it holds nothing."""


class NotingContext:
    def __init__(self, model):
        self.model, self.ran = model, []

    def bind(self, inputs, outputs):
        return NotingBinding(self, inputs[0].array, outputs[0].array)

    def close(self):
        """Do nothing: it holds nothing."""


class NotingBinding:
    def __init__(self, context, source, target):
        self.context, self.source, self.target = context, source, target

    def enqueue(self, rows, *, profile, stream, arena):
        if rows == self.context.model.fails_at:
            raise ValueError(f"no room for {rows} rows")
        stream.launch(lambda: self.compute(rows), label=rows)

    def compute(self, rows):
        self.context.model.hold()
        self.context.ran.append(rows)
        np.multiply(self.source[:rows], 2, out=self.target[:rows])

    def unbound_outputs(self, rows):
        return {}


def test_sizes_are_close_to_each_other():
    assert sizes_up_to(1) == (1,)
    assert sizes_up_to(3) == (1, 2, 3)
    assert sizes_up_to(64) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    for rows_max in range(2, 300):
        sizes = sizes_up_to(rows_max)
        assert sizes[-1] == rows_max
        for rows in range(2, rows_max + 1):
            padded = min(size for size in sizes if size >= rows)
            assert padded < rows * 1.5, (rows, padded)


def test_few_sizes_waste_no_more_than_a_third_of_a_large_batch():
    assert few_sizes((), 1) == (1,)
    assert few_sizes((), 6) == (1, 2, 4, 6)
    assert few_sizes((), 24) == (1, 2, 4, 8, 16, 24)
    assert few_sizes((), 64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert few_sizes((1, 3, 80), 64) == (1, 3, 64)


async def run(model, counts, **options):
    """Send batches of some rows; return what each context ran before and then, and the statistics."""
    device = HostDevice(in_place="never", threads=2)
    async with asynctrt.open(model, device=device, **{"contexts": 2, **options}) as engine:
        prepared = [list(context.ran) for context in model.contexts]
        for count in counts:
            sent = rows_of(*range(count))
            answer = await engine.infer(sent)
            np.testing.assert_array_equal(answer["output"], 2 * sent)
        statistics = engine.statistics()
    ran = [context.ran[len(before) :] for context, before in zip(model.contexts, prepared, strict=True)]
    return prepared, sorted(chain(*ran)), statistics


async def test_each_context_runs_each_size_and_batches_are_padded_to_them():
    prepared, ran, statistics = await run(Noting((4, 8, 16)), [1, 5, 9, 16])
    assert prepared == [[16, 16, 8, 8, 4, 4]] * 2
    assert ran == [4, 8, 16, 16]
    assert statistics.batch_sizes == (4, 8, 16)
    assert (statistics.rows, statistics.rows_padded) == (31, 13)


async def test_a_deterministic_engine_runs_nothing_beforehand():
    prepared, ran, _ = await run(Noting((4, 16)), [1], contexts=1, batching="deterministic")
    assert (prepared, ran) == ([[]], [16])


async def test_what_fails_beforehand_is_logged_and_padded_nevertheless(caplog):
    with caplog.at_level(logging.WARNING, logger="asynctrt"):
        _, ran, _ = await run(Noting((4, 12, 16), fails_at=12), [1, 13])
    assert "could not be run beforehand" in caplog.text
    assert "no room for 12 rows" in caplog.text
    assert ran == [4, 16]


class Held(Noting):
    """Lets the first ``after`` batches through, and holds the next until the latch is open."""

    def __init__(self, after):
        super().__init__((2, 4, 8))
        self.after, self.begun, self.latch = after, threading.Event(), threading.Event()

    def create_context(self, device):
        self.cancellation = current()
        return super().create_context(device)

    @property
    def ran(self):
        return sum(len(context.ran) for context in self.contexts)

    def hold(self):
        if self.ran >= self.after:
            self.begun.set()
            self.latch.wait(WAIT_S)


@pytest.mark.parametrize("after", [0, 5])
async def test_who_stops_waiting_for_an_engine_has_no_further_batches_run(after, caplog):
    model, device = Held(after), HostDevice(in_place="never", threads=3)

    async def opened():
        await asynctrt.open(model, device=device, contexts=3)

    opening = asyncio.create_task(opened())
    await until(model.begun.is_set)
    opening.cancel()
    await until(lambda: model.cancellation.is_cancelled)
    model.latch.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    # The threads of other contexts may have had theirs on the device by then.
    assert after < model.ran <= after + 3
    assert not caplog.records


async def test_rows_of_many_callers_are_padded_together():
    model = Noting((8, 16))
    async with asynctrt.open(model, device=HostDevice(in_place="never"), max_rows=16, contexts=1) as engine:
        sent = [rows_of(number) for number in range(21)]
        answers = await asyncio.gather(*map(engine.infer, sent))
        for one, answer in zip(sent, answers, strict=True):
            np.testing.assert_array_equal(answer["output"], 2 * one)
    assert set(model.contexts[0].ran) <= {8, 16}
