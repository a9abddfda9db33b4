"""Contexts: the order in which a batch is put on a stream, arenas in stream order, memory and its bounds."""

import asyncio
from functools import partial

import numpy as np
import pytest

import asynctrt
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.host import HostBuffer, HostDevice, HostStream
from asynctrt.errors import DeviceError, DeviceMemoryError, ExecutionError, OptionsError, UsageError
from asynctrt.runtime.contexts import SLAB_NBYTES_MIN, SLABS_MAX, BatchEvents, PooledContext
from asynctrt.runtime.staging import DeviceSource, StagingBuffers
from asynctrt.scheduling.key import BatchKey
from asynctrt.testing import LatchDevice
from tests.models import double_model, rows, sequence_onnx
from tests.runtime.support import (
    WAIT_S,
    RecordingModel,
    ScratchBinding,
    ScratchModel,
    ask,
    make_batch,
    make_pool,
    make_request,
    make_source,
    threads,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["separate", "unified"])
def device(request):
    return HostDevice(in_place="never", unified=request.param)


class Logged:
    """A stream that writes down what is put on it."""

    def __init__(self, context):
        self._stream, self.log = context.stream, []
        self._names = {
            getattr(events, name): name
            for events in (context.timed, context.untimed)
            for name in ("begun", "copied_in", "started", "computed", "copied_out")
        }
        context.stream = self

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

    def copy_bytes(self, target, source, nbytes):
        self.log.append(f"copy {nbytes} bytes")
        self._stream.copy_bytes(target, source, nbytes)

    def launch(self, work, *, label, **kw):
        self.log.append(f"launch {label}")
        self._stream.launch(work, label=label, **kw)

    def said(self):
        """What was put on it since the last time."""
        said, self.log = self.log, []
        return said


class TestTheOrderOfThings:
    """Copy in, wait for the arena, compute, copy out; and the events between them where times are taken."""

    @staticmethod
    def context(*, unified, arenas):
        device = HostDevice(in_place="never", unified=unified)
        made = Arenas(device, 1, nbytes=256) if arenas else None
        context = PooledContext(device, RecordingModel(256 * arenas), made and made.arenas[0])
        return context, Logged(context), made

    def test_with_an_arena_and_memory_of_its_own(self):
        context, stream, arenas = self.context(unified=False, arenas=True)
        arenas.arenas[0].last_use = HostDevice().create_event()
        source = make_source(context, rows(1, 2))
        context.enqueue(source, context.timed)
        assert stream.said() == [
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
        arenas.arenas[0].last_use = HostDevice().create_event()
        context.enqueue(source, context.untimed)
        assert stream.said() == [
            "copy 32",
            "wait",
            "launch 2",
            "record computed",
            "copy 32",
            "record copied_out",
        ]
        assert context.untimed.copied_out.synchronize(WAIT_S)
        context.enqueue(source, context.untimed)
        assert "wait" not in stream.said(), "what it did itself is over before anyway"
        assert context.close(WAIT_S)
        arenas.close()

    def test_on_unified_memory_and_without_an_arena(self):
        context, stream, _ = self.context(unified=True, arenas=False)
        source = make_source(context, rows(1, 2))
        context.enqueue(source, context.timed)
        assert stream.said() == ["record begun", "launch 2", "record computed"]
        context.enqueue(source, context.untimed)
        assert stream.said() == ["launch 2", "record computed"]
        assert context.close(WAIT_S)

    def test_of_a_padded_batch_all_rows_are_copied_in_and_only_the_callers_out(self):
        context, stream, _ = self.context(unified=False, arenas=False)
        context.enqueue(make_source(context, rows(1, 2), rows_run=4), context.untimed)
        assert stream.said() == ["copy 64", "launch 4", "record computed", "copy 32", "record copied_out"]
        assert context.close(WAIT_S)

    @pytest.mark.parametrize("unified", [False, True])
    def test_after_a_refusal_the_end_of_what_was_put_there_is_marked(self, unified):
        context, stream, arenas = self.context(unified=unified, arenas=True)
        source = make_source(context, rows(1))
        context._model.refused.add(1)
        with pytest.raises(ExecutionError):
            context.enqueue(source, context.untimed)
        assert arenas.arenas[0].last_use is None
        stream.said()
        context.enqueue_end(source, context.untimed)
        assert stream.said() == ["record computed", "record copied_out"][: 1 + (not unified)]
        assert arenas.arenas[0].last_use is context.untimed.computed
        assert context.close(WAIT_S)
        arenas.close()

    def test_after_a_failure_before_it_waited_the_next_batch_still_waits_for_the_one_before(self):
        """Else the next batch would compute in the arena beside the one that still computes there."""
        context, stream, arenas = self.context(unified=False, arenas=True)
        before = HostDevice().create_event()
        arenas.arenas[0].last_use = before
        source = make_source(context, rows(1))
        stream.copy = refuse
        with pytest.raises(DeviceError):
            context.enqueue(source, context.untimed)
        assert stream.said() == []
        context.enqueue_end(source, context.untimed)
        assert stream.said() == ["wait", "record computed", "record copied_out"]
        assert arenas.arenas[0].last_use is context.untimed.computed
        assert context.close(WAIT_S)
        arenas.close()


def refuse(*arguments, **more):
    raise DeviceError("a copy was refused")


def test_events_without_times_are_two():
    events = BatchEvents(HostDevice(), are_timed=False)
    assert (events.begun, events.copied_in, events.started) == (None, None, None)
    assert events.computed is not events.copied_out


def test_who_used_the_arena_last(device):
    arenas = Arenas(device, 1, nbytes=256)
    context = PooledContext(device, RecordingModel(256), arenas.arenas[0])
    assert not context.was_last_in_arena
    arenas.arenas[0].last_use = device.create_event()
    assert not context.was_last_in_arena
    arenas.arenas[0].last_use = context.untimed.computed
    assert context.was_last_in_arena
    assert context.close(WAIT_S)
    assert arenas.arenas[0].last_use is None
    arenas.close()


def test_a_stream_that_does_not_end_keeps_the_context():
    device = LatchDevice()
    context = PooledContext(device, RecordingModel(), None)
    context.enqueue(make_source(context, rows(1)), context.timed)
    assert not context.close(0.01)
    assert not context.context.is_closed
    device.open()
    assert context.close(WAIT_S)
    assert context.context.is_closed


class TestTheSourceOfABatch:
    """The pool makes the source that a batch's key asks for, in the slab of the batch's context."""

    @pytest.mark.parametrize(
        "key", [BatchKey(on_device=True), BatchKey(outputs_on_device=True)], ids=["in", "out"]
    )
    def test_rows_on_the_device_are_copied_one_by_one(self, key):
        pool = make_pool()
        assert type(pool.source(make_batch(make_request(rows(1)), key=key))) is DeviceSource
        pool.close(WAIT_S)


def test_fixed_shapes_have_their_memory_from_the_start():
    made = make_pool()
    nbytes = made.nbytes
    assert nbytes == 2 * 512
    for context in (0, 1):
        source = made.source(make_batch(make_request(rows(1)), context=context))
        made.contexts[context].binding(source)
    assert made.nbytes == nbytes
    assert repr(made) == "<ContextPool contexts=2 arenas=0 nbytes=1024>"
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
            made = make_pool(device=device)
        except DeviceMemoryError:
            assert nbytes < (1024 if unified else 2048)
        else:
            made.close(WAIT_S)
        assert device.left == nbytes


def sequence_pool(tmp_path):
    from asynctrt.backends.onnxruntime import OnnxModel

    return make_pool(OnnxModel(sequence_onnx(tmp_path / "m.onnx")), contexts=1)


def source_of(pool, length):
    key = BatchKey((("length", length),))
    return pool.source(make_batch(make_request(np.ones((1, length), np.float32)), key=key))


def test_memory_grows_with_the_shapes_and_the_last_one_stays(tmp_path):
    made = sequence_pool(tmp_path)
    assert made.nbytes == 0
    sizes = []
    for length in (10, 1000, 10):
        source_of(made, length)
        sizes.append(made.nbytes)
    assert sizes[0] < sizes[1] == sizes[2]
    made.close(WAIT_S)


def test_ordinary_memory_that_became_too_small_is_freed(tmp_path):
    made = sequence_pool(tmp_path)
    for length in range(10, 1000, 10):
        source_of(made, length)
    assert made.nbytes == made.contexts[0].slab_nbytes == made.layout((("length", length),)).nbytes
    made.close(WAIT_S)


class TestPinnedMemory:
    """To allocate and free it waits for the batches on the device, so it is done seldom."""

    def pool(self, tmp_path, **settings):
        from asynctrt.backends.onnxruntime import OnnxModel

        device = HostDevice(unified=False, **settings)
        return make_pool(OnnxModel(sequence_onnx(tmp_path / "m.onnx")), device, contexts=2)

    def batch(self, length, context):
        key = BatchKey((("length", length),))
        return make_batch(make_request(np.ones((1, length), np.float32)), key=key, context=context)

    def grow(self, pool, length, context):
        """Make room for a batch as the driver does, and return the memory of its context."""
        batch = self.batch(length, context)
        if pool.missing_nbytes(batch):
            pool.growth(batch)()
        pool.source(batch)
        return pool.contexts[context].slab_nbytes

    def test_small_shapes_need_none_but_what_there_is_from_the_start(self, tmp_path):
        made = self.pool(tmp_path)
        nbytes = made.nbytes
        for length in (1, 1000, 10, 30_000):
            assert not made.missing_nbytes(self.batch(length, 0))
            assert self.grow(made, length, 0) == SLAB_NBYTES_MIN
        assert made.nbytes == nbytes == 2 * 2 * SLAB_NBYTES_MIN
        assert made.missing_nbytes(self.batch(40_000, 0))
        made.close(WAIT_S)

    def test_a_context_gets_as_much_as_another_one_needed_before(self, tmp_path):
        made = self.pool(tmp_path)
        largest = self.grow(made, 400_000, 0)
        assert self.grow(made, 300_000, 1) == largest
        assert not made.missing_nbytes(self.batch(400_000, 1))
        made.close(WAIT_S)

    def test_it_gets_only_what_it_needs_if_there_is_no_room_for_more(self, tmp_path):
        made = self.pool(tmp_path, memory_nbytes=60 << 20)
        assert self.grow(made, 700_000, 0) > 20 << 20
        assert self.grow(made, 100_000, 1) < 5 << 20
        with pytest.raises(DeviceMemoryError):
            self.grow(made, 400_000, 1)
        made.close(WAIT_S)

    def test_what_was_outgrown_is_kept_while_there_is_room_as_freeing_it_holds_up_all_others(self, tmp_path):
        made = self.pool(tmp_path, memory_nbytes=60 << 20)
        device = made._device
        held = device.memory().held_nbytes
        grown = self.grow(made, 100_000, 0)
        assert device.memory().held_nbytes == held + 2 * grown
        again = self.grow(made, 120_000, 0)
        assert again == 2 * grown, "so that it rarely grows"
        assert made.nbytes == device.memory().held_nbytes == held + 2 * grown + 2 * again
        self.grow(made, 700_000, 0)
        assert len(made.contexts[0]._outgrown) == 1, "the others were freed for what had no room"
        made.close(WAIT_S)
        assert device.memory().held_nbytes == 0


def test_what_is_remembered_of_shapes_is_bounded(tmp_path):
    made = sequence_pool(tmp_path)
    for length in range(1, 3 * SLABS_MAX):
        made.contexts[0].binding(source_of(made, length))
    assert (
        max(len(made.contexts[0]._slabs), len(made.contexts[0]._bindings_in_place), len(made._layouts))
        <= SLABS_MAX
    )
    made.close(WAIT_S)


async def test_a_shape_that_does_not_fit_fails_its_batch_only(tmp_path):
    async with asynctrt.open(sequence_onnx(tmp_path / "m.onnx"), device=SmallDevice(20_000)) as engine:
        await engine.infer(np.ones((1, 10), np.float32))
        with pytest.raises(DeviceMemoryError, match="bytes are more than"):
            await engine.infer(np.ones((1, 100_000), np.float32))
        assert (await engine.infer(np.ones((1, 10), np.float32)))["total"].tolist() == [10]


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

        for binding in [
            slab.binding for context in engine._pool.contexts for slab in context._slabs.values()
        ]:
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
    memory = StagingBuffers(device, 1000)
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
            make_pool(model, device, arenas=made, **kw)
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
            "the slabs of 5 contexts, 512 bytes for 4 rows, need 2,560 bytes on host, and there is room for "
            "2,000 bytes",
            memory_nbytes=2000,
            contexts=5,
        )
        assert "fewer contexts or a smaller max_rows" in said

    def test_slabs_of_a_gpu_without_memory_of_its_own(self):
        """Staging memory and its counterpart are taken from the same."""

        class Integrated(HostDevice):
            is_integrated = True

        with pytest.raises(DeviceMemoryError, match="the slabs of 2 contexts.* need 2,048 bytes"):
            make_pool(device=Integrated(unified=False, memory_nbytes=2000))

    def test_slabs_beside_arenas(self):
        device = HostDevice(unified=False, memory_nbytes=2 * 4096 + 1000)
        arenas = Arenas(device, 2)
        with pytest.raises(DeviceMemoryError, match="slabs of 2 contexts.* 1,024 bytes .* room for 1,000"):
            make_pool(ScratchModel(4096), device, arenas=arenas)
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
            assert make_pool(model, device, contexts=contexts).close(WAIT_S) == 0
            assert len(made) == contexts
        else:
            with pytest.raises(DeviceMemoryError) as caught:
                make_pool(model, device, contexts=contexts)
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

    async def test_what_is_captured_while_another_engine_opens_does_not_use_their_memory(self):
        """An engine looks once, and the other may open and serve while it still captures."""
        device, model = threads(unified=False), ScratchModel(capturable=True)
        with Arenas(device, 1) as arenas:
            async with asynctrt.open(
                model, device=device, shared_arenas=arenas, max_rows=1, graphs=(1,)
            ) as engine:
                assert model.seen, "nothing ran before it was captured"
                assert arenas.arenas[0].memory.address not in model.seen
                assert engine.statistics().graphs == (1,)
                assert await ask(engine, range(3))
                assert arenas.arenas[0].memory.address in model.seen

    async def test_without_room_to_capture_beside_them_there_is_an_engine_without_graphs(self, caplog):
        device = HostDevice(unified=False, in_place="never", memory_nbytes=20_000)
        with Arenas(device, 1, nbytes=12_288) as arenas:
            model = ScratchModel(capturable=True)
            async with asynctrt.open(
                model, device=device, shared_arenas=arenas, contexts=1, max_rows=1, graphs=(1,)
            ) as engine:
                assert engine.statistics().graphs == ()
                assert await ask(engine, range(3))
        assert "has no room for CUDA graphs" in caplog.text

    async def test_a_stream_is_closed_after_what_may_refer_to_it(self, monkeypatch):
        order, closed = [], HostStream.close

        class Model(ScratchModel):
            def create_context(self, device):
                context = super().create_context(device)
                context.close = partial(order.append, "context")
                return context

        def close(self, timeout_s):
            order.append("stream")
            return closed(self, timeout_s)

        monkeypatch.setattr(HostStream, "close", close)
        async with asynctrt.open(Model(), device=threads(), contexts=2) as engine:
            assert await ask(engine, range(3))
        assert order == ["context", "stream"] * 2

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


def test_a_model_that_changes_its_mind_cannot_make_the_device_write_beyond_its_memory():
    pool = make_pool(rows_held=lambda shape: 4)
    batch = make_batch(make_request(rows(1, 2, 3)), rows_run=5)
    with pytest.raises(ExecutionError, match="must not change its answers"):
        pool.source(batch)
    pool.source(make_batch(*batch.requests, rows_run=4))
    assert pool.close(WAIT_S) == 0
