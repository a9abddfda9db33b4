"""Fronts and workers of ``asynctrt serve --fronts`` that are killed under 100,000 requests: what is lost?

Clients keep connections open, check every answer, and ask again over a new one where one broke: to kill a
front is to break its connections. ``fronts``: only these are killed, so the one worker shows what dead ones
leave behind. ``all``: fronts and workers.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import psutil
import uvloop

from tests.benchmarks.common import answered_again_s, arguments, outcome_of, save
from tests.helpers import free_port

ROOT = Path(__file__).parent.parent.parent
MODEL = "tests.workers.models:kind"
CALLERS = 64
LOST_S = 30.0
"""A request that has no answer after so long is lost."""
BROKEN = (OSError, asyncio.IncompleteReadError)


class Server:
    """The processes of a server with fronts."""

    def __init__(self, fronts, *flags):
        self.fronts = fronts
        self.port, self.metrics_port = free_port(), free_port()
        command = [
            sys.executable,
            "-m",
            "asynctrt",
            "serve",
            MODEL,
            f"--fronts={fronts}",
            "--no-grpc",
            *flags,
        ]
        command += [f"--http-port={self.port}", f"--metrics-port={self.metrics_port}", "--log-level=error"]
        self._started = subprocess.Popen(
            command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.parent = psutil.Process(self._started.pid)

    def all(self, *parts):
        """Return the processes whose command lines name one of these modules."""
        found = []
        for child in self.parent.children():
            try:
                if any(part in word for word in child.cmdline() for part in parts):
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return found

    async def wait_until_whole(self):
        """Wait until all fronts serve, which their parent knows."""
        async with asyncio.timeout(60):
            while len(await asyncio.to_thread(self._serving)) < self.fronts:
                assert self._started.poll() is None, "the server has ended"
                await asyncio.sleep(0.05)

    def _serving(self):
        try:
            with urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
                return set(re.findall(r'asynctrt_contexts{.*front="(\d+)"', answer.read().decode()))
        except OSError:
            return set()

    def look(self):
        """Return what the parent has, and the workers: descriptors, mapped memory of fronts, resident MB."""
        workers = self.all("workers.child")
        # Whoever has just asked for metrics may not have been hung up on yet. To subtract such connections
        # would not do: one may go between the two counts.
        end_s = time.monotonic() + LOST_S
        while any(one.status != psutil.CONN_LISTEN for one in self.parent.net_connections("tcp")):
            assert time.monotonic() < end_s, "the parent does not hang up"
            time.sleep(0.01)
        return {
            "parent_descriptors": self.parent.num_fds(),
            "parent_resident_mb": self.parent.memory_info().rss / 1e6,
            "workers": len(workers),
            "worker_descriptors": max(worker.num_fds() for worker in workers),
            "worker_resident_mb": max(worker.memory_info().rss for worker in workers) / 1e6,
            "worker_mappings": max(
                Path(f"/proc/{worker.pid}/maps").read_text().count("memfd:asynctrt") for worker in workers
            ),
        }

    def stop(self):
        """Stop it as a service manager does; return its status and how many processes are left."""
        children = self.parent.children(recursive=True)
        self._started.terminate()
        status = self._started.wait(60)
        _, alive = psutil.wait_procs(children, timeout=10)
        return {"status": status, "left": len(alive)}

    def kill(self):
        """End whatever of it is left."""
        if self._started.poll() is None:
            for process in [*self.parent.children(recursive=True), self.parent]:
                process.kill()
            self._started.wait()


class Callers:
    """Callers with a connection each."""

    def __init__(self, port, requests):
        self._port = port
        self._numbers = iter(range(1, 1 + requests))
        self.answered = self.lost = self.wrong = self.twice = self.broken = 0
        self.refused = Counter()
        self._seen = set()

    async def call(self):
        streams = None
        for number in self._numbers:
            end_s = time.monotonic() + LOST_S
            while True:
                try:
                    async with asyncio.timeout_at(asyncio.get_running_loop().time() + LOST_S):
                        streams = streams or await asyncio.open_connection("127.0.0.1", self._port)
                        status, answer = await self._asked(*streams, number)
                except (*BROKEN, TimeoutError):
                    self.broken += 1
                    if streams is not None:
                        streams[1].close()
                    streams = None
                    if time.monotonic() > end_s:
                        self.lost += 1
                        break
                    await asyncio.sleep(0.01)  # Nobody may listen for a moment.
                    continue
                if status == 200:
                    self._check(number, answer)
                    break
                self.refused[status] += 1
                if time.monotonic() > end_s:
                    self.lost += 1
                    break
                await asyncio.sleep(0.01)
        if streams is not None:
            streams[1].close()

    async def _asked(self, reader, writer, number):
        first = number % 1000
        tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [first, 1, 2, 3]}
        body = json.dumps({"id": str(number), "inputs": [tensor]}).encode()
        head = (
            f"POST /v2/models/kind/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        said = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"(?i)content-length: (\d+)", said)[1])
        return int(said[9:12]), json.loads(await reader.readexactly(length))

    def _check(self, number, answer):
        """Note an answer; of an answer too many, the next request on its connection would see the id."""
        told = int(answer["id"])
        self.twice += told in self._seen
        self._seen.add(told)
        self.answered += 1
        self.wrong += told != number or answer["outputs"][0]["data"] != [2 * (number % 1000), 2, 4, 6]


async def killed(given, *parts, flags=()):
    """Kill processes of a server now and then while requests are answered."""
    random = np.random.default_rng(1)
    server = Server(given.fronts, *flags)
    kills, pauses, looks = Counter(), [], []
    try:
        await server.wait_until_whole()
        callers = Callers(server.port, given.requests)

        async def kill():
            while True:
                await asyncio.sleep(random.uniform(0.5, 1.5) * given.every)
                alive = server.all(*parts)
                victim = alive[random.integers(len(alive))]
                kind = "worker" if "asynctrt.workers.child" in victim.cmdline() else "front"
                os.kill(victim.pid, signal.SIGKILL)
                kills[kind] += 1
                pauses.append(await answered_again_s(callers))
                if len(pauses) == 1:
                    await server.wait_until_whole()
                    looks.append(server.look())

        killing = asyncio.create_task(kill())
        began_s = time.perf_counter()
        await asyncio.gather(*[callers.call() for _ in range(CALLERS)])
        seconds = time.perf_counter() - began_s
        killing.cancel()
        await asyncio.wait([killing])
        if not killing.cancelled():
            killing.result()
        await server.wait_until_whole()
        looks.append(server.look())
        stopped = await asyncio.to_thread(server.stop)
    finally:
        server.kill()
    return {
        **outcome_of(callers, given.requests, pauses, seconds),
        "kills": dict(kills),
        "asked_again": callers.broken,
        "refused": dict(callers.refused),
        "first": looks[0],
        "last": looks[-1],
        "stopped": stopped,
    }


def main():
    given = arguments(__doc__, fronts=2, requests=100_000, every=2.0, only="")
    results = {}
    parts = {
        "fronts": (("serving.front",), ()),
        "all": (("serving.front", "workers.child"), ("--isolation=spare",)),
    }
    for name, (killable, flags) in parts.items():
        if given.only in name:
            results[name] = uvloop.run(killed(given, *killable, flags=flags))
            print(f"{name}: {results[name]}", flush=True)
            save(given.json, __doc__, results)  # What fails later takes nothing along.


if __name__ == "__main__":
    main()
