"""The pool: bays, leases that die, arenas in stream order, memory that grows and is given back."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.function import FunctionBinding, FunctionModel
from asynctrt.devices.host import HostBuffer, HostDevice
from asynctrt.errors import DeviceMemoryError, InternalError
from asynctrt.runtime.pool import SLABS_MAX, Memory, Pool
from asynctrt.scheduling.ledger import Launch
from asynctrt.tensors import TensorSpec
from tests.models import double_model, rows, sequence_onnx

pytestmark = pytest.mark.anyio
WAIT_S = 30


def launch(context=0, bucket=(), count=1, arena=None):
    return Launch(1, bucket, [], count, context, arena, 0)


def pool(model=None, device=None, **kw):
    kw = {"contexts": 2, "arenas": 0, "rows_max": 4, **kw}
    return Pool(device or HostDevice(), model or double_model(), **kw)


def test_a_lease_dies_when_it_is_released():
    made = pool()
    lease = made.lease(launch(), None)
    assert lease.bay is made._bays[0]
    lease.release()
    lease.release()
    with pytest.raises(InternalError, match="released"):
        lease.enqueue(1)
    assert made.close(WAIT_S) == 0


def test_fixed_shapes_have_their_memory_from_the_start():
    made = pool()
    nbytes = made.nbytes
    assert nbytes == 2 * 512
    for context in (0, 1):
        made.lease(launch(context), None).release()
    assert made.nbytes == nbytes
    assert repr(made) == "<Pool bays=2 arenas=0 nbytes=1024>"
    made.close(WAIT_S)
    made.close(WAIT_S)
    assert made.nbytes == 0


class SmallDevice(HostDevice):
    """A device that counts its memory, and has little of it."""

    def __init__(self, nbytes, **kw):
        super().__init__(**kw)
        self.left = nbytes

    def allocate_staging(self, nbytes):
        if nbytes > self.left:
            raise DeviceMemoryError(f"{nbytes} bytes are more than the {self.left} left")
        self.left -= nbytes
        buffer = HostBuffer(nbytes)
        give_back = buffer.close

        def close():
            self.left += buffer.nbytes
            give_back()

        buffer.close = close
        return buffer

    allocate = allocate_staging


@pytest.mark.parametrize("unified", [True, False])
def test_what_does_not_fit_is_refused_and_nothing_is_kept(unified):
    for nbytes in range(0, 2200, 256):
        device = SmallDevice(nbytes, unified=unified)
        try:
            made = pool(device=device)
        except DeviceMemoryError:
            assert nbytes < (1024 if unified else 2048)
        else:
            made.close(WAIT_S)
        assert device.left == nbytes


def test_memory_grows_with_the_shapes_and_the_last_one_stays(tmp_path):
    from asynctrt.backends.onnxruntime import OnnxModel

    made = pool(OnnxModel(sequence_onnx(tmp_path / "m.onnx")), contexts=1)
    assert made.nbytes == 0
    sizes = []
    for length in (10, 1000, 10):
        made.lease(launch(bucket=(("length", length),)), None).release()
        sizes.append(made.nbytes)
    assert sizes[0] < sizes[1] == sizes[2]
    made.close(WAIT_S)


def test_what_is_remembered_of_shapes_is_bounded(tmp_path):
    from asynctrt.backends.onnxruntime import OnnxModel

    made = pool(OnnxModel(sequence_onnx(tmp_path / "m.onnx")), contexts=1)
    for length in range(1, 3 * SLABS_MAX):
        lease = made.lease(launch(bucket=(("length", length),)), None)
        lease.bay.binding(lease.slab)
        lease.release()
    bay = made._bays[0]
    assert max(len(bay._slabs), len(bay._bindings), len(made._layouts)) <= SLABS_MAX
    made.close(WAIT_S)


async def test_a_shape_that_does_not_fit_fails_its_batch_only(tmp_path):
    async with asynctrt.open(sequence_onnx(tmp_path / "m.onnx"), device=SmallDevice(20_000)) as engine:
        await engine.infer(np.ones((1, 10), np.float32))
        with pytest.raises(DeviceMemoryError, match="bytes are more than"):
            await engine.infer(np.ones((1, 100_000), np.float32))
        with pytest.raises(DeviceMemoryError):
            async with engine.slot(dims={"tokens": (100_000,)}):
                pass
        assert (await engine.infer(np.ones((1, 10), np.float32)))["total"].tolist() == [10]


class ScratchModel(FunctionModel):
    """Doubles in two steps with what lies between them in the arena: a shared arena gives wrong numbers."""

    def __init__(self, nbytes=4096):
        spec = TensorSpec("input", "float32", (4,)), TensorSpec("output", "float32", (4,))
        super().__init__(lambda inputs, outputs: None, inputs=spec[0], outputs=spec[1], name="scratch")
        self.enqueue_nbytes = nbytes
        self.busy = set()
        self.seen = set()
        self.clashes = 0

    def create_context(self, device):
        context = super().create_context(device)
        context.bind = lambda inputs, outputs: ScratchBinding(self, inputs, outputs)
        return context


class ScratchBinding(FunctionBinding):
    def __init__(self, model, inputs, outputs):
        super().__init__(None, inputs, outputs)
        self.model, self.source, self.target = model, inputs[0].array, outputs[0].array

    def enqueue(self, count, *, stream, arena):
        scratch = arena.array(np.dtype("float32"), (count, 4), 0)
        model = self.model

        def first():
            model.clashes += arena.address in model.busy
            model.busy.add(arena.address)
            model.seen.add(arena.address)
            scratch[...] = 3 * self.source[:count]

        def second():
            self.target[:count] = scratch - self.source[:count]
            model.busy.discard(arena.address)

        stream.launch(first, label="first")
        stream.launch(second, label="second")


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(("contexts", "arenas"), [(4, 1), (4, 2), (4, 4)])
async def test_arenas_are_shared_in_stream_order(contexts, arenas, unified):
    model = ScratchModel()
    device = HostDevice(threads=4, in_place="never", unified=unified)
    async with asynctrt.open(model, device=device, contexts=contexts, arenas=arenas, max_rows=2) as engine:
        async with asyncio.timeout(WAIT_S):
            results = await asyncio.gather(*[engine.infer(rows(value)) for value in range(200)])
        assert [result["output"][0, 0] for result in results] == [2 * value for value in range(200)]
        assert model.clashes == 0
        assert len(model.seen) == arenas
        assert engine.statistics().arenas == arenas


async def test_without_enqueue_memory_no_arena_is_made():
    async with asynctrt.open(double_model(), contexts=2, arenas=1) as engine:
        assert engine.statistics().arenas == 0


def test_memory_of_both_sides_is_counted_and_given_back():
    device = SmallDevice(10_000, unified=False)
    memory = Memory(device, 1000)
    assert memory.nbytes == 2000
    memory.close()
    memory.close()
    assert memory.nbytes == 0
