"""What does an engine in a worker process cost, and what happens when its workers are killed?

Four parts (``--only``): `cost`, the same callers in process and with a worker, in turn; `kills`, requests
whose every answer is checked while workers are killed by SIGKILL, with and without a spare; `restarts`, what
is left behind after many; `fronts`, a server with one and with several. CPU time is that of all processes.
`--only cost --loads large --device cuda:0` is about large rows on a GPU.
"""

import asyncio
import gc
import logging
import os
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import uvloop
from rich.progress import Progress

import asynctrt
from tests.benchmarks.common import arguments, console, in_turn, median, save, show, spread
from tests.benchmarks.mlp import mlp_onnx
from tests.benchmarks.serving import INFER, load, process, wait_until_ready
from tests.helpers import free_port

NOOP = "tests.benchmarks.serving:noop"
LOADS = (("no-op", 16), ("MLP", 512), ("large", 150_528))
CALLERS = (1, 8, 64, 256)
WARM_UP_S = 1.5
"""Until the memory of large rows was all used once: to get a new page takes longer than to copy one."""


def large():
    """Return a model of rows of 588 KiB, as a picture of 224 x 224 in float32 has."""
    from asynctrt.backends.function import FunctionModel
    from asynctrt.tensors import TensorSpec

    return FunctionModel(
        lambda inputs: inputs["input"][:, :16],
        inputs=TensorSpec("input", "float32", (150_528,)),
        outputs=TensorSpec("output", "float32", (16,)),
        name="large",
    )


def cpu_s():
    own = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in [own, *own.children(recursive=True)])


async def loaded(model, dim, callers, seconds, **options):
    """Measure so many callers that ask again at once."""
    rows = np.zeros((1, dim), np.float32)
    async with asynctrt.open(model, **options) as engine:
        latencies_ns, ends = [], False

        async def caller():
            while not ends:
                began_ns = time.monotonic_ns()
                await engine.infer(rows)
                latencies_ns.append(time.monotonic_ns() - began_ns)

        tasks = [asyncio.create_task(caller()) for _ in range(callers)]
        await asyncio.sleep(WARM_UP_S)
        latencies_ns.clear()
        began, cpu, own = time.perf_counter(), cpu_s(), time.process_time()
        await asyncio.sleep(seconds)
        elapsed, cpu, own = time.perf_counter() - began, cpu_s() - cpu, time.process_time() - own
        cpu = max(cpu, own)  # All processes together are counted in ticks of 10 ms.
        count = max(len(latencies_ns), 1)
        p50_ns = float(np.median(latencies_ns))
        ends = True
        await asyncio.gather(*tasks)
    return {
        "requests_per_s": count / elapsed,
        "cpu_us": cpu / count * 1e6,
        "own_cpu_us": own / count * 1e6,
        "p50_us": p50_ns / 1e3,
    }


def cost(options, mlp):
    """Measure each load with both, in turn, and show the ratios of the pairs."""
    models = {"no-op": NOOP, "MLP": mlp, "large": "tests.benchmarks.workers:large"}
    if options.device != "host":
        models["large"] = "tests.gpu.fallible:large"
    results = {}
    for name, dim in LOADS:
        if options.loads and name not in options.loads.split(","):
            continue
        for callers in CALLERS[: options.callers]:
            pair = in_turn(
                {
                    kind: lambda name=name, dim=dim, callers=callers, kind=kind: uvloop.run(
                        loaded(
                            *(models[name], dim, callers, options.seconds),
                            isolation=kind,
                            device=options.device,
                        )
                    )
                    for kind in ("none", "process")
                },
                options.repeats,
                f"{name}, {callers}",
            )
            results[f"{name}, {callers}"] = pair
    show(
        "In process, and in a worker process",
        (
            "callers",
            *("requests/s", "worker", "least to most"),
            *("CPU µs", "worker", "front", "ratio", "p50 µs", "worker"),
        ),
        [_cost_line(name, pair["none"], pair["process"]) for name, pair in results.items()],
        f"medians of {options.repeats} runs of {options.seconds:g} s in turn; the ratio is that of pairs;",
    )
    return results


def _cost_line(name, local, worker):
    ratio = float(np.median([b["cpu_us"] / a["cpu_us"] for a, b in zip(local, worker, strict=True)]))
    return (
        name,
        f"{median(local, 'requests_per_s'):,.0f}",
        f"{median(worker, 'requests_per_s'):,.0f}",
        spread(worker, "requests_per_s"),
        *(f"{median(local, 'cpu_us'):.1f}", f"{median(worker, 'cpu_us'):.1f}"),
        f"{median(worker, 'own_cpu_us'):.1f}",
        f"{ratio:.2f}",
        *(f"{median(local, 'p50_us'):,.0f}", f"{median(worker, 'p50_us'):,.0f}"),
    )


async def killed(mlp, reference, requests, every_s, note, **options):
    """Check each of so many answers while a worker is killed now and then."""
    random = np.random.default_rng(1)
    inputs, outputs = reference
    found = {"answered": 0, "lost": 0, "wrong": 0, "twice": 0, "kills": 0, "recovery_ms": []}
    waits = []

    async with asynctrt.open(mlp, **{"isolation": "process", **options}) as engine:
        left = iter(range(requests))
        seen = set()

        async def caller():
            for number in left:
                which = number % len(inputs)
                try:
                    answer = await engine.infer(inputs[which : which + 1])
                except asynctrt.AsynctrtError:
                    found["lost"] += 1
                    continue
                found["twice"] += number in seen
                seen.add(number)
                found["answered"] += 1
                close = np.allclose(answer["output"], outputs[which : which + 1], rtol=1e-4, atol=1e-5)
                found["wrong"] += not close
                note(found["answered"])

        async def killer():
            while True:
                await asyncio.sleep(random.uniform(0.5, 1.5) * every_s)
                alive = [worker for worker in engine.workers if worker.state == "open"]
                if not alive:
                    continue
                worker = alive[random.integers(len(alive))]
                os.kill(worker.pid, signal.SIGKILL)
                found["kills"] += 1
                began, answered = time.perf_counter(), engine.statistics().succeeded
                while engine.statistics().succeeded <= answered + 256:  # Beyond what was on the way already.
                    await asyncio.sleep(0.001)
                waits.append(time.perf_counter() - began)

        killing = asyncio.create_task(killer())
        began = time.perf_counter()
        await asyncio.gather(*[caller() for _ in range(128)])
        found["seconds"] = time.perf_counter() - began
        killing.cancel()
        found["deaths"] = sum(worker.deaths for worker in engine.workers)
    found["recovery_ms"] = [wait * 1e3 for wait in waits]
    return found


async def reference_of(mlp):
    """Return inputs, and their outputs as computed in this process."""
    inputs = np.random.default_rng(2).random((997, 512), np.float32)
    async with asynctrt.open(mlp) as engine:
        return inputs, (await engine.infer(inputs))["output"]


def kills(options, mlp):
    """Count what is lost, wrong and answered twice."""
    kinds = {
        "one worker": {},
        "one worker and a spare": {"isolation": "spare"},
        "two workers": {"device": "host,host"},
    }
    reference = uvloop.run(reference_of(mlp))
    results = {}
    for name, settings in kinds.items():
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(f"killed: {name}", total=options.requests)
            results[name] = uvloop.run(
                killed(
                    mlp,
                    reference,
                    options.requests,
                    options.every,
                    lambda done, task=task, progress=progress: progress.update(task, completed=done),
                    **settings,
                )
            )
    show(
        f"{options.requests:,} requests of 128 callers; a worker is killed about every {options.every:g} s",
        (
            "",
            "kills",
            "answered",
            "lost",
            "wrong",
            "twice",
            "next answers: median ms",
            "longest ms",
            "requests/s",
        ),
        [
            (
                name,
                *(f"{found[what]:,}" for what in ("kills", "answered", "lost", "wrong", "twice")),
                f"{np.median(found['recovery_ms'] or [np.nan]):.0f}",
                f"{max(found['recovery_ms'] or [np.nan]):.0f}",
                f"{found['answered'] / found['seconds']:,.0f}",
            )
            for name, found in results.items()
        ],
        "the pause: until 256 more were answered;",
    )
    return results


def _left():
    """Return what this process has: descriptors, mappings of shared memory, resident MB, children."""
    gc.collect()
    own = psutil.Process()
    maps = Path("/proc/self/maps").read_text().count("memfd:asynctrt")
    return {
        "descriptors": own.num_fds(),
        "mappings": maps,
        "resident_mb": own.memory_info().rss / 1e6,
        "children": len(own.children(recursive=True)),
        "threads": own.num_threads(),
    }


async def restarted(count, note):
    """Kill workers one after the other; return what was left after the first tenth and in the end."""
    rows = np.zeros((4, 16), np.float32)
    looks = []
    async with asynctrt.open(NOOP, isolation="spare") as engine:
        for number in range(count):
            await engine.infer(rows)
            os.kill(engine.workers[0].pid, signal.SIGKILL)
            deaths = number + 1
            while engine.workers[0].deaths < deaths:
                await asyncio.sleep(0.001)
            note(deaths)
            if deaths in (max(count // 10, 1), count):
                await engine.infer(rows)
                looks.append(_left())
    return {"first": looks[0], "last": looks[-1], "closed": _left()}


def restarts(options, _mlp):
    """Look at what many deaths leave behind in the front."""
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("restarts", total=options.restarts)
        result = uvloop.run(restarted(options.restarts, lambda done: progress.update(task, completed=done)))
    show(
        f"The front while {options.restarts:,} workers die",
        ("", "descriptors", "mappings", "threads", "children", "resident MB"),
        [
            (
                name,
                *(f"{left[what]}" for what in ("descriptors", "mappings", "threads", "children")),
                f"{left['resident_mb']:.1f}",
            )
            for name, left in (
                ("after a tenth", result["first"]),
                ("after all", result["last"]),
                ("closed", result["closed"]),
            )
        ],
    )
    return result


def fronts(options, mlp):
    """Measure a server in one process, with a worker, and with several fronts."""
    kinds = {"one process": (), "a worker": ("--isolation=process",)}
    kinds |= {f"{count} fronts": (f"--fronts={count}",) for count in range(2, options.fronts + 1)}
    with ExitStack() as stack:
        runs = {}
        for kind, flags in kinds.items():
            http, rpc = free_port(), free_port()
            server = stack.enter_context(
                process(
                    *("asynctrt", "serve", "tests.benchmarks.serving:noop", f"mlp={mlp}", *flags),
                    *(f"--http-port={http}", f"--grpc-port={rpc}"),
                )
            )
            wait_until_ready(f"http://127.0.0.1:{http}")
            for model, dim in (("noop", 16), ("mlp", 512)):
                url = f"http://127.0.0.1:{http}" + INFER.format(model)
                runs[f"{model}, {kind}"] = lambda server=server, url=url, dim=dim: load(
                    server, url, options.seconds, connections=256, dim=dim
                )
        results = in_turn(runs, options.repeats, "fronts")
    show(
        "HTTP, 256 connections",
        ("", "requests/s", "least to most", "server CPU µs", "p50 ms", "p99 ms"),
        [
            (
                name,
                f"{median(found, 'requests_per_s'):,.0f}",
                spread(found, "requests_per_s"),
                f"{median(found, 'server_cpu_us'):.1f}",
                f"{median(found, 'p50_us') / 1e3:.1f}",
                f"{median(found, 'p99_us') / 1e3:.1f}",
            )
            for name, found in results.items()
        ],
        f"medians of {options.repeats} runs of {options.seconds:g} s in turn; the client has the same cores;",
    )
    return results


PARTS = {"cost": cost, "kills": kills, "restarts": restarts, "fronts": fronts}


def main():
    options = arguments(
        __doc__,
        repeats=3,
        seconds=1.0,
        callers=len(CALLERS),
        requests=100_000,
        every=2.0,
        restarts=1000,
        fronts=2,
        only="",
        loads="",
        device="host",
    )
    logging.getLogger("asynctrt").setLevel(logging.CRITICAL)  # Each death is an error there.
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        mlp = str(mlp_onnx(Path(folder) / "mlp.onnx"))
        results = {name: part(options, mlp) for name, part in PARTS.items() if options.only in name}
    save(options.json, __doc__, results)


if __name__ == "__main__":
    main()
