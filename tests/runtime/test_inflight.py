"""A batch under way: its events, what went wrong, its times, its outputs, and the slab that it holds."""

import numpy as np
import pytest

from asynctrt.devices.arenas import Arenas
from asynctrt.devices.host import HostDevice
from asynctrt.errors import ExecutionError
from asynctrt.runtime.contexts import PooledContext
from asynctrt.runtime.inflight import InFlight
from asynctrt.runtime.staging import lay_out
from asynctrt.scheduling.batch_times import BatchTimes
from tests.models import rows
from tests.runtime.support import WAIT_S, RecordingModel, make_source


def flight_on(device, *, arenas=None, **kw):
    """A batch of two rows, about to be enqueued."""
    arena = None if arenas is None else arenas.arenas[0]
    context = PooledContext(device, RecordingModel(256 * (arena is not None)), arena)
    source = make_source(context, rows(1, 2), **kw)
    return InFlight(source.batch, context, source)


@pytest.fixture(params=[False, True], ids=["separate", "unified"])
def device(request):
    return HostDevice(in_place="never", unified=request.param)


def test_it_ends_when_its_outputs_are_on_the_host(device):
    flight = flight_on(device)
    events = flight.events
    assert flight.end is (events.computed if device.unified else events.copied_out)
    flight.context.enqueue(flight.source, flight.events)
    assert flight.end.synchronize(WAIT_S)
    assert flight.take_error() is None
    outputs, nbytes = flight.outputs()
    np.testing.assert_array_equal(outputs["output"][:2], rows(2, 4))
    assert nbytes == 2 * 16
    assert flight.context.close(WAIT_S)


@pytest.mark.parametrize("is_timed", [False, True])
def test_only_a_timed_one_has_times(device, is_timed):
    arenas = Arenas(device, 1, nbytes=256)
    flight = flight_on(device, arenas=arenas, is_timed=is_timed)
    context = flight.context
    assert flight.events is (context.timed if is_timed else context.untimed)
    flight.record.copy_in_ns = 5  # What gathering took on the CPU.
    flight.context.enqueue(flight.source, flight.events)
    assert flight.end.synchronize(WAIT_S)
    copies = flight.note_times(BatchTimes())
    record = flight.record
    if not is_timed:
        assert copies is None
        assert (record.copy_in_ns, record.compute_ns, record.copy_out_ns, record.arena_wait_ns) == (
            5,
            0,
            0,
            0,
        )
    elif device.unified:
        assert copies is None
        assert record.compute_ns > 0
    else:
        assert min(copies) > 0
        assert (record.copy_in_ns, record.copy_out_ns) == (5 + copies[0], copies[1])
        assert record.compute_ns > 0
        assert record.arena_wait_ns >= 0
    assert context.close(WAIT_S)
    arenas.close()


def test_what_fails_on_the_stream_is_found_at_the_end(device):
    flight = flight_on(device)
    error = ValueError("the model")
    flight.context._model.work[2] = lambda: (_ for _ in ()).throw(error)
    flight.context.enqueue(flight.source, flight.events)
    assert flight.end.synchronize(WAIT_S)
    assert flight.take_error() is error
    assert flight.take_error() is None
    assert flight.context.close(WAIT_S)


@pytest.mark.parametrize(("copy", "is_timed"), [("in", True), ("in", False), ("out", True), ("out", False)])
def test_copies_that_fail_are_found_too(copy, is_timed):
    flight = flight_on(HostDevice(in_place="never", unified=False), is_timed=is_timed)
    error = ValueError("a copy")
    stream = flight.context.stream

    def put(*_):
        stream.launch(lambda: (_ for _ in ()).throw(error), label="copy")

    setattr(flight.source.slab, f"put_{copy}", put)
    flight.context.enqueue(flight.source, flight.events)
    assert flight.end.synchronize(WAIT_S)
    assert flight.take_error() is error
    assert flight.take_error() is None
    assert flight.context.close(WAIT_S)


def test_after_a_refusal_the_end_of_what_was_put_there_can_be_waited_for(device):
    flight = flight_on(device)
    flight.context._model.refused.add(2)
    with pytest.raises(ExecutionError):
        flight.context.enqueue(flight.source, flight.events)
    flight.context.enqueue_end(flight.source, flight.events)
    assert flight.end.synchronize(WAIT_S)
    assert flight.context.close(WAIT_S)


class Unbound:
    """A binding of a model whose output depends on the data."""

    def __init__(self, array):
        self.array = array

    def unbound_outputs(self, count):
        return {"output": self.array}


@pytest.mark.parametrize("shape", [(2,), (2, 5)])
def test_outputs_that_the_model_brought_are_added(device, shape):
    flight = flight_on(device)
    flight.source.slab.layout = lay_out([], [], {}, 8)
    flight.source.slab.outputs = {}
    layout = flight.source.slab.layout
    object.__setattr__(layout, "outputs", (None,))
    flight.source.slab.binding = Unbound(np.ones(shape, np.float32))
    outputs, nbytes = flight.outputs()
    assert outputs["output"].shape == shape
    assert nbytes == outputs["output"].nbytes
    assert flight.context.close(WAIT_S)


@pytest.mark.parametrize("shape", [(), (1,), (3, 2)])
def test_those_without_a_row_for_each_are_refused(device, shape):
    flight = flight_on(device)
    object.__setattr__(flight.source.slab.layout, "outputs", (None,))
    flight.source.slab.outputs = {}
    flight.source.slab.binding = Unbound(np.ones(shape, np.float32))
    with pytest.raises(ExecutionError, match=r"output 'output' has shape .* for a batch of 2 rows"):
        flight.outputs()
    assert flight.context.close(WAIT_S)
