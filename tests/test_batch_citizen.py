"""What ``@asynctrt.batch`` decorates passes for the coroutine function that it is."""

import asyncio
import copy
import functools
import inspect
import pickle
import threading

import numpy as np
import pytest

import asynctrt
from asynctrt.errors import ExecutionError, InputError

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
