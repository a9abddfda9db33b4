"""What do more fronts gain? For machines with many cores.

A server in one process and with several fronts, over HTTP (``--wrk PATH`` loads it with ``wrk``, with
``--wrk-connections``), websocket and gRPC, beside processes that answer whatever is asked
(``--fronts 8,bare8``), which show what the machine can do. ``--flags`` are the servers' own, such as
``--flags=--max-rows=512``.
"""

import os
import statistics
import sys
import tempfile
import traceback
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.benchmarks.client import infer_head
from tests.benchmarks.common import arguments, median, save, show
from tests.benchmarks.scale_clients import (
    by_clients,
    by_wrk,
    started,
    started_bare,
    wait_until_all_are_ready,
)
from tests.benchmarks.serving import INFER, SOCKET, grpc_body

NOOP = "tests.benchmarks.serving:noop"
PROTOCOLS = ("HTTP", "websocket", "gRPC")
BARE = "bare processes"


def failed(what, error, found):
    """Say that something failed, and keep it."""
    said = f"{what}: {type(error).__name__}: {error}"
    traceback.print_exception(error)
    print(f"FAILED {said}", flush=True)
    found.setdefault("failed", []).append(said)


def attempt(what, found, measure):
    """Measure, and add that to a list; a failure is said, and leaves the others their figures."""
    try:
        figures = measure()
        if figures.get("errors"):
            raise RuntimeError(f"{figures['errors']} requests failed")
    except Exception as error:  # What else is measured is of use all the same.
        failed(what, error, found)
    else:
        found.setdefault(what, []).append(figures)
        print(f"  {what}: {figures['requests_per_s']:,.0f}/s", flush=True)


def kinds_of(options):
    """Return the servers to compare: their names, fronts, workers and flags. ``8x2``: eight fronts and two
    workers; ``bare8``: eight processes that answer whatever is asked, which have no flags."""
    kinds, own = [], tuple(options.flags.split())
    for text in options.fronts.split(","):
        if text.startswith("bare"):
            kinds.append((f"{text[4:]} {BARE}", int(text[4:]), 0, None))
            continue
        count, workers = map(int, f"{text}x1".split("x")[:2])
        if count == 1:
            kinds += [("one process", 1, 0, own), ("a worker", 1, 1, ("--isolation=process", *own))]
        else:
            name = f"{count} fronts" + (f", {workers} workers" if workers > 1 else "")
            devices = f"--device={','.join(['host'] * workers)}"
            kinds.append((name, count, workers, (f"--fronts={count}", devices, *own)))
    return kinds


def measures_of(options, folder):
    """Return how to measure by each protocol: functions of a server and seconds."""
    body = folder / "noop.body"
    head = b"{" + infer_head(16)
    body.write_bytes(head + bytes(4 * 16))
    connections = options.connections
    each = max(connections // options.clients, 1)

    def http(server, seconds):
        url = server.url + INFER.format("noop")
        if not options.wrk:
            return by_clients(server, url, seconds, options.clients, connections=each)
        return by_wrk(
            *(options.wrk, server, url, seconds),
            threads=min(options.clients, connections),
            connections=options.wrk_connections or connections,
            body=body,
            json_nbytes=len(head),
        )

    def websocket(server, seconds):
        url = server.url.replace("http:", "ws:") + SOCKET.format("noop")
        return by_clients(server, url, seconds, options.clients, connections=each, depth=4)

    def rpc(server, seconds):
        url = f"grpc://127.0.0.1:{server.rpc}/inference.GRPCInferenceService/ModelInfer"
        return by_clients(
            server, url, seconds, options.clients, connections=each, body=grpc_body(), channels=min(each, 8)
        )

    return dict(zip(PROTOCOLS, (http, websocket, rpc), strict=True))


def fronts(options, folder, note):
    """Measure each server by each protocol; note what there is after each."""
    found = {}
    measures = measures_of(options, folder)
    with ExitStack() as stack:
        # All of them start at the same time, and those that are not measured sleep.
        starting = [
            (
                name,
                count,
                workers,
                stack.enter_context(started_bare(count) if flags is None else started(NOOP, *flags)),
            )
            for name, count, workers, flags in kinds_of(options)
        ]
        servers = {}
        for name, count, workers, server in starting:
            try:
                wait_until_all_are_ready(server, count, workers)
            except (RuntimeError, TimeoutError) as error:
                failed(name, error, found)
            else:
                servers[name] = server
        for protocol in options.protocols.split(","):
            figures = found[protocol] = {}
            print(protocol, flush=True)
            if options.wrk and protocol == "HTTP":  # It has no warm-up of its own.
                for name, server in servers.items():
                    attempt(f"{name}, first", {}, partial(measures[protocol], server, 1))
            for _ in range(options.repeats):
                for name, server in servers.items():
                    if protocol == "HTTP" or BARE not in name:
                        attempt(name, figures, partial(measures[protocol], server, options.seconds))
            show_fronts(protocol, figures, options)
            note(found)
    return found


def show_fronts(protocol, figures, options):
    alone = figures.get("one process")
    lines = []
    for name, count, _, flags in kinds_of(options):
        if flags is None and protocol != "HTTP":
            continue
        runs = figures.get(name)
        if not runs:
            lines.append((name, "failed", *[""] * 9))
            continue
        times = median(runs, "requests_per_s") / median(alone, "requests_per_s") if alone else float("nan")
        lines.append(
            (
                name,
                f"{median(runs, 'requests_per_s'):,.0f}",
                f"{times:.2f}",
                f"{times / count:.2f}",
                f"{median(runs, 'server_cpu_us'):.1f}",
                f"{median(runs, 'p50_us') / 1e3:.2f}",
                f"{median(runs, 'p99_us') / 1e3:.2f}",
                f"{runs[-1]['front_cores'][0]:.2f}",
                f"{statistics.mean(runs[-1]['front_cores']):.2f}",
                f"{sum(runs[-1]['worker_cores']):.2f}",
                f"{statistics.mean(runs[-1]['client_cores']):.2f}",
            )
        )
    by = "wrk" if options.wrk and protocol == "HTTP" else f"{options.clients} client processes"
    show(
        f"{protocol}, a no-op model",
        (
            *("", "requests/s", "x one process", "of linear", "server CPU µs", "p50 ms", "p99 ms"),
            *("cores: busiest front", "mean front", "worker", "mean client"),
        ),
        lines,
        f"{by}, {options.repeats} runs of {options.seconds:g} s in turn;",
    )


def settings():
    options = arguments(
        __doc__,
        fronts="1,2,4,8,8x2",
        flags="",
        protocols=",".join(PROTOCOLS),
        wrk="",
        clients=max((os.cpu_count() or 2) // 2, 1),
        connections=512,
        wrk_connections=0,
        seconds=2.0,
        repeats=1,
        quick=False,
    )
    if options.quick:
        options.fronts, options.connections, options.clients = "2,bare2", 32, 1
        options.seconds, options.repeats = min(options.seconds, 0.3), 1
    return options


def main():
    options = settings()
    given = {
        name: Path(value).name if isinstance(value, Path) or "/" in str(value) else value
        for name, value in vars(options).items()
    }
    with tempfile.TemporaryDirectory() as name:

        def note(found):
            save(options.json, __doc__, {"settings": given, "fronts": found})

        found = fronts(options, Path(name), note)
    parts = [found, *(found[protocol] for protocol in PROTOCOLS if protocol in found)]
    if said := [failure for part in parts for failure in part.get("failed", ())]:
        sys.exit("\n".join(["failed:", *said]))


if __name__ == "__main__":
    main()
