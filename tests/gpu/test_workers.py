"""Workers with a GPU: what ends one, from an illegal address to ``kill -9``, and what is left of it."""

import asyncio
import os
import signal

import numpy as np
import pytest

import asynctrt
from asynctrt.errors import DeviceMemoryError, PoisonError
from tests.contract.plans import OPTIONS, RealSubject, plans_are_here
from tests.gpu.fallible import GATE, HANG, ILLEGAL
from tests.gpu.support import gpu_count, gpu_is_here, processes_on
from tests.helpers import until
from tests.models import double_onnx
from tests.workers.test_isolated_engine import opened

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not gpu_is_here(), reason="needs a GPU")]
KIND = "tests.gpu.fallible:kind"
FREED_NBYTES = 64 << 20
"""What the memory of a GPU may differ by, which others may use too."""


def rows(first, count=1):
    return np.array([[first, 1, 2, 3]] * count, np.float32)


def used_nbytes(ordinal=0):
    """The bytes of a GPU that are in use, whoever uses them."""
    from cuda.bindings import nvml

    nvml.init_v2()
    return int(nvml.device_get_memory_info_v2(nvml.device_get_handle_by_index_v2(ordinal)).used)


async def answered(engine, firsts):
    """Ask for these rows at once, and return what comes of each."""
    return await asyncio.gather(*[engine.infer(rows(one)) for one in firsts], return_exceptions=True)


def check(firsts, answers, guilty=()):
    for first, answer in zip(firsts, answers, strict=True):
        if first in guilty:
            assert isinstance(answer, PoisonError), answer
        else:
            assert np.array_equal(answer["y"], 2 * rows(first)), answer


@pytest.mark.parametrize("graphs", ["off", "auto"])
async def test_each_caller_gets_its_own_rows(graphs):
    async with opened(KIND, device="cuda:0", contexts=3, graphs=graphs) as engine:
        assert engine.device_name == "cuda:0"
        firsts = range(1, 500)
        check(firsts, await answered(engine, firsts))


async def test_the_front_has_no_context_on_the_gpu():
    before = used_nbytes()
    if os.getpid() in processes_on(0):
        pytest.skip("tests before this one have used the GPU in this process")
    async with opened(KIND, device="cuda:0") as engine:
        await engine.infer(rows(1))
        assert os.getpid() not in processes_on(0)
    await until(lambda: used_nbytes() < before + FREED_NBYTES)


async def test_an_illegal_address_ends_its_worker_and_nothing_else():
    async with opened(KIND, device="cuda:0", isolation="spare") as engine:
        firsts = [ILLEGAL if number == 21 else number + 1 for number in range(64)]
        check(firsts, await answered(engine, firsts), {ILLEGAL})
        check(range(1, 65), await answered(engine, range(1, 65)))
        assert engine.workers[0].deaths >= 2


async def test_a_kernel_that_hangs_takes_its_worker_along():
    async with opened(KIND, device="cuda:0", batch_timeout=1.0, max_rows=4) as engine:
        firsts = [1, HANG, 2, 3]
        check(firsts, await answered(engine, firsts), {HANG})
        check(range(1, 65), await answered(engine, range(1, 65)))


async def test_what_killed_workers_held_of_the_gpu_is_free_again():
    used_nbytes()  # What NVML opens in this process is no leak.
    async with opened(KIND, device="cuda:0") as engine:
        await engine.infer(rows(1))
        before = used_nbytes()
        for number in range(4):
            pid = engine.workers[0].pid
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: engine.workers[0].pid != pid)
            check([number + 1], await answered(engine, [number + 1]))
        assert engine.workers[0].deaths == 4
        await until(lambda: used_nbytes() < before + FREED_NBYTES)


async def test_large_rows_are_copied_to_the_gpu_from_where_they_lie():
    """Many blocks, which are pinned and used again, and a worker that dies meanwhile."""
    async with opened("tests.gpu.fallible:large", device="cuda:0", max_rows=16) as engine:
        dim = engine.inputs[0].dims[0]
        for turn in range(6):
            arrays = [
                np.full((1 + number % 3, dim), 100 * turn + number, np.float32) for number in range(1, 90)
            ]
            calls = [engine.submit(array) for array in arrays]
            if turn == 3:
                os.kill(engine.workers[0].pid, signal.SIGKILL)
            answers = await asyncio.gather(*calls)
            for array, answer in zip(arrays, answers, strict=True):
                assert np.array_equal(answer["y"], 2 * array[:, :16])
        assert engine.workers[0].deaths == 1


async def test_what_does_not_fit_the_gpu_is_said_as_in_process():
    asynctrt.limit_gpu_memory(1)
    try:
        with pytest.raises(DeviceMemoryError):
            async with opened(KIND, device="cuda:0"):
                pass
    finally:
        asynctrt.limit_gpu_memory(None)


async def test_an_onnx_model_in_a_worker(tmp_path):
    backend = pytest.importorskip("asynctrt.backends.onnxruntime_cuda")
    if not backend.has_provider():
        pytest.skip("needs ONNX Runtime's CUDA provider")
    path = double_onnx(tmp_path / "double.onnx")
    async with opened(str(path), device="cuda:0", isolation="spare") as engine:
        name, expected = (
            engine.inputs[0].name,
            [np.full((1, *engine.inputs[0].dims), n, "f4") for n in range(64)],
        )
        for _ in range(2):
            answers = await asyncio.gather(*[engine.infer({name: one}) for one in expected])
            for one, answer in zip(expected, answers, strict=True):
                np.testing.assert_array_equal(next(iter(answer.values())), 2 * one)
            os.kill(engine.workers[0].pid, signal.SIGKILL)


@pytest.mark.skipif(not plans_are_here(), reason="needs what ASYNCTRT_TEST_FLAVOUR and _PLANS name")
@pytest.mark.parametrize("isolation", ["process", "spare"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP, "hang", "illegal-address"])
async def test_a_real_plan_survives_what_ends_its_worker(fault, isolation, tmp_path, monkeypatch):
    """Every caller is answered, and the GPU's memory is free in the end."""
    gate = tmp_path / "gate"
    monkeypatch.setenv(GATE, str(gate))
    before = used_nbytes()
    async with opened(
        "tests.gpu.fallible:plan",
        device="cuda:0",
        tensorrt=OPTIONS,
        isolation=isolation,
        batch_timeout=2.0,
        contexts=2,
        max_rows=16,
        graphs="off",
    ) as engine:
        RealSubject.compare(await engine.infer(RealSubject.rows(1)), RealSubject.rows(1))
        sent = [RealSubject.rows(number) for number in range(400)]
        asked = [engine.submit(one) for one in sent]
        if isinstance(fault, str):
            gate.write_text(fault)
        else:
            os.kill(engine.workers[0].pid, fault)
        for one, answer in zip(sent, await asyncio.gather(*asked), strict=True):
            RealSubject.compare(answer, one)
        assert engine.workers[0].deaths >= 1
        RealSubject.compare(await engine.infer(sent[5]), sent[5])
    await until(lambda: used_nbytes() < before + FREED_NBYTES)


@pytest.mark.skipif(gpu_count() < 2, reason="needs two GPUs")
async def test_one_lost_gpu_lowers_capacity_and_nothing_else():
    async with opened(KIND, device="cuda:0,cuda:1", contexts=1, max_rows=16) as engine:
        firsts = list(range(1, 2000))
        check(firsts, await answered(engine, firsts))
        assert [worker.device for worker in engine.workers] == ["cuda:0", "cuda:1"]
        first = engine.workers[0].pid
        asked = asyncio.gather(*[engine.infer(rows(one)) for one in firsts], return_exceptions=True)
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        check(firsts, await asked)
        assert engine.workers[1].deaths == 0
        firsts = [ILLEGAL if number == 21 else number + 1 for number in range(64)]
        check(firsts, await answered(engine, firsts), {ILLEGAL})
