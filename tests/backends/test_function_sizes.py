"""Functions that see a few batch sizes only, each of them before the first caller comes."""

import asyncio
import logging
import threading

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.devices.host import HostDevice
from asynctrt.errors import ExecutionError, OptionsError
from asynctrt.tensors import TensorSpec

pytestmark = pytest.mark.anyio
X = TensorSpec("x", "float32", (4,))
Y = TensorSpec("y", "float32", (4,))
SIZES = (1, 3, 8)


class Seen:
    """Doubles its rows, and notes the size and the thread of each batch."""

    def __init__(self):
        self.batches = []

    def __call__(self, inputs):
        self.batches.append((threading.get_ident(), len(inputs["x"])))
        result = 2 * inputs["x"]
        inputs["x"][...] = np.nan  # A function may write to its inputs.
        return result

    def sizes(self):
        return [size for _, size in self.batches]


def model_of(function, **settings):
    return FunctionModel(function, inputs=X, outputs=Y, **settings)


def rows_of(count, start=0):
    return np.arange(start, start + 4 * count, dtype=np.float32).reshape(count, 4)


async def answered(engine, counts):
    sent = [rows_of(count, 100 * number) for number, count in enumerate(counts)]
    answers = await asyncio.gather(*map(engine.infer, sent))
    for one, answer in zip(sent, answers, strict=True):
        np.testing.assert_array_equal(answer["y"], 2 * one)


async def test_no_other_size_is_seen_and_each_was_run_in_each_thread():
    seen = Seen()
    model = model_of(seen, batch_sizes=SIZES)
    async with asynctrt.open(model, device=HostDevice(threads=2), contexts=5) as engine:
        statistics = engine.statistics()
        assert (statistics.batch_sizes, statistics.contexts) == (SIZES, 2)
        beforehand = set(seen.batches)
        threads = {thread for thread, _ in beforehand}
        assert beforehand == {(thread, size) for thread in threads for size in SIZES}
        assert (len(threads), len(seen.batches)) == (2, 12)
        assert threading.get_ident() not in threads
        for count in (1, 2, 3, 4, 8):
            await answered(engine, [count])
        await answered(engine, [1] * 50)
        assert engine.statistics().rows == 68
    assert set(seen.batches) == beforehand
    assert seen.sizes()[12:17] == [1, 3, 3, 8, 8]


async def test_a_deterministic_engine_has_one_size_and_runs_nothing_beforehand():
    seen = Seen()
    async with asynctrt.open(model_of(seen, batch_sizes=SIZES), batching="deterministic") as engine:
        await answered(engine, [1])
    assert seen.sizes() == [8]


async def test_inputs_are_zero_in_each_batch_beforehand_and_copies_of_a_row_later():
    given = []

    def function(inputs):
        given.append({name: array.copy() for name, array in inputs.items()})
        inputs["number"][...] = 7
        return np.zeros(len(inputs["number"]), np.float32)

    model = FunctionModel(
        function,
        inputs=[TensorSpec("number", "int64"), TensorSpec("text", "object")],
        outputs=TensorSpec("y", "float32"),
        batch_sizes=(4,),
    )
    async with asynctrt.open(model, contexts=1) as engine:
        assert [each["number"].tolist() for each in given] == [[0] * 4] * 2
        assert [each["text"].tolist() for each in given] == [[""] * 4] * 2
        given.clear()
        await engine.infer({"number": np.array([1, 2]), "text": np.array(["a", "b"], object)})
    assert given[0]["number"].tolist() == [1, 2, 1, 1]
    assert given[0]["text"].tolist() == ["a", "b", "a", "a"]


@pytest.mark.parametrize("kind", ["coroutine", "loop"])
async def test_what_runs_on_the_loop_is_run_there_beforehand(kind):
    seen = Seen()

    async def coroutine(inputs):
        await asyncio.sleep(0)
        return seen(inputs)

    function, run_on = (seen, "loop") if kind == "loop" else (coroutine, "thread")
    model = model_of(function, run_on=run_on, batch_sizes=(2, 4))
    async with asynctrt.open(model, contexts=2) as engine:
        assert sorted(seen.sizes()) == [2, 2, 2, 2, 4, 4, 4, 4]
        await answered(engine, [1, 1, 1])
    assert {thread for thread, _ in seen.batches} == {threading.get_ident()}
    assert set(seen.sizes()) == {2, 4}


async def test_a_function_that_refuses_zeros_is_served_all_the_same(caplog):
    sizes = []

    def function(inputs):
        sizes.append(len(inputs["x"]))
        if not inputs["x"].any():
            raise ValueError("no zeros, please")
        return 2 * inputs["x"]

    with caplog.at_level(logging.WARNING, logger="asynctrt"):
        async with asynctrt.open(model_of(function, batch_sizes=(2, 4)), contexts=1) as engine:
            await answered(engine, [3])
    assert sizes[-1] == 4
    assert "could not be run beforehand" in caplog.text
    assert "no zeros, please" in caplog.text


@pytest.mark.parametrize("pad", [None, {"length": (2, 4)}])
async def test_rows_that_vary_are_padded_and_known_shapes_run_beforehand(pad):
    shapes = []

    def function(inputs):
        shapes.append(inputs["x"].shape)
        return inputs["x"].sum(axis=1)

    model = FunctionModel(
        function,
        inputs=TensorSpec("x", "float32", ("length",)),
        outputs=TensorSpec("y", "float32"),
        batch_sizes=(2, 4),
    )
    async with asynctrt.open(model, contexts=1, pad=pad) as engine:
        assert set(shapes) == ({(rows, length) for rows in (2, 4) for length in (2, 4)} if pad else set())
        shapes.clear()
        answer = await engine.infer(np.ones((3, 4), np.float32))
    assert shapes == [(4, 4)]
    assert answer["y"].tolist() == [4.0] * 3


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((4, 1), "does not rise. Write (1, 4)"),
        ((1, 4, 4), "has a size twice. Write (1, 4)"),
        ("4,1", "does not rise. Write (1, 4)"),
        ((), "batch_sizes must be batch sizes ≥ 1 in rising order, such as (1, 4, 16)"),
        ((0, 4), "batch_sizes must be batch sizes ≥ 1"),
        ((1, 2.5), "batch_sizes must be batch sizes ≥ 1"),
        (8, "batch_sizes must be batch sizes ≥ 1"),
    ],
)
def test_sizes_that_are_none(sizes, says):
    for make in (
        lambda: model_of(Seen(), batch_sizes=sizes),
        lambda: asynctrt.batch(batch_sizes=sizes),
    ):
        with pytest.raises(OptionsError) as caught:
            make()
        assert says in str(caught.value)


@pytest.mark.parametrize(
    ("of_model", "options", "says"),
    [
        ({"batch_sizes": SIZES}, {"max_rows": 64}, "Leave max_rows out, or let batch_sizes end with 64"),
        ({"batch_sizes": SIZES}, {"max_rows": 4}, "Leave max_rows out, or let batch_sizes end with 4"),
        ({"batch_sizes": SIZES}, {"max_queue_rows": 4}, "max_queue_rows (4) must be ≥ the largest of"),
    ],
)
async def test_sizes_that_something_contradicts(of_model, options, says):
    with pytest.raises(OptionsError) as caught:
        await asynctrt.open(model_of(Seen(), **of_model), **options)
    assert says in str(caught.value)


class TestBatch:
    """``@asynctrt.batch(batch_sizes=...)``."""

    @pytest.mark.parametrize("contexts", [1, 2])
    async def test_the_first_call_runs_each_size_in_each_thread(self, contexts):
        seen = []

        @asynctrt.batch(batch_sizes=(2, 4), contexts=contexts)
        def double(x):
            seen.append((threading.get_ident(), x.tolist()))
            return 2 * x

        async with double:
            assert not seen
            assert await double(3) == 6
            beforehand, after = seen[: 4 * contexts], seen[4 * contexts :]
            assert sorted(len(x) for _, x in beforehand) == sorted([2, 2, 4, 4] * contexts)
            assert all(set(x) == {3} for _, x in seen)
            assert [len(x) for _, x in after] == [2]
            assert await asyncio.gather(*map(double, range(11))) == [2 * number for number in range(11)]
        assert {len(x) for _, x in seen} == {2, 4}
        assert len({thread for thread, _ in seen}) <= contexts

    async def test_lists_keys_and_several_arguments(self):
        seen = []

        @asynctrt.batch(items=True, key="model", batch_sizes=(3,))
        def joined(first, second, model):
            seen.append((first, second, model))
            return [f"{model}{one}{other}" for one, other in zip(first, second, strict=True)]

        async with joined:
            answers = await asyncio.gather(
                joined("a", "b", "m"), joined("c", "d", "m"), joined("e", "f", "n")
            )
        assert answers == ["mab", "mcd", "nef"]
        assert all(len(first) == len(second) == 3 for first, second, _ in seen)
        assert (["a", "c", "c"], ["b", "d", "d"], "m") in seen

    async def test_a_coroutine_function(self):
        seen = []

        @asynctrt.batch(batch_sizes=(2, 4))
        async def double(x):
            await asyncio.sleep(0)
            seen.append(len(x))
            return 2 * x

        async with double:
            assert await asyncio.gather(*map(double, range(5))) == [0, 2, 4, 6, 8]
        assert sorted(seen[:4]) == [2, 2, 4, 4]
        assert set(seen) == {2, 4}

    async def test_a_function_that_fails_beforehand_answers_its_callers(self, caplog):
        @asynctrt.batch(batch_sizes=(2,))
        def careful(x):
            if x[0] < 0:
                raise ValueError("negative")
            return x

        async with careful:
            with pytest.raises(ExecutionError, match="negative"):
                await careful(-1)
            assert await careful(1) == 1
        assert "could not be run beforehand" in caplog.text

    async def test_one_result_for_each_copy_is_expected(self):
        @asynctrt.batch(batch_sizes=(4,), items=True)
        def short(x):
            return x[:1]

        async with short:
            with pytest.raises(ExecutionError, match="1 results for 4 items"):
                await short("a")


async def test_a_device_that_holds_batches_is_opened_and_pads():
    seen, device = Seen(), asynctrt.testing.LatchDevice()
    async with asynctrt.open(model_of(seen, batch_sizes=(4,)), device=device) as engine:
        assert not seen.batches
        answer = asyncio.create_task(answered(engine, [3]))
        await device.wait_held(1)
        device.open()
        await answer
    assert seen.sizes() == [4]
