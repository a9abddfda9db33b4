"""Batch sizes that are prepared for, where a batch of another size than the one before takes long."""

import asyncio
import dataclasses
import logging
import threading

import numpy as np
import pytest

import asynctrt
from asynctrt._util.cancellation import current
from asynctrt.backends.base import Capabilities, ModelBase
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceMemoryError
from asynctrt.runtime.prepare import CHANGE_NS_MIN, few_sizes, sizes_up_to
from asynctrt.tensors import TensorSpec
from tests.helpers import WAIT_S, until
from tests.models import rows as rows_of

pytestmark = pytest.mark.anyio
SLOW_S = 10 * CHANGE_NS_MIN / 1e9


class Forgetful(ModelBase):
    """``output = 2 * input``; a batch of another size than the one before takes ``change_s`` longer."""

    def __init__(self, change_s=SLOW_S, batch_sizes=None, fails_at=None, error=None):
        self.name = "forgetful"
        self.inputs = (TensorSpec("input", "float32", (4,)),)
        self.outputs = (TensorSpec("output", "float32", (4,)),)
        self.capabilities = Capabilities(keeps_sizes_apart=True, batch_sizes=batch_sizes)
        self.change_s, self.fails_at = change_s, fails_at
        self.error = error or DeviceMemoryError("no room for 12 rows")
        self.contexts = []

    def create_context(self, device):
        self.contexts.append(ForgetfulContext(self))
        return self.contexts[-1]

    def hold(self):
        """Let each batch go on."""

    def close(self):
        """Do nothing: it holds nothing."""


class ForgetfulContext:
    """A context, the rows of each batch that it ran, and how many changes there were."""

    def __init__(self, model):
        self.model, self.ran, self.last, self.changes = model, [], {}, 0
        self.apart = frozenset()

    def keep_apart(self, sizes):
        self.apart = frozenset(sizes)
        self.last = {size: last for size, last in self.last.items() if size in {0, *sizes}}

    def bind(self, inputs, outputs):
        return ForgetfulBinding(self, inputs[0].array, outputs[0].array)

    def close(self):
        """Do nothing: it holds nothing."""


class ForgetfulBinding:
    """A context with its memory."""

    def __init__(self, context, source, target):
        self.context, self.source, self.target = context, source, target

    def enqueue(self, rows, *, profile, stream, arena):
        if rows == self.context.model.fails_at:
            raise self.context.model.error
        stream.launch(lambda: self.compute(rows), label=rows)

    def compute(self, rows):
        context = self.context
        context.model.hold()
        where = rows if rows in context.apart else 0
        if context.last.get(where) != rows:
            context.last[where] = rows
            context.changes += 1
            threading.Event().wait(context.model.change_s)
        context.ran.append(rows)
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
    assert few_sizes(None, 1) == (1,)
    assert few_sizes(None, 6) == (1, 2, 4, 6)
    assert few_sizes(None, 24) == (1, 2, 4, 8, 16, 24)
    assert few_sizes(None, 64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert few_sizes((1, 3, 80), 64) == (1, 3, 64)


async def run(model, counts, **options):
    """Open an engine, send a batch of each of these numbers of rows, and check the answers."""
    device = HostDevice(in_place="never", threads=1)
    async with asynctrt.open(model, device=device, **{"contexts": 2, **options}) as engine:
        prepared = [list(context.ran) for context in model.contexts]
        changes = sum(context.changes for context in model.contexts)
        for count in counts:
            sent = rows_of(*range(count))
            answer = await engine.infer(sent)
            np.testing.assert_array_equal(answer["output"], 2 * sent)
        statistics = engine.statistics()
    ran = []
    for context, before in zip(model.contexts, prepared, strict=True):
        ran += context.ran[len(before) :]
    changes = sum(context.changes for context in model.contexts) - changes
    return prepared, sorted(ran), changes, statistics


async def test_sizes_are_kept_apart_if_changes_take_long():
    prepared, ran, changes, statistics = await run(Forgetful(), [9, 11, 16, 3, 9], max_rows=16)
    assert all(set(sizes) == set(sizes_up_to(16)) for sizes in prepared)
    assert ran == [3, 12, 12, 12, 16]
    assert changes == 0
    assert statistics.rows_padded == 7
    assert statistics.rows == 48


async def test_batches_are_run_as_they_are_if_changes_do_not():
    model = Forgetful(change_s=0)
    prepared, ran, _, statistics = await run(model, [9, 11, 16, 3], max_rows=16)
    assert not any(context.apart for context in model.contexts)
    assert set(prepared[0]) == {8, 16}
    assert not prepared[1]
    assert ran == [3, 9, 11, 16]
    assert statistics.rows_padded == 0


async def test_sizes_that_are_given_are_those():
    model = Forgetful(change_s=0, batch_sizes=(4, 8, 32))
    prepared, ran, _, _ = await run(model, [1, 5, 9, 16], max_rows=16)
    assert [sorted(set(sizes)) for sizes in prepared] == [[4, 8, 16]] * 2
    assert ran == [4, 8, 16, 16]
    prepared, ran, _, _ = await run(Forgetful(batch_sizes=()), [5], max_rows=16)
    assert prepared == [[], []]
    assert ran == [5]


async def test_batches_of_one_size_are_not_prepared():
    for options, ran_at in (({"batching": "deterministic", "max_rows": 16}, 16), ({"max_rows": 1}, 1)):
        prepared, ran, _, _ = await run(Forgetful(), [1], contexts=1, **options)
        assert prepared == [[]]
        assert ran == [ran_at]


@pytest.mark.parametrize(
    "options",
    [{"batch_sizes": (4, 12)}, {"error": ValueError("no room for 12 rows")}],
    ids=["given", "found"],
)
async def test_what_fails_beforehand_is_logged_and_nothing_is_padded(caplog, options):
    counts = [9, 11]
    with caplog.at_level(logging.WARNING, logger="asynctrt"):
        model = Forgetful(fails_at=12, **options)
        _, ran, _, _ = await run(model, counts, max_rows=16)
    assert "could not be run beforehand" in caplog.text
    assert "no room for 12 rows" in caplog.text
    assert not any(context.apart for context in model.contexts)
    assert ran == counts


class Cramped(HostDevice):
    """A device with memory of its own, of which each size that is kept apart takes 1 MiB."""

    def __init__(self, room_mib):
        super().__init__(in_place="never", threads=1, unified=False)
        self.model, self.room_mib = None, room_mib

    def memory(self):
        taken = sum(len(context.last) for context in self.model.contexts) if self.model else 0
        figures = super().memory()
        return dataclasses.replace(figures, free_nbytes=max(self.room_mib - taken, 0) << 20)


@pytest.mark.parametrize(
    ("room_mib", "sizes"),
    [
        pytest.param(100, (1, 2, 3, 4, 6, 8, 12, 16), id="for all"),
        pytest.param(20, (2, 4, 8, 16), id="for every other"),
        pytest.param(8, (4, 16), id="for two"),
        pytest.param(2, (), id="for none"),
    ],
)
async def test_as_many_sizes_are_kept_apart_as_there_is_room_for(room_mib, sizes, caplog):
    device, model = Cramped(room_mib), Forgetful()
    device.model = model
    async with asynctrt.open(model, device=device, contexts=2, max_rows=16) as engine:
        assert engine.statistics().batch_sizes == sizes
        assert all(context.apart == frozenset(sizes[:-1]) for context in model.contexts)
    assert ("could not be run beforehand" in caplog.text) == (not sizes)


class Held(Forgetful):
    """Lets the first ``after`` batches through, and holds the next until the latch is open."""

    def __init__(self, after, **options):
        super().__init__(change_s=0, **options)
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
@pytest.mark.parametrize("batch_sizes", [None, (2, 4, 8)], ids=["chosen", "given"])
async def test_who_stops_waiting_for_an_engine_has_no_further_batches_run(after, batch_sizes, caplog):
    model, device = Held(after, batch_sizes=batch_sizes), HostDevice(in_place="never", threads=1)

    async def opened():
        await asynctrt.open(model, device=device, contexts=3, max_rows=16)

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
    model = Forgetful(batch_sizes=(8, 16))
    async with asynctrt.open(model, device=HostDevice(in_place="never"), max_rows=16, contexts=1) as engine:
        sent = [rows_of(number) for number in range(21)]
        answers = await asyncio.gather(*map(engine.infer, sent))
        for one, answer in zip(sent, answers, strict=True):
            np.testing.assert_array_equal(answer["output"], 2 * one)
    assert set(model.contexts[0].ran) <= {8, 16}
