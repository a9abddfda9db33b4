"""Layouts, gathering and copying out."""

import asyncio

import numpy as np
import pytest

from asynctrt.runtime.batch import copy_out, deliver, gather, lay_out, spans_of
from asynctrt.scheduling.request import Request
from asynctrt.tensors import BatchRecord, TensorSpec

FLOAT, INT = np.dtype("float32"), np.dtype("int64")


def request(*arrays):
    return Request(len(arrays[0]), "b", 0, 0, payload=arrays)


def test_tensors_lie_apart_and_aligned():
    specs = [TensorSpec("a", FLOAT, (3,)), TensorSpec("b", INT, ())], [TensorSpec("c", FLOAT, (100,))]
    layout = lay_out(*specs, {}, 10)
    places = [*layout.inputs, *layout.outputs]
    assert [place.offset for place in places] == [0, 256, 512]
    assert layout.nbytes == 512 + 4096
    assert (layout.input_row_nbytes, layout.output_row_nbytes) == (12 + 8, 400)


def test_dynamic_dimensions_take_their_value_and_unknown_outputs_no_place():
    inputs, outputs = [TensorSpec("a", FLOAT, ("n",))], [TensorSpec("b", FLOAT, ("m",))]
    layout = lay_out(inputs, outputs, {"n": 7}, 2)
    assert layout.inputs[0].dims == (7,)
    assert layout.outputs == (None,)
    assert layout.output_row_nbytes == 0


def test_a_dimension_of_zero():
    layout = lay_out([TensorSpec("a", FLOAT, (0,))], [TensorSpec("b", FLOAT, (1,))], {}, 2)
    assert layout.inputs[0].row_nbytes == 0


@pytest.mark.parametrize("counts", [[1], [3], [1, 1, 1], [2, 1, 3]])
def test_rows_are_gathered_in_order_for_each_input(counts):
    starts = np.cumsum([0, *counts[:-1]])
    requests = [
        request(
            np.arange(start, start + count, dtype=np.float32)[:, None], np.arange(start, start + count) * 10
        )
        for start, count in zip(starts, counts, strict=True)
    ]
    total = sum(counts)
    views = np.full((8, 1), -1, np.float32), np.full(8, -1)
    gather(requests, views, total)
    assert views[0][:, 0].tolist() == [*range(total), *[-1] * (8 - total)]
    assert views[1].tolist() == [*range(0, total * 10, 10), *[-1] * (8 - total)]


def test_strided_rows_are_gathered():
    view = np.zeros((4, 2), np.float32)
    source = np.arange(16, dtype=np.float32).reshape(4, 4)
    gather([request(source[:2, ::2]), request(source[2:, ::2])], (view,), 4)
    assert view.tolist() == source[:, ::2].tolist()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("counts", [[1], [3], [1, 1, 1], [2, 1, 3]])
@pytest.mark.parametrize("names", [["y"], ["y", "z"]])
def test_each_request_gets_its_rows_and_owns_them(shared, counts, names):
    slab = {name: np.arange(16, dtype=np.float32).reshape(8, 2) for name in names}
    requests = [request(np.zeros((count, 1))) for count in counts]
    total = sum(counts)
    spans = None if total == len(counts) else spans_of(requests)
    copied = copy_out(slab, spans, total, shared=shared)
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
    copied = copy_out(slab, [slice(5, 7), slice(0, 1)], 7, shared=True)
    assert [outputs["y"].tolist() for outputs in copied] == [[5, 6], [0]]


def test_rows_without_dimensions_and_rows_with_many():
    slab = {"y": np.arange(4)}
    assert [outputs["y"].tolist() for outputs in copy_out(slab, None, 2, shared=True)] == [[0], [1]]
    slab = {"y": np.zeros((4, 2, 3, 5))}
    assert [outputs["y"].shape for outputs in copy_out(slab, None, 2, shared=True)] == [(1, 2, 3, 5)] * 2


@pytest.mark.anyio
async def test_who_has_gone_is_passed_over():
    """The trap: a filter over live requests, zipped with unfiltered answers."""
    loop = asyncio.get_running_loop()
    requests = [Request(1, "b", 0, 0, future=loop.create_future()) for _ in range(3)]
    futures = [request.future for request in requests]
    futures[1].cancel()
    deliver(requests, [{"y": value} for value in "abc"], BatchRecord(3, 0))
    assert futures[0].result()["y"] == "a"
    assert futures[2].result()["y"] == "c"
    assert futures[1].cancelled()
