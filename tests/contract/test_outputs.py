"""Outputs are never memory that the model did not write: slabs are poisoned, and each batch is compared.

ONNX Runtime does not write to the bound memory of an output that is also an input of the graph.
"""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto

from asynctrt.backends.onnxruntime import OnnxModel
from tests.backends.onnx_sessions import HostSessions
from tests.contract.test_model import Runner
from tests.gpu.support import gpu_is_here
from tests.models import lying_onnx, node, save

POISON = 0xA5

LOADERS = {
    "onnxruntime": OnnxModel,
    "onnxruntime-streams": lambda path: HostSessions(path, is_direct=True),
}

if gpu_is_here() and "CUDAExecutionProvider" in ort.get_available_providers():
    from asynctrt.backends.onnxruntime_cuda import OnnxCudaModel
    from asynctrt.devices.cuda import CudaDevice

    LOADERS["onnxruntime-cuda"] = lambda path: OnnxCudaModel(path, device=CudaDevice(0))

ADD = node("Add", "x x", "y")
ONES = ("ones", np.ones((4, 3), np.float32))

MODELS = {
    # Nodes, outputs, initialisers.
    "an input": ([ADD], "x y", ()),
    "an input, first of two": ([ADD, node("Identity", "x", "z")], "z x y", ()),
    "an identity of an input": ([node("Identity", "x", "z"), ADD], "y z", ()),
    "a reshape of an input": ([node("Reshape", "x same", "z"), ADD], "z y", [("same", np.array([0, 3]))]),
    "a cast to what it is": ([node("Cast", "x", "z", to=TensorProto.FLOAT), ADD], "z y", ()),
    "an inner value": ([ADD, node("Add", "y x", "z")], "y z", ()),
    "one of a dropout": ([node("Dropout", "x", "z"), ADD], "y z", ()),
    "an initialiser": ([ADD], "ones y", [ONES]),
    "a constant that was folded": ([node("Add", "ones ones", "z"), ADD], "z y", [ONES]),
    "an identity of an initialiser": ([node("Identity", "ones", "z"), ADD], "z y", [ONES]),
}


@pytest.fixture(params=LOADERS)
def load(request):
    return LOADERS[request.param]


def poison(runner):
    """Fill what outputs are written to, on the device as well."""
    slab, buffers = runner.slab, runner.slab.buffers
    for array in slab.outputs.values():
        array.reshape(-1).view(np.uint8)[...] = POISON
    if buffers.device_buffer is not None:
        for span in slab.layout.outputs:
            nbytes = span.row_nbytes * slab.layout.rows_max
            runner.stream.copy(buffers.device_buffer, buffers.staging, offset=span.offset, nbytes=nbytes)
        assert runner.stream.drain(20)


@pytest.mark.parametrize("name", MODELS)
def test_every_output_is_what_the_model_gives(load, name, tmp_path):
    nodes, outputs, weights = MODELS[name]
    is_fixed = any(weight is ONES for weight in weights)
    kind = TensorProto.FLOAT, [4 if is_fixed else "n", 3]
    tensors = [(output, *kind) for output in outputs.split()]
    path = save(tmp_path / "model.onnx", nodes, [("x", *kind)], tensors, weights)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    runner = Runner(load(path), rows_max=4)
    rng = np.random.default_rng(0)
    for rows in (4, 4) if is_fixed else (4, 1, 3, 4):
        batch = rng.random((rows, 3), np.float32)
        poison(runner)
        answer = runner.run(batch)
        for output, right in zip(session.get_outputs(), session.run(None, {"x": batch}), strict=True):
            np.testing.assert_array_equal(answer[output.name], right, err_msg=output.name)
    runner.close()


def test_an_output_of_another_shape_than_declared_fails_its_batch(load, tmp_path):
    """As many rows as declared, or an error: what was in the slab before is no answer."""
    runner = Runner(load(lying_onnx(tmp_path / "lying.onnx")), rows_max=4)
    poison(runner)
    runner.slab.inputs[0][...] = 1
    with pytest.raises(Exception, match="shape|dimension|failed to run"):
        event = runner.enqueue(2)
        assert event.synchronize(20)
        if event.error is not None:
            raise event.error
        runner.binding.unbound_outputs(2)
    runner.close()
