"""The pool: bays, leases that die, arenas in stream order, memory that grows and is given back."""

import asyncio
import time
from functools import partial

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.function import FunctionBinding, FunctionModel
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.host import HostBuffer, HostDevice
from asynctrt.errors import (
    DeviceLostError,
    DeviceMemoryError,
    ExecutionError,
    InternalError,
    OptionsError,
    UsageError,
)
from asynctrt.runtime.bay import SLABS_MAX, Memory
from asynctrt.runtime.pool import Pool
from asynctrt.scheduling.ledger import Launch
from asynctrt.tensors import TensorSpec
from tests.models import Gate, double_model, rows, sequence_onnx

pytestmark = pytest.mark.anyio
WAIT_S = 30


def launch(context=0, bucket=(), count=1, arena=None):
    return Launch(1, bucket, [], count, context, arena, 0)


def pool(model=None, device=None, **kw):
    kw = {"contexts": 2, "arenas": None, "rows_max": 4, **kw}
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
    """Doubles in two steps with what lies between them in the arena: a shared arena gives wrong numbers.

    :param like: another one, which it shares its watch over arenas with.
    """

    def __init__(self, nbytes=4096, *, like=None, capturable=False, **kw):
        spec = TensorSpec("input", "float32", (4,)), TensorSpec("output", "float32", (4,))
        super().__init__(lambda inputs, outputs: None, inputs=spec[0], outputs=spec[1], name="scratch", **kw)
        self.enqueue_nbytes = nbytes
        self.is_capturable = capturable
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
        super().__init__(None, inputs, outputs)
        self.model, self.source, self.target = model, inputs[0].array, outputs[0].array

    def enqueue(self, count, *, stream, arena):
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


def threads(unified=True, **kw):
    """A device on which batches really run side by side."""
    return HostDevice(threads=4, in_place="never", unified=unified, **kw)


async def ask(engine, values):
    """Send a row for each value at once; whether each was answered with its double."""
    async with asyncio.timeout(WAIT_S):
        results = await asyncio.gather(*[engine.infer(rows(value)) for value in values])
    return [result["output"][0].tolist() for result in results] == [[2 * value] * 4 for value in values]


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(("contexts", "arenas"), [(4, 1), (4, 2), (4, 4), (5, 3)])
async def test_arenas_are_shared_in_stream_order(contexts, arenas, unified):
    model = ScratchModel()
    async with asynctrt.open(
        model, device=threads(unified), contexts=contexts, arenas=arenas, max_rows=2
    ) as engine:
        assert await ask(engine, range(200))
        assert model.clashes == 0
        assert len(model.seen) == arenas
        statistics = engine.statistics()
    assert statistics.arenas == arenas
    assert statistics.arena_nbytes == arenas * 4096
    assert statistics.arena_nbytes_private == contexts * 4096
    assert statistics.memory_nbytes >= statistics.arena_nbytes
    assert 0 < statistics.arena_busy_share <= 1
    assert statistics.arena_waits <= statistics.batches
    assert (statistics.arena_wait_ns == 0) <= (statistics.arena_waits == 0)


async def test_without_enqueue_memory_no_arena_is_made():
    async with asynctrt.open(double_model(), contexts=2, arenas=1) as engine:
        statistics = engine.statistics()
        assert (statistics.arenas, statistics.arena_nbytes, statistics.arena_nbytes_private) == (0, 0, 0)
        await engine.infer(rows(1))
        assert engine.statistics().arena_busy_share == 0


@pytest.mark.parametrize("unified", [True, False])
async def test_after_an_enqueue_that_was_refused_the_arena_goes_on(unified):
    """Part of it may have been put on the stream: the next batch in the arena waits for just that."""
    model = ScratchModel()
    async with asynctrt.open(model, device=threads(unified), contexts=3, arenas=1, max_rows=1) as engine:
        assert await ask(engine, range(10))

        def refuse(binding, count, **kw):
            ScratchBinding.enqueue(binding, count, **kw)
            raise MemoryError("no workspace")

        for binding in [binding for bay in engine._pool._bays for binding in bay._bindings.values()]:
            binding.enqueue = partial(refuse, binding)
            refused = await asyncio.gather(
                *[engine.infer(rows(value)) for value in range(20)], return_exceptions=True
            )
            errors = [result for result in refused if isinstance(result, Exception)]
            assert errors
            assert all(isinstance(error, ExecutionError) and "no workspace" in str(error) for error in errors)
            del binding.enqueue
            assert await ask(engine, range(20))
    assert model.clashes == 0


def test_memory_of_both_sides_is_counted_and_given_back():
    device = SmallDevice(10_000, unified=False)
    memory = Memory(device, 1000)
    assert memory.nbytes == 2000
    memory.close()
    memory.close()
    assert memory.nbytes == 0


class TestAdmission:
    """What does not fit is refused before it is made, with the arithmetic, and nothing is kept."""

    @staticmethod
    def refused(says, *, memory_nbytes, model=None, arenas=None, **kw):
        device = HostDevice(unified=False, memory_nbytes=memory_nbytes)
        with pytest.raises(DeviceMemoryError) as caught:
            made = None if arenas is None else Arenas(device, arenas)
            pool(model, device, arenas=made, **kw)
        assert says in str(caught.value)
        assert f"out of a budget of {memory_nbytes:,} bytes" in str(caught.value)
        assert device.memory().held_nbytes == 0
        return str(caught.value)

    def test_arenas(self):
        said = self.refused(
            "3 arenas of 4096 bytes need 12,288 bytes on host, and there is room for 10,000 bytes",
            memory_nbytes=10_000,
            model=ScratchModel(4000),
            arenas=3,
            contexts=3,
        )
        assert "fewer arenas" in said

    def test_slabs(self):
        said = self.refused(
            "the slabs of 5 contexts, 512 bytes for 4 rows need 2,560 bytes on host, and there is room for "
            "2,000 bytes",
            memory_nbytes=2000,
            contexts=5,
        )
        assert "fewer contexts or a smaller max_rows" in said

    def test_slabs_beside_arenas(self):
        device = HostDevice(unified=False, memory_nbytes=2 * 4096 + 1000)
        arenas = Arenas(device, 2)
        with pytest.raises(DeviceMemoryError, match="slabs of 2 contexts.* 1,024 bytes .* room for 1,000"):
            pool(ScratchModel(4096), device, arenas=arenas)
        assert arenas.engines == 0
        assert device.memory().held_nbytes == 2 * 4096
        arenas.close()
        assert device.memory().held_nbytes == 0

    @pytest.mark.parametrize(("contexts", "fits"), [(1, True), (3, True), (4, False), (100, False)])
    def test_contexts(self, contexts, fits):
        """The first one shows what one takes; nobody knows before."""
        device = HostDevice(unified=False, memory_nbytes=40_000)
        model = double_model()
        create = model.create_context
        made = []

        def create_large(device):
            context = create(device)
            buffer = device.allocate(10_000)
            context.close = buffer.close
            made.append(context)
            return context

        model.create_context = create_large
        if fits:
            assert pool(model, device, contexts=contexts).close(WAIT_S) == 0
            assert len(made) == contexts
        else:
            with pytest.raises(DeviceMemoryError) as caught:
                pool(model, device, contexts=contexts)
            more = contexts - 1
            assert str(caught.value).startswith(
                f"{more} more contexts of 'double', each as large as the first (10,000 bytes), need "
            ) or (more == 3 and "slabs of 4 contexts" in str(caught.value))
            assert "fewer contexts" in str(caught.value)
        assert device.memory().held_nbytes == 0

    async def test_an_engine_that_does_not_fit_says_so_and_one_that_does_runs_in_the_same_memory(self):
        device = HostDevice(unified=False, memory_nbytes=100_000)
        for _ in range(3):
            with pytest.raises(DeviceMemoryError, match="Open the engine with fewer"):
                await asynctrt.open(ScratchModel(40_000), device=device, contexts=4)
            async with asynctrt.open(ScratchModel(40_000), device=device, contexts=4, arenas=2) as engine:
                assert await ask(engine, range(20))
                assert engine.statistics().memory_nbytes == device.memory().held_nbytes
            assert device.memory().held_nbytes == 0


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

            def enqueue_or_fail(count, *, stream, arena):
                enqueue(count, stream=stream, arena=arena)
                if stream.is_capturing:
                    self.left -= 1
                    if self.left <= 0:
                        raise self.error

            binding.enqueue = enqueue_or_fail
            return binding

        context.bind = bind_stubborn
        return context


class TestGraphs:
    @pytest.mark.parametrize("unified", [True, False])
    @pytest.mark.parametrize(("contexts", "arenas"), [(1, 1), (4, 1), (4, 2), (4, 4)])
    async def test_what_was_captured_is_what_runs(self, contexts, arenas, unified):
        model = ScratchModel(capturable=True)
        async with asynctrt.open(
            model,
            device=threads(unified),
            contexts=contexts,
            arenas=arenas,
            max_rows=4,
            graphs=(1, 2, 3, 4),
        ) as engine:
            assert engine.statistics().graphs == (1, 2, 3, 4)
            captured = model.enqueued
            for _ in range(3):
                assert await ask(engine, range(100))
            assert model.enqueued == captured, "every size is captured, so nothing is put on a stream anew"
            assert model.clashes == 0
            assert len(model.seen) == arenas
            assert engine.statistics().rows_padded == 0

    async def test_a_size_that_is_not_captured_runs_call_by_call(self):
        model = ScratchModel(capturable=True)
        async with asynctrt.open(model, device=threads(), contexts=1, max_rows=4, graphs=(1,)) as engine:
            captured = model.enqueued
            assert await ask(engine, range(4))
            assert model.enqueued == captured + 1
            assert await ask(engine, [5])
            assert model.enqueued == captured + 1
            assert engine.statistics().rows_padded == 0

    async def test_a_batch_is_padded_to_a_captured_size_and_nobody_sees_it(self):
        model = ScratchModel(capturable=True)
        async with asynctrt.open(model, device=threads(), contexts=1, max_rows=8, graphs=(8,)) as engine:
            captured = model.enqueued
            result = await engine.infer(rows(1, 2, 3))
            assert result["output"].tolist() == rows(2, 4, 6).tolist()
            assert result.batch_rows == 3
            statistics = engine.statistics()
            assert (statistics.rows, statistics.rows_padded, statistics.batches) == (3, 5, 1)
            assert list(statistics.by_batch_rows) == [3]
            assert statistics.mean_batch_rows == 3
            assert model.enqueued == captured

    async def test_rows_that_fill_a_batch_of_a_fixed_size_are_counted(self):
        model = double_model(rows_fixed=8)
        async with asynctrt.open(model, max_rows=8, contexts=1) as engine:
            await engine.infer(rows(1, 2, 3))
            assert engine.statistics().rows_padded == 5
            async with engine.slot(rows=2) as slot:
                slot["input"][...] = rows(4, 5)
                assert (await slot.infer())["output"][:, 0].tolist() == [8, 10]
            statistics = engine.statistics()
            assert (statistics.rows, statistics.rows_padded) == (5, 5 + 6)

    async def test_a_slot_runs_beside_what_is_captured(self):
        """Its slab is none that anything was captured for."""
        model = ScratchModel(capturable=True)
        async with asynctrt.open(model, device=threads(), contexts=2, max_rows=4, graphs=(1, 4)) as engine:
            for value in range(10):
                async with engine.slot(rows=4) as slot:
                    slot["input"][...] = value
                    result, others = await asyncio.gather(slot.infer(), ask(engine, range(10)))
                    assert others
                    assert (result["output"] == 2 * value).all()
            assert model.clashes == 0

    async def test_a_model_of_a_fixed_size_is_captured_at_it(self):
        model = ScratchModel(capturable=True, rows_fixed=4)
        async with asynctrt.open(model, device=threads(), max_rows=4, contexts=1, graphs=(4,)) as engine:
            assert engine.statistics().graphs == (4,)
            captured = model.enqueued
            assert await ask(engine, range(10))
            assert model.enqueued == captured

    async def test_by_default_a_device_that_gains_nothing_captures_nothing(self):
        async with asynctrt.open(ScratchModel(capturable=True), contexts=1) as engine:
            assert engine.statistics().graphs == ()

    @pytest.mark.parametrize(
        ("max_rows", "least", "sizes"),
        [(1, 1, (1,)), (64, 1, (1, 4, 16, 64)), (6, 1, (1, 4, 6)), (8, 3, (3, 4, 8)), (4, 4, (4,))],
    )
    async def test_by_default_a_device_that_prefers_graphs_gets_powers_of_four(self, max_rows, least, sizes):
        class Preferring(HostDevice):
            prefers_graphs = True

        model = ScratchModel(capturable=True)
        model.rows_min = least
        async with asynctrt.open(model, device=Preferring(), contexts=1, max_rows=max_rows) as engine:
            assert engine.statistics().graphs == sizes
            assert await ask(engine, range(5))

    @pytest.mark.parametrize("graphs", [(1, 9), (16,)])
    async def test_sizes_that_no_batch_has_are_refused(self, graphs):
        with pytest.raises(OptionsError, match=r"takes batches of 1 to 8 rows here"):
            await asynctrt.open(ScratchModel(capturable=True), max_rows=8, graphs=graphs)

    async def test_rows_of_many_shapes_are_not_captured(self, tmp_path):
        """What a graph reads and writes is known only for the shape that it was captured with."""
        model = asynctrt.FunctionModel(
            lambda inputs, outputs: np.multiply(inputs["input"], 2, out=outputs["output"]),
            inputs=TensorSpec("input", "float32", ("n",)),
            outputs=TensorSpec("output", "float32", ("n",)),
        )
        model.is_capturable = True
        async with asynctrt.open(model, contexts=1, graphs=(1, 4)) as engine:
            assert engine.statistics().graphs == ()
            assert (await engine.infer(rows(3, dims=(7,))))["output"].tolist() == [[6] * 7]

    @pytest.mark.parametrize("at", [1, 2, 3, 6])
    @pytest.mark.parametrize("unified", [True, False])
    async def test_a_model_that_cannot_be_captured_runs_call_by_call_and_that_is_said_once(
        self, at, unified, caplog
    ):
        model = Stubborn(at)
        async with asynctrt.open(
            model, device=threads(unified), contexts=3, arenas=2, max_rows=4, graphs=(1, 4)
        ) as engine:
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            said = caplog.records[0].getMessage()
            assert "'scratch' cannot be captured as a CUDA graph" in said
            assert "this plan allocates while it runs" in said
            assert "graphs='off'" in said
            assert engine.statistics().graphs == ()
            enqueued = model.enqueued
            assert await ask(engine, range(50))
            assert model.enqueued - enqueued == engine.statistics().batches
            assert engine.statistics().rows_padded == 0
            assert model.clashes == 0
        assert len(caplog.records) == 1

    async def test_a_model_that_does_not_run_at_all_says_so_too(self, caplog):
        """The batch that is run before capturing fails: the same as failing while capturing."""

        def broken(inputs, outputs):
            if not inputs["input"].any():
                raise ValueError("only zeros")
            np.multiply(inputs["input"], 2, out=outputs["output"])

        model = double_model(broken)
        model.is_capturable = True
        async with asynctrt.open(model, contexts=1, max_rows=2, graphs=(1,)) as engine:
            assert "only zeros" in caplog.text
            assert engine.statistics().graphs == ()
            assert await ask(engine, [1, 2, 3])

    async def test_a_model_that_says_it_cannot_is_not_tried(self, caplog):
        model = ScratchModel(capturable=False)
        async with asynctrt.open(model, contexts=1, max_rows=2, graphs=(1,)) as engine:
            assert model.enqueued == 0
            assert engine.statistics().graphs == ()

    @pytest.mark.parametrize("error", [DeviceMemoryError("no room for a graph"), DeviceLostError("lost")])
    async def test_what_is_wrong_with_the_device_is_no_fault_of_the_model(self, error):
        device = threads(unified=False)
        with pytest.raises(type(error), match=str(error)):
            await asynctrt.open(
                Stubborn(error=error), device=device, contexts=2, arenas=1, max_rows=4, graphs=(1, 4)
            )
        assert device.memory().held_nbytes == 0

    async def test_a_batch_that_hangs_while_it_is_captured_does_not_hang_opening(self, monkeypatch):
        monkeypatch.setattr("asynctrt.runtime.bay.CAPTURE_S", 0.01)
        gate = Gate()
        model = double_model(gate)
        model.is_capturable = True
        with pytest.raises(DeviceLostError, match="batch of 2 rows did not end within 0.01 s"):
            await asynctrt.open(model, device=threads(), contexts=1, max_rows=2, graphs=(2,))
        gate.go.release()

    def test_what_launching_costs_is_measured_both_ways(self):
        device = threads()
        made = pool(
            ScratchModel(capturable=True), device, arenas=Arenas(device, 1), graphs=(1, 2), contexts=1
        )
        assert made.graph_sizes == (1, 2)
        assert made.direct_ns > 0
        assert made.graph_ns > 0
        made.close(WAIT_S)


class TestSharedArenas:
    """Two engines in the same arenas of one device."""

    @pytest.mark.parametrize("unified", [True, False])
    @pytest.mark.parametrize("graphs", ["off", (1, 2)])
    @pytest.mark.parametrize("count", [1, 2])
    async def test_batches_of_both_never_overlap_in_one(self, count, graphs, unified):
        device = threads(unified)
        one = ScratchModel(capturable=graphs != "off")
        other = ScratchModel(like=one, capturable=graphs != "off")
        settings = {"device": device, "contexts": 3, "max_rows": 2, "graphs": graphs}
        with Arenas(device, count) as arenas:
            async with (
                asynctrt.open(one, shared_arenas=arenas, **settings) as first,
                asynctrt.open(other, shared_arenas=arenas, **settings) as second,
            ):
                for _ in range(3):
                    assert await asyncio.gather(ask(first, range(100)), ask(second, range(100, 200))) == [
                        True,
                        True,
                    ]
                assert one.clashes == other.clashes == 0
                assert one.seen >= {arena.memory.address for arena in arenas.arenas}
                assert arenas.users == [0] * count
                assert arenas.nbytes == count * 4096
                assert first.statistics().arena_nbytes == second.statistics().arena_nbytes == count * 4096
                assert first.statistics().graphs == (() if graphs == "off" else (1, 2))
                assert second.statistics().graphs == first.statistics().graphs

    @pytest.mark.parametrize("graphs", ["off", (1, 2)])
    async def test_a_second_engine_that_needs_more_lets_them_grow_while_the_first_works(self, graphs):
        device = threads(unified=False)
        small = ScratchModel(1000, capturable=True)
        large = ScratchModel(50_000, like=small, capturable=True)
        settings = {"device": device, "contexts": 2, "max_rows": 2, "graphs": graphs}
        with Arenas(device, 2) as arenas:
            async with asynctrt.open(small, shared_arenas=arenas, **settings) as first:
                assert arenas.nbytes == 2 * 1024
                assert await ask(first, range(20))
                working = asyncio.create_task(ask(first, range(300)))
                await asyncio.sleep(0)
                async with asynctrt.open(large, shared_arenas=arenas, **settings) as second:
                    assert await working
                    assert arenas.nbytes == 2 * (50_176 + 1024), "what a graph was captured in is kept"
                    both = await asyncio.gather(ask(first, range(100)), ask(second, range(100)))
                    assert both == [True, True]
                    assert small.clashes == large.clashes == 0
                assert await ask(first, range(20))
        assert device.memory().held_nbytes == 0

    async def test_what_is_captured_is_tried_elsewhere_while_another_engine_works(self):
        """Nothing is in order with the batches of the other one while it is opened."""
        device = threads()
        one = ScratchModel()
        with Arenas(device, 1) as arenas:
            async with asynctrt.open(
                one, device=device, shared_arenas=arenas, contexts=3, max_rows=1
            ) as first:
                for _ in range(5):
                    other = ScratchModel(like=one, capturable=True)
                    working = asyncio.create_task(ask(first, range(200)))
                    await asyncio.sleep(0)
                    async with asynctrt.open(
                        other, device=device, shared_arenas=arenas, contexts=2, max_rows=4, graphs=range(1, 5)
                    ) as second:
                        assert await working
                        assert arenas.arenas[0].memory.address not in other.seen
                        assert second.statistics().graphs == (1, 2, 3, 4)
                        both = await asyncio.gather(ask(first, range(50)), ask(second, range(50)))
                        assert both == [True, True]
                        assert arenas.arenas[0].memory.address in other.seen
                    assert one.clashes == other.clashes == 0
                assert device.memory().held_nbytes == first.statistics().memory_nbytes

    async def test_a_second_engine_that_needs_less_changes_nothing(self):
        device = threads()
        with Arenas(device, 1) as arenas:
            async with asynctrt.open(ScratchModel(5000), device=device, shared_arenas=arenas):
                before = arenas.arenas[0].memory
                async with asynctrt.open(ScratchModel(100), device=device, shared_arenas=arenas) as second:
                    assert arenas.arenas[0].memory is before
                    assert await ask(second, range(10))

    async def test_one_is_closed_and_the_other_goes_on(self):
        device = threads(unified=False)
        with Arenas(device, 1) as arenas:
            first = await asynctrt.open(ScratchModel(), device=device, shared_arenas=arenas, contexts=2)
            async with asynctrt.open(
                ScratchModel(capturable=True),
                device=device,
                shared_arenas=arenas,
                contexts=2,
                max_rows=1,
                graphs=(1,),
            ) as second:
                assert await asyncio.gather(ask(first, range(50)), ask(second, range(50))) == [True, True]
                await first.aclose()
                assert arenas.engines == 1
                assert await ask(second, range(50)), "its graphs waited for events of the one that is gone"
            assert arenas.engines == 0
            assert arenas.arenas[0].last_use is None, "nothing is kept of those that are gone"

    async def test_they_are_not_closed_while_an_engine_is_open(self):
        device = threads()
        arenas = Arenas(device, 1)
        async with asynctrt.open(ScratchModel(), device=device, shared_arenas=arenas) as engine:
            with pytest.raises(UsageError, match="still used by 1 engines"):
                arenas.close()
            assert await ask(engine, range(3))
        arenas.close()
        assert device.memory().held_nbytes == 0

    async def test_an_engine_closes_its_own_arenas_and_not_those_that_are_shared(self):
        device = threads()
        async with asynctrt.open(ScratchModel(), device=device):
            pass
        assert device.memory().held_nbytes == 0
        arenas = Arenas(device, 2)
        async with asynctrt.open(ScratchModel(), device=device, shared_arenas=arenas):
            pass
        assert device.memory().held_nbytes == arenas.nbytes == 2 * 4096
        arenas.close()

    async def test_arenas_of_another_device_are_refused(self):
        with Arenas(HostDevice(), 1) as arenas:
            for device in (HostDevice(), "host"):
                with pytest.raises(OptionsError, match="another device object.*Open both with the same one"):
                    await asynctrt.open(ScratchModel(), device=device, shared_arenas=arenas)
            assert arenas.engines == 0

    @pytest.mark.parametrize("settings", [{"contexts": 2}, {"arenas": 2}, {"contexts": 4, "arenas": 4}])
    async def test_fewer_contexts_than_arenas_or_another_number_of_arenas_is_refused(self, settings):
        device = threads()
        with Arenas(device, 3) as arenas:
            with pytest.raises(OptionsError, match="3 arenas are shared, so leave the option arenas out"):
                await asynctrt.open(ScratchModel(), device=device, shared_arenas=arenas, **settings)
            assert arenas.engines == 0
            async with asynctrt.open(
                ScratchModel(), device=device, shared_arenas=arenas, contexts=3, arenas=3
            ) as engine:
                assert engine.statistics().arenas == 3

    async def test_an_engine_that_is_refused_does_not_use_them(self):
        device = HostDevice(unified=False, memory_nbytes=20_000)
        with Arenas(device, 2) as arenas:
            async with asynctrt.open(ScratchModel(1000), device=device, shared_arenas=arenas, contexts=2):
                with pytest.raises(DeviceMemoryError, match="2 arenas of 100096 bytes"):
                    await asynctrt.open(
                        ScratchModel(100_000), device=device, shared_arenas=arenas, contexts=2
                    )
                with pytest.raises(DeviceMemoryError, match="slabs of 2 contexts"):
                    await asynctrt.open(
                        ScratchModel(1000), device=device, shared_arenas=arenas, contexts=2, max_rows=1000
                    )
                assert arenas.engines == 1
                assert arenas.nbytes == 2 * 1024

    async def test_a_model_without_enqueue_memory_has_no_use_for_them(self):
        device = threads()
        with Arenas(device, 1) as arenas:
            async with asynctrt.open(double_model(), device=device, shared_arenas=arenas) as engine:
                assert await ask(engine, range(3))
                assert engine.statistics().arenas == 0
                assert arenas.engines == 0
