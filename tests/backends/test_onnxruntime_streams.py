"""Sessions that belong to streams: what they are bound to, and when ONNX Runtime ends them.

They run here by ONNX Runtime's CPU provider; tests/gpu/test_onnxruntime.py runs them by its CUDA provider.
"""

import asyncio
import gc
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto

import asynctrt
from asynctrt.core import assembly
from asynctrt.devices.host import HostDevice
from asynctrt.errors import ExecutionError, InputError, UsageError
from asynctrt.runtime.staging import Slab, StagingBuffers, lay_out
from tests.backends.onnx_sessions import (
    CapturableSessions,
    CopyingSessions,
    HostSession,
    HostSessions,
    MovingSessions,
    in_place,
)
from tests.helpers import WAIT_S
from tests.models import double_onnx, node, rows, save, sequence_onnx

pytestmark = pytest.mark.anyio
FLOAT = TensorProto.FLOAT


@pytest.fixture
def model(tmp_path):
    return HostSessions(double_onnx(tmp_path / "double.onnx"))


async def check_doubled(engine, sent, name="output"):
    answers = await asyncio.gather(*map(engine.infer, sent))
    for each, answer in zip(sent, answers, strict=True):
        np.testing.assert_array_equal(answer[name], 2 * each)
    return answers


async def check_batches(engine):
    """Check batches of each size in turn, of other rows each time."""
    for turn in range(10):
        await check_doubled(engine, [rows(*range(turn, turn + 1 + number % 4)) for number in range(12)])


def watch_puts(model, note):
    """Have this called whenever a session puts a batch on its stream."""
    load = model.load_session

    def watched(device, stream, sizes):
        session = load(device, stream, sizes)
        put = session.put
        session.put = lambda *arguments: (note(), put(*arguments))
        return session

    model.load_session = watched


def picky_onnx(path):
    """``output = table[input]``: fails for an index that is out of range."""
    return save(
        path,
        [node("Gather", "table input", "output")],
        [("input", TensorProto.INT64, ["n", 1])],
        [("output", FLOAT, ["n", 1])],
        [("table", np.arange(4, dtype=np.float32))],
    )


def found_onnx(path):
    """Indices of what is not zero, for each of the two columns: their number depends on the data."""
    nodes = [
        node("NonZero", "input", "where"),
        node("Transpose", "where", "found", perm=[1, 0]),
        node("Unsqueeze", "found axes", "whole"),
        node("Expand", "whole wanted", "output"),
    ]
    weights = [("axes", np.array([0])), ("wanted", np.array([2, 1, 1]))]
    ends = [("input", FLOAT, [2, 3])], [("output", TensorProto.INT64, [2, None, 2])]
    return save(path, nodes, *ends, weights)


async def test_each_context_has_a_session_and_all_are_ended(model):
    assert model.capabilities.is_per_stream
    async with asynctrt.open(model, device=HostDevice(unified=False), contexts=3) as engine:
        assert model.alive == 3
        await check_doubled(engine, [rows(n) for n in range(1, 40)])
    assert model.alive == 0


def test_graphs_of_its_sessions_are_compared_with_batches(model):
    """On a GPU as well: the CUDA provider's model inherits it."""
    assert model.capabilities.is_traced
    assert not model.capabilities.is_specialisable


async def test_graphs_that_are_named_for_it_are_warned_of(model, caplog):
    device = HostDevice(unified=False)
    async with asynctrt.open(model, device=device, contexts=2, max_rows=4, graphs="1,4") as engine:
        assert model.alive == 2
        assert engine.statistics().graphs == ()
        await check_doubled(engine, [rows(3)])
    said = [record.getMessage() for record in caplog.records if "graphs is (1, 4)" in record.getMessage()]
    assert len(said) == 1
    assert "graphs='off'" in said[0]
    assert model.alive == 0


async def test_a_size_that_is_captured_has_a_session_that_runs_nothing_else(tmp_path):
    model, device = CapturableSessions(double_onnx(tmp_path / "double.onnx")), HostDevice(unified=False)
    async with asynctrt.open(model, device=device, contexts=2, max_rows=4, graphs="1,2,4") as engine:
        assert engine.statistics().graphs == engine.statistics().batch_sizes == (1, 2, 4)
        assert model.alive == 2 + 2 * 3
        captured = [session for session in model.sessions if session.runs]
        assert [session.runs for session in captured] == [["run", "run", "graph"]] * 6
        assert sorted(session.sizes["batch"] for session in captured) == [1, 1, 2, 2, 4, 4]
        await check_doubled(engine, [rows(*range(1 + n % 4)) for n in range(40)])
        assert {session.runs.count("graph") for session in captured} == {1}
    assert model.alive == 0


async def test_each_shape_that_rows_are_padded_to_is_captured(tmp_path):
    """So texts of different lengths run as graphs, however long, and however many of them come."""
    model, device = CapturableSessions(sequence_onnx(tmp_path / "sequence.onnx")), HostDevice(unified=False)
    opened = asynctrt.open(
        model, device=device, contexts=2, max_rows=4, graphs="1,2,4", pad={"length": (3, 8)}
    )
    async with opened as engine:
        assert engine.statistics().graphs == (1, 2, 4)
        direct, captured = model.sessions[:2], model.sessions[2:]
        assert [session.runs for session in captured] == [["run", "run", "graph"]] * (2 * 2 * 3)
        sizes = [{"batch": rows, "length": length} for rows in (1, 2, 4) for length in (3, 8)]
        assert all([session.sizes for session in captured].count(each) == 2 for each in sizes)
        assert [session.sizes for session in direct] == [{}, {}]
        ran_directly = [len(session.runs) for session in direct]
        ran = sum(len(session.runs) for session in model.sessions)
        held = device.memory().held_nbytes
        rng = np.random.default_rng(3)
        sent = [rng.random((1 + n % 4, 1 + n % 8), np.float32) for n in range(80)]
        for _ in range(3):
            answers = await check_doubled(engine, sent, "doubled")
            for each, answer in zip(sent, answers, strict=True):
                np.testing.assert_allclose(answer["total"], each.sum(axis=1), rtol=1e-5)
        assert device.memory().held_nbytes == held, "what shapes need is there from the start"
        assert sum(len(session.runs) for session in model.sessions) == ran, "all were replayed"
        assert [len(session.runs) for session in direct] == ran_directly
    assert model.alive == 0


async def test_by_default_as_many_sizes_are_captured_of_each_shape_as_of_one(tmp_path, monkeypatch):
    """With fewer of them batches would be padded more, with rows as well as in length."""
    monkeypatch.setattr(HostDevice, "prefers_graphs", True)
    model = CapturableSessions(sequence_onnx(tmp_path / "sequence.onnx"))
    opened = asynctrt.open(
        model, device=HostDevice(unified=False), contexts=1, max_rows=9, pad={"length": (3, 8)}
    )
    async with opened as engine:
        assert engine.statistics().graphs == engine.statistics().batch_sizes == (1, 2, 3, 4, 6, 8, 9)
        assert model.alive == 1 + 2 * 7
        await check_doubled(engine, [np.ones((5, 2), np.float32)], "doubled")


@pytest.mark.parametrize(
    ("pad", "nbytes_max"),
    [({"length": tuple(range(1, 10))}, None), ({"length": (3, 8)}, 200), (None, None)],
    ids=["too many", "not of all rows", "not padded"],
)
async def test_shapes_that_are_not_known_or_too_many_are_not_captured(
    tmp_path, pad, nbytes_max, caplog, monkeypatch
):
    if nbytes_max is not None:
        monkeypatch.setattr(assembly, "BATCH_NBYTES_MAX", nbytes_max)
    model = CapturableSessions(sequence_onnx(tmp_path / "sequence.onnx"))
    opened = asynctrt.open(
        model, device=HostDevice(unified=False), contexts=1, max_rows=4, graphs="1,2,4", pad=pad
    )
    async with opened as engine:
        assert engine.statistics().graphs == ()
        assert caplog.text.count("graphs is (1, 2, 4), but rows of 'sequence' vary in shape") == 1
        await check_doubled(
            engine, [np.full((1 + n % 4, 1 + n % 8), n, np.float32) for n in range(40)], "doubled"
        )
    assert model.alive == 0


@pytest.mark.parametrize("contexts", [1, 3])
async def test_inputs_that_the_cpu_reads_are_those_of_each_batch(tmp_path, contexts):
    """ONNX Runtime copies them when they are bound: each batch had the rows of the first of its size."""
    model, device = CopyingSessions(double_onnx(tmp_path / "double.onnx")), HostDevice(unified=False)
    async with asynctrt.open(model, device=device, contexts=contexts, max_rows=4) as engine:
        await check_batches(engine)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (CopyingSessions, "has inputs that operators on the CPU read: input"),
        (MovingSessions, "has outputs that ONNX Runtime has on the CPU: output"),
    ],
)
async def test_what_lies_on_the_cpu_is_not_captured(tmp_path, caplog, kind, said):
    model = kind(double_onnx(tmp_path / "double.onnx"))
    model.capabilities = replace(model.capabilities, is_capturable=True)
    device = in_place() if kind is MovingSessions else HostDevice(unified=False)
    async with asynctrt.open(model, device=device, max_rows=4, graphs="4") as engine:
        assert engine.statistics().graphs == ()
        await check_doubled(engine, [rows(3)])
    assert said in caplog.text


@pytest.mark.parametrize("ways", [("moved",), ("kept",), ("kept", "moved", "moved")])
async def test_outputs_that_are_put_elsewhere_are_brought(tmp_path, ways):
    """Callers had what lay where they were bound: outputs that the CPU reads, too, on a GPU."""
    model = MovingSessions(double_onnx(tmp_path / "double.onnx"), ways=ways)
    async with asynctrt.open(model, device=in_place(), contexts=1, max_rows=4) as engine:
        await check_batches(engine)


async def test_an_output_that_is_put_elsewhere_in_another_shape_is_an_error(tmp_path):
    model = MovingSessions(double_onnx(tmp_path / "double.onnx"), ways=("moved", "cut"))
    settings = {"device": in_place(), "contexts": 1, "idempotent": False, "batching": "on"}
    async with asynctrt.open(model, **settings) as engine:
        found = [await asyncio.gather(engine.infer(rows(1, 2)), return_exceptions=True) for _ in range(4)]
    failed = [one for [one] in found if isinstance(one, ExecutionError)]
    assert len(failed) == 2
    assert "shape (1, 4) for output 'output', which the model declares as (2, 4)" in str(failed[0])


async def test_an_error_that_a_caller_keeps_does_not_keep_the_session(tmp_path):
    model = HostSessions(picky_onnx(tmp_path / "picky.onnx"), is_direct=True)
    async with asynctrt.open(model, device=in_place(), contexts=1) as engine:
        kept = []
        for _ in range(3):
            with pytest.raises(ExecutionError, match="idx=9") as caught:
                await engine.infer(np.array([[9]]))
            kept.append(caught)
        answer = await engine.infer(np.array([[2], [1]]))
        np.testing.assert_array_equal(answer["output"], [[2], [1]])
    assert model.alive == 0


def test_the_collector_ends_no_session(model):
    device = HostDevice()
    stream = device.create_stream()
    context = model.create_context_on(device, stream)
    del context
    gc.collect()
    assert model.alive == 1
    assert model.made[0]() is not None


def test_each_context_has_a_session_of_its_own_also_on_one_stream(model):
    device = HostDevice()
    stream, other = device.create_stream(), device.create_stream()
    contexts = [model.create_context_on(device, each) for each in (stream, stream, other)]
    assert model.alive == 3
    assert "sessions=3" in repr(model)
    for left, context in zip((2, 1, 0), contexts, strict=True):
        context.close()
        context.close()
        assert model.alive == left
        assert f"sessions={left}" in repr(model)
    for each in (stream, other):
        each.close(1)


def test_a_binding_that_is_dropped_is_gone_at_once(model):
    device = HostDevice()
    stream = device.create_stream()
    context = model.create_context_on(device, stream)
    layout = lay_out(model.inputs, model.outputs, {}, 4)
    slab = Slab(layout, StagingBuffers(device, layout.nbytes))
    binding = context.bind(slab.input_memory(), slab.output_memory())
    binding.enqueue(2, profile=None, stream=stream, arena=None)
    assert stream.drain(10)
    kept = weakref.ref(binding)
    del binding
    assert kept() is None
    context.close()
    assert model.alive == 0
    stream.close(1)


def test_a_closed_model_loads_no_session(model):
    model.close()
    device = HostDevice()
    with pytest.raises(UsageError, match="Load it again"):
        model.create_context_on(device, device.create_stream())
    with pytest.raises(UsageError, match="lends none"):
        model.session


async def test_threads_put_batches_on_streams(model):
    seen, loop_thread = set(), threading.get_ident()
    watch_puts(model, lambda: seen.add(threading.get_ident() == loop_thread))
    async with asynctrt.open(model, device=HostDevice(in_place="never"), contexts=3) as engine:
        seen.clear()  # What was run beforehand, wherever the engine was opened.
        await asyncio.gather(*(engine.infer(rows(n)) for n in range(1, 20)))
    assert seen == {False}


@pytest.mark.parametrize("count", [1, 3, 60])
async def test_large_rows_are_staged_by_the_thread_that_enqueues(tmp_path, count):
    """Also where one caller has changed its rows meanwhile: it is told, and the others get their answers."""
    model = HostSessions(double_onnx(tmp_path / "double.onnx", dims=(50_000,)))
    threads = set()
    watch_puts(model, lambda: threads.add(threading.current_thread().name))
    device = HostDevice(in_place="never", unified=False)
    async with asynctrt.open(model, device=device, contexts=2, max_rows=64) as engine:
        threads.clear()
        sent = [np.full((1, 50_000), number, np.float32) for number in range(count)]
        changed = np.zeros((1, 50_000), np.float32)
        answers = [engine.submit(one) for one in [*sent, changed]]
        changed.shape = (50_000,)
        async with asyncio.timeout(WAIT_S):
            found = await asyncio.gather(*answers, return_exceptions=True)
        for one, answer in zip(sent, found, strict=False):
            np.testing.assert_array_equal(answer["output"], 2 * one)
        assert isinstance(found[-1], InputError)
        assert "changed between" in str(found[-1])
        assert all(name.startswith("asynctrt-enqueue") for name in threads), threads


async def test_a_batch_of_which_no_row_can_be_staged_fails_and_the_next_is_computed(tmp_path):
    model = HostSessions(double_onnx(tmp_path / "double.onnx", dims=(50_000,)))
    async with asynctrt.open(model, device=HostDevice(in_place="never"), contexts=1) as engine:
        for _ in range(3):
            changed = np.zeros((1, 50_000), np.float32)
            asked = engine.submit(changed)
            changed.shape = (50_000,)
            with pytest.raises(InputError, match="changed between"):
                await asyncio.wait_for(asked, WAIT_S)
        sent = np.ones((2, 50_000), np.float32)
        answer = await asyncio.wait_for(engine.infer(sent), WAIT_S)
        np.testing.assert_array_equal(answer["output"], 2 * sent)


async def test_an_output_whose_shape_depends_on_the_data(tmp_path):
    model = HostSessions(found_onnx(tmp_path / "found.onnx"), is_direct=True)
    async with asynctrt.open(model, device=in_place(), contexts=1, max_rows=2) as engine:
        for found in (1, 3, 0, 6):
            sent = np.zeros((2, 3), np.float32)
            sent.reshape(-1)[:found] = 1
            answer = await engine.infer(sent)
            expected = np.argwhere(sent)
            np.testing.assert_array_equal(answer["output"], np.stack([expected, expected]))


async def test_a_session_that_cannot_be_ended_is_left_alive(model, monkeypatch):
    """To end it would wait for ever for work that hangs, or end the process."""
    device = HostDevice(unified=False)
    streams = [device.create_stream() for _ in range(2)]
    contexts = [model.create_context_on(device, stream) for stream in streams]
    monkeypatch.setattr(HostSession, "may_end", False)
    contexts[0].close()
    assert model.alive == 2
    monkeypatch.undo()
    contexts[1].close()
    gc.collect()
    assert model.alive == 1, "what was left alive stays so"
    assert all(stream.close(10) for stream in streams)
