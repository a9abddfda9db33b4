"""What the tests of the runtime share: models that notice what goes wrong, batches without an engine."""

import asyncio
import time
from dataclasses import replace

import numpy as np

from asynctrt.backends.function import FunctionBinding, FunctionModel
from asynctrt.devices.host import HostDevice
from asynctrt.errors import ExecutionError
from asynctrt.runtime.contexts import ContextPool
from asynctrt.runtime.staging import RowSource, lay_out
from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.key import FIXED_SHAPE
from asynctrt.scheduling.request import Request
from asynctrt.tensors import TensorSpec
from tests.models import double_model, rows

WAIT_S = 30


def make_request(*arrays, future=None, rows=None, key=FIXED_SHAPE):
    """A request whose payload is the arrays."""
    return Request(len(arrays[0]) if rows is None else rows, key, 0, 0, payload=arrays, future=future)


def make_batch(*requests, key=FIXED_SHAPE, rows=None, rows_run=None, context=0, arena=None, is_timed=True):
    """A batch that no scheduler decided."""
    rows = sum(request.rows for request in requests) if rows is None else rows
    run = rows if rows_run is None else rows_run
    return Batch(key, requests, rows, run, None, context, arena, number=1, is_timed=is_timed)


def make_pool(model=None, device=None, **kw):
    kw = {"contexts": 2, "arenas": None, "rows_max": 4, **kw}
    return ContextPool(device or HostDevice(), model or double_model(), **kw)


class ScratchModel(FunctionModel):
    """Doubles in two steps with what lies between them in the arena: a shared arena gives wrong numbers.

    :param like: another one, which it shares its watch over arenas with.
    """

    def __init__(self, nbytes=4096, *, like=None, capturable=False, rows_fixed=None):
        spec = TensorSpec("input", "float32", (4,)), TensorSpec("output", "float32", (4,))
        super().__init__(lambda inputs, outputs: None, inputs=spec[0], outputs=spec[1], name="scratch")
        self.capabilities = replace(
            self.capabilities, enqueue_nbytes=nbytes, is_capturable=capturable, rows_fixed=rows_fixed
        )
        self.enqueued = 0
        self.busy = set() if like is None else like.busy
        self.seen = set()
        self.clashes = 0

    def create_context(self, device):
        context = super().create_context(device)
        context.bind = lambda inputs, outputs: ScratchBinding(self, inputs, outputs)
        return context


class ScratchBinding(FunctionBinding):
    def __init__(self, model, inputs, outputs):
        super().__init__(model, inputs, outputs)
        self.model, self.source, self.target = model, inputs[0].array, outputs[0].array

    def enqueue(self, count, *, profile, stream, arena):
        scratch = arena.array(np.dtype("float32"), (count, 4), 0)
        address = arena.address
        model = self.model
        model.enqueued += 1

        def first():
            model.clashes += address in model.busy
            model.busy.add(address)
            model.seen.add(address)
            scratch[...] = 3 * self.source[:count]
            time.sleep(20e-6)  # Long enough for another thread to come in between, if it may.

        def second():
            self.target[:count] = scratch - self.source[:count]
            model.busy.discard(address)

        stream.launch(first, label="first")
        stream.launch(second, label="second")


class Stubborn(ScratchModel):
    """Says that it can be captured, and cannot: it fails while the stream captures, from the nth time on."""

    def __init__(self, at=1, error=None):
        super().__init__(capturable=True)
        self.left = at
        self.error = error or ExecutionError("this plan allocates while it runs")

    def create_context(self, device):
        context = super().create_context(device)
        bind = context.bind

        def bind_stubborn(inputs, outputs):
            binding = bind(inputs, outputs)
            enqueue = binding.enqueue

            def enqueue_or_fail(count, *, profile, stream, arena):
                enqueue(count, profile=profile, stream=stream, arena=arena)
                if stream.is_capturing:
                    self.left -= 1
                    if self.left <= 0:
                        raise self.error

            binding.enqueue = enqueue_or_fail
            return binding

        context.bind = bind_stubborn
        return context


def threads(unified=True, **kw):
    """A device on which batches really run side by side."""
    return HostDevice(threads=4, in_place="never", unified=unified, **kw)


async def ask(engine, values):
    """Send a row for each value at once; whether each was answered with its double."""
    async with asyncio.timeout(WAIT_S):
        results = await asyncio.gather(*[engine.infer(rows(value)) for value in values])
    return [result["output"][0].tolist() for result in results] == [[2 * value] * 4 for value in values]


class RecordingModel(FunctionModel):
    """Doubles, and says which of its contexts was made, used and closed.

    It refuses to enqueue the sizes in ``refused``, and runs what ``work`` has for a size instead.
    """

    def __init__(self, enqueue_nbytes=0):
        spec = TensorSpec("input", "float32", (4,)), TensorSpec("output", "float32", (4,))
        super().__init__(lambda inputs, outputs: None, inputs=spec[0], outputs=spec[1], name="recording")
        self.capabilities = replace(self.capabilities, enqueue_nbytes=enqueue_nbytes)
        self.contexts, self.enqueued, self.refused, self.work = [], [], set(), {}

    def create_context(self, device):
        return RecordingContext(self)


class RecordingContext:
    def __init__(self, model):
        self.model = model
        self.is_closed = False
        model.contexts.append(self)

    def bind(self, inputs, outputs):
        return RecordingBinding(self, inputs, outputs)

    def close(self):
        self.is_closed = True


class RecordingBinding(FunctionBinding):
    def __init__(self, context, inputs, outputs):
        super().__init__(context.model, inputs, outputs)
        self.context = context
        self.source, self.target = inputs[0].array, outputs[0].array

    def enqueue(self, count, *, profile, stream, arena):
        model = self.context.model
        model.enqueued.append((self.context, count))
        if count in model.refused:
            raise ExecutionError("no")

        def double():
            self.target[:count] = 2 * self.source[:count]

        stream.launch(model.work.get(count, double), label=count)


def make_source(context, array, **kw):
    """The source of a batch of one request, whose rows lie in the context's slab."""
    layout = lay_out(context._model.inputs, context._model.outputs, {}, 8)
    source = RowSource(make_batch(make_request(array), **kw), context.slab((), lambda _: layout))
    source.stage()
    return source
