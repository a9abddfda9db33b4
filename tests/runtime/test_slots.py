"""Slots: written in place, batched with each other, left behind, given up, bounded."""

import asyncio
import threading
import time

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.base import Capabilities
from asynctrt.backends.function import FunctionModel
from asynctrt.devices.host import HostDevice
from asynctrt.errors import EngineClosedError, InputError, QueueFullError, UsageError
from asynctrt.runtime.staging import SlotSource
from asynctrt.tensors import TensorSpec
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import double, double_model, failing_model, mixed_onnx, rows, sequence_onnx

pytestmark = pytest.mark.anyio
WAIT_S = 30


def latched(model=None, **settings):
    settings = {"contexts": 1, "max_rows": 4, **settings}
    device = LatchDevice(concurrency=1)
    return asynctrt.open(model or double_model(), device=device, **settings), device


async def use(engine, *values, **kw):
    async with engine.slot(rows=len(values)) as slot:
        slot["input"][...] = rows(*values)
        return (await slot.infer(**kw))["output"][:, 0].tolist()


async def test_what_is_written_is_inferred_without_a_copy():
    addresses = []

    def note(inputs, outputs):
        addresses.append(inputs["input"].ctypes.data)
        outputs["output"][...] = 2 * inputs["input"]

    async with asynctrt.open(double_model(note)) as engine, engine.slot(rows=2) as slot:
        slot["input"][...] = rows(1, 2)
        written_at = slot["input"].ctypes.data
        result = await slot.infer()
        assert result["output"][:, 0].tolist() == [2, 4]
        assert addresses == [written_at]


async def test_slots_are_batched_with_each_other():
    opening, device = latched()
    async with opening as engine:
        first = asyncio.create_task(engine.infer(rows(0)))
        await until(lambda: device.held)
        tasks = [asyncio.create_task(use(engine, value, value)) for value in (1, 2)]
        await until(lambda: engine.statistics().queued_requests == 2)
        device.open()
        assert await asyncio.gather(*tasks) == [[2, 2], [4, 4]]
        await first
        assert {size: batch.count for size, batch in engine.statistics().by_batch_rows.items()} == {
            1: 1,
            4: 1,
        }


async def test_a_slot_that_is_written_slowly_is_left_behind_and_works_all_the_same():
    opening, device = latched()
    async with opening as engine:
        device.open()
        async with engine.slot(rows=1) as slow:
            slow["input"][...] = rows(1)
            assert await use(engine, 7) == [14]
            async with engine.slot(rows=1) as fresh:
                assert not np.shares_memory(fresh["input"], slow["input"])
            slow["input"][...] = rows(5)
            assert (await slow.infer())["output"][0, 0] == 10


async def test_a_slab_is_used_again_only_when_nobody_uses_it():
    opening, device = latched()
    async with opening as engine:
        async with engine.slot(rows=4) as slot:
            slot["input"][...] = rows(1, 2, 3, 4)
            task = asyncio.create_task(slot.infer())
            await until(lambda: device.held)
        # Left while its batch is in flight: its rows must stay as they are.
        async with engine.slot(rows=4) as other:
            other["input"][...] = rows(9, 9, 9, 9)
            device.open()
            assert (await task)["output"][:, 0].tolist() == [2, 4, 6, 8]
            assert (await other.infer())["output"][:, 0].tolist() == [18] * 4


async def test_a_slot_that_is_left_while_its_request_is_queued_keeps_its_rows():
    opening, device = latched()
    async with opening as engine:
        first = asyncio.create_task(engine.infer(rows(0)))
        await until(lambda: device.held)
        async with engine.slot(rows=4) as slot:
            slot["input"][...] = rows(1, 2, 3, 4)
            task = asyncio.create_task(slot.infer())
            await until(lambda: engine.statistics().queued_requests == 1)
        async with engine.slot(rows=4) as other:
            other["input"][...] = 9
        device.open()
        await first
        assert (await task)["output"][:, 0].tolist() == [2, 4, 6, 8]


async def test_cancelling_in_the_queue_and_in_flight():
    opening, device = latched()
    async with opening as engine:
        for wait_for in ("queued", "in flight"):
            first = asyncio.create_task(engine.infer(rows(0))) if wait_for == "queued" else None
            if first:
                await until(lambda: device.held)
            victim, mate = (asyncio.create_task(use(engine, value)) for value in (1, 2))
            await until(
                lambda first=first: engine.statistics().queued_requests == 2 if first else device.held
            )
            victim.cancel()
            await asyncio.sleep(0)
            while not mate.done():
                if device.held:
                    device.release()
                await asyncio.sleep(0)
            assert victim.cancelled()
            assert mate.result() == [4]
            if first:
                await first
        assert engine.statistics().cancelled == 2


async def test_who_finds_no_slab_waits_for_its_turn():
    opening, device = latched()
    async with opening as engine:
        device.open()
        order = []

        async def caller(number):
            async with engine.slot(rows=4) as slot:
                slot["input"][...] = number
                await slot.infer()
                order.append(number)

        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*[caller(number) for number in range(12)])
        assert order == list(range(12))
        assert engine._slots._waiting_rows == 0


async def test_waiting_is_bounded_and_can_be_cancelled():
    opening, _device = latched(max_queue_rows=4)
    async with opening as engine, engine.slot(rows=4), engine.slot(rows=4):
        waiting = asyncio.create_task(use(engine, 1, 1, 1))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="3 rows are waited for already"):
            await use(engine, 1, 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert engine._slots._waiting_rows == 0


async def test_a_turn_that_comes_as_its_waiter_is_cancelled_is_passed_on():
    opening, device = latched()
    async with opening as engine:
        device.open()
        async with engine.slot(rows=4):
            leaving = engine.slot(rows=4)
            await leaving.__aenter__()
            victim, heir = (asyncio.create_task(use(engine, *[v] * 4)) for v in (1, 2))
            await asyncio.sleep(0)
            await leaving.__aexit__(None, None, None)
            victim.cancel()
            async with asyncio.timeout(WAIT_S):
                assert await heir == [4] * 4
            assert victim.cancelled()


async def test_when_the_first_to_wait_is_cancelled_those_behind_may_fit_where_it_did_not():
    opening, device = latched(max_rows=8)
    async with opening as engine, engine.slot(rows=8):
        device.open()
        async with engine.slot(rows=6):
            large = asyncio.create_task(use(engine, *range(8)))
            await asyncio.sleep(0)
            small = [asyncio.create_task(use(engine, value)) for value in (1, 2)]
            await until(lambda: len(engine._slots._waiters) == 3)
            large.cancel()
            async with asyncio.timeout(WAIT_S):
                assert await asyncio.gather(*small) == [[2], [4]], "they fit beside the 6 rows"
            assert large.cancelled()
            assert engine._slots._waiting_rows == 0


async def test_those_who_gave_up_waiting_are_forgotten_though_the_first_still_waits():
    opening, _device = latched()
    async with opening as engine, engine.slot(rows=4), engine.slot(rows=4):
        first = asyncio.create_task(use(engine, 1))
        await asyncio.sleep(0)
        for _ in range(3):
            behind = [asyncio.create_task(use(engine, 2)) for _ in range(20)]
            await until(lambda: len(engine._slots._waiters) == 21)
            for task in behind:
                task.cancel()
            await asyncio.gather(*behind, return_exceptions=True)
            assert len(engine._slots._waiters) == 1
            assert engine._slots._waiting_rows == 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert not engine._slots._waiters


@pytest.mark.parametrize("must_wait", [False, True])
async def test_a_slot_that_is_entered_twice_at_once_is_held_once(must_wait):
    opening, _device = latched()
    async with opening as engine:
        others = [engine.slot(rows=4) for _ in range(2 if must_wait else 0)]
        for other in others:
            await other.__aenter__()
        slot = engine.slot(rows=4)
        tasks = [asyncio.create_task(slot.__aenter__()) for _ in range(2)]
        await asyncio.sleep(0)
        for other in others:
            await other.__aexit__(None, None, None)
        async with asyncio.timeout(WAIT_S):
            entered = await asyncio.gather(*tasks, return_exceptions=True)
        assert entered[0] is slot
        assert isinstance(entered[1], UsageError)
        assert [owner.users for owner in engine._slots._slabs.values() if owner.users] == [1]
        await slot.__aexit__(None, None, None)
        assert not any(owner.users for owner in engine._slots._slabs.values())


async def test_a_full_queue_leaves_the_slot_to_be_tried_again():
    opening, device = latched(max_queue_rows=4)
    async with opening as engine:
        flying = asyncio.create_task(engine.infer(rows(0)))
        await until(lambda: device.held)
        queued = asyncio.create_task(engine.infer(rows(1, 1, 1)))
        await asyncio.sleep(0)
        async with engine.slot(rows=2) as slot:
            slot["input"][...] = rows(5, 6)
            with pytest.raises(QueueFullError):
                await slot.infer()
            device.open()
            await asyncio.gather(flying, queued)
            assert (await slot.infer())["output"][:, 0].tolist() == [10, 12]


@pytest.mark.parametrize("wrong", [{"priority": 7}, {"priority": 0.5}, {"timeout": "soon"}, {"timeout": -1}])
async def test_what_is_refused_leaves_the_slot_to_be_tried_again(wrong):
    async with asynctrt.open(double_model(), max_rows=4) as engine, engine.slot(rows=2) as slot:
        slot["input"][...] = rows(5, 6)
        with pytest.raises(InputError):
            await slot.infer(**wrong)
        assert (await slot.infer())["output"][:, 0].tolist() == [10, 12]
        with pytest.raises(UsageError, match="used already"):
            await slot.infer()


async def test_misuse():
    async with asynctrt.open(double_model(), max_rows=4) as engine:
        for count in (0, 5, -1, 1.5, None):
            with pytest.raises(InputError, match="rows of a slot must be a whole number from 1 to 4"):
                engine.slot(rows=count)
        for dims in ([], "", 0, (4,), {"other": (4,)}):
            with pytest.raises(InputError, match="dims must map names of inputs"):
                engine.slot(rows=1, dims=dims)
        slot = engine.slot(rows=1, dims={})
        with pytest.raises(UsageError, match="enter the slot first"):
            slot["input"]
        async with slot:
            with pytest.raises(InputError, match="'nonsense' is not an input"):
                slot["nonsense"]
            await slot.infer()
            with pytest.raises(UsageError, match="used already"):
                await slot.infer()
            with pytest.raises(UsageError, match="used already"):
                slot["input"]
        with pytest.raises(UsageError, match="entered before"):
            async with slot:
                pass
        assert repr(slot) == "<Slot rows=1 released>"


async def test_several_inputs_and_dynamic_dimensions(tmp_path):
    async with asynctrt.open(mixed_onnx(tmp_path / "mixed.onnx")) as engine, engine.slot(rows=2) as slot:
        slot["ids"][...] = [[1, 2, 3], [4, 5, 6]]
        slot["values"][...] = 0.5
        result = await slot.infer()
        assert result["sum"].tolist() == [[1.5, 2.5, 3.5], [4.5, 5.5, 6.5]]
    async with asynctrt.open(sequence_onnx(tmp_path / "sequence.onnx")) as engine:
        with pytest.raises(InputError, match=r"input 'tokens' has rows of shape \('length',\)"):
            engine.slot()
        for length in (5, 900, 5):
            async with engine.slot(rows=1, dims={"tokens": (length,)}) as slot:
                slot["tokens"][...] = 1
                assert (await slot.infer())["total"].tolist() == [length]


async def test_slabs_of_shapes_that_have_gone_are_given_back(tmp_path):
    async with asynctrt.open(sequence_onnx(tmp_path / "sequence.onnx"), contexts=2) as engine:
        for length in range(1, 200):
            async with engine.slot(dims={"tokens": (length,)}) as slot:
                slot["tokens"][...] = 1
                await slot.infer()
        live = [owner.slab for owner in engine._slots._slabs.values()]
        assert len(live) <= 3
        for context in engine._pool.contexts:
            assert set(context._slot_bindings) <= set(live)


async def test_the_rows_of_a_slab_are_launched_together():
    """However many cores are idle: two batches out of one slab would write over each other."""
    running, together = 0, 0

    def slowly(inputs, outputs):
        nonlocal running, together
        running += 1
        together = max(together, running)
        time.sleep(0.002)  # What the model takes, so that sharing rows out would pay.
        outputs["output"][...] = 2 * inputs["input"]
        running -= 1

    device = HostDevice(threads=2)
    async with asynctrt.open(double_model(slowly), device=device, max_rows=8) as engine:
        for _ in range(3):
            answers = await asyncio.gather(*[use(engine, value) for value in range(8)])
            assert answers == [[2 * value] for value in range(8)]
        assert {size: batch.count for size, batch in engine.statistics().by_batch_rows.items()} == {8: 3}
    assert together == 1


async def test_failing_batches():
    async with asynctrt.open(failing_model(), max_rows=4) as engine:
        for _ in range(10):
            with pytest.raises(asynctrt.ExecutionError):
                await use(engine, -1)
            assert await use(engine, 1) == [2]


class Profiled(FunctionModel):
    """A model of rows of any length, which says which profile takes a batch; an exception is raised."""

    def __init__(self):
        specs = [TensorSpec(name, "float32", ("n",)) for name in ("input", "output")]
        super().__init__(double, inputs=specs[0], outputs=specs[1], name="profiled")
        self.capabilities = Capabilities(has_profiles=True)
        self.rows, self.profile = ((1, 4),), 0

    def rows_of(self, dims):
        return self._answer(self.rows)

    def profile_of(self, dims, rows):
        return self._answer(self.profile)

    @staticmethod
    def _answer(answer):
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("fault", [RuntimeError("third-party bug"), "garbage", InputError("none takes it")])
async def test_a_model_that_fails_to_choose_a_profile_leaks_no_slab(fault):
    model = Profiled()
    async with asynctrt.open(model, contexts=1, max_rows=4) as engine:
        for length in range(1, 10):
            dims = {"input": (length,)}
            async with engine.slot(dims=dims) as slot:
                slot["input"][...] = 1
                model.profile = fault
                expected = InputError if isinstance(fault, InputError) else asynctrt.ExecutionError
                with pytest.raises(expected):
                    await slot.infer()
            assert all(owner.is_unused for owner in engine._slots._slabs.values())
            model.profile = 0
            async with asyncio.timeout(WAIT_S), engine.slot(dims=dims, rows=4) as slot:
                slot["input"][...] = length
                assert (await slot.infer())["output"][3, 0] == 2 * length
        assert len(engine._slots._slabs) <= 2
        await engine.drain()


async def test_a_model_that_fails_to_say_what_it_takes_refuses_the_slot():
    model = Profiled()
    async with asynctrt.open(model, contexts=1, max_rows=4) as engine:
        model.rows = RuntimeError("third-party bug")
        with pytest.raises(asynctrt.ExecutionError, match="rows_of"):
            engine.slot(dims={"input": (3,)})
        model.rows = ((1, 4),)
        async with engine.slot(dims={"input": (3,)}) as slot:
            slot["input"][...] = 2
            assert (await slot.infer())["output"].tolist() == [[4, 4, 4]]


async def test_no_slot_joins_a_slab_whose_rows_are_being_copied_off_the_loop(monkeypatch):
    """The batch is decided by then: another one from the same slab would run beside it."""
    monkeypatch.setattr("asynctrt.runtime.driver.GATHER_ON_LOOP_NBYTES_MAX", 0)
    staging, go_on = threading.Event(), threading.Event()
    stage = SlotSource.stage

    def stage_slowly(source):
        staging.set()
        assert go_on.wait(WAIT_S)
        stage(source)

    monkeypatch.setattr(SlotSource, "stage", stage_slowly)
    async with asynctrt.open(double_model(rows_fixed=4), contexts=2, max_rows=4) as engine:
        async with engine.slot() as one:
            one["input"][...] = 1
            first = asyncio.create_task(one.infer())
            await until(staging.is_set)
            async with engine.slot() as other:
                other["input"][...] = 3
                go_on.set()
                async with asyncio.timeout(WAIT_S):
                    assert (await first)["output"][0, 0] == 2
                    assert (await other.infer())["output"][0, 0] == 6, "padding was written over it"
        assert all(owner.is_unused for owner in engine._slots._slabs.values())


async def test_closing_with_slots_open_queued_and_waited_for():
    opening, device = latched()
    engine = await opening
    async with asyncio.timeout(WAIT_S), engine.slot(rows=4) as slot:
        view = slot["input"]
        flying = asyncio.create_task(engine.infer(rows(0)))
        await until(lambda: device.held)
        queued = asyncio.create_task(use(engine, 1, 1, 1, 1))
        waiting = asyncio.create_task(use(engine, 2, 2, 2, 2))
        await until(lambda: engine.statistics().queued_requests == 1)
        closing = asyncio.create_task(engine.aclose())
        outcomes = await asyncio.gather(queued, waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineClosedError] * 2
        device.open()
        await closing
        await flying
        view[...] = 1  # The memory is still the slot's, though nobody will read it.
        with pytest.raises(EngineClosedError):
            await slot.infer()
