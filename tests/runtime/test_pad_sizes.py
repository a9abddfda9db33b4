"""Rows of different lengths are padded to common sizes and share batches; callers see their own length."""

import asyncio
import json
import tracemalloc

import numpy as np
import pytest

import asynctrt
import asynctrt.client
from asynctrt.backends.function import FunctionModel
from asynctrt.core.padded_inputs import PaddedInputCheck, front_check
from asynctrt.devices.host import HostDevice
from asynctrt.errors import InputError, OptionsError, TooLargeError
from asynctrt.kserve.json_codec import JsonCodec
from asynctrt.options import Options
from asynctrt.runtime.pad_sizes import Padding, Sizes
from asynctrt.runtime.padding import PaddedSource
from asynctrt.runtime.staging import Slab, StagingBuffers, lay_out
from asynctrt.tensors import TensorSpec
from tests.helpers import WAIT_S
from tests.models import sequence_onnx
from tests.runtime.support import make_batch, make_request
from tests.serving.support import ask, serving
from tests.workers.models import masked

pytestmark = pytest.mark.anyio

IDS = TensorSpec("ids", "int64", ("length",))
MASK = TensorSpec("mask", "bool", ("length",))
COUNT = TensorSpec("count", "int32", (1,))


def ids(rows, length, start=1):
    return np.arange(start, start + rows * length, dtype=np.int64).reshape(rows, length)


def padding(pad=None, pad_with=None, inputs=(IDS, MASK, COUNT), outputs=()):
    options = Options(pad=pad or {"length": (4, 8)}, pad_with=pad_with)
    return Padding.of("model", inputs, outputs, options)


@pytest.mark.parametrize("given", [{"n": (8, 4, 8)}, {"n": "4, 8"}, ["n=4,8"], {"n": [np.int64(4), 8]}])
def test_sizes_may_be_written_in_several_ways(given):
    assert Options(pad=given).pad == {"n": (4, 8)}


@pytest.mark.parametrize(
    "given",
    [{}, [], {"n": ()}, {"n": (0, 4)}, {"n": "x"}, {"n": 1.5}, {1: (4,)}, "n=4", ["n"], 4, {"n": None}],
)
def test_what_are_no_sizes(given):
    with pytest.raises(OptionsError, match="pad must be sizes"):
        Options(pad=given)


@pytest.mark.parametrize("given", ["auto", ["auto"], "auto:512", {"n": "auto"}, ["n=auto:8", "m=4"]])
def test_sizes_that_the_engine_chooses_are_the_default_and_no_option(given):
    with pytest.raises(OptionsError, match="pad='auto' was removed: by default rows are padded"):
        Options(pad=given)


def test_values_may_be_written_in_several_ways():
    written = ["a=-1", "b=0.5", "c=mask", "d=length:n", "e=nan", "f=1e3"]
    found = Options(pad={"n": 4}, pad_with=written).pad_with
    assert str(found) == "{'a': -1, 'b': 0.5, 'c': 'mask', 'd': 'length:n', 'e': nan, 'f': 1000.0}"
    with pytest.raises(OptionsError, match="pad_with must be numbers, 'mask' or 'length'"):
        Options(pad={"n": 4}, pad_with={"a": "ones"})
    with pytest.raises(OptionsError, match="pad is missing"):
        Options(pad_with={"a": 1})


@pytest.mark.parametrize(
    ("pad", "pad_with", "says"),
    [
        (
            {"lenght": 4},
            None,
            "the dimension 'lenght', but the dimensions of 'model' that vary are: 'length'",
        ),
        ({"length": 4}, {"idz": 1}, "the input 'idz', but the inputs of 'model' are: 'ids', 'mask', 'count'"),
        ({"length": 4}, {"ids": 0.5}, "'ids', whose dtype int64 does not hold it"),
        ({"length": 4}, {"count": 2**40}, "'count', whose dtype int32 does not hold it"),
        ({"length": 4}, {"ids": 10**400}, "'ids', whose dtype int64 does not hold it"),
        ({"length": 4, "length=other": 8}, None, "the dimension 'length' twice"),
        ({"length": (4, 2**31)}, {"count": "length"}, "up to 2147483648, and its dtype int32"),
        ({"length": 4}, {"count": "mask"}, "none of its dimensions"),
        ({"length": 4}, {"mask": "length"}, "one for each row"),
        ({"length": 4}, {"count": "length:width"}, "not which padded dimension has it"),
        ({"length": 4}, {"ids": "mask", "mask": "mask"}, "the size of 'length' is not known"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_when_it_is_opened(pad, pad_with, says):
    with pytest.raises(OptionsError, match=says):
        padding(pad, pad_with)


@pytest.mark.parametrize(
    ("pad", "shapes"),
    [
        ({"n": (4, 8), "m": 5}, [(("n", 4), ("m", 5)), (("n", 8), ("m", 5))]),
        ({"m": (2, 3), "n": 4}, [(("n", 4), ("m", 2)), (("n", 4), ("m", 3))]),
        ({"n=m": (4, 8)}, [(("n", 4), ("m", 4)), (("n", 8), ("m", 8))]),
        ({"n": (4, 8)}, []),
    ],
)
def test_the_shapes_of_all_batches_are_known_if_every_size_is_given(pad, shapes):
    made = padding(pad, inputs=(TensorSpec("x", "float32", ("n", 2)), TensorSpec("y", "float32", ("m", "n"))))
    assert list(made.shapes) == shapes
    keys = {made.key_of({"n": n, "m": n}).shape for n in (2, 3)}
    assert not shapes or keys <= {*shapes}


def test_inputs_that_contradict_each_other_do_not_fit():
    found = padding()
    assert found.fit(((3,), (3,), (1,))).dims == ((3,), (3,), (1,))
    assert found.fit(((3,), (4,), (1,))) is None
    assert found.fit(((3,), (3, 1), (1,))) is None


async def test_lengths_share_batches_and_outputs_are_cut_back(tmp_path):
    path = sequence_onnx(tmp_path / "sequence.onnx")
    async with asyncio.timeout(WAIT_S), asynctrt.open(path, pad={"length": (4, 8, 16)}) as engine:
        calls = [np.random.default_rng(n).random((1 + n % 3, n), np.float32) for n in range(1, 17)]
        answers = await asyncio.gather(*map(engine.infer, calls))
        for call, answer in zip(calls, answers, strict=True):
            np.testing.assert_array_equal(answer["doubled"], 2 * call)
            np.testing.assert_allclose(answer["total"], call.sum(1), rtol=1e-5)
            assert answer["doubled"].flags.c_contiguous
        assert engine.statistics().batches == 3
        assert engine.inputs[0].dims == ("length",)


async def test_too_long_or_wrong(tmp_path):
    path = sequence_onnx(tmp_path / "sequence.onnx")
    async with asynctrt.open(path, pad={"length": (4, 8)}) as engine:
        with pytest.raises(
            InputError, match=r"size 9 on axis 1 \('length'\), which this engine pads to 4, 8"
        ):
            await engine.infer(np.ones((1, 9), np.float32))
        with pytest.raises(InputError, match="takes shape"):
            await engine.infer(np.ones((1, 2, 3), np.float32))
        with pytest.raises(InputError, match="outputs='device'"):
            await engine.infer(np.ones((1, 4), np.float32), outputs="device")
        assert engine.statistics().failed == 0


async def test_masks_lengths_and_values():
    async with (
        asyncio.timeout(WAIT_S),
        asynctrt.open(
            masked(), pad={"length": (4, 8)}, pad_with={"ids": -100, "mask": "mask", "count": "length"}
        ) as engine,
    ):
        calls = [ids(1 + n % 2, n) for n in range(1, 9)]
        answers = await asyncio.gather(
            *map(engine.infer, calls),
            *[engine.infer({"ids": call}) for call in calls],
            *[engine.infer({"ids": call, "mask": np.ones(call.shape, bool)}) for call in calls],
        )
        for call, answer in zip(calls * 3, answers, strict=True):
            np.testing.assert_array_equal(answer["sum"], call.sum(1))
            np.testing.assert_array_equal(answer["length"], np.full((len(call), 1), call.shape[1]))
            np.testing.assert_array_equal(answer["same"], call)
            padded = (4 if call.shape[1] <= 4 else 8) - call.shape[1]
            np.testing.assert_array_equal(answer["rest"], np.full(len(call), -100 * padded))
        assert engine.statistics().batches < 8
        own = await engine.infer({"ids": ids(1, 3), "mask": [[True, False, True]], "count": [[7]]})
        assert (own["sum"].item(), own["length"].item()) == (4, 7)
        listed = await engine.infer({"ids": [[5, 6, 7]]})
        np.testing.assert_array_equal(listed["sum"], [18])
        for given, says in (
            ({"ids": ids(1, 3), "mask": np.ones((1, 2), bool)}, "'length'"),
            ({"mask": np.ones((1, 2), bool)}, "missing: .'ids'"),
            ({"ids": ids(1, 9)}, "8 is the most"),
            ({"ids": 3}, "takes shape"),
            ({"ids": ids(1, 3), "more": 1}, "unknown"),
        ):
            with pytest.raises(InputError, match=says):
                await engine.infer(given)


@pytest.mark.parametrize(
    ("dtype", "holds"), [("int8", 127), ("uint8", 255), ("float16", 2048), ("float32", 2**24), ("bool", 1)]
)
def test_a_length_that_its_dtype_does_not_hold_is_refused_when_it_is_opened(dtype, holds):
    inputs, pad_with = (IDS, TensorSpec("count", dtype, (1,))), {"count": "length"}
    found = padding({"length": holds}, pad_with, inputs)
    assert found.filled[0].array(2, {"length": holds}).tolist() == [[holds], [holds]]
    with pytest.raises(OptionsError, match=f"up to {holds + 1}, and its dtype {dtype}"):
        padding({"length": holds + 1}, pad_with, inputs)


def test_what_is_filled_for_callers_takes_no_memory_of_its_own():
    """Masks are kept for the next request of their shape, and callers choose the shapes."""
    specs = (TensorSpec("ids", "uint8", ("length",)), TensorSpec("mask", "int64", ("length",)))
    check = PaddedInputCheck(specs, padding({"length": 4096}, {"mask": "mask"}, specs))
    tracemalloc.start()
    try:
        for rows in range(1000, 1064):
            (_, mask), *_ = check.validate({"ids": np.broadcast_to(np.uint8(1), (rows, 4096))})
            assert mask.shape == (rows, 4096)
            assert not mask.flags.writeable
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


async def test_more_rows_than_a_batch_holds_and_large_batches():
    """Both ways of copying out, and calls that are split."""
    wide = FunctionModel(
        lambda inputs: inputs["x"] + 1,
        inputs=TensorSpec("x", "float32", ("n", 1024)),
        outputs=TensorSpec("y", "float32", ("n", 1024)),
    )
    async with asyncio.timeout(WAIT_S), asynctrt.open(wide, pad={"n": (8, 128)}, max_rows=16) as engine:
        calls = [
            np.full((rows, n, 1024), n, np.float32) for rows, n in ((20, 3), (16, 100), (1, 128), (2, 0))
        ]
        for call, answer in zip(calls, await asyncio.gather(*map(engine.infer, calls)), strict=True):
            np.testing.assert_array_equal(answer["y"], call + 1)


async def test_what_a_caller_changes_meanwhile_is_its_own_error(tmp_path):
    path = sequence_onnx(tmp_path / "sequence.onnx")
    async with asyncio.timeout(WAIT_S), asynctrt.open(path, pad={"length": (4, 8)}) as engine:
        for changed, kept in ((ids(1, 6).astype(np.float32), ids(1, 7).astype(np.float32)),):
            futures = [engine.submit(changed), engine.submit(kept)]
            changed.shape = (2, 3)
            results = await asyncio.gather(*futures, return_exceptions=True)
            assert isinstance(results[0], InputError)
            np.testing.assert_array_equal(results[1]["doubled"], 2 * kept)


async def test_a_row_that_fails_is_found_among_padded_ones():
    def fails(inputs):
        if (inputs["x"] == 13).any():
            raise ValueError("13")
        return 2 * inputs["x"]

    model = FunctionModel(
        fails, inputs=TensorSpec("x", "int64", ("n",)), outputs=TensorSpec("y", "int64", ("n",))
    )
    async with asyncio.timeout(WAIT_S), asynctrt.open(model, pad={"n": 8}) as engine:
        answers = await asyncio.gather(
            *[engine.infer(np.full((1, 1 + n % 8), n)) for n in range(20)], return_exceptions=True
        )
        for number, answer in enumerate(answers):
            if number == 13:
                assert isinstance(answer, asynctrt.ExecutionError)
            else:
                np.testing.assert_array_equal(answer["y"], np.full((1, 1 + number % 8), 2 * number))


async def test_batches_of_a_fixed_size(tmp_path):
    path = sequence_onnx(tmp_path / "sequence.onnx", rows=8)
    async with asyncio.timeout(WAIT_S), asynctrt.open(path, pad={"length": (4, 8)}, max_rows=8) as engine:
        calls = [np.full((rows, length), rows, np.float32) for rows in (1, 3, 8, 11) for length in (2, 8)]
        for call, answer in zip(calls, await asyncio.gather(*map(engine.infer, calls)), strict=True):
            np.testing.assert_array_equal(answer["doubled"], 2 * call)
        assert engine.statistics().rows_padded > 0


@pytest.mark.tier2
async def test_clients_of_a_server_see_that_the_dimension_varies():
    settings = {"pad": {"length": (4, 8)}, "pad_with": {"mask": "mask", "count": "length"}}
    async with asyncio.timeout(WAIT_S), serving({"masked": masked()}, engine=settings) as server:
        answers = [await ask(server, f"/v2/models/masked{path}") for path in ("", "/config")]
        metadata, config = [json.loads(body) for _, _, body in answers]
        assert [tensor["shape"] for tensor in metadata["inputs"]] == [[-1, -1], [-1, -1], [-1, 1]]
        assert [tensor["optional"] for tensor in config["input"]] == [False, True, True]
        for url in (server.http_url, server.http_url.replace("http", "ws") + "/v2/ws"):
            async with asynctrt.client.connect(url) as client:
                calls = [ids(1, n) for n in range(1, 9)]
                answers = await asyncio.gather(*[client.infer("masked", {"ids": call}) for call in calls])
                for call, answer in zip(calls, answers, strict=True):
                    np.testing.assert_array_equal(answer["sum"], call.sum(1))
                    np.testing.assert_array_equal(answer["same"], call)
                with pytest.raises(InputError, match="8 is the most"):
                    await client.infer("masked", {"ids": ids(1, 9)})


@pytest.mark.tier2
async def test_in_a_worker_process():
    async with (
        asyncio.timeout(WAIT_S),
        asynctrt.open(
            "tests.workers.models:masked",
            isolation="process",
            pad={"length": (4, 8)},
            pad_with={"mask": "mask", "count": "length"},
        ) as engine,
    ):
        calls = [ids(1 + n % 2, 1 + n % 8) for n in range(64)]
        for call, answer in zip(calls, await asyncio.gather(*map(engine.infer, calls)), strict=True):
            np.testing.assert_array_equal(answer["sum"], call.sum(1))
            np.testing.assert_array_equal(answer["length"], np.full((len(call), 1), call.shape[1]))
            np.testing.assert_array_equal(answer["same"], call)
        with pytest.raises(InputError, match="8 is the most"):
            await engine.infer(ids(1, 9))


TWO = (TensorSpec("x", "float32", ("n", "m")), TensorSpec("mask", "int8", ("n",)))


def test_a_dimension_that_is_not_padded_stays_as_it_is():
    check = PaddedInputCheck(TWO, padding({"n": (4, 8)}, {"mask": "mask"}, TWO))
    assert not check.looks_at_shapes_alone
    keys = [check.validate(np.ones((1, *dims), np.float32))[2].shape for dims in ((3, 2), (4, 2), (3, 5))]
    assert keys == [(("n", 4), ("m", 2)), (("n", 4), ("m", 2)), (("n", 4), ("m", 5))]


def test_dimensions_that_are_the_same():
    """A plan of TensorRT has no names for them: the size of one is read from the other."""
    specs = (TensorSpec("ids", "int64", ("ids.1",)), TensorSpec("mask", "bool", ("mask.1",)))
    found = padding({"ids.1 = mask.1": (4, 8)}, {"mask": "mask"}, specs)
    check = PaddedInputCheck(specs, found)
    (_, mask), rows, key = check.validate({"ids": ids(2, 3)})
    assert (mask.shape, rows, key.shape) == ((2, 3), 2, (("ids.1", 4), ("mask.1", 4)))
    with pytest.raises(InputError, match="padded as one dimension, given 3, 2"):
        check.validate({"ids": ids(2, 3), "mask": np.ones((2, 2), bool)})


def test_what_is_remembered_of_shapes_is_bounded(monkeypatch):
    monkeypatch.setattr("asynctrt.runtime.pad_sizes.SHAPES_MAX", 8)
    monkeypatch.setattr("asynctrt.core.padded_inputs.KEYS_KEPT_MAX", 8)
    found = padding({"n": 100}, {"mask": "mask"}, TWO)
    check = PaddedInputCheck(TWO, found)
    for n in range(50):
        (_, mask), *_ = check.validate({"x": np.ones((1 + n % 3, n, 2), np.float32)})
        assert mask.shape == (1 + n % 3, n)
        assert found.fit(((n, 2), (n,))).corners[0] == (slice(None), slice(n), slice(2))
        assert len(found._fits) <= 8
        assert len(check._kept) <= 8


async def test_what_is_too_long_is_refused_before_its_length_is_written_down():
    """An int8 holds 127: a longer one cannot be made for the input that the engine fills."""
    specs = (TensorSpec("ids", "int64", ("length",)), TensorSpec("count", "int8", (1,)))
    check = PaddedInputCheck(specs, padding({"length": 100}, {"count": "length"}, specs))
    with pytest.raises(InputError, match="100 is the most"):
        check.validate(ids(1, 300))


def test_a_front_has_the_shapes_that_callers_gave():
    options = Options(pad={"length": (4, 8)}, pad_with={"mask": "mask", "count": "length"})
    check = front_check("model", (IDS, MASK, COUNT), (), options)
    (_, mask, count), _, key = check.validate(ids(2, 3))
    assert key.shape == (("length", 3),)
    assert mask.shape == (2, 3)
    assert count.tolist() == [[3], [3]]
    with pytest.raises(InputError, match="8 is the most"):
        check.validate(ids(1, 9))


def test_two_dimensions_that_no_profile_takes_as_they_are_padded():
    """Each is within one of the profiles, but not in the same."""

    def check_key(key):
        sizes = dict(key.shape)
        if sizes["n"] > 8 and sizes["m"] > 8:
            raise InputError("no profile")

    inputs = [TensorSpec("x", "int8", ("n", "m"))]
    ranges = {"n": [(1, 8), (1, 99)], "m": [(1, 99), (1, 8)]}
    found = Padding("model", inputs, (), {dim: Sizes.within([dim], ranges.get) for dim in ranges})
    check = PaddedInputCheck(inputs, found, check_key=check_key)
    keys = [dict(check.validate(np.zeros((1, *dims), np.int8))[2].shape) for dims in ((9, 3), (9, 8), (9, 7))]
    assert keys == [{"n": 16, "m": 4}, {"n": 16, "m": 8}, {"n": 16, "m": 8}]
    keys = [dict(check.validate(np.zeros((1, *dims), np.int8))[2].shape) for dims in ((5, 6), (100, 3))]
    assert keys == [{"n": 8, "m": 8}, {"n": 100, "m": 3}], "rows that cannot be padded are left to the check"
    with pytest.raises(InputError, match="no profile"):
        check.validate(np.zeros((1, 50, 30), np.int8))


@pytest.mark.parametrize(("pad", "nbytes"), [({"length": (16,)}, 16 * 8), (None, 9 * 8), ("off", 9 * 8)])
def test_a_server_counts_the_bytes_of_what_is_padded(pad, nbytes):
    request = {"inputs": [{"name": "ids", "shape": [1, 9], "datatype": "INT64", "data": [[1] * 9]}]}
    body = json.dumps(request).encode()
    JsonCodec("model", "1", [IDS], [IDS], answer_max=nbytes, pad=pad).decode(body, len(body))
    with pytest.raises(TooLargeError, match="bytes"):
        JsonCodec("model", "1", [IDS], [IDS], answer_max=nbytes - 1, pad=pad).decode(body, len(body))


def staged(found, *requests, rows_run=None):
    """What lies in a slab in which these requests were staged, which was full of something else before."""
    layout = lay_out(TWO, (), {"n": 4, "m": 2}, 8)
    slab = Slab(layout, StagingBuffers(HostDevice(), layout.nbytes))
    for view in slab.inputs:
        view[...] = 77
    source = PaddedSource(make_batch(*requests, rows_run=rows_run), slab, found)
    source.stage()
    return source, slab.inputs


def two(rows, n):
    return make_request(np.full((rows, n, 2), n, np.float32), np.ones((rows, n), np.int8))


def test_rows_that_fill_a_batch_are_copies_of_its_own():
    _, (x, mask) = staged(padding({"n": 4}, {"x": -1}, TWO), two(1, 3), two(1, 2), rows_run=5)
    assert x[:5, :, 0].tolist() == [[3, 3, 3, -1], [2, 2, -1, -1], *[[3, 3, 3, -1]] * 3]
    assert mask[:5].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], *[[1, 1, 1, 0]] * 3]
    assert (x[5:] == 77).all()


def test_nothing_that_lay_there_before_is_left_when_one_of_several_cannot_be_staged():
    changed = two(1, 3)
    changed.payload = (changed.payload[0], np.ones((1, 2), np.int8))
    source, (x, mask) = staged(padding({"n": 4}, {"x": -1}, TWO), two(1, 1), changed, two(2, 2), rows_run=5)
    assert [request for request, _ in source.refused] == [changed]
    assert x[:5, :, 0].tolist() == [[1, -1, -1, -1], [2, 2, -1, -1], *[[2, 2, -1, -1]] * 2, [1, -1, -1, -1]]
    assert mask[:5].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], *[[1, 1, 0, 0]] * 2, [1, 0, 0, 0]]


async def test_rows_on_the_device_are_of_one_of_the_sizes(tmp_path):
    path = sequence_onnx(tmp_path / "sequence.onnx")
    device = HostDevice()
    async with (
        asyncio.timeout(WAIT_S),
        asynctrt.open(path, device=device) as first,
        asynctrt.open(path, device=device, pad={"length": (4, 8)}) as second,
    ):
        for length in (3, 4):
            array = np.ones((2, length), np.float32)
            held = (await first.infer(array, outputs="device"))["doubled"]
            if length == 4:
                np.testing.assert_array_equal((await second.infer(held))["doubled"], 4 * array)
            else:
                with pytest.raises(InputError, match="rows on the device are not padded: they have"):
                    await second.infer(held)
