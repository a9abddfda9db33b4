"""The parent, a front or a worker is killed, stopped or hangs: the others answer, and nothing is left."""

import asyncio
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import aiohttp
import psutil
import pytest

from tests.helpers import WAIT_S, free_port, until
from tests.serving.test_fronts import KIND, ROOT, asked, check, counts, running
from tests.workers import models
from tests.workers.models import HANG, RAISE, WAIT
from tests.workers.test_served import body

pytestmark = [pytest.mark.anyio, pytest.mark.tier2, pytest.mark.timeout(130)]
WHOLE_S = 120
"""What a test may take on a busy machine, on which processes start slowly."""

FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "hang": signal.SIGUSR1}

HANDLERS = """
import ctypes, os, signal, sys
# Native code that keeps Python's lock.
hang = lambda *_: ctypes.PyDLL(None).sleep(100000)
signal.signal(signal.SIGUSR1, hang)
if (start_s := os.environ.get("ASYNCTRT_TEST_START_S")) and "serve" in sys.orig_argv:
    from asynctrt.serving import fronts
    fronts.START_S = float(start_s)
if "asynctrt.serving.front" in sys.orig_argv:
    if os.path.exists(path := os.environ.get("ASYNCTRT_TEST_HANG", "")):
        os.unlink(path)
        hang()
    from asynctrt.workers.front import Dispatcher as Front
    made, init = [], Front.__init__
    def noted(self, *args, **settings):
        init(self, *args, **settings)
        made.append(self)
    def lose(*_):
        for front in made:
            for link in front.links:
                front._loop.call_soon_threadsafe(link._lose, "was lost")
    Front.__init__ = noted
    signal.signal(signal.SIGUSR2, lose)
"""


@pytest.fixture(scope="module")
def anyio_backend():
    """One will do: all that is tried runs in other processes."""
    return "asyncio"


@pytest.fixture(autouse=True)
def handlers(tmp_path, monkeypatch):
    """Every process of ours hangs on SIGUSR1, and a front loses its engines on SIGUSR2."""
    (tmp_path / "sitecustomize.py").write_text(HANDLERS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")


def pids(processes):
    return {process.pid for process in processes}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("who", ["fronts", "workers"])
async def test_what_dies_or_hangs_is_replaced(who, fault):
    async with asyncio.timeout(WHOLE_S), running("--batch-timeout=1") as server:
        await check(server.url, range(1, 9))
        count = len(getattr(server, who))
        victim = getattr(server, who)[0]
        victim.send_signal(FAULTS[fault])
        if who == "workers":
            await check(server.url, range(1, 9))  # Whoever asks waits for the next one, and no longer.
        while victim.pid in pids(now := getattr(server, who)) or len(now) != count:
            await asyncio.sleep(0.05)
        while len(await counts(server.metrics, "asynctrt_contexts")) < 2:
            await asyncio.sleep(0.05)
        await check(server.url, range(1, 41))


@asynccontextmanager
async def orphans():
    """A server whose parent may end as it likes; gives its process, its URL and all of its children."""
    port = free_port()
    flags = ["--fronts=2", "--no-grpc", f"--http-port={port}"]
    command = [sys.executable, "-m", "asynctrt", "serve", KIND, *flags]
    process = await asyncio.to_thread(subprocess.Popen, command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    children = []
    try:
        while not (line := await asyncio.to_thread(process.stderr.readline)).startswith("metrics"):
            assert line
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 3
        yield process, f"http://127.0.0.1:{port}", children
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()


@pytest.mark.parametrize(("fault", "others"), [("kill", "kill"), ("stop", "hang"), ("hang", "stop")])
async def test_without_their_parent_all_others_end_whatever_they_do(fault, others):
    async with asyncio.timeout(WHOLE_S), orphans() as (process, url, children):
        if fault != "kill":
            process.send_signal(FAULTS[fault])
            await check(url, range(1, 21))  # It is not needed for that.
        for child in children:
            child.send_signal(FAULTS[others])
        process.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=WAIT_S)
        assert not alive


@asynccontextmanager
async def in_flight(server, gate, count):
    """Requests that have been taken, and are answered once there is a file ``gate``."""
    calls = [asyncio.create_task(asked(server.url, WAIT)) for _ in range(count)]
    while sum((await counts(server.metrics, "asynctrt_server_requests_in_flight")).values()) < count:
        await asyncio.sleep(0.05)
    yield calls
    gate.touch()


async def test_the_first_signal_drops_no_request_whoever_gets_it(tmp_path, monkeypatch):
    """A service's supervisor sends it to every process, some to one of them twice."""
    gate = tmp_path / "gate"
    monkeypatch.setenv(models.GATE, str(gate))
    async with asyncio.timeout(WHOLE_S), running() as server, in_flight(server, gate, 12) as calls:
        for process in (server.process, *server.fronts, *server.workers, server.process, *server.fronts):
            process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        gate.touch()
        assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 12
        assert await asyncio.to_thread(server.popen.wait, WAIT_S) == 0


@pytest.mark.parametrize("who", ["fronts", "workers"])
async def test_a_signal_to_one_process_drops_no_request(tmp_path, monkeypatch, who):
    gate = tmp_path / "gate"
    monkeypatch.setenv(models.GATE, str(gate))
    async with asyncio.timeout(WHOLE_S), running() as server:
        before = pids(server.fronts)
        async with in_flight(server, gate, 12) as calls:
            for process in getattr(server, who):
                for number in (signal.SIGTERM, signal.SIGINT):
                    process.send_signal(number)
            gate.touch()
            assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 12
        if who == "fronts":
            await until(lambda: len(server.fronts) == 2 and not before & pids(server.fronts))


@pytest.mark.parametrize(("fronts", "fault"), [(1, "stop"), (2, "hang")])
async def test_a_second_signal_ends_it_at_once(fronts, fault):
    """Whatever fronts and workers do. The first would leave them 30 s, and a busy machine takes seconds."""
    port = free_port()
    flags = [f"--fronts={fronts}", "--isolation=process", "--no-grpc", f"--http-port={port}"]
    command = [sys.executable, "-m", "asynctrt", "serve", KIND, *flags]
    process = await asyncio.to_thread(subprocess.Popen, command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        async with asyncio.timeout(WHOLE_S):
            while not (line := await asyncio.to_thread(process.stderr.readline)).startswith("metrics"):
                assert line
            children = psutil.Process(process.pid).children(recursive=True)
            for child in children:
                child.send_signal(FAULTS[fault])
            call = asyncio.create_task(asked(f"http://127.0.0.1:{port}", 1))
            await asyncio.sleep(0.5)
            process.terminate()
            while "stopping" not in line:
                line = await asyncio.to_thread(process.stderr.readline)
            await asyncio.sleep(0.2)  # What comes at once is still the first one.
            assert process.poll() is None
            process.terminate()
            began_s = time.perf_counter()
            await asyncio.to_thread(process.wait, WAIT_S)
            assert time.perf_counter() - began_s < 15
            _, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=WAIT_S)
            assert not alive
            await asyncio.gather(call, return_exceptions=True)
    finally:
        process.kill()
        process.communicate()


async def test_a_row_that_hangs_costs_those_of_others_the_batch_timeout():
    async with asyncio.timeout(WHOLE_S), running("--batch-timeout=2", "--contexts=1") as server:
        await check(server.url, range(1, 9))
        hanging = asyncio.create_task(asked(server.url, HANG))
        await asyncio.sleep(0.5)
        await check(server.url, range(1, 21))
        assert (await hanging)[0] == 500
        await check(server.url, range(1, 3))
        await until(lambda: len(server.workers) == 1)


async def test_a_front_whose_engine_is_lost_is_replaced():
    """The others have the same worker, and can answer."""
    async with asyncio.timeout(WHOLE_S), running() as server:
        victim = server.fronts[0]
        victim.send_signal(signal.SIGUSR2)
        await until(lambda: victim.pid not in pids(server.fronts))
        await check(server.url, range(1, 21))
        while len(await counts(server.metrics, "asynctrt_contexts")) < 2:
            await asyncio.sleep(0.05)
        await check(server.url, range(1, 41))
        assert len(server.workers) == 1


async def test_a_front_that_hangs_while_it_starts_is_replaced(tmp_path, monkeypatch):
    hang = tmp_path / "hang"
    monkeypatch.setenv("ASYNCTRT_TEST_HANG", str(hang))
    monkeypatch.setenv("ASYNCTRT_TEST_START_S", "8")
    async with asyncio.timeout(WHOLE_S), running() as server:
        hang.touch()
        server.fronts[0].kill()
        while hang.exists() or len(server.fronts) < 2:
            await asyncio.sleep(0.05)
        before = pids(server.fronts)
        await check(server.url, range(1, 9))  # By the other one.
        while not pids(server.fronts) - before:
            await asyncio.sleep(0.05)
        while len(await counts(server.metrics, "asynctrt_contexts")) < 2:
            await asyncio.sleep(0.05)
        await check(server.url, range(1, 41))


async def test_callers_who_always_send_what_fails_fail_nobody_else():
    """Of 40 callers, a twentieth, a fifth and a half, over two fronts, whose rows share batches."""
    async with (
        asyncio.timeout(WHOLE_S),
        running("--max-rows=16") as server,
        AsyncExitStack() as stack,
    ):
        # A connection each, as one of another session may be to another front.
        clients = [await stack.enter_async_context(aiohttp.ClientSession(server.url)) for _ in range(40)]
        for bad in (2, 8, 20):
            answered = dict.fromkeys(range(bad, 40), 0)

            async def call(number, bad=bad, answered=answered):
                payload = body(RAISE if number < bad else number)
                while min(answered.values()) < 5:
                    async with clients[number].post("/v2/models/kind/infer", json=payload) as response:
                        answer = await response.json()
                        if number < bad:
                            assert (response.status, "this request alone" in answer["error"]) == (500, True)
                        else:
                            assert answer["outputs"][0]["data"][0] == 2 * number
                            answered[number] += 1

            await asyncio.gather(*[call(number) for number in range(40)])
        assert len(server.workers) == 1


async def test_fronts_serve_what_there_was_when_the_server_was_started(tmp_path):
    from tests.models import scale_onnx

    folder = tmp_path / "models"
    scale_onnx(folder / "m/1/model.onnx", 2)

    async def answers():
        found = []
        for _ in range(20):
            payload = body(3)
            payload["inputs"][0]["name"] = "input"
            async with (
                aiohttp.ClientSession() as client,
                client.post(f"{server.url}/v2/models/m/infer", json=payload) as answer,
            ):
                told = await answer.json()
                found.append((told["model_version"], told["outputs"][0]["data"][0]))
        return set(found)

    async with asyncio.timeout(WHOLE_S), running(model=str(folder)) as server:
        assert await answers() == {("1", 6)}
        scale_onnx(folder / "m/2/model.onnx", 3)
        for _ in range(2):
            front = server.fronts[0]
            front.kill()
            await until(lambda front=front: front.pid not in pids(server.fronts) and len(server.fronts) == 2)
            while len(await counts(server.metrics, "asynctrt_contexts")) < 2:
                await asyncio.sleep(0.05)
            assert await answers() == {("1", 6)}
            if (folder / "m").exists():
                (folder / "m").rename(tmp_path / "gone")
