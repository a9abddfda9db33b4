"""What every model and its contexts do, under the engine: one suite for all backends."""

import threading

import numpy as np
import pytest

from asynctrt.backends.base import Model
from asynctrt.backends.onnxruntime import OnnxModel
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceUnavailableError
from asynctrt.runtime.batch import lay_out
from asynctrt.runtime.bay import Memory, Slab
from asynctrt.tensors import TensorSpec
from tests.models import double_model, double_onnx, mixed_onnx, rows, sequence_onnx

WAIT_S = 20

MODELS = {
    "function": lambda path: double_model(),
    "onnxruntime": lambda path: OnnxModel(double_onnx(path / "double.onnx")),
}


@pytest.fixture(params=MODELS)
def model(request, tmp_path):
    made = MODELS[request.param](tmp_path)
    yield made
    made.close()
    made.close()


class Runner:
    """A context bound to a slab of its own."""

    def __init__(self, model, rows_max=8, symbols=None):
        self.device = HostDevice()
        self.stream = self.device.create_stream()
        layout = lay_out(model.inputs, model.outputs, symbols or {}, rows_max)
        self.slab = Slab(layout, Memory(self.device, layout.nbytes))
        self.context = model.create_context(self.device)
        self.binding = self.slab.bind(self.context)

    def enqueue(self, count):
        self.binding.enqueue(count, stream=self.stream, arena=None)
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
        assert self.stream.close(WAIT_S)
        self.context.close()
        self.context.close()


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
    assert (model.rows_fixed, model.rows_max, model.enqueue_nbytes) == (None, None, 0)


def test_a_batch_is_computed_from_the_slab_into_the_slab(runner):
    np.testing.assert_array_equal(runner.run(rows(1, 2, 3))["output"], rows(2, 4, 6))


def test_batches_of_changing_size(runner):
    for count in (1, 8, 3, 3, 5, 1):
        batch = rows(*range(count))
        np.testing.assert_array_equal(runner.run(batch)["output"], 2 * batch)


def test_rows_behind_the_batch_are_not_written(runner):
    runner.slab.outputs["output"][...] = -1
    runner.run(rows(1, 2))
    assert (runner.slab.outputs["output"][2:] == -1).all()


def test_contexts_run_side_by_side(model):
    runners = [Runner(model) for _ in range(4)]
    batches = [rows(*range(start, start + 8)) for start in range(0, 32, 8)]
    for runner, batch in zip(runners, batches, strict=True):
        runner.slab.inputs[0][...] = batch
    events = [runner.enqueue(8) for runner in runners]
    for runner, batch, event in zip(runners, batches, events, strict=True):
        assert event.synchronize(WAIT_S)
        np.testing.assert_array_equal(runner.slab.outputs["output"], 2 * batch)
        runner.close()


def test_contexts_are_made_from_several_threads(model):
    contexts = []
    threads = [
        threading.Thread(target=lambda: contexts.append(model.create_context(HostDevice()))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(contexts) == 8


def test_another_kind_of_device_is_refused(model):
    class Elsewhere(HostDevice):
        name = "cuda:0"

    with pytest.raises(DeviceUnavailableError, match="not on 'cuda:0'.*device='host'"):
        model.create_context(Elsewhere())


def test_several_tensors_of_mixed_types(tmp_path):
    runner = Runner(OnnxModel(mixed_onnx(tmp_path / "mixed.onnx")))
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    values = np.array([[0.5, 0.5, 0.5], [9, 9, 9]], np.float32)
    answer = runner.run(ids, values)
    np.testing.assert_array_equal(answer["sum"], ids + values)
    np.testing.assert_array_equal(answer["large"], ids + values > 10)
    np.testing.assert_array_equal(answer["twice"], 2 * ids)
    runner.close()


def test_dynamic_dimensions(tmp_path):
    model = OnnxModel(sequence_onnx(tmp_path / "sequence.onnx"))
    for length in (3, 7):
        runner = Runner(model, symbols={"length": length})
        tokens = np.arange(2 * length, dtype=np.float32).reshape(2, length)
        answer = runner.run(tokens)
        np.testing.assert_array_equal(answer["doubled"], 2 * tokens)
        np.testing.assert_array_equal(answer["total"], tokens.sum(axis=1))
        runner.close()
