"""What ``@asynctrt.batch`` decorates passes for the coroutine function that it is."""

import asyncio
import copy
import functools
import inspect
import pickle
import threading
from contextvars import ContextVar
from unittest import mock

import numpy as np
import pytest

import asynctrt
from asynctrt.errors import ExecutionError, InputError, UsageError

pytestmark = pytest.mark.anyio


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

        @asynctrt.batch(items=True, max_rows=3, key=len, run_on="loop")
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

        with pytest.raises(InputError, match="a Tensor, cannot be read as an array: RuntimeError: it req"):
            await double(Tensor())


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
