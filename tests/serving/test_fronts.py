"""``asynctrt serve --fronts``: several processes on one port, with workers in common; any of them may die."""

import asyncio
import os
import re
import resource
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc.service_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelStatisticsRequest,
    ModelStatisticsResponse,
)

import asynctrt
from asynctrt.errors import OptionsError, UsageError
from asynctrt.serving import command
from asynctrt.serving.command import configure
from asynctrt.serving.fronts import SOON_NS, Front, Texts, content_of, file_of
from asynctrt.serving.metrics import merged_answer
from asynctrt.serving.repository import Repository
from asynctrt.serving.served import ServedModel, summed
from asynctrt.serving.server import Server
from asynctrt.serving.settings import ServerSettings
from tests.benchmarks import front_faults
from tests.helpers import WAIT_S, free_port, until
from tests.models import double_model, rows
from tests.workers.models import SEGFAULT
from tests.workers.test_served import body

pytestmark = [pytest.mark.anyio]
ROOT = Path(__file__).parent.parent.parent
KIND = "tests.workers.models:kind"
METHOD = "/inference.GRPCInferenceService/ModelInfer"


class Running:
    """A server in processes of its own."""

    def __init__(self, process, url, metrics, grpc_target):
        self.process = psutil.Process(process.pid)
        self.popen = process
        self.url, self.metrics, self.grpc_target = url, metrics, grpc_target
        self.said = ""
        """What it wrote, for a test that has read it to its end."""

    def all(self, part):
        """Return the processes of its fronts (``serving.front``), or of its workers (``workers.child``)."""
        found = []
        for child in self.process.children():
            try:
                if any(part in word for word in child.cmdline()):
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return found

    @property
    def fronts(self):
        return self.all("serving.front")

    @property
    def workers(self):
        return self.all("workers.child")


def started(command):
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@asynccontextmanager
async def running(*flags, model=KIND, fronts=2):
    ports = [free_port() for _ in range(3)]
    command = [sys.executable, "-m", "asynctrt", "serve", model, f"--fronts={fronts}", *flags]
    command += [
        f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)
    ]
    process = await asyncio.to_thread(started, command)
    server = None
    try:
        lines = []
        while not lines or not lines[-1].startswith("metrics"):
            line = await asyncio.to_thread(process.stderr.readline)
            assert line, lines
            lines.append(line)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        server = Running(process, urls[0], f"{urls[2]}/metrics", f"127.0.0.1:{ports[1]}")
        yield server
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        rest = await asyncio.to_thread(process.communicate, timeout=WAIT_S)
        assert "stopped" in (server.said if server is not None else "") + rest[1]
        gone, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=WAIT_S)
        assert not alive, (gone, alive)


async def asked(url, first, model="kind"):
    """Ask over a connection of its own, so that any front may get it."""
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v2/models/{model}/infer", json=body(first)) as answer,
    ):
        return answer.status, await answer.json()


async def check(url, firsts, model="kind"):
    answers = await asyncio.gather(*[asked(url, first, model) for first in firsts])
    for first, (status, answer) in zip(firsts, answers, strict=True):
        assert status == 200, answer
        assert answer["outputs"][0]["data"] == [2 * first, 2, 4, 6]


async def counts(url, name, by="front"):
    """Return a metric's samples by front or another label, summed over the other labels."""
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        text = await answer.text()
    found = {}
    for line in text.splitlines():
        if line.startswith(name + "{"):
            value = re.search(rf'{by}="(\w+)"', line)[1]
            found[value] = found.get(value, 0) + float(line.split()[-1])
    return found


@pytest.mark.tier2
async def test_fronts_share_a_port_and_a_worker():
    async with running() as server:
        assert len(server.fronts) == 2
        assert len(server.workers) == 1
        await check(server.url, range(1, 41))
        by_front = await counts(server.metrics, "nv_inference_request_success")
        assert sum(by_front.values()) == 40
        assert min(by_front.values()) > 0, by_front
        assert sum((await counts(server.metrics, "nv_inference_count")).values()) <= 40
        contexts = await counts(server.metrics, "asynctrt_contexts")
        assert min(contexts.values()) == 0, "contexts were counted twice"
        request = ModelInferRequest(
            model_name="kind", raw_input_contents=[np.float32([7, 1, 2, 3]).tobytes()]
        )
        request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        async with grpc.aio.insecure_channel(server.grpc_target) as channel:
            answer = await channel.unary_unary(METHOD)(request.SerializeToString())
        outputs = ModelInferResponse.FromString(answer).raw_output_contents
        assert np.frombuffer(outputs[0], np.float32).tolist() == [14, 2, 4, 6]
        await check_statistics(server, 41)


async def check_statistics(server, count):
    """Whichever front is asked, they are of all."""
    async with grpc.aio.insecure_channel(server.grpc_target) as channel:
        ask = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelStatistics",
            request_serializer=ModelStatisticsRequest.SerializeToString,
            response_deserializer=ModelStatisticsResponse.FromString,
        )
        (model,) = (await ask(ModelStatisticsRequest(name="kind"))).model_stats
        assert model.inference_stats.success.count == count
    # What workers tell of batches comes up to 0.1 s later.
    while (await statistics_of(server.url))["inference_count"] < count:
        await asyncio.sleep(0.01)
    found = [await statistics_of(server.url) for _ in range(10)]
    assert [one["inference_stats"]["success"]["count"] for one in found] == [count] * 10
    assert {one["inference_count"] for one in found} == {count}
    assert {sum(batch["compute_infer"]["count"] for batch in one["batch_stats"]) for one in found} == {
        found[0]["execution_count"]
    }
    async with aiohttp.ClientSession() as client, client.get(f"{server.url}/v2/models/other/stats") as answer:
        assert answer.status == 404


@pytest.mark.tier2
async def test_each_device_of_each_model_has_a_worker_though_they_are_the_same():
    async with running(f"other={KIND}", "--device=host,host", model=f"kind={KIND}") as server:
        workers = server.workers
        assert len(workers) == 4
        await check(server.url, range(1, 41), model="other")
        async with asyncio.timeout(WAIT_S):
            while not (told := await counts(server.metrics, "nv_inference_exec_count", by="model"))["other"]:
                await asyncio.sleep(0.05)
        assert told["kind"] == 0
        for worker in workers[:3]:
            worker.kill()
        for model in ("kind", "other"):
            await check(server.url, range(1, 41), model=model)
        await until(lambda: len(server.workers) == 4)


@pytest.mark.tier2
async def test_there_is_a_new_spare_after_the_first_has_taken_over_and_deaths_are_told_once():
    async with running("--isolation=spare") as server:
        await until(lambda: len(server.workers) == 2)
        first, spare = sorted(server.workers, key=lambda one: one.create_time())
        await check(server.url, [1])
        first.kill()
        await until(lambda: {spare.pid} < {one.pid for one in server.workers} - {first.pid})
        await check(server.url, range(2, 9))
        server.popen.terminate()
        said = await asyncio.to_thread(server.popen.stderr.read)
        assert said.count("SIGKILL") == 1, said
        server.said = said


@pytest.mark.tier2
async def test_all_fronts_die_at_once_and_their_model_stays_open():
    """To open it takes seconds, and minutes if its plan is to be built."""
    async with running() as server:
        (worker,) = server.workers
        for front in server.fronts:
            front.kill()
        async with asyncio.timeout(WAIT_S):
            while len(await counts(server.metrics, "asynctrt_contexts")) < 2:
                await asyncio.sleep(0.05)
        await check(server.url, range(1, 41))
        assert server.workers == [worker]


@pytest.mark.tier2
def test_nothing_is_lost_wrong_or_left_behind_while_fronts_are_killed():
    given = SimpleNamespace(fronts=2, requests=8000, every=0.4)
    found = asyncio.run(asyncio.wait_for(front_faults.killed(given, "serving.front"), WAIT_S))
    assert (found["answered"], found["lost"], found["wrong"], found["twice"]) == (8000, 0, 0, 0)
    assert not found["refused"]
    assert found["kills"]["front"] >= 1
    assert found["stopped"] == {"status": 0, "left": 0}
    assert found["last"]["worker_mappings"] == 4  # Two of each front: its heap, and rings.
    assert found["last"]["worker_descriptors"] == found["first"]["worker_descriptors"]
    assert found["last"]["parent_descriptors"] == found["first"]["parent_descriptors"]


@pytest.mark.usefixtures("command_alone")
async def test_a_front_that_takes_anothers_place_has_its_models_before_it_listens(monkeypatch):
    """Connections that it accepted before would be told to come again, and others are there to take them."""
    order = []

    async def load(server, _say):
        order.append("loaded")

    async def serving(_server):
        order.append("serves")

    monkeypatch.setattr(command, "_load_models", load)
    monkeypatch.setattr(Server, "serve", serving)
    config = configure({"models": ["none.onnx"], "http_port": 0, "grpc": False}, {})

    def opened(_server):
        order.append("listens")

    for is_last in (True, False):
        order.clear()
        await command.serve(config, order.append, opened=opened, listens_last=is_last)
        assert (order.index("loaded") < order.index("listens")) is is_last, order
        assert order.count("loaded") == 1


def test_only_a_front_that_dies_of_how_it_starts_is_waited_for():
    front = Front(0)
    assert [front.died(0) for _ in range(9)] == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5]
    front.ready_ns = 1
    assert front.died(SOON_NS + 2) == 0
    front.ready_ns = 1
    assert front.died(SOON_NS) == 0.1


@pytest.mark.tier2
async def test_a_deadly_request_of_one_front_does_no_harm_to_those_of_others():
    async with running("--max-rows=8") as server:
        deadly = [asyncio.create_task(asked(server.url, SEGFAULT)) for _ in range(2)]
        await asyncio.gather(*[check(server.url, range(start, start + 10)) for start in (1, 20, 40)])
        for status, answer in await asyncio.gather(*deadly):
            assert status == 500
            assert "ended each of the" in answer["error"]
        await check(server.url, range(1, 20))
        await until(lambda: len(server.workers) == 1)


@pytest.mark.tier2
def test_what_a_front_cannot_do_is_said_once():
    command = [sys.executable, "-m", "asynctrt", "serve", "nothing.onnx", "--fronts=2", "--http-port=0"]
    done = subprocess.run(
        [*command, "--grpc-port=0"], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 1
    assert done.stderr.count("ModelNotFoundError: there is no file 'nothing.onnx'") == 1


def test_a_port_is_not_shared_with_another_server():
    import socket
    from contextlib import ExitStack

    from asynctrt.serving.fronts import _reserve

    with socket.socket() as other, ExitStack() as stack:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(UsageError, match="Address already in use. Choose another http_port"):
            _reserve(stack, "127.0.0.1", other.getsockname()[1], "http_port")


async def test_a_text_that_cannot_be_told_holds_up_no_other():
    loop = asyncio.get_running_loop()
    ends = []

    def send_to(number):
        return lambda message, fds: loop.call_soon(ends[number].hear, message, [os.dup(fd) for fd in fds])

    async def told(text):
        if not text:
            raise RuntimeError("nothing to tell")
        return text

    ends += Texts(send_to(1)), Texts(send_to(0))
    ends[1].known = {text.decode(): partial(told, text) for text in (b"", b"this")}
    assert await ends[0].ask("", WAIT_S) == b""
    assert await ends[0].ask("this", WAIT_S) == b"this"


def test_a_file_in_memory_that_cannot_be_written_is_closed():
    assert content_of([file_of(b"all of it")]) == b"all of it"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            file_of(bytes(11))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_setting_that_goes_with_one_process_alone():
    with pytest.raises(OptionsError, match="one process"):
        ServerSettings(fronts=2, model_control=True)


@pytest.mark.tier2
async def test_the_limit_of_gpu_memory_is_that_of_the_workers():
    model = "kind=tests.workers.models:limited"
    async with running("--gpu-memory", str(1 << 20), model=model) as server:
        status, answer = await asked(server.url, 1)
        assert (status, answer["outputs"][0]["data"]) == (200, [1 << 20] * 4)


def test_fronts_have_workers():
    config = configure({"fronts": 2, "models": ["a=a.onnx"]}, {})
    assert config.models[0].settings["isolation"] == "process"
    with pytest.raises(OptionsError, match="isolation of 'a.onnx' is 'none'"):
        configure({"fronts": 2, "models": ["a.onnx"], "isolation": "none"}, {})
    with pytest.raises(UsageError, match="serve --fronts"):
        Server(Repository(), ServerSettings(fronts=2))


async def statistics_of(url):
    """Ask over a connection of its own, so that any front may answer."""
    async with aiohttp.ClientSession() as client, client.get(f"{url}/v2/models/kind/stats") as answer:
        (one,) = (await answer.json())["model_stats"]
        return one


def test_statistics_of_processes_are_added():
    async def figures(*counts):
        async with asynctrt.open(double_model(), max_rows=8) as engine:
            served = ServedModel("double", "1", engine)
            for count in counts:
                await engine.infer(rows(*range(count)))
            return served.statistics()

    one, other = asyncio.run(figures(1, 8)), asyncio.run(figures(8))
    (both,) = summed([one, other])
    assert both["inference_count"] == 17
    assert {batch["batch_size"]: batch["compute_infer"]["count"] for batch in both["batch_stats"]} == {
        1: 1,
        8: 2,
    }
    assert both["inference_stats"]["success"]["count"] == 3
    assert both["memory_usage"][0]["id"] == 0
    assert len(summed([one, {**other, "version": "2"}])) == 2


def test_metrics_of_fronts_are_told_apart():
    one = b"""# HELP nv_inference_count Rows answered.
# TYPE nv_inference_count counter
nv_inference_count{model="m",version="1"} 3.0
# HELP asynctrt_requests_total Requests.
# TYPE asynctrt_requests_total counter
asynctrt_requests_total{model="m"} 2.0
# HELP asynctrt_queue_seconds Times.
# TYPE asynctrt_queue_seconds histogram
asynctrt_queue_seconds_bucket{le="0.1",model="m"} 1.0
asynctrt_queue_seconds_bucket{le="+Inf",model="m"} 2.0
asynctrt_queue_seconds_count{model="m"} 2.0
asynctrt_queue_seconds_sum{model="m"} 0.5
# HELP process_open_fds Files.
# TYPE process_open_fds gauge
process_open_fds 9.0
"""
    text = b"".join(merged_answer({0: one, 3: one}).body).decode()
    assert text.count("# TYPE nv_inference_count counter") == 1
    for front in (0, 3):
        assert f'nv_inference_count{{front="{front}",model="m",version="1"}} 3.0' in text
        assert f'asynctrt_requests_total{{front="{front}",model="m"}} 2.0' in text
        assert f'asynctrt_queue_seconds_bucket{{front="{front}",le="+Inf",model="m"}} 2.0' in text
        assert f'process_open_fds{{front="{front}"}} 9.0' in text
    assert "nv_inference_count_total" not in text
    assert os.linesep in text
