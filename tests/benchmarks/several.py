"""One client of several servers: ``python -m tests.benchmarks.several``.

First, four servers, of which one takes five times as long, one drains after a third of the time and one is
killed after two thirds. Calls arrive at random. Their 99th percentile stands beside that of the best
assignment, which knows all of this beforehand, and sends each call to the server that would answer it first.

Then what a client of several servers costs beside one of a single server, in CPU time of the client a call.
"""

import asyncio
import random
import signal
from contextlib import ExitStack
from functools import partial

import numpy as np
import uvloop

from asynctrt.client import connect
from asynctrt.errors import AsynctrtError
from tests.benchmarks.client import OPEN_S
from tests.benchmarks.common import arguments, copying_model, in_turn, report, requests_of, save, show
from tests.benchmarks.scale_clients import started
from tests.benchmarks.serving import wait_until_ready

SERVICE_S = {"slow": 0.25, "drains": 0.05, "killed": 0.05, "stays": 0.05}
CASES = {"one call at a time, 14/s": (1, 14), "batches, 25/s": (64, 25), "batches, 80/s": (64, 80)}
"""The most calls in a batch, and the rate of calls."""
CALLERS = 64
ROW = np.zeros((1, 16), np.float32)


def slow():
    return copying_model(lambda _: SERVICE_S["slow"])


def fast():
    return copying_model(lambda _: SERVICE_S["stays"])


class Best:
    """A server of the best assignment, which takes ``rows_max`` calls at once for ``service_s``."""

    def __init__(self, service_s, rows_max, end_s):
        self.service_s = service_s
        self.rows_max = rows_max
        self.end_s = end_s
        self.began_s = -1.0
        self.rows = 0

    def next_batch(self, now_s):
        """Return when the batch that a call would join begins, and how many it then has."""
        if now_s >= self.began_s + self.service_s:
            return now_s, 1
        if now_s < self.began_s and self.rows < self.rows_max:
            return self.began_s, self.rows + 1
        return self.began_s + self.service_s, 1

    def answer_s(self, now_s):
        """Return when it would answer a call; never, if it is gone by then."""
        answer_s = self.next_batch(now_s)[0] + self.service_s
        return answer_s if answer_s < self.end_s else float("inf")

    def take(self, now_s):
        """Take a call, and return when it is answered."""
        self.began_s, self.rows = self.next_batch(now_s)
        return self.began_s + self.service_s


def arrivals_of(rate, seconds, seed=1):
    """Return the times of calls that come at random."""
    chance = random.Random(seed)
    return np.cumsum([chance.expovariate(rate) for _ in range(int(rate * seconds))]).tolist()


def ends_of(rows_max, seconds):
    """Return each server's service time, the most calls in its batches, and when it is gone."""
    ends_s = {"drains": seconds / 3, "killed": 2 * seconds / 3}
    return [(service_s, rows_max, ends_s.get(name, 1e9)) for name, service_s in SERVICE_S.items()]


def best_latencies_s(arrivals_s, rows_max, seconds):
    servers = [Best(*given) for given in ends_of(rows_max, seconds)]
    found = []
    for now_s in arrivals_s:
        server = min(servers, key=lambda one: one.answer_s(now_s))
        found.append(server.take(now_s) - now_s)
    return found


async def call_all(urls, processes, arrivals_s, seconds):
    """Call at the given times, end servers meanwhile, and return how long calls waited and computed.

    Lost calls are NaN.
    """
    loop = asyncio.get_running_loop()
    async with connect(urls, idempotent=True) as client:

        async def call():
            began_s = loop.time()
            try:
                await client.infer("model", {"input": ROW})
            except AsynctrtError:
                return float("nan")
            return loop.time() - began_s

        # A call takes somewhat longer than the model, which no assignment can change.
        extra_s = float(np.median([await call() for _ in range(40)])) - SERVICE_S["stays"]
        begins_s = loop.time()
        loop.call_later(seconds / 3, processes["drains"].send_signal, signal.SIGTERM)
        loop.call_later(2 * seconds / 3, processes["killed"].send_signal, signal.SIGKILL)
        async with asyncio.TaskGroup() as calls:
            tasks = []
            for arrival_s in arrivals_s:
                await asyncio.sleep(begins_s + arrival_s - loop.time())
                tasks.append(calls.create_task(call()))
        return [task.result() - extra_s for task in tasks]


def company(rows_max, rate, seconds):
    """Run four servers, and return what became of the calls."""
    with ExitStack() as stack:
        servers = {}
        for name in SERVICE_S:
            kind = "slow" if name == "slow" else "fast"
            model = f"model=tests.benchmarks.several:{kind}"
            servers[name] = stack.enter_context(
                started(model, f"--max-rows={rows_max}", "--contexts=1", "--no-grpc")
            )
        urls = [server.url for server in servers.values()]
        for url in urls:
            wait_until_ready(url)
        arrivals_s = arrivals_of(rate, seconds)
        processes = {name: server.process for name, server in servers.items()}
        took_s = np.array(uvloop.run(call_all(urls, processes, arrivals_s, seconds)))
    best_s = best_latencies_s(arrivals_s, rows_max, seconds)
    lost = int(np.isnan(took_s).sum())
    p50_ms, p99_ms = 1e3 * np.percentile(took_s[~np.isnan(took_s)], [50, 99])
    best_p50_ms, best_p99_ms = 1e3 * np.percentile(best_s, [50, 99])
    return {
        "calls": len(took_s),
        "lost": lost,
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "best_p50_ms": best_p50_ms,
        "best_p99_ms": best_p99_ms,
    }


async def cost(address, seconds):
    """Return what a client that keeps 64 calls in flight takes of the CPU, and how many are answered."""
    async with connect(address) as client:
        return await requests_of(
            lambda row: client.infer("model", {"input": row}), [ROW] * CALLERS, seconds, warm_up_s=OPEN_S
        )


def main():
    given = arguments(__doc__, seconds=30.0, cost_seconds=1.5, repeats=7, only="")
    figures = {"company": {}, "cost": {}}
    for name, (rows_max, rate) in CASES.items():
        if given.only in name:
            figures["company"][name] = company(rows_max, rate, given.seconds)
    with started("model=tests.benchmarks.serving:noop") as server:
        wait_until_ready(server.url)
        addresses = {
            "one address": server.url,
            "a list of one": [server.url],
            "two addresses": [server.url, server.url.replace("127.0.0.1", "localhost")],
        }
        runs = {name: partial(cost, address, given.cost_seconds) for name, address in addresses.items()}
        figures["cost"] = in_turn(runs, given.repeats, "several addresses")
    lines = [
        (name, *(f"{found[figure]:.1f}" for figure in found)) for name, found in figures["company"].items()
    ]
    show("a slow, a draining and a killed server", ("", *next(iter(figures["company"].values()))), lines)
    formats = {"requests_per_s": ",.0f", "cpu_us_per_request": ".0f"}
    report("what several addresses cost a client", figures["cost"], **formats)
    save(given.json, "One client of several servers", figures)


if __name__ == "__main__":
    main()
