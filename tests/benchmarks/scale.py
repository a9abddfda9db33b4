"""What do more fronts, and more devices, gain? For machines with many cores, and with several GPUs.

Three parts (``--only``, with commas): `fronts`, a server in one process and with several fronts, over HTTP
(``--wrk PATH`` loads it with ``wrk``, with ``--wrk-connections``), websocket and gRPC, beside processes that
answer whatever is asked (``--fronts 8,bare8``), which show what the machine can do; `devices`, rows/s of an
engine with workers on one device and on several, in turn; `fed`, a model (``--onnx``) behind fronts beside
bare loops of the same model. ``--flags`` are the servers' own, such as ``--flags=--max-rows=512``.
"""

import asyncio
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import uvloop

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.tensors import TensorSpec
from tests.benchmarks.client import infer_head
from tests.benchmarks.common import arguments, median, save, show
from tests.benchmarks.gpu.support import verdict, verdicts
from tests.benchmarks.scale_clients import (
    by_clients,
    by_wrk,
    request_for,
    rows_of,
    started,
    started_bare,
    wait_until_all_are_ready,
)
from tests.benchmarks.serving import INFER, SOCKET, grpc_body

NOOP = "tests.benchmarks.serving:noop"
STEADY = {"cuda": "tests.gpu.fallible:steady", "host": "tests.benchmarks.scale:steady"}
STEADY_ROWS_MAX, STEADY_S = 64, 0.002
ROWS = 8
"""Of each request of ``devices``, so that there are few of them for what they make the device do."""
MANY_ROWS = 1 << 16
SAMPLES = 16
WARM_UP_S = 0.7
DEVICES_S, BARE_S = 120, 60
"""How long a model of ``devices``, and a bare loop, may take before they are given up."""
FRONTS_TARGET, HTTP_TARGET, DEVICES_TARGET, FED_TARGET = 0.8, 250_000, 1.95, 0.97
PROTOCOLS = ("HTTP", "websocket", "gRPC")
BARE = "bare processes"


def steady():
    """Return a model on the host device whose batches take 2 ms each, whatever their rows."""

    def work(inputs, outputs):
        np.multiply(inputs["x"], 2, out=outputs["y"])
        time.sleep(STEADY_S)

    row = TensorSpec("x", "float32", (16,)), TensorSpec("y", "float32", (16,))
    return FunctionModel(work, inputs=row[0], outputs=row[1], name="steady", rows_max=STEADY_ROWS_MAX)


def failed(what, error, found):
    """Say that something failed, and keep it."""
    said = f"{what}: {type(error).__name__}: {error}"
    traceback.print_exception(error)
    print(f"FAILED {said}", flush=True)
    found.setdefault("failed", []).append(said)


def failures(found):
    """Return all that failed."""
    if not isinstance(found, dict):
        return []
    return found.get("failed", []) + [said for value in found.values() for said in failures(value)]


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
        rate = figures.get("requests_per_s") or figures["rows_per_s"]
        print(f"  {what}: {rate:,.0f}/s", flush=True)


# The part `fronts`.


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


def verdicts_of_fronts(found):
    said = []
    for protocol in PROTOCOLS:
        figures = found.get(protocol, {})
        if "one process" in figures and "4 fronts" in figures:
            gain = median(figures["4 fronts"], "requests_per_s") / median(
                figures["one process"], "requests_per_s"
            )
            what = f"{protocol}, 4 fronts, of linear"
            said.append(verdict(what, gain / 4, FRONTS_TARGET, is_at_least=True, unit=""))
    http = found.get("HTTP", {}).items()
    many = [median(runs, "requests_per_s") for name, runs in http if "fronts" in name]
    if many:
        what = "HTTP, a no-op model"
        said.append(verdict(what, max(many), HTTP_TARGET, is_at_least=True, unit="requests/s"))
    return said


# The part `devices`.


async def rows_per_s(engine, callers, seconds):
    """Measure so many callers that send requests of several rows again at once."""
    samples = [rows_of(engine.inputs, ROWS, seed) for seed in range(SAMPLES)]
    latencies_ns, ends = [], False

    async def caller(rows):
        while not ends:
            began_ns = time.monotonic_ns()
            await engine.infer(rows)
            latencies_ns.append(time.monotonic_ns() - began_ns)

    tasks = [asyncio.create_task(caller(samples[number % SAMPLES])) for number in range(callers)]
    await asyncio.sleep(min(WARM_UP_S, 2 * seconds))
    latencies_ns.clear()
    before, began, cpu = engine.statistics(), time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    elapsed, cpu, after = time.perf_counter() - began, time.process_time() - cpu, engine.statistics()
    measured = list(latencies_ns)
    ends = True
    await asyncio.gather(*tasks)
    return {
        "rows_per_s": len(measured) * ROWS / elapsed,
        "mean_batch_rows": (after.rows - before.rows) / max(after.batches - before.batches, 1),
        "p50_us": float(np.median(measured)) / 1e3 if measured else float("nan"),
        "front_cores": cpu / elapsed,
        "deaths": sum(worker.deaths for worker in engine.workers),
    }


async def compared(model, names, loads, options, note, **settings):
    """Return the figures of engines on the first device and on all, by callers, in turn."""
    kinds = {"one": names[:1], "all": names}
    found = {}
    async with asyncio.timeout(DEVICES_S), AsyncExitStack() as stack:
        engines = {
            kind: await stack.enter_async_context(
                asynctrt.open(
                    model,
                    device=",".join(devices),
                    isolation="process",
                    max_queue_rows=MANY_ROWS,
                    **settings,
                )
            )
            for kind, devices in kinds.items()
        }
        for engine in engines.values():
            await rows_per_s(engine, loads[0], 0.1)
        for callers in loads:
            figures = found[str(callers)] = {kind: [] for kind in kinds}
            for _ in range(options.repeats + 1):
                for kind, engine in engines.items():
                    figures[kind].append(await rows_per_s(engine, callers, options.seconds))
                    print(f"  {kind}, {callers}: {figures[kind][-1]['rows_per_s']:,.0f} rows/s", flush=True)
            note(found)
    return found


def devices(options, folder, note):
    """Compare one device and all, with the steady model and, if given, an ONNX one."""
    names = options.devices.split(",")
    loads = [int(callers) for callers in options.callers.split(",")]
    onnx_loads = [int(callers) for callers in options.onnx_callers.split(",")]
    steady_model = STEADY["host" if names[0] == "host" else "cuda"]
    models = {"steady": (steady_model, loads, {"contexts": options.contexts})}
    if options.onnx:
        models["ONNX"] = (options.onnx, onnx_loads, {"max_rows": options.max_rows})
    found = {}
    for name, (model, loads_of, settings) in models.items():
        measured = {}

        try:
            uvloop.run(compared(model, names, loads_of, options, measured.update, **settings))
        except Exception as error:
            failed(name, error, found)
        found[name] = measured
        note(found)
    lines = []
    for name, callers, one, several in pairs(found):
        lines.append(
            (
                f"{name}, {callers}",
                f"{median(one, 'rows_per_s'):,.0f}",
                f"{median(several, 'rows_per_s'):,.0f}",
                f"{median(several, 'rows_per_s') / median(one, 'rows_per_s'):.2f}",
                *(f"{median(runs, 'mean_batch_rows'):.1f}" for runs in (one, several)),
                *(f"{median(runs, 'p50_us') / 1e3:.1f}" for runs in (one, several)),
                f"{median(several, 'front_cores'):.2f}",
            )
        )
    show(
        f"An engine on {names[0]}, and on {options.devices}: callers with {ROWS} rows each",
        (
            *("", "rows/s", "all", "ratio", "rows a batch", "all", "p50 ms", "all"),
            "cores of the front, all",
        ),
        lines,
        f"medians of {options.repeats + 1} runs of {options.seconds:g} s in turn;",
    )
    return found


def pairs(found):
    """Yield what was measured with one device and with all."""
    for name in ("steady", "ONNX"):
        for callers, figures in found.get(name, {}).items():
            if figures["one"] and figures["all"]:
                yield name, callers, figures["one"], figures["all"]


def verdicts_of_devices(found):
    ratios = {}
    for name, _, one, several in pairs(found):
        ratios.setdefault(name, []).append(median(several, "rows_per_s") / median(one, "rows_per_s"))
    return [
        verdict(f"{name}: all devices over one", max(values), DEVICES_TARGET, is_at_least=True, unit="x")
        for name, values in ratios.items()
    ]


# The part `fed`.

_bare = {}


def load_bare(path, device_name, rows_max):
    """Load the model in this process, twice, and the rows that its bare loops run."""
    from tests.benchmarks.gpu.batchers import Runner
    from tests.benchmarks.gpu.support import open_device

    device = open_device(device_name)
    if device_name == "host":
        from tests.backends.onnx_sessions import HostSessions

        model = HostSessions(path)
    else:
        from asynctrt.backends.onnxruntime_cuda import OnnxCudaModel

        model = OnnxCudaModel(path, device=device)
    _bare["runners"] = [Runner(device, model, rows_max) for _ in range(2)]
    samples = [rows_of(model.inputs, 1, seed) for seed in range(SAMPLES)]
    _bare["batch"] = [samples[number % SAMPLES] for number in range(rows_max)]


def run_bare(seconds, *model):
    """Return rows/s of bare loops, with one and with two threads, and of computing without copies."""
    from tests.benchmarks.gpu.batchers import back_to_back, bare_loop

    if not _bare:
        load_bare(*model)
    runners, batch = _bare["runners"], _bare["batch"]
    figures = {
        "one thread": bare_loop(runners[:1], batch, seconds),
        "two threads": bare_loop(runners, batch, seconds),
        "computing alone": back_to_back(runners[0], batch, seconds),
    }
    return {"rows_per_s": max(figures["one thread"], figures["two threads"]), **figures}


def fed(options, folder, note):
    """Measure a model that is fed over HTTP by several fronts, beside bare loops of it, in turn."""
    if not options.onnx:
        raise ValueError("it needs a model: --onnx PATH")
    found = {"fed": [], "bare": []}
    count = options.fed_fronts
    flags = (f"--fronts={count}", f"--device={options.device}", f"--max-rows={options.max_rows}")
    # Each has a process of its own, so that what one leaves on the device goes with it.
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        server = stack.enter_context(started(f"fed={options.onnx}", *flags, "--warmup=2"))
        pool = stack.enter_context(spawn.Pool(1))  # It is terminated in the end, whatever it does then.
        wait_until_all_are_ready(server, count, workers=1)
        body = folder / "fed.body"
        json_nbytes = request_for(server, "fed", body)

        def bare(seconds):
            model = options.onnx, options.device, options.max_rows
            return pool.apply_async(run_bare, (seconds, *model)).get(BARE_S)

        def feed(seconds):
            return by_clients(
                *(server, server.url + INFER.format("fed"), seconds, options.clients),
                connections=max(options.fed_connections // options.clients, 1),
                file=body,
                json_nbytes=json_nbytes,
            )

        attempt("fed, first", {}, lambda: feed(options.seconds))
        attempt("bare, first", {}, lambda: bare(0.2))
        for _ in range(options.repeats + 1):
            attempt("fed", found, lambda: feed(options.seconds))
            attempt("bare", found, lambda: bare(options.seconds / 2))
            note(found)
    runs, alone = found["fed"], found["bare"]
    row_nbytes = body.stat().st_size - json_nbytes
    found["row_nbytes"] = row_nbytes
    if runs and alone:
        rate, bare_rate = median(runs, "requests_per_s"), median(alone, "rows_per_s")
        show(
            f"{Path(options.onnx).name} on {options.device}, {row_nbytes / 1e3:,.0f} KB each, {count} fronts",
            (
                *(
                    "",
                    "rows/s",
                    "MB/s",
                    "bare, one thread",
                    "two threads",
                    "computing alone",
                    "fed over bare",
                ),
                *("p50 ms", "p99 ms", "server CPU µs", "cores: busiest front", "worker", "mean client"),
            ),
            [
                (
                    "fed",
                    f"{rate:,.0f}",
                    f"{rate * row_nbytes / 1e6:,.0f}",
                    *(f"{median(alone, what):,.0f}" for what in ("one thread", "two threads")),
                    f"{median(alone, 'computing alone'):,.0f}",
                    f"{rate / bare_rate:.3f}",
                    f"{median(runs, 'p50_us') / 1e3:.1f}",
                    f"{median(runs, 'p99_us') / 1e3:.1f}",
                    f"{median(runs, 'server_cpu_us'):.0f}",
                    f"{runs[-1]['front_cores'][0]:.2f}",
                    f"{sum(runs[-1]['worker_cores']):.2f}",
                    f"{statistics.mean(runs[-1]['client_cores']):.2f}",
                )
            ],
            f"medians of {options.repeats + 1} runs of {options.seconds:g} s in turn;",
        )
    return found


def verdicts_of_fed(found):
    if not (found["fed"] and found["bare"]):
        return []
    share = median(found["fed"], "requests_per_s") / median(found["bare"], "rows_per_s")
    what = "fed over HTTP, over the better bare loop"
    return [verdict(what, share, FED_TARGET, is_at_least=True, unit="")]


PARTS = {
    "fronts": (fronts, verdicts_of_fronts),
    "devices": (devices, verdicts_of_devices),
    "fed": (fed, verdicts_of_fed),
}


def gpus():
    """Return what ``nvidia-smi`` says of the GPUs; nothing where there are none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def told(value):
    """Return a setting as it is kept: of a path its last part."""
    return Path(value).name if isinstance(value, Path) or "/" in str(value) else value


def settings():
    options = arguments(
        __doc__,
        only=",".join(PARTS),
        fronts="1,2,4,8,8x2",
        flags="",
        protocols=",".join(PROTOCOLS),
        wrk="",
        clients=max((os.cpu_count() or 2) // 2, 1),
        connections=512,
        wrk_connections=0,
        devices="host,host",
        contexts=1,
        callers="512,2048",
        onnx="",
        onnx_callers="256",
        max_rows=64,
        device="host",
        fed_fronts=4,
        fed_connections=384,
        seconds=2.0,
        repeats=1,
        budget=1e9,
        quick=False,
    )
    if options.quick:
        options.fronts, options.connections, options.clients = "1,2x2,bare2", 32, 1
        options.callers, options.onnx_callers = "64", "8"
        options.fed_fronts, options.fed_connections = 2, 32
        options.seconds, options.repeats, options.max_rows = min(options.seconds, 0.3), 1, 32
    return options


def main():
    options, began = settings(), time.monotonic()
    wanted = options.only.split(",")
    results = {"settings": {name: told(value) for name, value in vars(options).items()}, "gpus": gpus()}
    met = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        on_host = options.device == "host" and options.devices.startswith("host")
        if not options.onnx and on_host and {"devices", "fed"} & set(wanted):
            from tests.benchmarks.mlp import mlp_onnx

            options.onnx = str(mlp_onnx(folder / "mlp.onnx"))
        for part, (measure, judge) in PARTS.items():
            if part not in wanted:
                continue
            if time.monotonic() - began > options.budget:
                print(f"no time is left for {part}", flush=True)
                continue

            def note(found, part=part):
                results[part] = found
                save(options.json, __doc__, results)

            began_part = time.monotonic()
            try:
                found = measure(options, folder, note)
                note(found)
                met += judge(found)
            except Exception as error:
                failed(part, error, results)
            print(f"{part}: {time.monotonic() - began_part:.1f} s", flush=True)
    results["verdicts"] = verdicts(met)
    save(options.json, __doc__, results)
    if found := failures(results):
        sys.exit("\n".join(["failed:", *found]))


if __name__ == "__main__":
    main()
