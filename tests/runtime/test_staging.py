"""Staging: layouts, where the rows of a batch come from, and how outputs are copied out."""

import asyncio
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.devices.host import HostDevice
from asynctrt.errors import InputError, QueueFullError, UsageError
from asynctrt.runtime import driver, spans
from asynctrt.runtime.results import ResultMemory
from asynctrt.runtime.spans import PART_NBYTES_MIN, copy_out, fills, spans_of
from asynctrt.runtime.staging import (
    RowSource,
    Slab,
    StagingBuffers,
    deliver,
    lay_out,
)
from asynctrt.tensors import BatchRecord, TensorSpec
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import double_model, double_onnx, rows, unnamed_output_onnx
from tests.runtime.support import WAIT_S, make_batch, make_request

FLOAT, INT = np.dtype("float32"), np.dtype("int64")


def test_tensors_lie_apart_and_aligned():
    specs = [TensorSpec("a", FLOAT, (3,)), TensorSpec("b", INT, ())], [TensorSpec("c", FLOAT, (100,))]
    layout = lay_out(*specs, {}, 10)
    spans = [*layout.inputs, *layout.outputs]
    assert [span.offset for span in spans] == [0, 256, 512]
    assert layout.nbytes == 512 + 4096
    assert (layout.input_row_nbytes, layout.output_row_nbytes) == (12 + 8, 400)


def test_dynamic_dimensions_take_their_value_and_unknown_outputs_no_memory():
    inputs, outputs = [TensorSpec("a", FLOAT, ("n",))], [TensorSpec("b", FLOAT, ("m",))]
    layout = lay_out(inputs, outputs, {"n": 7}, 2)
    assert layout.inputs[0].dims == (7,)
    assert layout.outputs == (None,)
    assert layout.output_row_nbytes == 0


def test_a_dimension_of_zero():
    layout = lay_out([TensorSpec("a", FLOAT, (0,))], [TensorSpec("b", FLOAT, (1,))], {}, 2)
    assert layout.inputs[0].row_nbytes == 0


def slab_of(dims=(), dtype=FLOAT, rows_max=8, *, inputs=None, device=None, **kw):
    """A slab for inputs and an output of the same rows, filled with what must never be seen."""
    specs = inputs or [TensorSpec("x", dtype, dims)]
    layout = lay_out(specs, [TensorSpec("y", dtype, dims)], {}, rows_max)
    slab = Slab(layout, StagingBuffers(device or HostDevice(), layout.nbytes), **kw)
    for view in slab.inputs:
        view[...] = -1
    return slab


def stage(slab, *requests, **kw):
    """The source of a batch of the requests, staged."""
    source = RowSource(make_batch(*requests, **kw), slab)
    source.stage()
    return source


@pytest.mark.parametrize("counts", [[1], [3], [1, 1, 1], [2, 1, 3]])
def test_rows_are_gathered_in_order_for_each_input(counts):
    starts = np.cumsum([0, *counts[:-1]])
    requests = [
        make_request(
            np.arange(start, start + count, dtype=np.float32)[:, None], np.arange(start, start + count) * 10
        )
        for start, count in zip(starts, counts, strict=True)
    ]
    total = sum(counts)
    slab = slab_of(inputs=[TensorSpec("a", FLOAT, (1,)), TensorSpec("b", INT)])
    source = stage(slab, *requests)
    assert slab.inputs[0][:, 0].tolist() == [*range(total), *[-1] * (8 - total)]
    assert slab.inputs[1].tolist() == [*range(0, total * 10, 10), *[-1] * (8 - total)]
    assert source.spans == (None if total == len(counts) else spans_of(requests))
    assert source.staged_nbytes == total * (4 + 8)


def test_strided_rows_are_gathered():
    slab = slab_of(dims=(2,), rows_max=4)
    array = np.arange(16, dtype=np.float32).reshape(4, 4)
    stage(slab, make_request(array[:2, ::2]), make_request(array[2:, ::2]))
    assert slab.inputs[0].tolist() == array[:, ::2].tolist()


def test_padding_is_a_copy_of_the_first_row():
    slab = slab_of(inputs=[TensorSpec("a", FLOAT, (2,)), TensorSpec("b", INT)])
    requests = [
        make_request(np.full((count, 2), count, np.float32), np.full(count, 10 * count)) for count in (1, 2)
    ]
    source = stage(slab, *requests, rows_run=6)
    assert slab.inputs[0].tolist() == [[n, n] for n in (1, 2, 2, 1, 1, 1, -1, -1)]
    assert slab.inputs[1].tolist() == [10, 20, 20, 10, 10, 10, -1, -1]
    assert source.staged_nbytes == 6 * (8 + 8)


@pytest.mark.parametrize("counts", [[8], [1] * 8, [1, 6, 1], [3, 2], [1]])
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_parts_do_together_what_is_done_at_once(monkeypatch, counts, parts):
    monkeypatch.setattr(spans, "PART_NBYTES_MIN", 1)
    rng = np.random.default_rng(0)
    requests = [
        make_request(rng.random((count, 2)).astype(FLOAT), rng.integers(0, 99, count)) for count in counts
    ]
    inputs = [TensorSpec("a", FLOAT, (2,)), TensorSpec("b", INT)]
    at_once, in_parts = slab_of(inputs=inputs), slab_of(inputs=inputs)
    stage(at_once, *requests, rows_run=8)
    work = RowSource(make_batch(*requests, rows_run=8), in_parts).parts(parts)
    assert len(work) == parts
    for part in reversed(work):
        part()
    for expected, found in zip(at_once.inputs, in_parts.inputs, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_small_batches_are_staged_in_one_part():
    source = RowSource(make_batch(make_request(np.zeros((2, 1), FLOAT))), slab_of())
    assert source.parts(4) == [source.stage]


class TestArraysThatChanged:
    """An array that was resized, reshaped or filled anew after it was checked: its caller alone is told."""

    @pytest.mark.parametrize("guilty", [{0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}])
    @pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1, 2)])
    @pytest.mark.parametrize("rows_run", [None, 8])
    def test_those_of_the_others_are_staged(self, guilty, counts, rows_run):
        slab = slab_of(dims=(2,))
        requests = [
            make_request(np.full((count, 2), 10 + number, np.float32)) for number, count in enumerate(counts)
        ]
        for number in guilty:
            (array,) = requests[number].payload
            array.shape = array.shape[::-1] if array.shape != (2, 2) else (1, 4)
        source = stage(slab, *requests, rows_run=rows_run)
        assert [request for request, _ in source.refused] == [requests[number] for number in sorted(guilty)]
        for _, error in source.refused:
            assert isinstance(error, InputError)
            assert "changed between the call and their batch: ValueError" in str(error)
            assert isinstance(error.__cause__, ValueError)
        staged = slab.inputs[0]
        innocent = {10 + number for number in range(3)} - {10 + number for number in guilty}
        assert set(staged[: rows_run or sum(counts)].ravel().tolist()) <= innocent, "a copy of a mate's rows"
        for number, span in enumerate(spans_of(requests)):
            if number not in guilty:
                assert (staged[span] == 10 + number).all()

    @pytest.mark.parametrize("count", [1, 3])
    def test_if_all_did_the_batch_fails(self, count):
        requests = [make_request(np.ones((1, 2), np.float32)) for _ in range(count)]
        for request in requests:
            request.payload[0].shape = (2, 1)
        with pytest.raises(InputError, match="Leave arrays alone until infer has returned"):
            stage(slab_of(dims=(2,)), *requests)

    def test_one_whose_rows_broadcast_is_found_too(self):
        requests = [make_request(np.ones((3, 2), np.float32)), make_request(np.full((1, 2), 5, np.float32))]
        requests[0].payload[0].resize((1, 2), refcheck=False)
        source = stage(slab_of(dims=(2,)), *requests)
        assert [request for request, _ in source.refused] == requests[:1]

    @pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1, 2), (2, 3, 1)])
    @pytest.mark.parametrize("parts", [None, 2, 6])
    def test_one_that_grew_and_one_that_shrank_push_no_other_along(self, monkeypatch, counts, parts):
        """Together they have as many rows as before, and so nothing else tells."""
        monkeypatch.setattr(spans, "PART_NBYTES_MIN", 1)
        arrays = [np.full((count, 2), 10 + number, np.float32) for number, count in enumerate(counts)]
        requests = [make_request(array) for array in arrays]
        slab = slab_of(dims=(2,))
        source = RowSource(make_batch(*requests), slab)
        work = [source.stage] if parts is None else source.parts(parts)
        source._pins = []  # As for what is staged at once.
        arrays[0].resize((counts[0] + 1, 2), refcheck=False)
        arrays[0][-1] = 99
        arrays[2].resize((counts[2] - 1, 2), refcheck=False)
        try:
            for part in work:
                part()
        except ValueError:
            source.stage()
        assert {requests[2]} <= {request for request, _ in source.refused} <= {requests[0], requests[2]}
        assert (slab.inputs[0][spans_of(requests)[1]] == 11).all()
        assert not (slab.inputs[0] == 99).any()

    @pytest.mark.anyio
    @pytest.mark.parametrize("parts", [1, 3])
    async def test_what_threads_read_cannot_be_freed(self, monkeypatch, parts):
        monkeypatch.setattr(driver, "GATHER_ON_LOOP_NBYTES_MAX", 0)
        monkeypatch.setattr(spans, "PART_NBYTES_MIN", 1)
        begun, go = threading.Event(), threading.Event()
        stage = RowSource.stage if parts == 1 else RowSource._stage_part

        def held(self, *between):
            begun.set()
            assert go.wait(WAIT_S)
            stage(self, *between)

        monkeypatch.setattr(RowSource, stage.__name__, held)
        monkeypatch.setattr("asynctrt.runtime.jobs.cores", lambda: parts)
        array = rows(1, 2, 3)
        async with asynctrt.open(double_model(), max_rows=4) as engine:
            task = asyncio.create_task(engine.infer(array))
            await until(begun.is_set)
            with pytest.raises(ValueError, match="cannot resize an array"):
                array.resize((1, 4), refcheck=False)
            go.set()
            async with asyncio.timeout(WAIT_S):
                np.testing.assert_array_equal((await task)["output"], rows(2, 4, 6))
            del task
            await until(lambda: weakref.getweakrefcount(array) == 0)
            array.resize((1, 4), refcheck=False)

    @pytest.mark.anyio
    @pytest.mark.parametrize("kind", [np.ndarray, np.recarray, np.ma.MaskedArray])
    async def test_views_that_its_caller_knows_nothing_of_keep_an_array_where_it_is(self, kind):
        """Of an array that is split, and of one of a subclass."""
        device = LatchDevice(concurrency=1)
        rows_max = 2 if kind is np.ndarray else 4
        given = np.array(rows(1, 2, 3)).view(kind).copy()
        if kind is np.ma.MaskedArray:
            given = np.ma.MaskedArray(rows(1, 2, 3))
            given = given.copy()
        async with asynctrt.open(double_model(), device=device, max_rows=rows_max, contexts=1) as engine:
            first = asyncio.create_task(engine.infer(rows(0)))
            await until(lambda: device.held)
            task = asyncio.create_task(engine.infer(given))
            await until(lambda: engine.statistics().queued_requests)
            with pytest.raises(ValueError, match="cannot resize|does not own"):
                np.ndarray.resize(given, (1, 4), refcheck=False)
            device.open()
            async with asyncio.timeout(WAIT_S):
                await first
                np.testing.assert_array_equal((await task)["output"], rows(2, 4, 6))

    @pytest.mark.anyio
    @pytest.mark.parametrize("unified", [True, False])
    @pytest.mark.parametrize("outputs", ["host", "device"])
    @pytest.mark.parametrize("guilty", [{0}, {2}, {0, 1}, {0, 1, 2}])
    async def test_each_caller_of_an_engine_is_told_about_its_own(self, guilty, outputs, unified):
        device = LatchDevice(unified=unified, concurrency=1)
        async with asynctrt.open(double_model(), device=device, max_rows=4, contexts=1) as engine:
            first = asyncio.create_task(engine.infer(rows(0), outputs=outputs))
            await until(lambda: device.held)
            arrays = [rows(number) for number in (1, 2, 3)]
            tasks = [asyncio.create_task(engine.infer(array, outputs=outputs)) for array in arrays]
            await until(lambda: engine.statistics().queued_requests == 3)
            for number in guilty:
                arrays[number].shape = (4, 1)
            device.open()
            async with asyncio.timeout(WAIT_S):
                answers = await asyncio.gather(*tasks, return_exceptions=True)
                await first
            for number, answer in enumerate(answers):
                if number in guilty:
                    assert type(answer) is InputError
                else:
                    found = answer["output"] if outputs == "host" else answer["output"].numpy()
                    np.testing.assert_array_equal(found, rows(2 * (number + 1)))
            errors = [answer for answer in answers if isinstance(answer, InputError)]
            assert len({id(error) for error in errors}) == len(guilty)
            statistics = engine.statistics()
            assert (statistics.failed, statistics.succeeded) == (len(guilty), 4 - len(guilty))
            await engine.drain()


@pytest.mark.parametrize("width", [2, 600], ids=["small", "large"])
@pytest.mark.parametrize("counts", [[1], [3], [1, 1, 1], [2, 1, 3]])
@pytest.mark.parametrize("names", [["y"], ["y", "z"]])
def test_each_request_gets_its_rows_and_owns_them(width, counts, names):
    slab = {name: np.arange(8 * width, dtype=np.float32).reshape(8, width) for name in names}
    requests = [make_request(np.zeros((count, 1))) for count in counts]
    total = sum(counts)
    spans = None if total == len(counts) else spans_of(requests)
    copied = copy_out(slab, spans, total, ResultMemory())
    start = 0
    for count, outputs in zip(counts, copied, strict=True):
        assert list(outputs) == names
        for name in names:
            np.testing.assert_array_equal(outputs[name], slab[name][start : start + count])
            assert not np.shares_memory(outputs[name], slab[name])
            outputs[name][...] = -1
        start += count
    assert (slab[names[0]] >= 0).all(), "a caller wrote into the slab"


def test_spans_may_leave_rows_out():
    slab = {"y": np.arange(8)}
    copied = copy_out(slab, [slice(5, 7), slice(0, 1)], 7, ResultMemory())
    assert [outputs["y"].tolist() for outputs in copied] == [[5, 6], [0]]


@pytest.mark.parametrize("parts_max", [1, 4])
def test_what_other_threads_copy_is_reserved_before(parts_max):
    slab = {"y": np.arange(16.0).reshape(8, 2)}
    views = [{"y": slab["y"][rows]} for rows in (slice(5, 7), slice(0, 1), slice(2, 3))]
    reserved = ResultMemory().reserved(views)
    parts = fills(reserved, views, PART_NBYTES_MIN * parts_max, parts_max)
    assert len(parts) == min(parts_max, len(reserved))
    for part in reversed(parts):
        part()
    for values, own in zip(reserved, views, strict=True):
        np.testing.assert_array_equal(values["y"], own["y"])
        assert not np.shares_memory(values["y"], slab["y"])


def test_rows_without_dimensions_and_rows_with_many():
    slab = {"y": np.arange(4)}
    assert [outputs["y"].tolist() for outputs in copy_out(slab, None, 2, ResultMemory())] == [[0], [1]]
    slab = {"y": np.zeros((4, 2, 3, 5))}
    assert [outputs["y"].shape for outputs in copy_out(slab, None, 2, ResultMemory())] == [(1, 2, 3, 5)] * 2


@pytest.mark.parametrize("width", [1, 16, 1000])
@pytest.mark.parametrize("names", [["y"], ["y", "z"]])
def test_who_keeps_a_result_keeps_little_of_others(width, names):
    slab = {name: np.ones((64, width), np.float32) for name in names}
    for values in copy_out(slab, None, 64, ResultMemory()):
        for value in values.values():
            held = value if value.base is None else value.base
            assert held.nbytes <= max(2 * value.nbytes, 4096)


@pytest.mark.anyio
async def test_who_has_gone_is_passed_over():
    """The trap: a filter over live requests, zipped with unfiltered answers."""
    loop = asyncio.get_running_loop()
    requests = [make_request(np.zeros(1), future=loop.create_future()) for _ in range(3)]
    futures = [request.future for request in requests]
    futures[1].cancel()
    deliver(requests, [{"y": value} for value in "abc"], BatchRecord(3, 0))
    assert futures[0].result()["y"] == "a"
    assert futures[2].result()["y"] == "c"
    assert futures[1].cancelled()
    assert all(request.payload is request.future is None for request in requests), "nothing is kept"


@pytest.fixture(params=[False, True], ids=["separate", "unified"])
def device(request):
    made = HostDevice(in_place="never", unified=request.param)
    yield made
    made.close()


@pytest.mark.anyio
class TestRowsOnTheDevice:
    """Rows that lie on the device already, and outputs that stay there."""

    async def test_outputs_stay_and_are_inputs_of_the_next_engine(self, device):
        async with (
            asynctrt.open(double_model(), device=device) as first,
            asynctrt.open(double_model(), device=device) as second,
        ):
            held = (await first.infer(rows(1, 2, 3), outputs="device"))["output"]
            assert repr(held) == "<DeviceArray float32[3, 4] on host>"
            assert (held.ndim, held.nbytes, held.row_nbytes, len(held)) == (2, 48, 16, 3)
            np.testing.assert_array_equal((await second.infer({"input": held}))["output"], rows(4, 8, 12))
            np.testing.assert_array_equal((await second.infer(held[1:]))["output"], rows(8, 12))
            again = await second.infer(held, outputs="device")
            np.testing.assert_array_equal(again["output"].numpy(), rows(4, 8, 12))
            np.testing.assert_array_equal(held.numpy(), rows(2, 4, 6))

    async def test_host_and_device_rows_each_get_their_own_answers(self, device):
        async with asynctrt.open(double_model(), device=device, max_rows=8) as engine:
            held = (await engine.infer(rows(10, 20), outputs="device"))["output"]

            async def caller(number):
                kind = number % 4
                sent = held[number % 2 : number % 2 + 1] if kind == 0 else rows(number)
                expected = 40 * (number % 2 + 1) if kind == 0 else 2 * number
                result = await engine.infer(sent, outputs="device" if kind in (0, 1) else "host")
                output = result["output"]
                np.testing.assert_array_equal(output if kind > 1 else output.numpy(), rows(expected))

            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*[caller(number) for number in range(100)])
            assert engine.statistics().mean_batch_rows > 2

    async def test_rows_on_the_device_are_split_and_outputs_there_are_not(self, device):
        async with asynctrt.open(double_model(), device=device, max_rows=4) as engine:
            held = [(await engine.infer(rows(n, n), outputs="device"))["output"] for n in (1, 2)]
            assert len(held[0]) == 2
            more = asynctrt.DeviceArray(
                device, held[0].address, held[0].dtype, (2, 4), owner=held[0], ready=held[0].ready
            )
            np.testing.assert_array_equal((await engine.infer(more))["output"], rows(4, 4))
            with pytest.raises(InputError, match=r"takes the rows of one batch \(4\), given 5"):
                await engine.infer(rows(*range(5)), outputs="device")

    async def test_what_cannot_be_is_refused_before_it_is_queued(self, device, tmp_path):
        async with asynctrt.open(double_model(), device=device) as engine:
            held = (await engine.infer(rows(1), outputs="device"))["output"]
            with pytest.raises(InputError, match=r"a list of names .* \(output\), not 'gpu'"):
                await engine.infer(rows(1), outputs="gpu")
            with pytest.raises(UsageError, match="sliced by consecutive rows"):
                held[::2]
        async with asynctrt.open(double_model(dims=(5,)), device=device) as engine:
            with pytest.raises(InputError, match=r"takes shape \(rows, 5\), given \(1, 4\)"):
                await engine.infer(held)
        async with asynctrt.open(unnamed_output_onnx(tmp_path / "m.onnx"), device=device) as engine:
            with pytest.raises(InputError, match="depends on the data"):
                await engine.infer(np.ones((1, 3), np.float32), outputs="device")
            await engine.infer(np.ones((1, 3), np.float32))

    async def test_an_array_of_another_device_is_no_array_here(self, device):
        other = HostDevice(unified=False)
        async with asynctrt.open(double_model(), device=other) as engine:
            held = (await engine.infer(rows(1), outputs="device"))["output"]
        async with asynctrt.open(double_model(), device=device) as engine:
            with pytest.raises(InputError, match="given DeviceArray"):
                await engine.infer(held)

    async def test_memory_of_outputs_goes_with_them(self):
        device = HostDevice(unified=False, memory_nbytes=1 << 20)
        async with asynctrt.open(double_model(dims=(1000,)), device=device, contexts=1, max_rows=1) as engine:
            sent = rows(1, dims=(1000,))
            before = device.memory().held_nbytes
            kept = [(await engine.infer(sent, outputs="device"))["output"] for _ in range(10)]
            assert device.memory().held_nbytes == before + 10 * 4000
            with pytest.raises(asynctrt.DeviceMemoryError):
                for _ in range(1000):
                    kept.append((await engine.infer(sent, outputs="device"))["output"])
            np.testing.assert_array_equal((await engine.infer(sent))["output"], 2 * sent)
            kept.clear()
            assert device.memory().held_nbytes == before
            np.testing.assert_array_equal(
                (await engine.infer(sent, outputs="device"))["output"].numpy(), 2 * sent
            )

    async def test_a_full_queue_takes_nothing(self, device, tmp_path):
        model = double_onnx(tmp_path / "double.onnx")
        async with asynctrt.open(model, device=device, max_rows=2, max_queue_rows=2) as engine:
            sent = [asyncio.create_task(engine.infer(rows(1), outputs="device")) for _ in range(40)]
            outcomes = await asyncio.gather(*sent, return_exceptions=True)
            assert any(isinstance(outcome, QueueFullError) for outcome in outcomes)
            for outcome in outcomes:
                if not isinstance(outcome, QueueFullError):
                    np.testing.assert_array_equal(outcome["output"].numpy(), rows(2))


class Careful(FunctionModel):
    """Doubles rows below 100 and remembers all that it sees; a batch with any other row fails.

    A row that nobody sent may be anything: what an earlier batch left, or what is still being written.
    """

    def __init__(self):
        specs = [TensorSpec(name, FLOAT, (1,)) for name in ("input", "output")]
        super().__init__(self.run, inputs=specs[0], outputs=specs[1], name="careful")
        self.seen = set()

    def run(self, inputs, outputs):
        values = inputs["input"]
        self.seen |= set(values[:, 0].tolist())
        if (values >= 100).any():
            raise IndexError("row out of range")
        np.multiply(values, 2, out=outputs["output"])

    def saw(self):
        """What it has seen since the last time."""
        seen, self.seen = self.seen, set()
        return seen


def one(*values):
    return rows(*values, dims=(1,))


@pytest.mark.anyio
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("sizes", ["as they are", "fixed", "captured"])
class TestRowsOfOthers:
    """Gaps and padding are never executed."""

    @staticmethod
    def opening(unified, sizes, device=None, **settings):
        model = Careful()
        model.capabilities = replace(
            model.capabilities,
            is_capturable=sizes == "captured",
            rows_fixed=4 if sizes == "fixed" else None,
        )
        device = device or HostDevice(in_place="always", unified=unified)
        settings = {"contexts": 1, "max_rows": 4, **settings}
        if sizes == "captured":
            settings["graphs"] = (4,)
        return model, asynctrt.open(model, device=device, **settings)

    @staticmethod
    async def poison(model, engine):
        """Leave rows behind that no other batch may see, in the slab of the context."""
        with pytest.raises(asynctrt.ExecutionError):
            await engine.infer(one(1, 999, 999, 999))
        model.saw()

    @pytest.mark.parametrize("count", [1, 2, 3, 4])
    async def test_of_callers(self, unified, sizes, count):
        model, opening = self.opening(unified, sizes)
        async with opening as engine:
            for _ in range(3):
                await self.poison(model, engine)
                results = await asyncio.gather(*[engine.infer(one(10 + number)) for number in range(count)])
                assert [result["output"][0, 0] for result in results] == [20 + 2 * n for n in range(count)]
                assert model.saw() == {10 + number for number in range(count)}

    @pytest.mark.parametrize("outputs", ["host", "device"])
    @pytest.mark.parametrize("count", [1, 3])
    async def test_on_the_device(self, unified, sizes, count, outputs):
        model, opening = self.opening(unified, sizes)
        async with opening as engine:
            held = (await engine.infer(one(*range(count)), outputs="device"))["output"]
            for sent in (held, one(*range(0, 2 * count, 2))):
                await self.poison(model, engine)
                output = (await engine.infer(sent, outputs=outputs))["output"]
                answer = output if outputs == "host" else output.numpy()
                assert answer[:, 0].tolist() == [4 * number for number in range(count)]
                assert model.saw() == {2 * number for number in range(count)}

    async def test_of_requests_that_were_cancelled_or_expired(self, unified, sizes):
        device = LatchDevice(unified=unified, concurrency=1)
        device.open()
        model, opening = self.opening(unified, sizes, device)
        async with opening as engine, asyncio.timeout(WAIT_S):
            await self.poison(model, engine)
            device.shut()
            first = asyncio.create_task(engine.infer(one(1)))
            await until(lambda: device.held)
            gone = asyncio.create_task(engine.infer(one(999)))
            stays = asyncio.create_task(engine.infer(one(2)))
            late = asyncio.create_task(engine.infer(one(999), timeout=0.0))
            with pytest.raises(asynctrt.DeadlineError):
                await late
            gone.cancel()
            await until(gone.done)
            device.open()
            await first
            assert (await stays)["output"][0, 0] == 4
            assert model.saw() == {1, 2}
