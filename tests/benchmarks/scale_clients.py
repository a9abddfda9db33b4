"""The servers of ``scale``, and what loads them: several client processes at once, or ``wrk``.

What a process took of the CPU is in cores, over the time that was measured: at 1.0 an event loop has no time
left. Latencies of several clients are put together from their quantiles.
"""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from tests.benchmarks.client import OPEN_S, QUANTILES
from tests.benchmarks.serving import ROOT, is_ready, process
from tests.helpers import free_port

START_S = 90
"""How long a server may take to have its model: on a GPU that is seconds, and there are several at once."""
CLIENT_S = 30
"""How long clients may take beyond what they measure."""
LOOKS = 16
"""Connections for each front that all have to find it ready; the kernel gives them to fronts by chance."""
LISTENS = "0A"

SCRIPT = """
local file = io.open("{body}", "rb")
wrk.method = "POST"
wrk.body = file:read("*a")
file:close()
wrk.headers["Content-Type"] = "application/octet-stream"
wrk.headers["Inference-Header-Content-Length"] = "{json_nbytes}"
function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '\\n{{"requests": %d, "elapsed_us": %d, "p50_us": %f, "p99_us": %f, "errors": %d}}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
"""

BARE = "tests.benchmarks.bare_http"
FRONTS = {"asynctrt.serving.front", BARE}
"""The modules of processes that answer requests."""


@dataclass(frozen=True)
class Server:
    """A server process, with its fronts and workers below it."""

    process: psutil.Process
    http: int
    rpc: int

    @property
    def url(self):
        return f"http://127.0.0.1:{self.http}"

    def cpu_s(self):
        """Return the CPU time so far of each process: ``{pid: (kind, seconds)}``."""
        found = {}
        for one in [self.process, *self.process.children(recursive=True)]:
            try:
                words, times = one.cmdline(), one.cpu_times()
            except psutil.NoSuchProcess:
                continue
            kind = "front" if FRONTS.intersection(words) else "parent"
            if "asynctrt.workers.child" in words:
                kind = "worker"
            found[one.pid] = kind, times.user + times.system
        if not any(kind == "front" for kind, _ in found.values()):
            found[self.process.pid] = "front", found[self.process.pid][1]
        return found


@contextmanager
def started(model, *flags):
    """Start ``asynctrt serve``; ``wait_until_all_are_ready`` is yet to be called."""
    http, rpc = free_port(), free_port()
    ports = f"--http-port={http}", f"--grpc-port={rpc}"
    with process("asynctrt", "serve", model, *flags, *ports, "--log-level=error") as server:
        yield Server(server, http, rpc)


@contextmanager
def started_bare(count):
    """Start ``count`` processes that answer whatever is asked, and yield them as :func:`started` does."""
    port = free_port()
    with process(BARE, port, f"--processes={count}") as server:
        yield Server(server, port, 0)


def listeners(port):
    """Return how many sockets listen on a port, of which each front has one."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(words[1].endswith(f":{port:04X}") and words[3] == LISTENS for words in lines)


def wait_until_all_are_ready(server, fronts, workers):
    """Wait until every front has its models: the first one that has them answers before the others do.

    :raises RuntimeError: if the server has ended, or other workers than it should have.
    """
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if server.process.status() == psutil.STATUS_ZOMBIE:
            raise RuntimeError("the server has ended: see its messages")
        if listeners(server.http) == fronts and all(
            is_ready(server.url, None) for _ in range(LOOKS * fronts if fronts > 1 else 1)
        ):
            kinds = [kind for kind, _ in server.cpu_s().values()]
            if kinds.count("worker") != workers:
                raise RuntimeError(f"the server has {kinds.count('worker')} workers, not {workers}")
            return
        time.sleep(0.1)
    raise TimeoutError(f"{server.url} is not ready")


def shares(before, after, elapsed, requests):
    """Return what the processes of a server took of the CPU meanwhile."""
    cores = {"front": [], "worker": [], "parent": []}
    for pid, (kind, cpu_s) in after.items():
        cores[kind].append((cpu_s - before.get(pid, (kind, 0.0))[1]) / elapsed)
    total = sum(sum(values) for values in cores.values())
    return {
        "server_cpu_us": total * elapsed / max(requests, 1) * 1e6,
        "front_cores": sorted(cores["front"], reverse=True),
        "worker_cores": sorted(cores["worker"], reverse=True),
    }


def percentiles(told):
    """Put the quantiles of clients together, each with the weight of its requests."""
    told = [one for one in told if one["requests"]]
    if not told:
        return {"p50_us": float("nan"), "p99_us": float("nan")}
    values = np.concatenate([one["quantiles_us"] for one in told])
    weights = np.repeat([one["requests"] for one in told], len(QUANTILES)).astype(float)
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    at = {name: int(np.searchsorted(reached, share)) for name, share in (("p50_us", 0.5), ("p99_us", 0.99))}
    return {name: float(values[order][min(index, len(values) - 1)]) for name, index in at.items()}


def by_clients(server, url, seconds, count, **settings):
    """Run so many client processes at once; return their figures together.

    :raises RuntimeError: if one of them fails, or does not answer in time.
    """
    given = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "tests.benchmarks.client", url, "--told", f"--seconds={seconds}", *given]
    # Each would start a thread for each core, to do no linear algebra.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    with ExitStack() as stack:
        clients = []
        for _ in range(count):
            client = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(_end, client)
            clients.append(client)
        late = threading.Timer(CLIENT_S + seconds, lambda: [client.kill() for client in clients])
        stack.callback(late.cancel)
        late.start()
        for client in clients:
            if client.stdout.readline() != "connected\n":
                raise RuntimeError("a client could not connect: see its messages")
        opens_ns = time.monotonic_ns() + int(OPEN_S * 1e9)
        for client in clients:
            print(opens_ns, file=client.stdin, flush=True)
        time.sleep(max(opens_ns - time.monotonic_ns(), 0) / 1e9)
        before, began = server.cpu_s(), time.monotonic()
        time.sleep(seconds)
        after, elapsed = server.cpu_s(), time.monotonic() - began
        said = [client.stdout.read().splitlines() for client in clients]
    if not all(lines and lines[-1].startswith("{") for lines in said):
        raise RuntimeError("a client failed, or was too slow: see its messages")
    told = [json.loads(lines[-1]) for lines in said]
    requests = sum(one["requests"] for one in told)
    busy = [one["client_cpu_us"] * one["requests_per_s"] / 1e6 if one["requests"] else 0.0 for one in told]
    return {
        "requests": requests,
        "requests_per_s": sum(one["requests_per_s"] for one in told),
        **percentiles(told),
        "errors": sum(one["errors"] for one in told),
        "clients": count,
        "client_cores": sorted(busy, reverse=True),
        **shares(before, after, elapsed, requests),
    }


def _end(client):
    client.kill()
    client.wait()


def by_wrk(wrk, server, url, seconds, *, threads, connections, body, json_nbytes):
    """Run ``wrk``, whose libraries may lie beside it, over binary requests with this body.

    :raises subprocess.CalledProcessError: if it fails.
    """
    script = body.with_suffix(".lua")
    script.write_text(SCRIPT.format(body=body, json_nbytes=json_nbytes))
    duration = f"{max(round(seconds), 1)}s"
    command = [str(wrk), f"-t{threads}", f"-c{connections}", f"-d{duration}", "-s", str(script), url]
    path = os.pathsep.join(filter(None, [str(Path(wrk).parent), os.environ.get("LD_LIBRARY_PATH", "")]))
    before, began, own = server.cpu_s(), time.monotonic(), _children_cpu_s()
    done = subprocess.run(
        command,
        env=os.environ | {"LD_LIBRARY_PATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=seconds + CLIENT_S,
    )
    after, elapsed, own = server.cpu_s(), time.monotonic() - began, _children_cpu_s() - own
    told = json.loads(done.stdout.splitlines()[-1])
    return {
        **told,
        "requests_per_s": told["requests"] / told["elapsed_us"] * 1e6,
        "clients": threads,
        "client_cores": [own / elapsed / threads],
        **shares(before, after, elapsed, told["requests"]),
    }


def _children_cpu_s():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
