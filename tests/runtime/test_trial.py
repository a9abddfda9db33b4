"""Graphs of a library that was not made to be captured: each is compared with what the model computes."""

import asyncio
import dataclasses
import logging
import threading

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.base import Capabilities, ModelBase
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceMemoryError
from asynctrt.runtime.capturing import are_dense
from asynctrt.runtime.prepare import sizes_up_to
from asynctrt.runtime.trial import SAMPLES, _sample
from asynctrt.tensors import TensorSpec
from tests.models import rows

pytestmark = pytest.mark.anyio
ROWS_MAX = 8


class Traced(ModelBase):
    """``output = 2 * input``, and ``sum``, of whole numbers. What a graph of it does is another thing.

    :param replayed: what a graph does, of the arrays of a batch: its inputs and its outputs.
    """

    capabilities = Capabilities(is_capturable=True, is_traced=True, enqueue_may_block=True)

    def __init__(self, replayed=None, dtype="float32"):
        self.name = "traced"
        self.inputs = (TensorSpec("input", dtype, (4,)), TensorSpec("mask", "bool", (2,)))
        self.outputs = (TensorSpec("output", dtype, (4,)), TensorSpec("sum", "int64", ()))
        self.replayed = replayed or compute
        self.contexts = []

    def create_context(self, device):
        self.contexts.append(TracedContext(self))
        return self.contexts[-1]

    def create_context_for(self, device, stream, shape, rows):
        context = self.create_context(device)
        context.done.append(("for", dict(shape), rows))
        return context

    def close(self):
        """Do nothing: it holds nothing."""


def compute(inputs, outputs):
    np.multiply(inputs[0], 2, out=outputs[0])
    np.sum(inputs[0] > 0.5, axis=1, out=outputs[1])


class TracedContext:
    """A context, and all that it was asked to do."""

    def __init__(self, model):
        self.model, self.done, self.is_closed = model, [], False

    def bind(self, inputs, outputs):
        return TracedBinding(self, [memory.array for memory in inputs], [memory.array for memory in outputs])

    def close(self):
        self.is_closed = True


class TracedBinding:
    def __init__(self, context, inputs, outputs):
        self.context, self.inputs, self.outputs = context, inputs, outputs

    def enqueue(self, count, *, profile, stream, arena):
        done = self.context.done
        kind = "capture" if stream.is_capturing else "run"
        done.append((kind, count, threading.current_thread().name))
        work = self.context.model.replayed if stream.is_capturing else compute
        ins, outs = [array[:count] for array in self.inputs], [array[:count] for array in self.outputs]
        stream.launch(lambda: work(ins, outs), label=count)

    def settle(self):
        self.context.done.append(("settle",))

    def unbound_outputs(self, count):
        return {}


def stale(inputs, outputs):
    """Write nothing: as a graph whose addresses are those of other memory."""


def baked(inputs, outputs):
    """Have the answer to zeros, whatever the rows are, as if it had been computed on the CPU."""
    outputs[0][...] = 0
    outputs[1][...] = 0


def half(inputs, outputs):
    """Forget the second half of the batch."""
    compute([array[: (len(array) + 1) // 2] for array in inputs], outputs_of_first_half(outputs))


def outputs_of_first_half(outputs):
    return [array[: (len(array) + 1) // 2] for array in outputs]


def one_output(inputs, outputs):
    """Forget the output that is whole numbers."""
    np.multiply(inputs[0], 2, out=outputs[0])


def off(inputs, outputs):
    """Be off by a tenth."""
    compute(inputs, outputs)
    outputs[0][...] *= np.float32(1.1)


def not_a_number(inputs, outputs):
    compute(inputs, outputs)
    outputs[0][...] = np.nan


def rounded(inputs, outputs):
    """Be right but for the rounding of sums in another order."""
    compute(inputs, outputs)
    outputs[0][...] *= np.float32(1 + 1e-6)


async def check(engine):
    sent = [rows(*range(n, n + 1 + n % ROWS_MAX)) for n in range(1, 24)]
    masks = [np.ones((len(each), 2), bool) for each in sent]
    async with asyncio.timeout(30):
        asked = [engine.infer({"input": a, "mask": b}) for a, b in zip(sent, masks, strict=True)]
        answers = await asyncio.gather(*asked)
    for each, answer in zip(sent, answers, strict=True):
        np.testing.assert_allclose(answer["output"], 2 * each, rtol=1e-5)
        np.testing.assert_array_equal(answer["sum"], (each > 0.5).sum(axis=1))


@pytest.mark.parametrize("unified", [False, True], ids=["separate", "unified"])
@pytest.mark.parametrize("wrong", [stale, baked, half, one_output, off, not_a_number])
async def test_a_graph_that_computes_something_else_is_not_used(wrong, unified, caplog):
    model, device = Traced(wrong), HostDevice(in_place="never", unified=unified)
    async with asynctrt.open(model, device=device, contexts=2, max_rows=ROWS_MAX, graphs="8") as engine:
        assert engine.statistics().graphs == ()
        await check(engine)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "'traced' cannot be captured as a CUDA graph, so its batches are put on the device" in said
    assert "a graph of 8 rows does not compute what the model does: output" in said
    assert all(context.is_closed for context in model.contexts)
    assert device.memory().held_nbytes == 0


@pytest.mark.parametrize("unified", [False, True], ids=["separate", "unified"])
@pytest.mark.parametrize("right", [compute, rounded])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
async def test_graphs_that_are_right_run_every_batch_and_a_thread_puts_none_there(
    right, unified, dtype, caplog
):
    model, device = Traced(right, dtype), HostDevice(in_place="never", unified=unified)
    device_prefers_graphs(device)
    caplog.set_level(logging.INFO, "asynctrt")
    async with asynctrt.open(model, device=device, contexts=2, max_rows=ROWS_MAX, graphs="auto") as engine:
        said = [record.getMessage() for record in caplog.records]
        assert said[0].startswith("'traced': 6 batch sizes are captured as CUDA graphs in 2 contexts")
        assert said[1].startswith("'traced': graphs of 1, 2, 3, 4, 6, 8 rows took ")
        assert len(said) == 2
        sizes = sizes_up_to(ROWS_MAX)
        assert engine.statistics().graphs == engine.statistics().batch_sizes == sizes
        own, captured = model.contexts[:2], model.contexts[2:]
        assert len(captured) == 2 * len(sizes), "each size has a context of its own on each context"
        for context in captured:
            made_for, *kinds = [kind for kind, *_ in context.done]
            assert kinds == ["run", "run", "settle", "capture"], "nothing runs there after it was captured"
            assert made_for == "for"
            assert context.done[0][1:] == ({}, context.done[1][1])
        if dtype == "float32":
            await check(engine)
        assert not any(context.done for context in own), "what is replayed is not enqueued"
        assert [len(context.done) for context in captured] == [5] * len(captured)


def device_prefers_graphs(device):
    type_of = type(device)
    device.__class__ = type("Preferring", (type_of,), {"prefers_graphs": True})


async def test_sizes_far_apart_are_replayed_where_they_fit_and_nothing_is_always_padded():
    model, device = Traced(), HostDevice(in_place="never")
    async with asynctrt.open(model, device=device, contexts=1, max_rows=ROWS_MAX, graphs="1,8") as engine:
        assert engine.statistics().graphs == (1, 8)
        assert engine.statistics().batch_sizes == ()
        await check(engine)


@pytest.mark.parametrize(
    ("sizes", "dense"),
    [
        ((1, 2, 4, 8), True),
        ((2, 4, 8), True),
        ((2, 3, 6, 8), True),
        ((4, 8), False),
        ((1, 4, 8), False),
        ((1, 2, 4), False),
        ((8,), False),
        ((), False),
    ],
)
def test_sizes_are_dense_if_padding_at_most_doubles_rows(sizes, dense):
    assert are_dense(sizes, 8) is dense


class Cramped(HostDevice):
    """A device on which each graph takes as many MiB as it has rows."""

    prefers_graphs = True

    def __init__(self, room_mib):
        super().__init__(in_place="never", unified=False)
        self.model, self.room_mib = None, room_mib

    def memory(self):
        taken = 0
        for context in self.model.contexts if self.model else ():
            if not context.is_closed:
                taken += max((entry[1] for entry in context.done if entry[0] == "run"), default=0)
        figures = super().memory()
        return dataclasses.replace(figures, free_nbytes=max(self.room_mib - taken, 0) << 20)


@pytest.mark.parametrize(
    ("room_mib", "sizes"),
    [
        pytest.param(1000, (1, 2, 3, 4, 6, 8), id="for all"),
        pytest.param(4 * 14, (2, 4, 8), id="for every other"),
        pytest.param(4 * 8 - 1, (), id="for none"),
    ],
)
async def test_as_many_sizes_are_captured_as_there_is_room_for(room_mib, sizes, caplog):
    device, model = Cramped(room_mib), Traced()
    device.model = model
    async with asynctrt.open(model, device=device, contexts=2, max_rows=ROWS_MAX) as engine:
        assert engine.statistics().graphs == sizes
        assert engine.statistics().batch_sizes == (sizes or ())
        await check(engine)
    assert ("has no room for CUDA graphs" in caplog.text) == (not sizes)
    assert all(context.is_closed for context in model.contexts)


async def test_what_another_context_has_no_memory_for_is_forgotten_on_all(caplog):
    """The first context had room, and something else has taken it since."""
    model, device = Traced(), HostDevice(in_place="never", unified=False)
    device_prefers_graphs(device)
    create = model.create_context

    def create_few(device):
        if len(model.contexts) >= 2 + len(sizes_up_to(ROWS_MAX)) + 1:
            raise DeviceMemoryError("no room for another context")
        return create(device)

    model.create_context = create_few
    async with asynctrt.open(model, device=device, contexts=2, max_rows=ROWS_MAX) as engine:
        graphs = engine.statistics().graphs
        await check(engine)
    assert graphs == ()
    assert "no room for another context" in caplog.text
    assert all(context.is_closed for context in model.contexts)


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
@pytest.mark.parametrize("row", [3, 40_000])
def test_rows_of_a_trial_are_the_first_rows_of_a_larger_one(dtype, row):
    """So the answers to a large batch are those to all smaller ones."""
    large = np.empty((7, row), dtype)
    for number in range(SAMPLES):
        large[...] = _sample(number, large)
        for count in (1, 2, 5):
            small = np.empty((count, row), dtype)
            small[...] = _sample(number, small)
            np.testing.assert_array_equal(small, large[:count])
