"""Workers die in every way there is; callers get right answers, or the error that they caused."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

import asynctrt
from asynctrt.errors import DeviceLostError, DeviceUnavailableError, ModelError, PoisonError
from tests.helpers import WAIT_S, until
from tests.workers import models
from tests.workers.models import HANG, ONCE, SEGFAULT, STOP, WAIT, rows
from tests.workers.test_isolated_engine import KIND, gate, opened  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.anyio, pytest.mark.tier2]
ROOT = Path(__file__).parent.parent.parent


def kill(engine, number=signal.SIGKILL):
    os.kill(engine.workers[0].pid, number)


async def answered(engine, firsts):
    """Ask for these rows at once, and return what comes of each."""
    return await asyncio.gather(*[engine.infer(rows(one)) for one in firsts], return_exceptions=True)


def check(firsts, answers, guilty=(), error=PoisonError):
    for first, answer in zip(firsts, answers, strict=True):
        if first in guilty:
            assert isinstance(answer, error), answer
        else:
            assert np.array_equal(answer["y"], 2 * rows(first)), answer


async def test_a_worker_that_was_killed_is_replaced():
    async with opened() as engine:
        first = engine.workers[0].pid
        await engine.infer(rows(1))
        kill(engine)
        await until(lambda: engine.state == "restarting")
        assert np.array_equal((await engine.infer(rows(2)))["y"], 2 * rows(2))
        assert engine.state == "open"
        assert engine.workers[0].pid != first
        assert engine.workers[0].deaths == 1
        assert engine.statistics().contexts > 0


async def test_what_was_in_flight_is_computed_again(gate):  # noqa: F811
    async with opened(max_rows=8) as engine:
        firsts = [ONCE, *range(1, 40)]
        check(firsts, await answered(engine, firsts))
        assert engine.workers[0].deaths == 1
        assert gate.exists()


async def test_without_idempotent_what_was_in_flight_fails_and_the_rest_is_computed(gate):  # noqa: F811
    async with opened(max_rows=1, contexts=1, idempotent=False) as engine:
        held = engine.submit(rows(WAIT))
        await until(lambda: engine.statistics().in_flight_batches == 1)
        queued = [engine.submit(rows(number)) for number in (1, 2, 3)]
        await asyncio.sleep(0)
        kill(engine)
        with pytest.raises(DeviceLostError, match="SIGKILL.*idempotent=False"):
            await held
        gate.touch()
        check((1, 2, 3), await asyncio.gather(*queued))


async def test_the_row_that_ends_workers_fails_alone():
    async with opened(max_rows=32) as engine:
        firsts = [SEGFAULT if number == 21 else number + 1 for number in range(64)]
        answers = await answered(engine, firsts)
        check(firsts, answers, {SEGFAULT})
        assert "SIGSEGV" in str(answers[21])
        assert engine.state == "open"
        check([1], await answered(engine, [1]))


async def test_two_rows_that_end_workers_fail_alone():
    async with opened(max_rows=8, isolation="spare") as engine:
        firsts = [SEGFAULT if number in (0, 13) else number + 1 for number in range(16)]
        check(firsts, await answered(engine, firsts), {SEGFAULT})


@pytest.mark.timeout(240)  # Seven workers or more start, one after the other.
async def test_many_rows_at_once_that_end_workers_fail_nobody_else_and_the_engine_goes_on():
    async with opened(max_rows=16, isolation="spare") as engine:
        deadly, told = 5, []

        async def call(number):
            while len(told) < deadly:
                assert (await engine.infer(rows(number)))["y"][0, 0] == 2 * number

        calls = [asyncio.create_task(call(number)) for number in range(1, 9)]
        await engine.infer(rows(1))
        told += await answered(engine, [SEGFAULT] * deadly)
        assert all(isinstance(error, PoisonError) for error in told)
        await asyncio.gather(*calls)
        check([1], await answered(engine, [1]))
        assert engine.workers[0].deaths <= 3 + deadly


async def test_a_row_whose_neighbours_left_is_not_blamed_for_them():
    async with opened(max_rows=8) as engine:
        guilty = engine.submit(rows(SEGFAULT))
        innocent = engine.submit(rows(3))
        await asyncio.sleep(0)
        guilty.cancel()
        check([3], [await innocent])


async def test_a_batch_that_hangs_takes_its_worker_along():
    async with opened(batch_timeout=0.5) as engine:
        firsts = [1, HANG, 2]
        check(firsts, await answered(engine, firsts), {HANG})


async def test_a_worker_whose_loop_hangs_is_killed():
    async with opened(batch_timeout=0.7) as engine:
        await engine.infer(rows(1))
        kill(engine, signal.SIGSTOP)
        check([2, 3], await answered(engine, [2, 3]))
        assert engine.workers[0].deaths == 1


async def test_a_row_that_stops_its_worker():
    async with opened(batch_timeout=0.7) as engine:
        check([1, STOP, 2], await answered(engine, [1, STOP, 2]), {STOP})


async def test_each_request_to_a_model_that_always_dies_fails():
    async with opened("tests.workers.models:deadly", isolation="spare") as engine:
        for error in await answered(engine, (1, 2, 3)):
            assert isinstance(error, PoisonError)
        assert engine.workers[0].deaths == 2 + 3
        assert engine.state != "lost"


async def test_a_warm_spare_takes_over():
    async with opened(isolation="spare") as engine:
        link = engine._front.links[0]
        await until(lambda: link._spare is not None and link._spare.description is not None)
        spare = link._spare.process.pid
        await engine.infer(rows(1))
        kill(engine)
        await until(lambda: engine.workers[0].deaths == 1)
        assert engine.state == "open", "it had to wait for a new one"
        assert engine.workers[0].pid == spare
        check([2], await answered(engine, [2]))
        await until(lambda: link._spare is not None and link._spare.description is not None)


async def test_the_other_device_goes_on(gate):  # noqa: F811
    async with opened(device="host,host", max_rows=4) as engine:
        kill(engine)
        firsts = range(1, 100)
        check(firsts, await answered(engine, firsts))
        await until(lambda: all(worker.state == "open" for worker in engine.workers))


async def test_closing_while_a_worker_restarts():
    async with opened() as engine:
        kill(engine)
        await until(lambda: engine.state == "restarting")
        call = engine.submit(rows(1))
        await engine.aclose()
        with pytest.raises(asynctrt.EngineClosedError):
            await call


async def test_a_worker_that_does_not_end_is_ended(gate):  # noqa: F811
    async with opened(max_rows=1, close_timeout=0.3) as engine:
        held = engine.submit(rows(WAIT))
        await until(lambda: engine.statistics().in_flight_batches == 1)
        await engine.aclose()
        with pytest.raises(asynctrt.AsynctrtError):
            await held


async def test_nothing_is_lost_wrong_or_answered_twice_while_workers_are_killed():
    async with opened(device="host,host", max_rows=16, isolation="spare") as engine:
        random = np.random.default_rng(5)
        told = {}

        killed = set()

        async def caller(number):
            turn = 0
            while len(killed) < 6:
                turn += 1
                first = 1 + number * 100_000 + turn
                answer = await engine.infer(rows(first))
                assert first not in told
                told[first] = answer["y"][0, 0]

        async def killer():
            while True:
                await asyncio.sleep(random.uniform(0.05, 0.4))
                # One that is starting is left alone: after five in a row that fail to start it gives up.
                # So is one that was killed: on a busy machine it may take longer to die than this sleeps.
                worker = engine.workers[random.integers(2)]
                if worker.state == "open" and worker.pid not in killed:
                    os.kill(worker.pid, signal.SIGKILL)
                    killed.add(worker.pid)

        killing = asyncio.create_task(killer())
        await asyncio.gather(*[caller(number) for number in range(32)])
        killing.cancel()
        assert all(value == np.float32(2 * first) for first, value in told.items())
        assert len(told) >= 32
        await until(lambda: sum(worker.deaths for worker in engine.workers) == len(killed))


PARENT = f"""
import asyncio, asynctrt, os, sys, time
async def main():
    async with asynctrt.open({KIND!r}, isolation="spare") as engine:
        link = engine._front.links[0]
        while link._spare is None or link._spare.description is None:
            await asyncio.sleep(0.01)
        child = os.fork() if sys.argv[1] == "forks" else 0
        if sys.argv[1] == "forks" and not child:
            time.sleep(60)
            os._exit(0)
        print(engine.workers[0].pid, link._spare.process.pid, child, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("forks", ["", "forks"])
def test_workers_end_with_their_front(forks):
    command = [sys.executable, "-c", PARENT, forks]
    front = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = 0
    try:
        *pids, child = map(int, front.stdout.readline().split())
        workers = [psutil.Process(pid) for pid in pids]
        front.kill()
        gone, alive = psutil.wait_procs(workers, timeout=WAIT_S)
        assert not alive
        assert len(gone) == 2
    finally:
        front.kill()
        front.wait()
        front.stdout.close()
        if child:
            os.kill(child, signal.SIGKILL)  # It has the front's descriptors, and lives on.


WITHOUT_STREAMS = f"""
import asyncio, asynctrt, numpy, sys
async def main():
    async with asyncio.timeout({WAIT_S}), asynctrt.open({KIND!r}, isolation="process") as engine:
        answer = await engine.infer(numpy.ones((1, 4), numpy.float32))
        with open(sys.argv[1], "w") as file:
            print(answer["y"].sum(), file=file)
asyncio.run(main())
"""


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_an_application_that_began_without_standard_streams(tmp_path, closed):
    shell = f'exec "$0" -c "$1" "$2" {closed}'
    command = ["sh", "-c", shell, sys.executable, WITHOUT_STREAMS, str(tmp_path / "answer")]
    subprocess.run(command, cwd=ROOT, timeout=WAIT_S, check=True)
    assert (tmp_path / "answer").read_text() == "8.0\n"


async def test_whoever_read_what_a_worker_prints_is_gone(monkeypatch):
    """It says why the model cannot be opened, and ends, although there is a thread that does not."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    stdout = os.dup(1)
    end, full = os.pipe()
    os.close(end)
    os.dup2(full, 1)
    try:
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(ModelError, match="it fails"):
                await asynctrt.open("tests.workers.models:prints_and_fails", isolation="process")
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(full)


async def test_signals_to_all_processes_of_a_terminal_do_not_end_a_worker_that_starts(monkeypatch):
    start = subprocess.Popen

    def signalled(*args, **settings):
        child = start(*args, **settings)
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGTERM)
        return child

    monkeypatch.setattr(subprocess, "Popen", signalled)
    async with opened() as engine:
        check([1], await answered(engine, [1]))
        assert engine.workers[0].deaths == 0
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGINT, signal.SIGTERM}


async def test_a_worker_without_address_space_says_so_at_once():
    with pytest.raises(DeviceUnavailableError, match=r"address space.*ulimit -v"):
        await asynctrt.open("tests.workers.models:without_memory", isolation="process")
    assert not models.workers_left()


async def test_a_worker_without_descriptors_for_its_model():
    with pytest.raises((ModelError, DeviceUnavailableError), match="Too many open files"):
        await asynctrt.open("tests.workers.models_without_descriptors:kind", isolation="process")


FEW_DESCRIPTORS = f"""
import asyncio, asynctrt, os, resource, sys
async def main():
    async with asyncio.timeout({WAIT_S}):
        async with asynctrt.open({KIND!r}, isolation="process"):
            pass
for limit in map(int, sys.argv[1:]):
    if not os.fork():
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        try:
            asyncio.run(main())
        except asynctrt.DeviceUnavailableError:
            os._exit(7)
        except OSError as error:
            os._exit(8 if error.filename is None else 9)  # The loop itself had none.
        os._exit(0)
for _ in sys.argv[1:]:
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_few_descriptors_are_a_typed_error():
    limits = ("6", "8", "11", "14", "40")
    command = [sys.executable, "-c", FEW_DESCRIPTORS, *limits]
    found = subprocess.run(
        command,
        cwd=ROOT,
        timeout=WAIT_S,
        check=True,
        capture_output=True,
        text=True,
    )
    assert sorted(found.stdout.split()) == ["0", "7", "7", "7", "7"], found.stderr
