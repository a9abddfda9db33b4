"""Graphs: what is captured is what runs, in a context of its own, whatever the rows come from."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import asynctrt
from asynctrt._util.cancellation import Cancellation, cancelled_by
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.host import HostDevice
from asynctrt.devices.host.streams import HostGraph
from asynctrt.errors import (
    DeviceLostError,
    DeviceMemoryError,
    ExecutionError,
    InputError,
    OptionsError,
    UsageError,
)
from asynctrt.runtime.contexts import PooledContext
from asynctrt.runtime.graphs import Capture, CapturedBatch, Turns
from asynctrt.tensors import TensorSpec
from tests.models import Gate, double_model, rows
from tests.runtime.support import (
    WAIT_S,
    RecordingModel,
    ScratchModel,
    Stubborn,
    ask,
    make_pool,
    make_source,
    threads,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["separate", "unified"])
def device(request):
    return HostDevice(in_place="never", unified=request.param)


def captured(context, slab, count):
    """Capture a size, and return what launching it cost."""
    capture = Capture(
        context._device,
        context._model,
        slab,
        {},
        count,
        profile=None,
        stream=context.stream,
        end=context.untimed.computed,
        arena=context.arena,
        scratch=None,
    )
    capture.warm_up()
    return context.keep_captured((), count, capture)


def test_graphs_that_share_a_context_run_in_turn():
    device = HostDevice(in_place="never", unified=False, threads=2)
    streams, go, ran = [device.create_stream() for _ in range(2)], threading.Event(), []
    graphs, turns = [], Turns()
    for work in (lambda: (go.wait(WAIT_S), ran.append(0)), lambda: ran.append(1)):
        streams[0].begin_capture()
        streams[0].launch(work, label="work")
        graphs.append(CapturedBatch(None, streams[0].end_capture(), 0, turns))
    done = [device.create_event(is_timed=False) for _ in range(2)]
    for graph, stream, event in zip(graphs, streams, done, strict=True):
        graph.launch(stream, event)
    assert not done[1].synchronize(0.05)
    assert not turns.is_stuck
    streams[1].abandon()
    assert turns.is_stuck, "nothing may run after what hangs"
    go.set()
    assert done[1].synchronize(WAIT_S)
    assert ran == [0, 1]
    for stream in streams:
        assert stream.close(WAIT_S)
    device.close()


class TestOneContext:
    """A context of the pool, and those that are captured beside it."""

    @staticmethod
    def make(device):
        context = PooledContext(device, RecordingModel(), None)
        return context, make_source(context, rows(0)).slab, context._model

    @staticmethod
    def run(context, count):
        source = make_source(context, rows(*range(count)))
        context.enqueue(source, context.timed)
        end = context.timed.copied_out if source.has_copies_out else context.timed.computed
        assert end.synchronize(WAIT_S)
        assert end.error is context.timed.computed.error is None
        np.testing.assert_array_equal(source.slab.outputs["output"][:count], 2 * rows(*range(count)))

    def test_a_captured_size_has_a_context_of_its_own(self, device):
        context, slab, model = self.make(device)
        for count in (2, 8):
            assert min(captured(context, slab, count)) > 0
        assert len(model.contexts) == 3
        captured_by = {count: captured for captured, count in model.enqueued}
        assert captured_by == {2: model.contexts[1], 8: model.contexts[2]}
        assert [context.is_captured((), count) for count in (1, 2, 3, 8)] == [False, True, False, True]
        model.enqueued.clear()
        for count in (2, 8, 3, 2):
            self.run(context, count)
        # Only what was not captured is put there call by call, on the context's own.
        assert model.enqueued == [(model.contexts[0], 3)]
        context.forget_captured()
        assert [each.is_closed for each in model.contexts] == [False, True, True]
        self.run(context, 8)
        assert context.close(WAIT_S)
        assert all(each.is_closed for each in model.contexts)

    def test_what_cannot_be_captured_leaves_the_context_as_it_was(self, device):
        context, slab, model = self.make(device)
        model.refused.add(4)
        with pytest.raises(ExecutionError):
            captured(context, slab, 4)
        assert model.contexts[1].is_closed
        assert not context.stream.is_capturing
        assert not context.is_captured((), 4)
        self.run(context, 3)
        assert context.close(WAIT_S)

    def test_a_batch_that_fails_while_it_is_captured(self, device):
        context, slab, model = self.make(device)
        model.work[4] = lambda: 1 // 0
        with pytest.raises(ZeroDivisionError):
            captured(context, slab, 4)
        assert model.contexts[1].is_closed
        assert context.close(WAIT_S)


class TestAnEngine:
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
        [
            (1, 1, (1,)),
            (64, 1, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)),
            (6, 1, (1, 2, 3, 4, 6)),
            (8, 3, (3, 4, 6, 8)),
            (4, 4, (4,)),
        ],
    )
    async def test_by_default_a_device_that_prefers_graphs_gets_a_few_sizes(self, max_rows, least, sizes):
        class Preferring(HostDevice):
            prefers_graphs = True

        model = ScratchModel(capturable=True)
        model.capabilities = replace(model.capabilities, rows_min=least)
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
        model.capabilities = replace(model.capabilities, is_capturable=True)
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
        model.capabilities = replace(model.capabilities, is_capturable=True)
        async with asynctrt.open(model, contexts=1, max_rows=2, graphs=(1,)) as engine:
            assert "only zeros" in caplog.text
            assert engine.statistics().graphs == ()
            assert await ask(engine, [1, 2, 3])

    async def test_a_model_that_says_it_cannot_is_not_tried(self, caplog):
        model = ScratchModel(capturable=False)
        async with asynctrt.open(model, contexts=1, max_rows=2, graphs=(1,)) as engine:
            assert model.enqueued == 0
            assert engine.statistics().graphs == ()

    async def test_what_is_wrong_with_the_device_is_no_fault_of_the_model(self):
        device, error = threads(unified=False), DeviceLostError("lost")
        with pytest.raises(DeviceLostError, match="lost"):
            await asynctrt.open(
                Stubborn(error=error), device=device, contexts=2, arenas=1, max_rows=4, graphs=(1, 4)
            )
        assert device.memory().held_nbytes == 0

    async def test_without_room_for_graphs_there_is_an_engine_without_graphs(self, caplog):
        device, error = threads(unified=False), DeviceMemoryError("no room for a graph")
        async with asynctrt.open(
            Stubborn(error=error), device=device, contexts=2, arenas=1, max_rows=4, graphs=(1, 4)
        ) as engine:
            assert engine.statistics().graphs == ()
            assert await ask(engine, [1, 2, 3])
        (said,) = [record.getMessage() for record in caplog.records]
        assert said.startswith("'scratch' has no room for CUDA graphs, so its batches")
        assert said.endswith("no room for a graph")
        assert device.memory().held_nbytes == 0

    @pytest.mark.parametrize(
        ("room", "sizes", "captured"),
        [
            (17, (1, 2, 4, 8), (1, 2, 4, 8)),
            (13, (1, 2, 4, 8), (2, 8)),
            (7, (1, 2, 4, 8), ()),
            (9, (1, 4), (1, 4)),
            (7, (1, 4), ()),
            (1, (1, 4), ()),
        ],
    )
    def test_graphs_that_will_not_all_fit_are_not_begun(self, caplog, room, sizes, captured):
        """Those of the first context show what each takes: at most half of what is free, in two contexts. If
        that is too much, every second size may do."""
        device, model = HostDevice(unified=False, memory_nbytes=room * 10_000 + 6_000), double_model()
        model.capabilities = replace(model.capabilities, is_capturable=True)
        create, made = model.create_context, []

        def create_large(device):
            context = create(device)
            if len(made) < 2:  # Those of the pool.
                made.append(context)
                return context
            buffer = device.allocate(10_000)
            context.close = buffer.close
            made.append(context)
            return context

        model.create_context = create_large
        pool = make_pool(model, device, contexts=2, graphs=sizes, rows_max=8)
        assert pool.captured.sizes == captured
        assert len(made) <= 2 + len(sizes) + (2 * len(captured) if captured else len(sizes) // 2)
        warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warned) == (not captured)
        assert all(said.startswith("'double' has no room for CUDA graphs") for said in warned)
        pool.close(WAIT_S)
        assert device.memory().held_nbytes == 0

    def test_a_batch_that_is_not_captured_costs_what_a_change_of_size_does(self, monkeypatch):
        """It seldom has the size of the one before. While one size is captured, no batch changes it."""
        now = [0]
        clock = SimpleNamespace(now_ns=lambda: now[0])
        monkeypatch.setattr("asynctrt.runtime.contexts.clock", clock)

        class Changing(ScratchModel):
            def create_context(self, device):
                context = super().create_context(device)
                bind, last = context.bind, [0]

                def bind_changing(inputs, outputs):
                    binding = bind(inputs, outputs)
                    enqueue = binding.enqueue

                    def enqueue_changing(rows, **kw):
                        now[0] += 400_000 if rows == last[0] else 1_300_000
                        last[0] = rows
                        enqueue(rows, **kw)

                    binding.enqueue = enqueue_changing
                    return binding

                context.bind = bind_changing
                return context

        device = threads()
        model = Changing(capturable=True)
        made = make_pool(model, device, arenas=Arenas(device, 1), graphs=(1, 4), contexts=2, rows_max=4)
        assert made.captured.direct_ns == 1_300_000
        made.close(WAIT_S)

    def test_nothing_more_is_captured_for_an_engine_that_nobody_waits_for(self, caplog):
        device, model, cancellation = HostDevice(unified=False), double_model(), Cancellation()
        model.capabilities = replace(model.capabilities, is_capturable=True)
        create, made = model.create_context, []

        def create_and_cancel(device):
            made.append(create(device))
            if len(made) > 2:  # Those of the pool come before.
                cancellation.cancel()
            return made[-1]

        model.create_context = create_and_cancel
        with cancelled_by(cancellation), pytest.raises(UsageError, match="opening was cancelled"):
            make_pool(model, device, contexts=2, graphs=(1, 4))
        assert len(made) == 3
        assert not caplog.records
        assert device.memory().held_nbytes == 0

    @pytest.mark.parametrize("error", [InputError("no profile takes it"), ExecutionError("it cannot tell")])
    def test_if_no_size_is_taken_nothing_is_captured(self, error):
        def profile_of(shape, rows):
            raise error

        device = threads()
        arenas = Arenas(device, 1)
        model = ScratchModel(capturable=True)
        made = make_pool(model, device, arenas=arenas, graphs=(1, 4), contexts=1, profile_of=profile_of)
        assert made.captured.sizes == ()
        made.close(WAIT_S)

    def test_sizes_between_two_profiles_are_left_out(self):
        def profile_of(shape, rows):
            if 8 < rows < 32:
                raise InputError("no profile takes 16 rows")
            return int(rows >= 32)

        device = threads()
        made = make_pool(
            ScratchModel(capturable=True),
            device,
            arenas=Arenas(device, 1),
            graphs=(1, 4, 16, 64),
            contexts=1,
            rows_max=64,
            profile_of=profile_of,
        )
        assert made.captured.sizes == (1, 4, 64)
        made.close(WAIT_S)

    async def test_a_batch_that_hangs_while_it_is_captured_does_not_hang_opening(self, monkeypatch):
        monkeypatch.setattr("asynctrt.runtime.graphs.TRIAL_S", 0.01)
        gate = Gate()
        model = double_model(gate)
        model.capabilities = replace(model.capabilities, is_capturable=True)
        with pytest.raises(DeviceLostError, match="batch of 2 rows did not end within 0.01 s"):
            await asynctrt.open(model, device=threads(), contexts=1, max_rows=2, graphs=(2,))
        gate.go.release()

    def test_what_launching_costs_is_measured_both_ways(self):
        device = threads()
        made = make_pool(
            ScratchModel(capturable=True), device, arenas=Arenas(device, 1), graphs=(1, 2), contexts=1
        )
        assert made.captured.sizes == (1, 2)
        assert made.captured.direct_ns > 0
        assert made.captured.graph_ns > 0
        made.close(WAIT_S)


@pytest.fixture
def replays(monkeypatch):
    """How often a graph was launched: ``replays()`` tells, and begins anew."""
    count, launch = [0], HostGraph.launch

    def counted(graph, *, stream):
        count[0] += 1
        launch(graph, stream=stream)

    monkeypatch.setattr(HostGraph, "launch", counted)

    def told():
        replayed, count[0] = count[0], 0
        return replayed

    return told


@pytest.mark.parametrize("unified", [True, False])
class TestRowsOfEveryKind:
    """A graph reads the context's own slab, so rows from anywhere are replayed with it."""

    @staticmethod
    def opening(unified, model=None, **settings):
        model = model or double_model()
        model.capabilities = replace(model.capabilities, is_capturable=True)
        device = HostDevice(in_place="always", unified=unified)
        settings = {"max_rows": 4, "graphs": (4,), "contexts": 2, **settings}
        return asynctrt.open(model, device=device, **settings)

    async def test_rows_of_callers_and_rows_on_the_device(self, unified, replays):
        async with self.opening(unified) as engine:
            replays()
            for value in range(10):
                held = (await engine.infer(rows(value, 1, 2), outputs="device"))["output"]
                assert (await engine.infer(held))["output"].tolist() == rows(4 * value, 4, 8).tolist()
            assert replays() == 20
            assert engine.statistics().rows_padded == 20

    async def test_what_was_captured_stays_however_many_contexts_and_slabs_there_are(self, unified, replays):
        async with self.opening(unified, contexts=70) as engine:
            replays()
            for value in range(10):
                assert ((await engine.infer(rows(*[value] * 4)))["output"] == 2 * value).all()
            assert replays() == 10
            assert engine.statistics().graphs == (4,)
            assert all(context.is_captured((), 4) for context in engine._pool.contexts)
