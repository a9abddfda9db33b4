"""``@asynctrt.batch``: one item in, one result out, and batches in between."""

import asyncio
import gc
import json
import threading
import time
import warnings
import weakref
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

import asynctrt
from asynctrt.core.items import GROUPS_MAX
from asynctrt.errors import (
    DeviceLostError,
    EngineClosedError,
    ExecutionError,
    InputError,
    ModelError,
    OptionsError,
    UsageError,
)
from tests.helpers import until

WAIT_S = 30


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(WAIT_S):
            return await coroutine

    return asyncio.run(bounded())


async def gathered(function, *items):
    return await asyncio.gather(*map(function, items), return_exceptions=True)


async def engine_of(function):
    return function.engine


class Held:
    """A coroutine function over items that keeps its first batch until the test lets it go."""

    def __init__(self):
        self.batches = []
        self.go = asyncio.Event()

    async def __call__(self, items):
        self.batches.append(items)
        await self.go.wait()
        return items


@asynctrt.batch
def double(x):
    return 2 * x


class TestArrays:
    def test_calls_form_batches(self):
        shapes = []

        @asynctrt.batch(max_rows=8)
        def rows(x):
            shapes.append((x.shape, x.dtype))
            return x

        async def main():
            await gathered(rows, *[np.full((2, 3), number, np.float32) for number in range(20)])
            return rows.statistics()

        statistics = run(main())
        assert statistics.rows == 20
        assert sum(shape[0] for shape, _ in shapes) == 20
        assert max(shape[0] for shape, _ in shapes) == 8
        assert {shape[1:] for shape, _ in shapes} == {(2, 3)}
        assert {dtype for _, dtype in shapes} == {np.dtype(np.float32)}

    def test_a_function_that_returns_an_awaitable(self):
        @asynctrt.batch
        def later(x):
            async def wait():
                await asyncio.sleep(0)
                return x + 1

            return wait()

        assert run(gathered(later, 1, np.ones(2), 3))[0] == 2

    def test_several_arguments(self):
        @asynctrt.batch
        def weigh(x, weight=1.0, *, bias):
            assert x.shape == (len(x), 3)
            return x * np.reshape(weight, (-1, 1)) + bias[:, None]

        async def main():
            return await asyncio.gather(
                *[weigh(np.full(3, number), float(number), bias=number) for number in range(10)],
                *[weigh(np.full(3, number), bias=number) for number in range(10)],
            )

        results = run(main())
        for number in range(10):
            assert results[number].tolist() == [number * number + number] * 3
            assert results[10 + number].tolist() == [2 * number] * 3

    @pytest.mark.parametrize(
        ("item", "dtype", "shape"),
        [
            (True, "bool", ()),
            (3, "int64", ()),
            (2**63 - 1, "int64", ()),
            (0.5, "float64", ()),
            (1j, "complex128", ()),
            (np.float16(0.5), "float16", ()),
            (np.zeros((), "int8"), "int8", ()),
            (np.zeros((2, 0), "int8"), "int8", (2, 0)),
            (np.zeros((0, 2), "int8"), "int8", (0, 2)),
            (np.ones((2, 3), "uint8")[::-1, ::2], "uint8", (2, 2)),
            (np.ma.array([1.0, 2.0]), "float64", (2,)),
        ],
    )
    def test_what_is_stacked(self, item, dtype, shape):
        seen = []

        @asynctrt.batch
        def look(x):
            seen.append(x)
            return x

        results = run(gathered(look, item, item))
        assert sum(len(x) for x in seen) == 2
        for x in seen:
            assert (x.dtype, x.shape[1:]) == (dtype, shape)
        for result in results:
            np.testing.assert_array_equal(result, item)

    @pytest.mark.parametrize("item", ["a", b"a", 2**63, -(2**63) - 1, None, [1, 2], (1, 2), {"a": 1}, object])
    def test_what_is_not_stacked_comes_as_a_list(self, item):
        @asynctrt.batch
        def look(x):
            assert type(x) is list
            return x

        assert run(gathered(look, item, item)) == [item, item]

    def test_an_array_of_another_library(self):
        class Foreign:
            def __array__(self, dtype=None, copy=None):
                return np.ones(3)

        assert run(gathered(double, Foreign()))[0].tolist() == [2, 2, 2]

    def test_each_shape_and_dtype_batches_with_its_own(self):
        batches = []

        @asynctrt.batch(max_rows=16)
        def look(x):
            batches.append(x)
            return x

        items = [np.full(number % 3 + 1, number, "f4") for number in range(48)]
        items += [1, 1.0, "a"] * 16

        async def main():
            await look(0.0)  # So that the engine is open, and all of them wait together.
            return await gathered(look, *items)

        for item, result in zip(items, run(main()), strict=True):
            np.testing.assert_array_equal(item, result)
        assert sorted(map(len, batches[1:])) == [16] * 6

    def test_more_shapes_than_there_are_queues(self):
        items = [np.zeros(number, np.int8) for number in range(1, 3 * GROUPS_MAX)]
        results = run(gathered(double, *items))
        assert [result.shape for result in results] == [item.shape for item in items]

    def test_an_item_may_be_large(self):
        items = [np.full(300_000, number, np.float32) for number in range(3)]
        for number, result in enumerate(run(gathered(double, *items))):
            assert (result == 2 * number).all()


class TestResults:
    def test_tuples_named_tuples_and_mappings(self):
        class Point(NamedTuple):
            x: object
            y: object

        @asynctrt.batch
        def split(x):
            return {"pair": (x, [str(value) for value in x]), "point": Point(x, -x)}

        results = run(gathered(split, 1, 2))
        assert results == [
            {"pair": (1, "1"), "point": (1, -1)},
            {"pair": (2, "2"), "point": (2, -2)},
        ]
        assert type(results[0]["point"]) is Point

    def test_an_exception_in_a_list_is_raised_to_the_caller_of_its_item(self):
        @asynctrt.batch(items=True)
        def checked(words):
            return [word or ValueError("empty") for word in words]

        first, second, third = run(gathered(checked, "a", "", "b"))
        assert (first, third) == ("a", "b")
        with pytest.raises(ValueError, match="empty"):
            raise second

    def test_arrays_that_the_function_uses_again(self):
        buffer = np.zeros((64, 2))

        @asynctrt.batch
        def reuse(x):
            buffer[: len(x)] = x[:, None]
            return buffer[: len(x)]

        async def main():
            first = await reuse(1.0)
            await reuse(2.0)
            return first.tolist()

        assert run(main()) == [1, 1]

    def test_results_may_be_written_to(self):
        @asynctrt.batch
        def same(x):
            return x

        async def main():
            items = [np.full(3, number) for number in range(4)]
            results = await gathered(same, *items)
            results[0][:] = 77
            return items, results

        items, results = run(main())
        assert items[0].tolist() == [0, 0, 0]
        assert [result.tolist() for result in results[1:]] == [[1] * 3, [2] * 3, [3] * 3]

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ([1], "returned 1 results for 2 items. Return one per item"),
            (np.zeros(3), "returned 3 results for 2 items"),
            (([1, 2], [1]), "returned 1 results for 2 items"),
            ({"a": np.zeros(1)}, "returned 1 results for 2 items"),
            (None, "returned a NoneType for 2 items. Return a list with one result per item"),
            (1.5, "returned a float for 2 items"),
            ("ab", "returned a str for 2 items"),
            (np.float64(1), "returned a float64 for 2 items"),
            (np.array(1.0), "returned a ndarray for 2 items"),
            ((), "returned a tuple for 2 items"),
            (iter([1, 2]), "iterator for 2 items"),
        ],
    )
    def test_anything_else_is_an_error(self, given, message):
        @asynctrt.batch
        def wrong(x):
            return given if len(x) == 2 else x

        async def main():
            await wrong(0)
            return await gathered(wrong, 1, 2)

        for result in run(main()):
            with pytest.raises(ExecutionError, match=message):
                raise result

    def test_an_error_fails_its_batch_alone(self):
        @asynctrt.batch(max_rows=2)
        def picky(x):
            if (x < 0).any():
                raise asynctrt.InputError("negative")
            return x

        async def main():
            await picky(0)
            return await gathered(picky, 1, 2, 3, -4, 5, 6)

        results = run(main())
        assert [results[index] for index in (0, 1, 4, 5)] == [1, 2, 5, 6]
        for index in (2, 3):
            assert isinstance(results[index], ExecutionError)


class TestItems:
    def test_any_object(self):
        @asynctrt.batch(items=True, max_rows=4)
        def describe(values, *, suffix):
            assert type(values) is type(suffix) is list
            return [f"{value!r}{end}" for value, end in zip(values, suffix, strict=True)]

        items = [1, 2.0, "a", None, [1], {"b"}]

        async def main():
            return await asyncio.gather(*[describe(item, suffix="!") for item in items])

        assert run(main()) == [f"{item!r}!" for item in items]

    def test_none_is_a_result(self):
        @asynctrt.batch(items=True)
        def nothing(values):
            return [None] * len(values)

        assert run(nothing(1)) is None


class HeldByKey(Held):
    """The same with a model's name besides, as one value or as a list."""

    async def __call__(self, items, model):
        self.batches.append((list(items), model))
        await self.go.wait()
        return items


class TestKey:
    def test_arrays_are_stacked_and_shapes_still_matter(self):
        batches = []

        @asynctrt.batch(key=("scale", "bias"))
        def apply(x, scale, *, bias=0):
            batches.append((x.shape, scale, bias))
            return x * scale + bias

        async def main():
            await apply(1.0, 1)
            return await asyncio.gather(
                *[apply(np.ones(number % 2 + 1), 2, bias=number % 3) for number in range(12)],
                *[apply(np.ones(1), 3) for _ in range(2)],
            )

        for number, result in enumerate(run(main())):
            expected = [2.0 + number % 3] * (number % 2 + 1) if number < 12 else [3.0]
            assert result.tolist() == expected
        assert sorted(batches[1:]) == [
            *[((2, 1), 2, bias) for bias in range(3)],
            ((2, 1), 3, 0),
            *[((2, 2), 2, bias) for bias in range(3)],
        ]

    def test_an_argument_that_a_key_names_is_not_converted(self):
        seen = []

        @asynctrt.batch(key="value")
        def look(x, value):
            seen.append(value)
            return x

        values = [1, True, 1.0, np.float32(1), None, (1, "a"), frozenset({2})]
        assert run(gathered(lambda value: look(0, value), *values)) == [0] * len(values)
        assert {(type(value), value) for value in seen} == {(type(value), value) for value in values}

    def test_a_default_counts(self):
        batches = []

        @asynctrt.batch(items=True, key="lang")
        async def translate(words, lang="en"):
            batches.append(words)
            return words

        async def main():
            await translate("first")
            return await asyncio.gather(translate("a"), translate("b"), translate("c", lang="de"))

        assert run(main()) == ["a", "b", "c"]
        assert sorted(batches[1:]) == [["a", "b"], ["c"]]

    def test_methods(self):
        class Models:
            @asynctrt.batch(key="name")
            def named(self, name, x):
                return [f"{name} {value}" for value in x]

            @asynctrt.batch(items=True, key="name")
            async def made(self, x, name):
                return [f"{name} {value}" for value in x]

        async def main():
            models = Models()
            calls = [models.named(name, number) for name in "ab" for number in range(3)]
            calls += [models.made(number, name=name) for name in "ab" for number in range(3)]
            return await asyncio.gather(*calls)

        assert run(main()) == [f"{name} {number}" for name in "ab" for number in range(3)] * 2

    @pytest.mark.parametrize("items", [False, True])
    def test_a_key_that_cannot_be_hashed_fails_its_call_alone(self, items):
        @asynctrt.batch(items=items, key="model")
        def function(x, model):
            return list(x)

        async def main():
            results = await gathered(lambda model: function(0, model), "a", ["a"], "b")
            return results, function.statistics().rows

        (first, failed, last), rows = run(main())
        assert (first, last, rows) == (0, 0, 2)
        with pytest.raises(InputError, match=r"must be hashable.*TypeError: unhashable type: 'list'"):
            raise failed

    def test_a_call_without_what_its_key_names(self):
        @asynctrt.batch(key="model")
        def function(x, model):
            return x

        with pytest.raises(InputError, match="'function' was called without 'model', which its key names"):
            run(function(1))

    def test_any_number_of_keys_and_none_is_kept(self):
        class Name:
            pass

        names = weakref.WeakSet()

        @asynctrt.batch(items=True, key="name")
        async def function(x, name):
            return x

        async def call(number):
            name = Name()
            names.add(name)
            return await function(number, name)

        async def main():
            results = await gathered(call, *range(20 * GROUPS_MAX))
            gc.collect()
            return results, len(names)

        assert run(main()) == (list(range(20 * GROUPS_MAX)), 0)

    def test_a_key_that_the_function_changes(self):
        class Settings:
            def __init__(self, scale):
                self.scale = scale

            def __hash__(self):
                return self.scale

            def __eq__(self, other):
                return self.scale == other.scale

        @asynctrt.batch(key="settings")
        def scaled(x, settings):
            settings.scale += 1
            return settings.scale * x

        async def main():
            given = [Settings(scale) for scale in (1, 2, 5)]
            kept = [weakref.ref(settings) for settings in given]
            assert await gathered(partial(scaled, 1), *given) == [2, 3, 6]
            given.clear()
            gc.collect()
            assert [reference() for reference in kept] == [None] * 3

        run(main())

    def test_a_new_key_waits_in_a_queue_that_no_other_uses(self):
        async def main():
            function = HeldByKey()
            async with asynctrt.batch(items=True, key="model")(function) as batched:

                async def queued(model, rows):
                    call = asyncio.create_task(batched(0, model))
                    await until(lambda: batched.statistics().queued_rows == rows)
                    return call

                first = asyncio.create_task(batched(0, "first"))
                await until(lambda: function.batches)
                gone = await queued("gone", 1)
                calls = [first, await queued("a", 2)]
                gone.cancel()
                await until(lambda: batched.statistics().queued_rows == 1)
                calls += [await queued("b", 2), await queued("a", 3), await queued("b", 4)]
                function.go.set()
                await asyncio.gather(*calls)
                assert function.batches[1:] == [([0, 0], "a"), ([0, 0], "b")]
                assert batched.statistics().batches == 3

        run(main())

    @pytest.mark.parametrize("isolate", [False, True])
    @pytest.mark.parametrize("waits", [False, True])
    def test_a_key_whose_batch_fails_fails_no_other(self, waits, isolate):
        """Even where keys share a queue because there are so many."""

        def check(x, model):
            if model == 70:
                raise InputError("no such model")
            return [value + model for value in x]

        async def check_later(x, model):
            await asyncio.sleep(0)
            return check(x, model)

        batched = asynctrt.batch(key="model", idempotent=isolate)(check_later if waits else check)

        async def main():
            await batched(0, 0)
            return await gathered(lambda model: batched(1, model), *[*range(2 * GROUPS_MAX)] * 2)

        for model, result in enumerate(run(main())):
            if model % (2 * GROUPS_MAX) == 70:
                assert isinstance(result, ExecutionError)
                assert "no such model" in str(result)
            else:
                assert result == model % (2 * GROUPS_MAX) + 1

    @pytest.mark.parametrize("key", [3, (), ("model", 3), {"model"}, len])
    def test_values_that_are_no_keys(self, key):
        with pytest.raises(OptionsError, match="key must be the name of a parameter"):
            asynctrt.batch(key=key)(lambda x, model: x)

    @pytest.mark.parametrize("key", ["modl", ("x", "modl"), "args"])
    def test_a_parameter_that_is_not_there(self, key):
        with pytest.raises(
            OptionsError, match="unknown parameter .* of 'function'.*alid parameters.*: x, model"
        ):

            @asynctrt.batch(key=key)
            def function(x, *args, model):
                return x

    def test_names_of_a_function_without_a_signature(self):
        with pytest.raises(OptionsError, match="'min', which has no signature: wrap it"):
            asynctrt.batch(key="x")(min)


class TestMethods:
    def test_each_instance_has_its_own_engine(self):
        class Scale:
            def __init__(self, factor):
                self.factor = factor

            @asynctrt.batch(max_rows=8)
            def __call__(self, x):
                return self.factor * x

            @asynctrt.batch
            async def later(self, x, *, more=0):
                return self.factor * x + more

            __hash__ = None

            def __eq__(self, other):
                return True

        async def main():
            scales = [Scale(factor) for factor in range(3)]
            calls = [scale.later(number) for scale in scales for number in range(5)]
            results = await asyncio.gather(*calls)
            batches = [scale.later.statistics().rows for scale in scales]
            assert scales[0].later.engine is not scales[1].later.engine
            assert "Scale.later" in repr(scales[0].later.engine)
            return results, batches, await scales[2].__call__(4), await Scale(5).later(1, more=2)

        results, batches, eight, seven = run(main())
        assert results == [factor * number for factor in range(3) for number in range(5)]
        assert batches == [5, 5, 5]
        assert (eight, seven) == (8, 7)

    def test_an_instance_that_is_gone_takes_its_engine_along(self):
        class Scale:
            @asynctrt.batch
            def twice(self, x):
                return 2 * x

        async def main():
            scale = Scale()
            assert await scale.twice(2) == 4
            engine = scale.twice.engine
            del scale
            gc.collect()
            await until(lambda: engine.state == "closed")

        run(main())
        assert not Scale.twice._bound

    @pytest.mark.parametrize("steps", range(5))
    def test_an_instance_that_goes_just_before_its_loop(self, steps):
        """Its engine is closed all the same, however far closing it has come by then."""

        class Scale:
            @asynctrt.batch
            def twice(self, x):
                return 2 * x

        async def turn():
            for _ in range(steps):
                await asyncio.sleep(0)

        before = set(threading.enumerate())
        with asyncio.Runner() as runner:
            scale = Scale()
            assert runner.run(gathered(scale.twice, 1)) == [2]
            engine = runner.run(engine_of(scale.twice))
            del scale
            gc.collect()
            if steps:
                runner.run(turn())
        assert engine.state == "closed"
        assert set(threading.enumerate()) == before

    def test_instances_without_weak_references(self):
        class Slotted:
            __slots__ = ()

            @asynctrt.batch
            def twice(self, x):
                return 2 * x

        with pytest.raises(UsageError, match="Add '__weakref__' to its __slots__; for a data"):
            Slotted().twice(1)

    def test_a_static_method(self):
        class Scale:
            @staticmethod
            @asynctrt.batch
            def twice(x):
                return 2 * x

        assert run(gathered(Scale.twice, 1, 2)) == [2, 4]
        assert run(gathered(Scale().twice, 1, 2)) == [2, 4]


class TestLoops:
    def test_each_loop_has_its_own_engine_and_closes_it(self):
        engines = []

        async def main():
            assert await double(1) == 2
            engines.append(double.engine)
            assert double.engine.state == "open"

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                run(main())
            assert [engine.state for engine in engines] == ["closed"] * 3
            assert len(set(map(id, engines))) == 3
            engines.clear()
            gc.collect()

    @pytest.mark.parametrize("count", [4])
    def test_loops_in_threads_at_once(self, count):
        together = threading.Barrier(count)
        results = [None] * count

        async def main(number):
            await asyncio.to_thread(together.wait, WAIT_S)
            results[number] = await gathered(double, *range(100))

        threads = [threading.Thread(target=run, args=(main(number),)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert results == [[2 * number for number in range(100)]] * count

    def test_a_loop_that_was_closed_by_hand_is_forgotten(self):
        loop = asyncio.new_event_loop()
        assert loop.run_until_complete(double(1)) == 2
        engine = loop.run_until_complete(self.engine())
        loop.close()
        with pytest.warns(ResourceWarning, match="was never closed") as warned:
            del loop, engine
            # The thread that computed may be about to let go of it.
            end_s = time.monotonic() + WAIT_S
            while not warned and time.monotonic() < end_s:
                gc.collect()

    @staticmethod
    async def engine():
        return double.engine

    def test_closing_and_calling_again(self):
        async def main():
            async with double:
                first = double.engine
                assert await double(1) == 2
            assert first.state == "closed"
            with pytest.raises(UsageError, match="'double' has no engine on this event loop yet: call it"):
                double.engine
            assert await double(1) == 2
            second = double.engine
            assert second is not first
            await double.aclose()
            await double.aclose()
            assert second.state == "closed"

        run(main())

    def test_closing_while_it_is_opened(self):
        async def main():
            call = asyncio.create_task(double(1))
            await asyncio.sleep(0)
            await double.aclose()
            (result,) = await asyncio.gather(call, return_exceptions=True)
            assert result == 2 or isinstance(result, EngineClosedError)
            assert await double(2) == 4

        run(main())

    def test_an_engine_that_was_closed_is_replaced(self):
        async def main():
            await double(1)
            await double.engine.aclose()
            with pytest.raises(EngineClosedError):
                await double(1)
            assert await double(1) == 2

        run(main())

    def test_an_engine_that_is_lost_is_replaced(self):
        hangs = [True]

        @asynctrt.batch(batch_timeout=0.3)
        async def sometimes(x):
            if hangs:
                hangs.clear()
                await asyncio.Event().wait()
            return x

        async def main():
            with pytest.raises(DeviceLostError, match="batch_timeout"):
                await sometimes(1)
            return await sometimes(1)

        assert run(main()) == 1

    def test_a_caller_who_opens_it_and_goes_away(self):
        async def main():
            first, second = (asyncio.create_task(double(number)) for number in (1, 2))
            await asyncio.sleep(0)
            first.cancel()
            assert await second == 4

        run(main())

    def test_without_a_loop(self):
        coroutine = double(1)
        with pytest.raises(UsageError, match="no event loop is running"):
            coroutine.send(None)


class TestCancellation:
    def test_a_queued_item_is_dropped(self):
        async def main():
            function = Held()
            batched = asynctrt.batch(items=True)(function)
            first = asyncio.create_task(batched("first"))
            await until(lambda: function.batches)
            others = [asyncio.create_task(batched(name)) for name in "abc"]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            others[1].cancel()
            await asyncio.sleep(0)
            function.go.set()
            assert await first == "first"
            assert await others[0] == "a"
            assert await others[2] == "c"
            assert function.batches == [["first"], ["a", "c"]]
            assert not batched._engines.last()._waiting

        run(main())

    def test_in_a_batch_its_mates_are_untouched(self):
        async def main():
            function = Held()
            batched = asynctrt.batch(items=True)(function)
            async with batched:
                calls = [asyncio.create_task(batched(name)) for name in "abc"]
                await until(lambda: function.batches)
                calls[1].cancel()
                await asyncio.sleep(0)
                function.go.set()
                results = await asyncio.gather(*calls, return_exceptions=True)
                assert results[0::2] == ["a", "c"]
                assert isinstance(results[1], asyncio.CancelledError)

        run(main())

    def test_a_batch_all_of_whose_callers_went_away(self):
        async def main():
            function = Held()
            batched = asynctrt.batch(items=True, contexts=1)(function)
            first = asyncio.create_task(batched("first"))
            await until(lambda: function.batches)
            calls = [asyncio.create_task(batched(name)) for name in "abc"]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            function.go.set()
            await first
            await asyncio.gather(*calls, return_exceptions=True)
            assert await batched("last") == "last"
            assert function.batches == [["first"], ["last"]]

        run(main())


class TestOptions:
    def test_they_reach_the_engine(self):
        @asynctrt.batch(max_rows=3, max_delay=0.001, contexts=2, timeout=9.0)
        def function(x):
            return x

        async def main():
            await function(1)
            return function.engine

        engine = run(main())
        assert engine.options.max_rows == engine.max_rows == 3
        assert engine.options.contexts == 2
        assert engine.options.timeout == 9.0

    def test_one_batch_at_a_time_unless_more_is_asked_for(self):
        async def main(contexts, expected):
            function = Held()
            batched = asynctrt.batch(items=True, max_rows=1, **contexts)(function)
            async with batched:
                calls = [asyncio.create_task(batched(name)) for name in "abc"]
                await until(lambda: len(function.batches) == expected)
                assert batched.statistics().in_flight_batches == expected
                function.go.set()
                assert await asyncio.gather(*calls) == ["a", "b", "c"]

        run(main({}, 1))
        run(main({"contexts": 2}, 2))

    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("max_batch_size", "max_rows"),
            ("batch_wait_timeout_s", "max_delay"),
            ("max_latency_ms", "max_delay"),
            ("max_row", "max_rows"),
        ],
    )
    def test_what_others_call_them(self, name, meant):
        with pytest.raises(OptionsError, match=f"unknown option '{name}'; did you mean '{meant}'"):
            asynctrt.batch(**{name: 1})

    def test_options_of_models_are_refused(self):
        with pytest.raises(OptionsError, match="unknown option 'graphs'"):
            asynctrt.batch(graphs="off")

    def test_values_are_checked_where_they_are_given(self):
        with pytest.raises(OptionsError, match="max_rows"):
            asynctrt.batch(max_rows=0)

    @pytest.mark.parametrize("value", [32, "name"])
    def test_something_else_than_a_function(self, value):
        with pytest.raises(
            OptionsError, match=r"asynctrt.batch decorates a function, not .*batch\(max_rows=32\)"
        ):
            asynctrt.batch(value)

    def test_a_generator_function(self):
        with pytest.raises(ModelError, match="is a generator function"):

            @asynctrt.batch
            def stream(x):
                yield x


class TestTheFunction:
    def test_it_stays_reachable(self):
        """Its name and documentation, too."""

        @asynctrt.batch
        def named(x):
            """Does nothing."""
            return x

        assert named.__wrapped__([1]) == [1]
        assert named.__name__ == "named"
        assert named.__doc__ == "Does nothing."
        assert named.__module__ == __name__
        assert repr(named) == "<asynctrt.batch 'named' max_rows=default>"

    def test_a_lambda_and_a_builtin(self):
        assert run(gathered(asynctrt.batch(lambda x: -x), 1, 2)) == [-1, -2]
        assert run(gathered(asynctrt.batch(np.negative), 1, 2)) == [-1, -2]


@pytest.mark.parametrize("width", [1, 100, 1000])
def test_who_keeps_a_result_keeps_little_of_others(width):
    @asynctrt.batch(max_rows=64)
    def repeat(x):
        return np.repeat(x[:, None], width, 1)

    for value in run(gathered(repeat, *map(float, range(64)))):
        held = value if value.base is None else value.base
        assert held.nbytes <= max(2 * value.nbytes, 4096)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (np.array([3, 4]), 3),
        (np.array([3, 4], np.uint8), 3),
        (np.array([0.5, 4], np.float32), 0.5),
        (np.array([True, False]), True),
        (np.array([1j, 2]), 1j),
        (np.array(["a", "bc"]), "a"),
        (list(np.array([3, 4])), 3),
        (list(np.array([0.5, 4], np.float16)), 0.5),
        ({"label": list(np.array(["a", "b"]))}, {"label": "a"}),
        ((np.array([3, 4]), np.array([0.5, 1])), (3, 0.5)),
        (
            {"label": np.array(["a", "b"]), "score": np.array([0.25, 1], np.float16)},
            {"label": "a", "score": 0.25},
        ),
    ],
)
async def test_numbers_and_texts_are_pythons_own(answers, expected):
    @asynctrt.batch(max_rows=2)
    def answer(x):
        return answers

    async with answer:
        found, _ = await asyncio.gather(answer(1), answer(2))
    assert found == expected
    assert type(found) is type(expected)
    if not isinstance(expected, complex):
        assert json.loads(json.dumps({"found": found}))
