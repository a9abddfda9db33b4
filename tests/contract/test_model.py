"""What every model and its contexts do, under the engine: one suite for all backends."""

import re
import threading

import numpy as np
import pytest

from asynctrt.backends.base import Model
from asynctrt.backends.onnxruntime import OnnxModel, ort
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.devices.host import HostDevice
from asynctrt.errors import AsynctrtError, DeviceUnavailableError, UsageError
from asynctrt.runtime.staging import Slab, StagingBuffers, lay_out
from asynctrt.tensors import TensorSpec
from tests.backends.onnx_sessions import HostSessions
from tests.contract.devices import four_floats, strict
from tests.gpu.support import gpu_is_here
from tests.models import double_model, double_onnx, rows

WAIT_S = 20

MODELS = {
    "function": lambda path: double_model(),
    "onnxruntime": lambda path: OnnxModel(double_onnx(path / "double.onnx")),
    "onnxruntime-streams": lambda path: HostSessions(double_onnx(path / "double.onnx")),
    "tensorrt": lambda path: strict(HostDevice(in_place="never", threads=4), DOUBLE),
}

DOUBLE = four_floats(steps=1)
"""An engine of the strict double, which computes ``2 * x + 1``."""

if gpu_is_here():
    from asynctrt.devices.cuda import CudaDevice

    MODELS["tensorrt-cuda"] = lambda path: strict(CudaDevice(0), DOUBLE)
    if "CUDAExecutionProvider" in ort.get_available_providers():
        from asynctrt.backends.onnxruntime_cuda import OnnxCudaModel

        MODELS["onnxruntime-cuda"] = lambda path: OnnxCudaModel(
            double_onnx(path / "double.onnx"), device=CudaDevice(0)
        )


def device_of(model):
    """Return the device of a model that was loaded for one; others run on any host device."""
    return getattr(model, "device", None) or HostDevice()


@pytest.fixture(params=MODELS)
def model(request, tmp_path):
    made = MODELS[request.param](tmp_path)
    yield made
    made.close()
    made.close()
    if (device := device_of(made)).name != "host":
        device.close()


class Runner:
    """A context bound to a slab of its own."""

    def __init__(self, model, rows_max=8, symbols=None):
        self.device = device_of(model)
        self.arena = (
            self.device.allocate(model.capabilities.enqueue_nbytes)
            if model.capabilities.enqueue_nbytes
            else None
        )
        self.added = 1 if isinstance(model, TensorRTModel) else 0
        self.stream = self.device.create_stream()
        layout = lay_out(model.inputs, model.outputs, symbols or {}, rows_max)
        self.slab = Slab(layout, StagingBuffers(self.device, layout.nbytes))
        self.context = model.create_context(self.device)
        self.binding = self.context.bind(self.slab.input_memory(), self.slab.output_memory())

    def enqueue(self, count):
        has_copies = self.slab.buffers.device_buffer is not None
        if has_copies:
            self.slab.put_in(self.stream, count)
        self.binding.enqueue(count, profile=None, stream=self.stream, arena=self.arena)
        if has_copies:
            self.slab.put_out(self.stream, count)
        event = self.device.create_event()
        self.stream.record(event)
        return event

    def run(self, *arrays):
        for slab, array in zip(self.slab.inputs, arrays, strict=True):
            slab[: len(array)] = array
        event = self.enqueue(len(arrays[0]))
        assert event.synchronize(WAIT_S)
        assert event.error is None
        bound = {name: array[: len(arrays[0])].copy() for name, array in self.slab.outputs.items()}
        return {**bound, **self.binding.unbound_outputs(len(arrays[0]))}

    def close(self):
        assert self.stream.drain(WAIT_S)
        self.context.close()
        self.context.close()
        assert self.stream.close(WAIT_S)
        if self.arena is not None:
            self.arena.close()

    def doubled(self, batch):
        """Return what the model answers to a batch."""
        return 2 * batch + self.added


@pytest.fixture
def runner(model):
    made = Runner(model)
    yield made
    made.close()


def test_it_is_a_model(model):
    assert isinstance(model, Model)
    assert model.name
    assert model.inputs == (TensorSpec("input", "float32", (4,)),)
    assert model.outputs == (TensorSpec("output", "float32", (4,)),)
    assert (model.capabilities.rows_fixed, model.capabilities.rows_min) == (None, 1)
    assert model.capabilities.rows_max is None or model.capabilities.rows_max >= 8


def test_rows_behind_the_batch_are_not_written(runner):
    runner.slab.outputs["output"][...] = -1
    runner.run(rows(1, 2))
    assert (runner.slab.outputs["output"][2:] == -1).all()


def test_no_row_of_an_earlier_batch_is_answered(runner):
    """Whatever lies in the outputs beforehand, every row of the batch is written anew."""
    for count in (8, 1, 5, 8):
        runner.slab.outputs["output"][...] = np.nan
        batch = rows(*range(count))
        np.testing.assert_array_equal(runner.run(batch)["output"], runner.doubled(batch))


def test_contexts_run_side_by_side(model):
    runners = [Runner(model) for _ in range(4)]
    batches = [rows(*range(start, start + 8)) for start in range(0, 32, 8)]
    for runner, batch in zip(runners, batches, strict=True):
        runner.slab.inputs[0][...] = batch
    events = [runner.enqueue(8) for runner in runners]
    for runner, batch, event in zip(runners, batches, events, strict=True):
        assert event.synchronize(WAIT_S)
        np.testing.assert_array_equal(runner.slab.outputs["output"], runner.doubled(batch))
        runner.close()


def test_contexts_are_made_from_several_threads(model):
    contexts = []
    device = device_of(model)
    threads = [
        threading.Thread(target=lambda: contexts.append(model.create_context(device))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(contexts) == 8
    for context in contexts:
        context.close()


def test_another_kind_of_device_is_refused(model):
    class Elsewhere(HostDevice):
        name = "cuda:0"

    with pytest.raises(AsynctrtError) as caught:
        model.create_context(Elsewhere())
    if isinstance(model, TensorRTModel):
        assert isinstance(caught.value, UsageError)
    else:
        assert isinstance(caught.value, DeviceUnavailableError)
        assert re.search("not on 'cuda:0'.*device='host'|not for 'cuda:0'", str(caught.value))
