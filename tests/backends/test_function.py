"""Python functions as models: whatever a function does, each caller gets its own rows or a typed error."""

import asyncio
import functools
import threading
import types
from contextlib import asynccontextmanager

import ml_dtypes
import numpy as np
import pytest

import asynctrt
from asynctrt.backends.base import TensorMemory
from asynctrt.backends.function import FunctionBinding, FunctionModel, OutputMemory, Outputs
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceLostError, ExecutionError, InputError, ModelError, QueueFullError
from asynctrt.tensors import TensorSpec
from tests.helpers import until
from tests.models import double

WAIT_S = 30
X = TensorSpec("x", "float32", (4,))
Y = TensorSpec("y", "float32", (4,))
Z = TensorSpec("z", "int64")


def own_rows(sent):
    return {"y": 2 * sent, "z": sent[:, 0].astype(np.int64)}


def in_place(inputs, outputs):
    outputs["y"][...] = 2 * inputs["x"]
    outputs["z"][...] = inputs["x"][:, 0]


def through_items(inputs, outputs):
    ways = {"y": lambda: 2 * inputs["x"], "z": lambda: inputs["x"][:, 0]}
    for name, array in outputs.items():
        array[...] = ways[name]()


def assigned(inputs, outputs):
    outputs["y"] = 2 * inputs["x"]
    outputs["z"] = inputs["x"][:, 0].astype(int)


def assigned_and_changed(inputs, outputs):
    outputs["y"] = inputs["x"]
    outputs["y"] *= 2
    outputs["z"] = np.zeros(len(inputs["x"]), np.int64)
    outputs["z"] += inputs["x"][:, 0].astype(np.int64)


def as_a_tuple(rows):
    return tuple(rows.values())


def as_a_list(rows):
    return list(rows.values())


def returns_as(kind):
    def returns(inputs):
        return kind(own_rows(inputs["x"]))

    returns.__name__ = f"returns_{kind.__name__}"
    return returns


def returns_its_outputs(inputs, outputs):
    in_place(inputs, outputs)
    return outputs


def returns_its_outputs_as_a_tuple(inputs, outputs):
    in_place(inputs, outputs)
    return outputs["y"], outputs["z"]


def returns_one_and_writes_one(inputs, outputs):
    outputs["z"][...] = inputs["x"][:, 0]
    return {"y": 2 * inputs["x"]}


def returns_a_view_of_its_input(inputs):
    x = inputs["x"]
    z = x[:, 0].astype(np.int64)
    x *= 2
    return x[:, :], z


KEPT = threading.local()
"""Of each thread: two that share an array race for it, whoever calls them."""


def returns_what_it_used_before(inputs):
    kept = vars(KEPT).setdefault("rows", np.zeros((64, 4), np.float32))
    rows = len(inputs["x"])
    np.multiply(2, inputs["x"], out=kept[:rows])
    return kept[:rows], inputs["x"][:, 0].astype(np.int64)


def pops_its_inputs(inputs):
    x = inputs.pop("x")
    assert not inputs
    return own_rows(x)


def clears_its_inputs(inputs, outputs):
    x = inputs["x"]
    inputs.clear()
    inputs["x"] = None
    outputs["y"], outputs["z"] = own_rows(x).values()


def reshapes_its_inputs(inputs):
    x = inputs["x"]
    x.shape = (-1, 2, 2)
    return 2 * x.reshape(-1, 4), x[:, 0, 0].astype(np.int64)


def reshapes_its_outputs(inputs, outputs):
    outputs["y"].shape = (-1,)
    outputs["y"][:] = 2 * inputs["x"].ravel()
    outputs["z"][...] = inputs["x"][:, 0]


def other_dtypes(inputs):
    return 2 * inputs["x"].astype(np.float64), inputs["x"][:, 0].astype(np.int16)


class Callable:
    def __call__(self, inputs, outputs):
        in_place(inputs, outputs)


async def coroutine(inputs):
    await asyncio.sleep(0)
    return own_rows(inputs["x"])


async def coroutine_without_a_pause(inputs):
    return own_rows(inputs["x"])


async def coroutine_in_place(inputs, outputs):
    outputs["y"][...] = inputs["x"]
    await asyncio.sleep(0)
    outputs["y"] *= 2
    outputs["z"] = inputs["x"][:, 0].astype(np.int64)


class CoroutineCallable:
    async def __call__(self, inputs):
        await asyncio.sleep(0)
        return own_rows(inputs["x"])


def returns_a_coroutine(inputs):
    return coroutine(inputs)


def returns_a_future(inputs):
    class Later:
        def __await__(self):
            yield from asyncio.sleep(0).__await__()
            return own_rows(inputs["x"])

    return Later()


def with_an_option(inputs, scale=2):
    return scale * inputs["x"], inputs["x"][:, 0].astype(np.int64)


RIGHT = [
    in_place,
    through_items,
    assigned,
    assigned_and_changed,
    *(returns_as(kind) for kind in (dict, as_a_tuple, as_a_list, types.MappingProxyType)),
    returns_its_outputs,
    returns_its_outputs_as_a_tuple,
    returns_one_and_writes_one,
    returns_a_view_of_its_input,
    returns_what_it_used_before,
    pops_its_inputs,
    clears_its_inputs,
    reshapes_its_inputs,
    reshapes_its_outputs,
    other_dtypes,
    Callable(),
    functools.partial(in_place),
    coroutine,
    coroutine_without_a_pause,
    coroutine_in_place,
    CoroutineCallable(),
    functools.partial(coroutine),
    returns_a_coroutine,
    returns_a_future,
    with_an_option,
]


def only_one_output(inputs, outputs):
    outputs["y"][...] = 2 * inputs["x"]


def complex_numbers(inputs, outputs):
    outputs["y"] = inputs["x"] * 2j


def assigns_an_unknown_output(inputs, outputs):
    in_place(inputs, outputs)
    outputs["w"] = inputs["x"]


def raises(inputs, outputs):
    in_place(inputs, outputs)
    raise ValueError("no")


def removes_an_output(inputs, outputs):
    in_place(inputs, outputs)
    del outputs["y"]


async def a_coroutine_that_returns_nothing(inputs, outputs):
    await asyncio.sleep(0)
    outputs["z"] = inputs["x"][:, 0].astype(int)


async def a_coroutine_that_raises(inputs):
    await asyncio.sleep(0)
    raise ValueError("no")


async def a_coroutine_that_is_cancelled(inputs):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


def gives(outputs):
    """Return a function that returns what this makes of its input and of the right outputs."""
    return lambda inputs: outputs(inputs["x"], **own_rows(inputs["x"]))


WRONG = {
    "nothing returned": (
        gives(lambda x, y, z: None),
        r"output 'y': \d+ of \d+ rows were not written. A function returns .* or it takes",
    ),
    "only one output": (only_one_output, r"output 'z': \d+ of \d+ rows were not written"),
    "fewer rows": (
        gives(lambda x, y, z: {"y": y[:-1], "z": z[:-1]}),
        r"'y' has shape \(\d, 4\) in a batch of \d rows, and the function gave \(\d+, 4\)",
    ),
    "one row for all": (
        gives(lambda x, y, z: {"y": y[:1].sum(axis=0), "z": np.int64(1)}),
        r"'y' has shape \(\d, 4\) in a batch of \d rows, and the function gave \(4,\)",
    ),
    "another row shape": (gives(lambda x, y, z: {"y": y[:, :3], "z": z}), r"the function gave \(\d, 3\)"),
    "another kind of dtype": (
        gives(lambda x, y, z: {"y": y, "z": x[:, 0]}),
        r"'z' is int64, and the function gave float32.*same_kind.*astype\('int64'\)",
    ),
    "complex numbers": (complex_numbers, r"'y' is float32, and the function gave complex64"),
    "integers that do not fit": (
        gives(lambda x, y, z: {"y": y, "z": np.full(len(x), 2**63, np.uint64)}),
        r"'z' is int64, which holds -\d+ to \d+, and .* uint64 with a value outside",
    ),
    "too few outputs": (
        gives(lambda x, y, z: (y,)),
        "returned a tuple of 1, and the model has 2 outputs: y, z",
    ),
    "one array": (gives(lambda x, y, z: y), "returned one ndarray, and the model has 2 outputs: y, z"),
    "an unknown output": (
        gives(lambda x, y, z: {"y": y, "z": z, "w": x}),
        "'w' is not an output of this model; its outputs: y, z",
    ),
    "assigns an unknown output": (
        assigns_an_unknown_output,
        "'w' is not an output of this model; its outputs: y, z",
    ),
    "an object": (
        gives(lambda x, y, z: {"y": object(), "z": z}),
        "'y' is an array, and the function gave a object",
    ),
    "lists of rows": (
        gives(lambda x, y, z: {"y": y.tolist(), "z": z}),
        r"'y' is an array, and the function gave a list. .* np.asarray\(rows\)",
    ),
    "a generator": (gives(lambda x, y, z: (row for row in x)), "returned one generator"),
    "raises": (raises, "ValueError: no"),
    "a coroutine returns nothing": (
        a_coroutine_that_returns_nothing,
        r"output 'y': \d+ of \d+ rows were not written",
    ),
    "a coroutine raises": (a_coroutine_that_raises, "ValueError: no"),
    "a coroutine is cancelled": (
        a_coroutine_that_is_cancelled,
        "the function's coroutine was cancelled",
    ),
    "removes an output": (removes_an_output, "AttributeError: __delitem__"),
}

DEVICES = {
    "in place": lambda: HostDevice(in_place="always"),
    "threads": lambda: HostDevice(in_place="never", threads=2),
    "own memory, in place": lambda: HostDevice(in_place="always", unified=False),
    "own memory, threads": lambda: HostDevice(in_place="never", threads=2, unified=False),
}


@pytest.fixture(params=DEVICES)
def device(request):
    return DEVICES[request.param]()


def name_of(value):
    return getattr(value, "__name__", type(value).__name__) if callable(value) else ""


def opened(function, device):
    model = FunctionModel(function, inputs=X, outputs=[Y, Z])
    return asynctrt.open(model, device=device, contexts=2, max_rows=8)


@pytest.mark.anyio
@pytest.mark.parametrize("function", RIGHT, ids=name_of)
async def test_each_caller_gets_its_own_rows(function, device):
    async def caller(number):
        rows = number % 3 + 1
        sent = np.full((rows, 4), number, np.float32) + np.arange(rows, dtype=np.float32)[:, None]
        expected = own_rows(sent)
        result = await engine.infer(sent)
        for name in ("y", "z"):
            np.testing.assert_array_equal(result[name], expected[name])

    async with opened(function, device) as engine:
        await caller(5)
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*map(caller, range(1, 40)))


@pytest.mark.anyio
@pytest.mark.parametrize(("function", "message"), WRONG.values(), ids=WRONG)
async def test_a_batch_without_its_outputs_fails(function, message, device):
    sent = [one_row(number) for number in range(1, 6)]
    async with opened(function, device) as engine, asyncio.timeout(WAIT_S):
        answers = await asyncio.gather(*map(engine.infer, sent), return_exceptions=True)
        answers += await asyncio.gather(engine.infer(sent[0]), return_exceptions=True)
    for answer in answers:
        with pytest.raises(ExecutionError, match=message):
            raise answer


class Held:
    """A coroutine function whose batches wait for the test."""

    def __init__(self):
        self.rows = []
        self.cancelled = 0
        self.go = asyncio.Event()

    async def __call__(self, inputs):
        self.rows.append(len(inputs["x"]))
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return own_rows(inputs["x"])


def one_row(number):
    return np.full((1, 4), number, np.float32)


@asynccontextmanager
async def held(device, **settings):
    """Open an engine of a coroutine function whose batches wait for the test."""
    function = Held()
    model = FunctionModel(function, inputs=X, outputs=[Y, Z])
    async with asyncio.timeout(WAIT_S), asynctrt.open(model, device=device, **settings) as engine:
        yield function, engine


@pytest.mark.anyio
class TestCoroutines:
    async def test_as_many_are_under_way_as_there_are_contexts(self, device):
        async with held(device, contexts=8, max_rows=2) as (function, engine):
            tasks = []
            for number in range(8):  # Batches of one row, which are not full.
                tasks.append(asyncio.create_task(engine.infer(one_row(number))))
                await until(lambda: len(function.rows) == len(tasks))
            assert function.rows == [1] * 8
            function.go.set()
            for number, result in enumerate(await asyncio.gather(*tasks)):
                assert result["z"].tolist() == [number]
                assert result["y"].tolist() == [[2 * number] * 4]

    async def test_one_that_never_ends_is_given_up_and_cancelled(self, device):
        async with held(device, contexts=2, batch_timeout=0.3) as (function, engine):
            with pytest.raises(DeviceLostError, match="batch_timeout"):
                await engine.infer(one_row(1))
            await until(lambda: function.cancelled == 1)
            function.go.set()
            assert (await engine.infer(one_row(1)))["z"].tolist() == [1]

    async def test_one_that_never_ends_is_cancelled_when_the_engine_closes(self, device):
        async with held(device, close_timeout=0.05) as (function, engine):
            task = asyncio.create_task(engine.infer(one_row(1)))
            await until(lambda: function.rows)
            await engine.aclose()
            with pytest.raises(DeviceLostError, match="close_timeout"):
                await task
            assert function.cancelled == 1
            assert engine.state == "closed"

    async def test_a_caller_who_goes_away_leaves_the_batch_alone(self, device):
        async with held(device, contexts=1) as (function, engine):
            tasks = [asyncio.create_task(engine.infer(one_row(number))) for number in range(3)]
            await until(lambda: function.rows)
            tasks[1].cancel()
            await asyncio.sleep(0)
            function.go.set()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(answers[1], asyncio.CancelledError)
            assert [answers[0]["z"], answers[2]["z"]] == [[0], [2]]
            assert function.cancelled == 0

    async def test_what_goes_on_after_its_batch_writes_into_no_other(self):
        late, release = [], asyncio.Event()

        async def function(inputs, outputs):
            async def later():
                await release.wait()
                outputs["y"] = 77 + inputs["x"]

            late.append(asyncio.create_task(later()))
            return own_rows(inputs["x"])

        model = FunctionModel(function, inputs=X, outputs=[Y, Z])
        async with asyncio.timeout(WAIT_S), asynctrt.open(model, contexts=1) as engine:
            await engine.infer(one_row(1))
            release.set()
            with pytest.raises(KeyError, match="'y' cannot be written any more: its batch has ended"):
                await late[0]


def test_a_coroutine_without_a_loop():
    stream = HostDevice(in_place="always").create_stream()
    model = FunctionModel(coroutine, inputs=X, outputs=(Y, Z))
    binding = FunctionBinding(model, (memory_of(X),), (memory_of(Y), memory_of(Z)))
    binding.enqueue(1, profile=None, stream=stream, arena=None)
    end = HostDevice().create_event()
    stream.record(end)
    assert "returned an awaitable, and no event loop is running" in str(end.error)
    assert stream.close(WAIT_S)


@pytest.mark.anyio
async def test_what_is_learned_of_one_model_is_not_believed_of_another():
    """A quick one runs on the loop's thread; a slow one on the same device would hold the loop up there."""
    threads = []

    def slow(inputs):
        threads.append(threading.get_ident())
        return inputs["x"]

    device = HostDevice(threads=1)
    quick = FunctionModel(lambda inputs: inputs["x"], inputs=X, outputs=Y)
    other = FunctionModel(slow, inputs=X, outputs=Y)
    async with asynctrt.open(quick, device=device) as first, asynctrt.open(other, device=device) as second:
        for _ in range(50):
            await first.infer(one_row(1))
        await second.infer(one_row(1))
    assert threading.get_ident() not in threads


def memory_of(spec, rows_max=16):
    array = np.zeros((rows_max, *spec.dims), spec.dtype)
    return TensorMemory(spec.name, spec.dtype, spec.dims, array.ctypes.data, array)


class Inline:
    """Runs a function as a binding does, once for each batch."""

    def __init__(self, function, *outputs):
        self.memory = [memory_of(spec) for spec in outputs]
        model = FunctionModel(function, inputs=X, outputs=outputs)
        self.binding = FunctionBinding(model, (memory_of(X),), tuple(self.memory))

    def __call__(self, rows):
        self.binding._run(rows)
        return [memory.array[:rows] for memory in self.memory]


RECOGNISED = {
    "float32 rows": (TensorSpec("y", "float32", (4,)), 1),
    "one float32": (TensorSpec("y", "float32"), 1),
    "one float64": (TensorSpec("y", "float64"), 1),
    "one int64": (TensorSpec("y", "int64", (1,)), 1),
    "10 bytes": (TensorSpec("y", "uint8", (10,)), 1),
    "17 bytes": (TensorSpec("y", "int8", (17,)), 1),
    "16 bytes": (TensorSpec("y", "int16", (2, 4)), 1),
    "bool rows": (TensorSpec("y", "bool", (5,)), 1),
    "one bool": (TensorSpec("y", "bool"), 1),
    "one complex": (TensorSpec("y", "complex64"), 1),
    "bfloat16 rows": (TensorSpec("y", ml_dtypes.bfloat16, (4,)), 1),
    "one int32": (TensorSpec("y", "int32"), 2),
    "one float16": (TensorSpec("y", "float16"), 4),
    "one uint8": (TensorSpec("y", "uint8"), 8),
    "three uint8": (TensorSpec("y", "uint8", (3,)), 4),
}
"""For each kind of output how many rows, from a multiple of 8 bytes on, have to be left out to be noticed."""


class WritesAllBut:
    """A function that leaves out some rows of its output."""

    def __init__(self):
        self.left_out = slice(0, 0)

    def __call__(self, inputs, outputs):
        values = outputs["y"]
        keep = values[self.left_out].copy()
        values[...] = 1
        values[self.left_out] = keep


class TestWhichUnwrittenRowsAreRecognised:
    @pytest.mark.parametrize("kind", RECOGNISED)
    def test_after_batches_of_other_sizes(self, kind):
        """In each size what is left out is found as ever, and what lies behind the batch is left alone."""
        spec, least = RECOGNISED[kind]
        writes = WritesAllBut()
        run = Inline(writes, spec)
        whole = run.memory[0].array
        for rows in (16, 8, 9, 1, 8, 16):
            behind = whole[rows:].copy()
            assert (run(rows)[0] == 1).all()
            if rows >= 8:
                writes.left_out = slice(rows // 8 * 8 - 8, rows // 8 * 8 - 8 + least)
                with pytest.raises(ExecutionError, match=rf"output 'y': \d of {rows} rows were not written"):
                    run(rows)
                writes.left_out = slice(0, 0)
            assert whole[rows:].tobytes() == behind.tobytes()

    def test_after_ctrl_c_while_it_was_decided_where_marks_lie(self, monkeypatch):
        """Nothing of what was half done is used."""

        def interrupt(*_):
            raise KeyboardInterrupt

        memory = OutputMemory(memory_of(TensorSpec("y", "float32", (4,))))
        for method in ("_draw", "_cut"):
            with monkeypatch.context() as patched:
                patched.setattr(memory, method, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    memory.hand_out(5)
            memory.hand_out(5)[:3] = 1
            assert memory.count_marked() == 2

    @pytest.mark.parametrize("kind", RECOGNISED)
    def test_what_is_not_recognised_is_no_row_of_an_earlier_batch(self, kind, monkeypatch):
        """Every value that a batch before had written is gone, also within rows and between marks."""
        monkeypatch.setattr("secrets.token_bytes", lambda count: count * b"\x5a")
        spec, _ = RECOGNISED[kind]
        units = f"V{spec.dtype.itemsize}"
        writes = [True]

        def function(inputs, outputs):
            if writes[0]:
                outputs["y"][...] = 1
            else:
                outputs["y"]

        run = Inline(function, spec)
        for rows in (1, 3, 16):
            run(16)
            writes[0] = False
            try:
                (answer,) = run(rows)
            except ExecutionError:
                answer = run.memory[0].array[:rows]
            writes[0] = True
            for value in (0, 1):
                assert not (answer.reshape(-1).view(units) == np.array([value], spec.dtype).view(units)).any()

    def test_how_many(self):
        def function(inputs, outputs):
            outputs["y"][2:5] = 1

        for dtype, dims, missing in (("float32", (4,), 7), ("float32", (), 7), ("bool", (3,), 7)):
            with pytest.raises(ExecutionError, match=f"'y': {missing} of 10 rows were not written"):
                Inline(function, TensorSpec("y", dtype, dims))(10)
        # Of int32 rows, pairs are told: (0, 1), (6, 7) and (8, 9).
        with pytest.raises(ExecutionError, match="'y': 6 of 10 rows were not written"):
            Inline(function, TensorSpec("y", "int32"))(10)

    def test_half_a_row(self):
        def first_half(inputs, outputs):
            outputs["y"][:, :2] = 1

        def second_half(inputs, outputs):
            outputs["y"][:, 2:] = 1

        for function in (first_half, second_half):
            with pytest.raises(ExecutionError, match="'y': 3 of 3 rows"):
                Inline(function, Y)(3)

    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
    @pytest.mark.parametrize("dims", [(), (4,)])
    def test_values_that_are_read_before_they_are_written(self, dtype, dims):
        def adds(inputs, outputs):
            with np.errstate(invalid="ignore"):  # Some marks are signalling NaNs.
                outputs["y"] += 1

        try:
            (answer,) = Inline(adds, TensorSpec("y", dtype, dims))(8)
        except ExecutionError:
            return  # The mark came out again, as it does on most processors.
        assert np.isnan(answer).all()

    def test_the_middle_of_a_row(self):
        def ends(inputs, outputs):
            outputs["y"][1:, :2] = outputs["y"][1:, -2:] = outputs["y"][0] = 1

        with pytest.raises(ExecutionError, match="'y': 2 of 3 rows"):
            Inline(ends, TensorSpec("y", "float32", (6,)))(3)

    def test_fewer_than_8_bytes_at_the_end_of_a_row_are_not(self):
        def first_two(inputs, outputs):
            outputs["y"][:, :2] = 1

        (answer,) = Inline(first_two, TensorSpec("y", "float32", (3,)))(3)
        assert np.isnan(answer[:, 2]).all()

    @pytest.mark.parametrize("kind", RECOGNISED)
    def test_no_legal_value_is_mistaken(self, kind):
        """Every byte there is, over and over, and whatever the fill or an earlier mark was."""
        spec, _ = RECOGNISED[kind]
        generator = np.random.default_rng(0)
        values = np.zeros((16, *spec.dims), spec.dtype)

        def function(inputs, outputs):
            outputs["y"][...] = values[: len(outputs["y"])]

        run = Inline(function, spec)
        fills = [np.full(values.nbytes, byte, np.uint8) for byte in range(256)]
        randoms = [generator.integers(0, 256, values.nbytes, np.uint8) for _ in range(300)]
        for content in fills + randoms:
            if spec.dtype == bool:
                content &= 1
            values = content.view(spec.dtype).reshape(values.shape)
            for rows in (1, 7, 16):
                (answer,) = run(rows)
                assert answer.tobytes() == values[:rows].tobytes()

    def test_a_mark_that_is_found_is_not_used_again(self):
        output = OutputMemory(memory_of(Y))
        output.hand_out(3)
        mark = output.mark
        output.hand_out(3)
        assert output.mark == mark
        assert output.count_marked() == 3
        output.hand_out(3)
        assert output.mark != mark

    def test_an_output_without_bytes(self):
        def function(inputs, outputs):
            assert outputs["y"].shape == (3, 0)

        assert Inline(function, TensorSpec("y", "float32", (0,)))(3)[0].shape == (3, 0)


class TestOutputs:
    def test_a_mapping(self):
        memory = {spec.name: OutputMemory(memory_of(spec)) for spec in (Y, Z)}
        outputs = Outputs(memory, 2)
        assert repr(outputs) == "<Outputs of 2 rows: y, z>"
        assert list(outputs) == ["y", "z"]
        assert len(outputs) == 2
        assert "y" in outputs
        assert "w" not in outputs
        assert outputs.get("w") is None
        assert outputs["y"] is outputs["y"]
        assert outputs["y"].shape == (2, 4)
        with pytest.raises(KeyError, match="'w' is not an output"):
            outputs["w"]

    def test_outputs_that_are_swapped(self):
        specs = TensorSpec("a", "float32"), TensorSpec("b", "float32")

        def swaps(inputs, outputs):
            outputs["a"][...] = 1
            outputs["b"][...] = 2
            return outputs["b"], outputs["a"]

        a, b = Inline(swaps, *specs)(3)
        assert a.tolist() == [2, 2, 2]
        assert b.tolist() == [1, 1, 1]

    def test_an_array_of_another_library(self):
        class Foreign:
            def __array__(self, dtype=None, copy=None):
                return np.ones((3, 4), np.float32)

        (answer,) = Inline(lambda inputs: Foreign(), Y)(3)
        assert (answer == 1).all()


class TestTheModel:
    def test_names(self):
        spec = TensorSpec("x", "float32", (2,))
        assert FunctionModel(double, inputs=spec, outputs=spec).name == "double"
        assert FunctionModel(double, inputs=spec, outputs=spec, name="other").name == "other"
        assert repr(FunctionModel(double, inputs=[spec], outputs=[spec])) == "<FunctionModel double>"

    def test_an_output_dimension_that_no_input_determines(self):
        with pytest.raises(ModelError, match="output 'y' has the dimension 'n', which no input has"):
            FunctionModel(
                double, inputs=TensorSpec("x", "float32", ("m",)), outputs=TensorSpec("y", "float32", ("n",))
            )

    def test_generators(self):
        def generator(inputs):
            yield inputs

        async def asynchronous(inputs):
            yield inputs

        class Yields:
            def __call__(self, inputs):
                yield inputs

        for function in (generator, asynchronous, Yields(), functools.partial(generator)):
            with pytest.raises(ModelError, match="is a generator function.*Return them"):
                FunctionModel(function, inputs=X, outputs=Y)

    @pytest.mark.parametrize(
        ("function", "takes_outputs"),
        [
            (lambda inputs: None, False),
            (lambda inputs, outputs: None, True),
            (lambda inputs, scale=1: None, False),
            (lambda inputs, outputs=None: None, True),
            (lambda inputs, *, scale=1: None, False),
            (lambda *tensors: None, True),
            (lambda inputs, *more: None, False),
            (functools.partial(lambda scale, inputs: None, 2), False),
            (print, True),
            (max, True),
        ],
    )
    def test_with_or_without_outputs(self, function, takes_outputs):
        assert FunctionModel(function, inputs=X, outputs=Y).takes_outputs == takes_outputs

    @pytest.mark.parametrize(
        "function", [lambda: None, lambda a, b, c: None, lambda inputs, *, scale: None, lambda **names: None]
    )
    def test_a_function_that_cannot_be_called(self, function):
        with pytest.raises(
            ModelError, match=r"is called as function\(inputs\) or function\(inputs, outputs\)"
        ):
            FunctionModel(function, inputs=X, outputs=Y)


@pytest.mark.anyio
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("error", [InputError("row 1"), QueueFullError("inner"), DeviceLostError("inner")])
async def test_an_error_of_another_engine_is_not_taken_for_one_of_this(error, is_async):
    def plain(inputs):
        if (inputs["x"] < 0).any():
            raise error
        return inputs["x"]

    async def coroutine(inputs):
        return plain(inputs)

    model = FunctionModel(
        coroutine if is_async else plain,
        inputs=TensorSpec("x", "float32", (2,)),
        outputs=TensorSpec("y", "float32", (2,)),
    )
    async with asynctrt.open(model) as engine:
        with pytest.raises(ExecutionError, match=type(error).__name__) as caught:
            await engine.infer(np.full((1, 2), -1, np.float32))
        assert type(caught.value) is ExecutionError
        assert engine.state == "open"
        await engine.infer(np.ones((1, 2), np.float32))
