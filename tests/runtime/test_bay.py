"""A bay: the order in which a batch is put on its stream, and the contexts of what is captured."""

import numpy as np
import pytest

from asynctrt.backends.function import FunctionBinding, FunctionModel
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.host import HostDevice
from asynctrt.errors import ExecutionError
from asynctrt.runtime.batch import lay_out
from asynctrt.runtime.bay import Bay, Marks
from asynctrt.tensors import TensorSpec
from tests.models import rows

WAIT_S = 20
SPEC = TensorSpec("input", "float32", (4,)), TensorSpec("output", "float32", (4,))


class Context:
    """A context that says when it is made, used and closed."""

    def __init__(self, model):
        self.model = model
        self.is_closed = False
        model.contexts.append(self)

    def bind(self, inputs, outputs):
        return Binding(self, inputs, outputs)

    def close(self):
        self.is_closed = True


class Binding(FunctionBinding):
    def __init__(self, context, inputs, outputs):
        super().__init__(None, inputs, outputs)
        self.context = context
        self.source, self.target = inputs[0].array, outputs[0].array

    def enqueue(self, count, *, stream, arena):
        self.context.model.enqueued.append((self.context, count))
        if count in self.context.model.refused:
            raise ExecutionError("no")

        def double():
            self.target[:count] = 2 * self.source[:count]

        stream.launch(double, label=count)


class Model(FunctionModel):
    def __init__(self, enqueue_nbytes=0):
        super().__init__(lambda inputs, outputs: None, inputs=SPEC[0], outputs=SPEC[1], name="model")
        self.enqueue_nbytes = enqueue_nbytes
        self.contexts, self.enqueued, self.refused = [], [], set()

    def create_context(self, device):
        return Context(self)


class Logged:
    """A stream that writes down what is put on it."""

    def __init__(self, stream, names):
        self._stream, self._names, self.log = stream, names, []

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def record(self, event):
        self.log.append(f"record {self._names[event]}")
        self._stream.record(event)

    def wait(self, event):
        self.log.append("wait")
        self._stream.wait(event)

    def copy(self, target, source, *, offset, nbytes):
        self.log.append(f"copy {nbytes}")
        self._stream.copy(target, source, offset=offset, nbytes=nbytes)

    def launch(self, work, *, label):
        self.log.append(f"launch {label}")
        self._stream.launch(work, label=label)


@pytest.fixture(params=[False, True], ids=["separate", "unified"])
def device(request):
    return HostDevice(in_place="never", unified=request.param)


def bay_on(device, model=None, arenas=None):
    bay = Bay(device, model or Model(), None if arenas is None else arenas.arenas[0])
    return bay, bay.slab((), lay_out(SPEC[:1], SPEC[1:], {}, 8))


def logged(bay):
    names = {
        getattr(marks, name): name
        for marks in (bay.timed, bay.plain)
        for name in ("begun", "copied_in", "started", "computed", "copied_out")
    }
    bay.stream = Logged(bay.stream, names)
    return bay.stream.log


def run(bay, slab, count, marks=None):
    slab.inputs[0][:count] = rows(*range(count))
    bay.put(slab, count, marks or bay.timed, None, None)
    bay._wait("a batch")
    np.testing.assert_array_equal(slab.outputs["output"][:count], 2 * rows(*range(count)))


def test_the_order_of_things():
    device = HostDevice(in_place="never", unified=False)
    arenas = Arenas(device, 1, nbytes=256)
    bay, slab = bay_on(device, Model(256), arenas)
    log = logged(bay)
    bay.put(slab, 2, bay.timed, device.create_event(), None)
    assert log == [
        "record begun",
        "copy 32",
        "record copied_in",
        "wait",
        "record started",
        "launch 2",
        "record computed",
        "copy 32",
        "record copied_out",
    ]
    log.clear()
    bay.put(slab, 2, bay.plain, device.create_event(), None)
    assert log == ["copy 32", "wait", "launch 2", "record computed", "copy 32", "record copied_out"]
    assert bay.close(WAIT_S)
    arenas.close()


def test_marks_without_times_have_none():
    marks = Marks(HostDevice(), are_timed=False)
    assert (marks.begun, marks.copied_in, marks.started) == (None, None, None)


def test_a_captured_size_has_a_context_of_its_own(device):
    model = Model()
    bay, slab = bay_on(device, model)
    for count in (2, 8):
        assert min(bay.capture(slab, count, None)) > 0
    assert len(model.contexts) == 3
    captured_by = {count: context for context, count in model.enqueued}
    assert captured_by == {2: model.contexts[1], 8: model.contexts[2]}
    model.enqueued.clear()
    for count in (2, 8, 3, 2):
        run(bay, slab, count)
    # Only what was not captured is put there call by call, on the bay's own context.
    assert model.enqueued == [(model.contexts[0], 3)]
    bay.uncapture()
    assert [context.is_closed for context in model.contexts] == [False, True, True]
    run(bay, slab, 8)
    assert bay.close(WAIT_S)
    assert all(context.is_closed for context in model.contexts)


def test_what_cannot_be_captured_leaves_the_bay_as_it_was(device):
    model = Model()
    bay, slab = bay_on(device, model)
    model.refused.add(4)
    with pytest.raises(ExecutionError):
        bay.capture(slab, 4, None)
    assert model.contexts[1].is_closed
    assert not bay.stream.is_capturing
    run(bay, slab, 3)
    bay.forget(slab)
    assert bay.close(WAIT_S)


def test_a_batch_that_fails_while_it_is_captured(device):
    model = Model()
    bay, slab = bay_on(device, model)

    class Failing(Binding):
        def enqueue(self, count, *, stream, arena):
            stream.launch(lambda: 1 // 0, label=count)

    slab.bind = lambda context: Failing(context, _memory(slab), _memory(slab, out=True))
    with pytest.raises(ZeroDivisionError):
        bay.capture(slab, 4, None)
    assert bay.close(WAIT_S)


def _memory(slab, *, out=False):
    place = slab.layout.outputs[0] if out else slab.layout.inputs[0]
    return (slab._tensor_memory(place),)


def test_who_used_the_arena_last(device):
    arenas = Arenas(device, 1, nbytes=256)
    bay, _ = bay_on(device, Model(256), arenas)
    assert not bay.was_last_in_arena
    arenas.arenas[0].last_use = device.create_event()
    assert not bay.was_last_in_arena
    arenas.arenas[0].last_use = bay.plain.computed
    assert bay.was_last_in_arena
    assert bay.close(WAIT_S)
    assert arenas.arenas[0].last_use is None
    arenas.close()


def test_a_stream_that_does_not_end_keeps_the_bay():
    from asynctrt.testing import LatchDevice

    device = LatchDevice()
    bay, slab = bay_on(device)
    bay.put(slab, 1, bay.timed, None, None)
    assert not bay.close(0.01)
    assert not bay.context.is_closed
    device.open()
    assert bay.close(WAIT_S)
    assert bay.context.is_closed
