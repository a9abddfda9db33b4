"""A function that would wait for its own engine, directly or through others, is told so in its own call."""

import asyncio
import contextvars
from contextlib import AsyncExitStack

import numpy as np
import pytest

import asynctrt
from asynctrt import FunctionModel, Pipeline, TensorSpec, UsageError
from asynctrt.errors import ExecutionError
from tests.helpers import WAIT_S
from tests.models import rows

pytestmark = pytest.mark.anyio
SPECS = {"inputs": TensorSpec("x", "float32", (4,)), "outputs": TensorSpec("y", "float32", (4,))}


async def bounded(call):
    return await asyncio.wait_for(call, WAIT_S)


async def refusal(call):
    """Return the names that the error says which a call raises."""
    with pytest.raises(UsageError, match="would wait for itself") as caught:
        await call
    way = str(caught.value).partition("(")[2].partition(")")[0]
    return way.replace("'", "").split(" → ")


class TestItself:
    @pytest.mark.parametrize("contexts", [1, 4])
    async def test_a_coroutine_function(self, contexts):
        """With several contexts it would work until as many runs wait."""

        @asynctrt.batch(items=True, contexts=contexts)
        async def again(items):
            return [item and await refusal(again(0)) for item in items]

        async with again:
            assert await bounded(again(1)) == ["again", "again"]
            assert await bounded(again(0)) == 0
            assert again.statistics().failed == 0

    async def test_a_plain_function_in_its_thread(self):
        loop = asyncio.get_running_loop()

        @asynctrt.batch(items=True)
        def again(items):
            return [
                item and asyncio.run_coroutine_threadsafe(refusal(again(0)), loop).result(WAIT_S)
                for item in items
            ]

        async with again:
            assert await bounded(again(1)) == ["again", "again"]

    async def test_through_a_thread_and_a_task_group(self):
        loop = asyncio.get_running_loop()

        def ask():
            return asyncio.run_coroutine_threadsafe(refusal(again(0)), loop).result(WAIT_S)

        @asynctrt.batch(items=True)
        async def again(items):
            return [
                item and await asyncio.gather(asyncio.to_thread(ask), refusal(again(0))) for item in items
            ]

        async with again:
            assert await bounded(again(1)) == [["again", "again"]] * 2

    async def test_what_it_raises_ends_the_batch(self):
        @asynctrt.batch
        async def again(x):
            return await again(x)

        async with again:
            with pytest.raises(ExecutionError) as caught:
                await bounded(again(1))
            assert isinstance(caught.value.__cause__, UsageError)

    @pytest.mark.parametrize("way", ["infer", "submit", "split"])
    async def test_an_engine(self, way):
        async def ask():
            if way == "submit":
                await engine.submit(rows(1))
            else:
                await engine.infer(rows(100 if way == "split" else 1))

        async def again(inputs):
            asked.append(await refusal(ask()))
            return inputs["x"]

        asked = []
        async with asynctrt.open(FunctionModel(again, **SPECS)) as engine:
            await bounded(engine.infer(rows(1)))
        assert asked == [["again", "again"]]

    async def test_another_engine_of_the_same_function(self):
        """Each instance has one, so a tree of them may ask its children."""

        class Node:
            def __init__(self, *children):
                self.children = children

            @asynctrt.batch(items=True)
            async def count(self, items):
                return [1 + sum([await child.count(item) for child in self.children]) for item in items]

        leaves = Node(), Node()
        middle = Node(leaves[0])
        tree = Node(leaves[1], middle)
        async with AsyncExitStack() as stack:
            for node in (*leaves, middle, tree):
                await stack.enter_async_context(node.count)
            assert await bounded(tree.count(0)) == 4

    async def test_limits_within_a_run_keep_it(self):
        @asynctrt.batch(items=True)
        async def again(items):
            with asynctrt.within(WAIT_S):
                return [item and await refusal(again(0)) for item in items]

        async with again:
            assert await bounded(again(1)) == ["again", "again"]


class TestOthers:
    async def test_a_function_that_calls_another_waits_for_it(self):
        @asynctrt.batch
        def double(x):
            return 2 * x

        @asynctrt.batch(items=True)
        async def both(items):
            return await asyncio.gather(*[double(item) for item in items])

        async with double, both:
            assert await bounded(asyncio.gather(*map(both, range(8)))) == [2 * x for x in range(8)]

    async def test_two_that_call_each_other(self):
        @asynctrt.batch(items=True)
        async def even(items):
            return [item and await odd(item) for item in items]

        @asynctrt.batch(items=True)
        async def odd(items):
            return [await refusal(even(item - 1)) for item in items]

        async with even, odd:
            assert await bounded(even(2)) == ["odd", "even", "odd"]
            assert await bounded(even(0)) == 0

    async def test_two_whose_runs_cross(self):
        """Neither is part of a call of the other, and yet each waits for the other."""
        began = asyncio.Barrier(2)

        def crossing(name, other):
            async def function(items):
                if items == ["answer"]:
                    return items
                await began.wait()
                return await asyncio.gather(engines[other]("answer"), return_exceptions=True)

            function.__name__ = name
            return asynctrt.batch(items=True)(function)

        engines = {"a": crossing("a", "b"), "b": crossing("b", "a")}
        async with engines["a"], engines["b"]:
            asked = asyncio.gather(*[engines[name]("ask") for name in engines], return_exceptions=True)
            found = await bounded(asked)
        assert sorted(type(one).__name__ for one in found) == ["UsageError", "str"]

    async def test_a_call_that_has_ended_is_no_wait(self):
        @asynctrt.batch(items=True)
        async def first(items):
            return [item and await second(0) for item in items]

        @asynctrt.batch(items=True)
        async def second(items):
            return [item and await first(0) for item in items]

        async with first, second:
            for _ in range(3):
                assert await bounded(first(1)) == await bounded(second(1)) == 0


class TestTasks:
    async def test_a_task_is_free_when_the_run_is_over(self):
        tasks, over = [], asyncio.Event()

        async def later():
            await over.wait()
            return await again(0)

        @asynctrt.batch(items=True)
        async def again(items):
            if any(items):
                tasks.append(asyncio.create_task(later()))
            return items

        async with again:
            assert await bounded(again(1)) == 1
            over.set()
            assert await bounded(tasks[0]) == 0

    async def test_a_task_with_a_context_of_its_own_is_no_part_of_the_run(self):
        tasks = []

        @asynctrt.batch(items=True)
        async def again(items):
            if any(items):
                tasks.append(asyncio.create_task(again(0), context=contextvars.Context()))
                await asyncio.sleep(0)
            return items

        async with again:
            assert await bounded(again(1)) == 1
            assert await bounded(tasks[0]) == 0

    async def test_an_engine_that_a_run_opens_is_no_part_of_it(self):
        async with AsyncExitStack() as stack:

            @asynctrt.batch(items=True)
            async def opener(items):
                if "open" in items:
                    await stack.enter_async_context(other)
                return await asyncio.gather(*[other(item) for item in items])

            @asynctrt.batch(items=True)
            async def other(items):
                return items

            await stack.enter_async_context(opener)
            assert await bounded(opener("open")) == "open"
            assert await bounded(opener("again")) == "again"


class TestPipelines:
    async def test_a_plain_stage_that_asks_its_pipeline(self):
        loop = asyncio.get_running_loop()

        def stage(given):
            asked = refusal(pipeline.infer(given))
            names.append(asyncio.run_coroutine_threadsafe(asked, loop).result(WAIT_S))
            return {"y": given["x"]}

        names = []
        async with Pipeline(stage, name="p", **SPECS) as pipeline:
            await bounded(pipeline.infer(rows(1)))
        assert names == [["p", "p"]]

    async def test_threads_that_a_coroutine_stage_asks_for(self):
        loop = asyncio.get_running_loop()

        async def stage(given, call):
            def ask():
                inner = call.in_thread(np.copy, given["x"])
                return asyncio.run_coroutine_threadsafe(refusal(inner), loop).result(WAIT_S)

            names.append(await call.in_thread(ask))
            return {"y": await call.in_thread(np.copy, given["x"])}

        names = []
        async with Pipeline(stage, name="p", **SPECS) as pipeline:
            await bounded(pipeline.infer(rows(1)))
        assert names == [["p", "p"]]

    async def test_a_coroutine_stage_may_ask_its_pipeline(self):
        """It holds nothing that another request would wait for."""

        async def stage(given, call):
            if given["x"][0, 0] < 3:
                given = {"x": (await pipeline.infer(given["x"] + 1))["y"]}
            return {"y": given["x"]}

        async with Pipeline(stage, **SPECS) as pipeline:
            answer = await bounded(pipeline.infer(np.zeros((1, 4), np.float32)))
        assert answer["y"].tolist() == [[3.0] * 4]

    async def test_an_engine_that_asks_the_pipeline_it_is_a_stage_of(self):
        async def ask(inputs):
            with pytest.raises(ExecutionError, match="would wait for itself"):
                await pipeline.infer(inputs["x"])
            return inputs["x"]

        async with (
            asynctrt.open(FunctionModel(ask, **SPECS)) as engine,
            Pipeline(engine, **SPECS) as pipeline,
        ):
            await bounded(pipeline.infer(rows(1)))
