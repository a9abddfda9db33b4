"""What ``@asynctrt.batch`` decorates passes for the coroutine function that it is."""

import asyncio
import copy
import functools
import inspect
import pickle
import subprocess
import sys
import threading
from contextvars import ContextVar
from typing import Generic, TypeVar
from unittest import mock

import numpy as np
import pytest

import asynctrt
from asynctrt import FunctionModel, TensorSpec
from asynctrt.core.items import GROUPS_MAX
from asynctrt.errors import DeviceError, ExecutionError, InputError, ModelError, UsageError
from tests.helpers import WAIT_S, until
from tests.models import double_model, rows

pytestmark = pytest.mark.anyio
T = TypeVar("T")


@asynctrt.batch
def double(x, scale=2):
    """Double it."""
    return scale * x


class Service:
    def __init__(self, factor):
        self.factor = factor

    @asynctrt.batch(max_rows=8)
    def predict(self, x):
        return self.factor * x

    @asynctrt.batch
    @staticmethod
    def triple(x):
        return 3 * x


class TestCopies:
    @pytest.mark.parametrize(
        "copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
    )
    async def test_a_function_is_itself(self, copied):
        async with double:
            await double(1.0)
            assert copied(double) is double
            assert copied({"f": double})["f"] is double
        assert copied(Service.predict) is Service.predict

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
    async def test_a_method_takes_its_instance_along(self, copied):
        service = Service(3)
        async with service.predict as own, copied(service.predict) as other:
            service.factor = 5
            assert (await own(2.0), await other(2.0)) == (10.0, 6.0)

    async def test_a_function_without_a_name_is_copied_without_its_engines(self):
        threads = set()

        @asynctrt.batch(items=True, max_rows=3, run_on="loop")
        def local(words):
            threads.add(threading.get_ident())
            return [word.upper() for word in words]

        async with local:
            await local("a")
            made = copy.deepcopy(local)
            assert made is not local
            async with made:
                assert await made("ab") == "AB"
                assert made.engine is not local.engine
                assert made.engine.max_rows == 3
        assert threads == {threading.get_ident()}

    def test_a_function_without_a_name_that_can_be_pickled(self):
        made = pickle.loads(pickle.dumps(asynctrt.batch(max_rows=3)(np.add)))
        assert (made.__wrapped__, repr(made)) == (np.add, "<asynctrt.batch 'add' max_rows=3>")


class TestCoroutineFunction:
    @pytest.mark.parametrize("what", [double, Service.predict, Service(1).predict, functools.partial(double)])
    @pytest.mark.filterwarnings("ignore:'asyncio.iscoroutinefunction':DeprecationWarning")
    def test_inspect_and_asyncio_say_so(self, what):
        assert inspect.iscoroutinefunction(what)
        assert asyncio.iscoroutinefunction(what)

    async def test_a_static_method_has_no_instance(self):
        async with Service.triple:
            assert [await Service(1).triple(2.0), await Service.triple(3.0)] == [6, 9]

    def test_its_signature_is_that_of_the_function(self):
        assert str(inspect.signature(double)) == "(x, scale=2)"
        assert inspect.getdoc(double) == "Double it."
        assert "scale * x" in inspect.getsource(double)


class Names:
    """Methods that answer with what they are bound to."""

    @asynctrt.batch(items=True)
    def of_instance(self, items):
        return [(self, item) for item in items]

    @classmethod
    @asynctrt.batch(items=True)
    def of_class(cls, items):
        return [(cls, item) for item in items]


class TestMethods:
    async def test_a_method_that_is_asked_of_its_class(self):
        names = Names()
        assert await Names.of_instance(names, 1) == (names, 1)

        class Other(Names):
            async def of_instance(self, item):
                return await Names.of_instance(self, item)

        other = Other()
        assert await other.of_instance(2) == (other, 2)

    async def test_what_stands_in_for_a_method_calls_it(self, monkeypatch):
        original = Names.of_instance

        async def traced(self, item):
            return await original(self, -item)

        monkeypatch.setattr(Names, "of_instance", traced)
        names = Names()
        assert await names.of_instance(1) == (names, -1)

    async def test_a_method_of_two_classes(self):
        class Lender:
            of_instance = Names.of_instance

        for kind in (Names, Lender):
            one = kind()
            assert await kind.of_instance(one, 1) == (one, 1)

    async def test_instances_may_be_items(self):
        class Word(str):
            @asynctrt.batch(items=True)
            def upper_of(items):
                return [item.upper() for item in items]

        async with Word.upper_of:
            assert await Word.upper_of(Word("a")) == "A"

    async def test_a_class_method(self):
        class Other(Names):
            pass

        for kind in (Names, Other):
            assert await kind.of_class(1) == await kind().of_class(1) == (kind, 1)

    async def test_a_bound_method_is_not_bound_again(self):
        names = Names()

        class Holder:
            ask = names.of_instance

        assert await Holder().ask(1) == (names, 1)

    async def test_a_bound_method_is_a_stage_of_a_pipeline(self):
        class Doubler:
            @asynctrt.batch(items=True)
            def run(self, requests):
                return [{"y": 2 * given["x"]} for given in requests]

        x, y = (asynctrt.TensorSpec(name, "float32", (1,)) for name in "xy")
        async with asynctrt.Pipeline(Doubler().run, inputs=x, outputs=y) as pipeline:
            assert (await pipeline.infer(np.ones((1, 1), np.float32)))["y"] == 2

    def test_its_signature_is_without_self(self):
        assert str(inspect.signature(Service(1).predict)) == "(x)"
        assert str(inspect.signature(Service.predict)) == "(self, x)"
        assert Service(1).predict.__wrapped__(2) == 2

    def test_bound_methods_are_equal_as_those_of_functions_are(self):
        one, other = Service(1), Service(1)
        assert one.predict == one.predict != other.predict
        assert {one.predict: "found"}[one.predict] == "found"
        assert one.predict != Service.predict == Service.predict
        assert one.predict != double == double


class TestLookingAtIt:
    """``inspect`` and ``unittest.mock`` read every attribute, and expect no error but AttributeError."""

    def test_without_a_loop(self):
        assert dict(inspect.getmembers(double))["__wrapped__"] is double.__wrapped__
        assert not hasattr(double, "engine")

    async def test_before_the_first_call(self):
        made = copy.deepcopy(asynctrt.batch(lambda x: x))
        assert not hasattr(made, "engine")
        with pytest.raises(UsageError, match="no engine on this event loop yet"):
            made.statistics()

    async def test_a_mock_of_it(self):
        assert await mock.create_autospec(double, return_value=3)(1) == 3
        with mock.patch.object(Service, "predict", autospec=True) as method:
            method.return_value = 3
            assert await Service(1).predict(2) == 3

    def test_an_object_whose_attributes_are_called_like_ours(self):
        class Model:
            def __init__(self):
                self.statistics = self.aclose = "its own"

            def __call__(self, x):
                return x

        made = asynctrt.batch(Model())
        assert callable(made.statistics)
        assert callable(made.aclose)

    @pytest.mark.parametrize("run_on", ["loop", "thread"])
    async def test_it_runs_in_no_callers_context(self, run_on):
        request = ContextVar("request", default=None)

        @asynctrt.batch(run_on=run_on)
        def seen(items):
            return [request.get()] * len(items)

        async def call(number):
            request.set(number)
            return await seen(str(number))

        assert [await asyncio.create_task(call(number)) for number in range(3)] == [None] * 3


class TestForeignArrays:
    async def test_one_that_cannot_be_read(self):
        class Tensor:
            def __array__(self, dtype=None, copy=None):
                raise RuntimeError("it requires grad")

        with pytest.raises(InputError, match="a Tensor, cannot be read.*RuntimeError: it req"):
            await double(Tensor())


class Shape(Generic[T]):
    name = "shape"

    @asynctrt.batch
    def sides(self, x):
        return [f"{self.name} {value:g}" for value in x]

    @asynctrt.batch(key="unit")
    @classmethod
    def named(cls, x, unit):
        return [f"{cls.name} {value:g} {unit}" for value in x]

    @asynctrt.batch
    @classmethod
    async def later(cls, x):
        return [f"{cls.name} {value:g}" for value in x]

    twice = functools.partialmethod(sides, 2.0)


class Square(Shape[int]):
    name = "square"


class TestMethodsOfClasses:
    async def test_a_class_method_takes_the_class_it_is_called_on(self):
        async with Shape.named, Square.named:
            calls = Shape.named(1.0, "m"), Square.named(2.0, unit="m"), Square().named(3.0, "km")
            assert await asyncio.gather(*calls) == ["shape 1 m", "square 2 m", "square 3 km"]
            assert Square.named.engine is not Shape.named.engine
            assert Square().named.engine is Square.named.engine
            assert "'Square.named'" in repr(Square.named.engine)
        async with Square.later:
            assert await Square.later(4.0) == "square 4"
        assert inspect.iscoroutinefunction(Square.named)
        assert pickle.loads(pickle.dumps(Square.named)) is not None

    async def test_methods_of_generic_classes_and_partial_ones(self):
        one = Shape[str]()
        async with one.sides:
            assert await asyncio.gather(one.sides(3.0), one.twice()) == ["shape 3", "shape 2"]

    async def test_a_partial_function(self):
        made = asynctrt.batch(functools.partial(scaled, factor=3))
        waits = asynctrt.batch(functools.partial(scaled_later, factor=4))
        async with made, waits:
            assert await asyncio.gather(made(2.0), waits(2.0)) == [6, 8]
        async with pickle.loads(pickle.dumps(made)) as other:
            assert await other(3.0) == 9

    def test_generator_methods_are_refused(self):
        with pytest.raises(ModelError, match="generator"):

            @asynctrt.batch
            @classmethod
            def each(cls, x):
                yield x


def scaled(x, factor):
    return factor * x


async def scaled_later(x, factor):
    return factor * x


BY_VALUE = """
import asyncio, sys
import asynctrt
from ray import cloudpickle


class Service:
    @asynctrt.batch(max_rows=8)
    def predict(self, x):
        return factor * x

    @asynctrt.batch
    @classmethod
    def create(cls, x):
        return [cls.__name__] * len(x)


@asynctrt.batch
def double(x):
    return 2 * x


factor = 3
asyncio.run(double(1.0))
sys.stdout.buffer.write(cloudpickle.dumps((Service, double, Service().predict)))
"""

FROM_VALUE = """
import asyncio, pickle, sys

Service, double, predict = pickle.load(sys.stdin.buffer)


async def main():
    print(await Service().predict(2.0), await double(2.0), await predict(3.0), await Service.create(1.0))


asyncio.run(main())
"""


@pytest.mark.tier2
def test_a_class_of_the_main_module_is_pickled_by_value():
    pytest.importorskip("ray")
    run = functools.partial(subprocess.run, check=True, capture_output=True, timeout=60)
    dumped = run([sys.executable, "-c", BY_VALUE]).stdout
    assert run([sys.executable, "-c", FROM_VALUE], input=dumped).stdout.split() == [
        b"6.0",
        b"4.0",
        b"9.0",
        b"Service",
    ]


class TestGroups:
    """Items of different kinds may share a batch of tickets, and are computed apart."""

    @pytest.mark.parametrize(
        "error", [ValueError("no"), SystemExit(3), asyncio.CancelledError(), "few"], ids=repr
    )
    @pytest.mark.parametrize("kind", ["thread", "awaitable", "coroutine"])
    async def test_they_fail_apart(self, kind, error):
        held = asyncio.Event()

        def compute(x):
            if isinstance(x, list) and x != ["first"]:
                if error == "few":
                    return []
                raise error
            return x

        async def later(x):
            if isinstance(x, list) and x == ["first"]:
                await held.wait()
            return compute(x)

        function = {"thread": compute, "awaitable": lambda x: later(x), "coroutine": later}[kind]
        batched = asynctrt.batch(max_rows=64)(function)
        async with batched, asyncio.timeout(WAIT_S):
            first = asyncio.create_task(batched("first"))
            await until(lambda: batched.statistics().in_flight_batches or first.done())
            # More kinds than queues, so that some share one.
            good = [asyncio.create_task(batched(np.zeros(size))) for size in range(1, 2 * GROUPS_MAX)]
            bad = [asyncio.create_task(batched(f"{number}")) for number in range(8)]
            await asyncio.sleep(0)
            held.set()
            found = await asyncio.gather(*bad, return_exceptions=True)
            assert {type(each) for each in found} == {ExecutionError}
            assert [(await each).shape for each in good] == [(size,) for size in range(1, 2 * GROUPS_MAX)]
            assert await first == "first"


class TestCancellation:
    @pytest.mark.parametrize("isolates", [False, True])
    async def test_a_batch_that_nobody_waits_for_ends(self, isolates):
        begun, ended, never = asyncio.Event(), [], asyncio.Event()

        @asynctrt.batch(items=True, idempotent=isolates)
        async def wait(names):
            if "quick" in names:
                return names
            begun.set()
            try:
                await never.wait()
            finally:
                ended.append(names)

        async with wait, asyncio.timeout(WAIT_S):
            calls = [asyncio.create_task(wait(name)) for name in "ab"]
            await begun.wait()
            following = asyncio.create_task(wait("quick"))
            calls[0].cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not ended
            calls[1].cancel()
            assert await following == "quick"
            assert ended == [["a", "b"]]
            statistics = wait.statistics()
            assert (statistics.cancelled, statistics.failed, statistics.batches_bisected) == (2, 0, 0)

    async def test_other_groups_of_its_batch_go_on(self):
        begun, first, never = asyncio.Event(), asyncio.Event(), asyncio.Event()

        @asynctrt.batch(max_rows=64)
        async def wait(x):
            if isinstance(x, list):
                await first.wait()
            elif x.shape[1:] == (1,):
                begun.set()
                await never.wait()
            return x

        async with wait, asyncio.timeout(WAIT_S):
            held = asyncio.create_task(wait("first"))
            await until(lambda: wait.statistics().in_flight_batches)
            sizes = [1, *range(GROUPS_MAX, 2 * GROUPS_MAX)]
            calls = [asyncio.create_task(wait(np.zeros(size))) for size in sizes]
            await asyncio.sleep(0)
            first.set()
            await held
            await begun.wait()
            calls[0].cancel()
            assert [(await call).shape for call in calls[1:]] == [(size,) for size in sizes[1:]]

    async def test_who_ignores_it_is_waited_for(self):
        begun, go = asyncio.Event(), asyncio.Event()

        @asynctrt.batch(items=True)
        async def stubborn(names):
            begun.set()
            try:
                await go.wait()
            except asyncio.CancelledError:
                await go.wait()
            return names

        async with stubborn, asyncio.timeout(WAIT_S):
            call = asyncio.create_task(stubborn("a"))
            await begun.wait()
            call.cancel()
            await asyncio.wait([call])
            following = asyncio.create_task(stubborn("b"))
            await asyncio.sleep(0)
            go.set()
            assert await following == "b"


class TestClosing:
    async def test_two_at_once_both_wait(self):
        async with asyncio.timeout(WAIT_S):
            await double(1.0)
            engine = double.engine
            closing = [asyncio.create_task(double.aclose()) for _ in range(2)]
            for task in closing:
                await task
                assert engine.state == "closed"

    async def test_each_gets_an_error_of_its_own(self):
        class Stuck(FunctionModel):
            def create_context(self, device):
                context = super().create_context(device)
                context.close = self.fail
                return context

            def fail(self):
                raise DeviceError("it cannot be unloaded")

        spec = TensorSpec("x", "float32")
        engine = await asynctrt.open(Stuck(lambda given: given["x"], inputs=spec, outputs=spec))
        found = await asyncio.gather(engine.aclose(), engine.aclose(), return_exceptions=True)
        assert [str(each) for each in found] == ["it cannot be unloaded"] * 2
        assert found[0] is not found[1]


class Tensor:
    """An array as PyTorch has them: with a gradient, of a dtype that NumPy lacks, or on a GPU."""

    def __init__(self, values, grad=False, foreign=False):
        self.values, self.grad, self.foreign = values, grad, foreign
        self.shape = np.shape(values)

    def detach(self):
        return Tensor(self.values, False, self.foreign)

    def clone(self):
        return Tensor(np.array(self.values), self.grad, self.foreign)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return Tensor(self.values[index], self.grad, self.foreign)

    def __array__(self, dtype=None, copy=None):
        if self.grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad")
        if self.foreign:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return np.asarray(self.values, dtype)


class OnlyDLPack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **settings):
        return self.array.__dlpack__(**settings)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class TestTensors:
    async def test_results_become_numpy_s_where_it_can_hold_them(self):
        @asynctrt.batch
        def function(x):
            return Tensor(np.stack([x, x], 1), grad=True), Tensor(x, foreign=True), OnlyDLPack(2 * x)

        async with function:
            plain, foreign, dlpack = await function(3.0)
        assert (plain.tolist(), type(plain)) == ([3, 3], np.ndarray)
        assert (foreign.values, type(foreign)) == (3, Tensor)
        assert dlpack == 6

    async def test_results_of_lists_stay_what_they_are(self):
        buffer = np.zeros((64, 2))

        @asynctrt.batch(items=True)
        def function(values):
            buffer[: len(values), 0] = values
            return {"tensor": Tensor(buffer[: len(values)], grad=True), "array": buffer[: len(values)]}

        async with function:
            first, second = await asyncio.gather(function(1.0), function(2.0))
            await asyncio.gather(function(3.0), function(4.0))
        assert [one["tensor"].values.tolist() for one in (first, second)] == [[1, 0], [2, 0]]
        assert not first["tensor"].grad
        assert type(first["array"]) is np.ndarray

    async def test_one_row_for_each_item(self):
        @asynctrt.batch(items=True)
        def function(values):
            return Tensor(np.zeros(len(values) + 1))

        async with function:
            with pytest.raises(ExecutionError, match="2 results for 1 items"):
                await function(1.0)

    async def test_arguments(self):
        async with double:
            assert (await double(OnlyDLPack(np.ones(2)))).tolist() == [2, 2]
            with pytest.raises(InputError, match=r"a Tensor, cannot be read.*BFloat16.*items=True"):
                await double(Tensor(np.ones(2), foreign=True))

    async def test_engines_take_and_give_what_has_no_other_way(self):
        def function(inputs):
            return OnlyDLPack(2 * inputs["input"])

        async with asynctrt.open(double_model(function)) as engine:
            assert (await engine.infer(OnlyDLPack(rows(3))))["output"].tolist() == rows(6).tolist()


class TestMasks:
    masked = np.ma.masked_array([1.0, 1e9, 3.0], [0, 1, 0])

    async def test_masked_arguments_are_refused(self):
        async with double:
            with pytest.raises(InputError, match=r"masked values.*filled"):
                await double(self.masked)
            assert (await double(np.ma.masked_array([1.0, 2.0], [0, 0]))).tolist() == [2, 4]

    async def test_items_are_kept_as_they_are(self):
        @asynctrt.batch(items=True)
        def total(arrays):
            return [array.sum() for array in arrays]

        async with total:
            assert await total(self.masked) == 4

    async def test_masked_results_are_refused(self):
        @asynctrt.batch
        def mask(x):
            return np.ma.masked_greater(x, 2)

        async with mask:
            with pytest.raises(ExecutionError, match=r"masked values.*filled"):
                await mask(self.masked.filled(5))
