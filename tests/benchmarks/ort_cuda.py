"""Real models on a GPU, by ONNX Runtime's CUDA provider: the engine beside a bare loop and two batchers.

For each model rows a second, latency and CPU time a request of 1, 8, 64 and 256 callers who send one row each
again and again; the same on a loop that is never idle (20 µs burned each tick); and latency when requests
come at random at 50 and 80% of the capacity of the slower of the engine and the batcher by hand. In turn,
``--repeats`` times; medians and spread are kept. Every caller's last answer is compared with the CPU's.

``--host`` shows that it works where there is no GPU. ``--models`` is a folder with the ONNX files; what torch
can export is put there.
"""

import asyncio
import statistics
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import uvloop

import asynctrt
from asynctrt._util import clock
from asynctrt._util.process import freeze_gc
from asynctrt.cli.demo import ContentModel
from asynctrt.devices.host import HostDevice
from tests.benchmarks.common import WARM_UP_S, arguments, medians, requests_of, save
from tests.benchmarks.gpu.batchers import ByHand, Runner, async_batcher, back_to_back, bare_loop
from tests.benchmarks.gpu.onnx_models import SUBJECTS, export
from tests.benchmarks.gpu.resnet import Poisson
from tests.benchmarks.gpu.support import Load, open_device, said

CALLERS = (1, 8, 64, 256)
SHARES = (0.5, 0.8)
TOLERANCE = 0.03
"""How far an answer may be from the CPU's, relative to its largest value: the GPU multiplies in TF32."""


def options():
    given = arguments(
        __doc__,
        models="models",
        only="",
        callers=",".join(map(str, CALLERS)),
        seconds=0.5,
        repeats=2,
        quick=False,
        contexts=4,
        host=False,
    )
    given.models = Path(given.models)
    if given.quick:
        given.seconds, given.repeats = 0.1, 1
    return given


class Answers:
    """The CPU's answers to the samples of a model."""

    def __init__(self, path, samples):
        from asynctrt.backends.onnxruntime import ort

        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        self.samples = samples
        self.expected = [dict(zip(names, session.run(names, rows), strict=True)) for rows in samples]
        self.worst = 0.0

    def check(self, number, answer):
        """Check an answer to a sample.

        :raises AssertionError: if it is further from the CPU's than allowed.
        """
        for name, expected in self.expected[number].items():
            most = max(float(np.abs(expected).max()), 1e-6)
            apart = np.abs(answer[name] - expected) / most
            off = float(apart.max())
            self.worst = max(self.worst, off)
            # A sigmoid at its steepest makes much of little: single pixels of a map may be further off.
            if not off <= TOLERANCE and not float(np.quantile(apart, 0.99)) <= TOLERANCE:
                raise AssertionError(f"a wrong answer to sample {number}: {name} is off by {off:.2g}")


async def callers(infer, answers, count, seconds, kind):
    """Return the figures of some callers, on a loop with other work (``busy``) or without (``idle``)."""
    load = Load(kind)
    numbers = [number % len(answers.samples) for number in range(count)]
    found = await requests_of(lambda number: infer(answers.samples[number]), numbers, seconds, answers.check)
    load.end()
    return found


def path_of(subject, given):
    """Return where the model is: in the folder, or in the package that brings it."""
    path = given.models / f"{subject.name}.onnx"
    return ContentModel().path if subject.name == "magika" and not path.exists() else path


def load(device, subject, given):
    """Return the model, opened for the device."""
    path = path_of(subject, given)
    if given.host:
        from tests.backends.onnx_sessions import HostSessions

        return HostSessions(path)
    from asynctrt.backends.onnxruntime_cuda import OnnxCudaModel

    return OnnxCudaModel(path, device=device)


def bare(runners, answers, subject, seconds):
    """Return rows a second of bare loops, with one and two threads, and of computing alone."""
    # Rows of one shape, the last: the longest.
    samples = answers.samples[len(subject.lengths) - 1 :: len(subject.lengths)]
    batch = [samples[number % len(samples)] for number in range(subject.rows_max)]
    return {
        "one thread": bare_loop(runners[:1], batch, seconds),
        "two threads": bare_loop(runners, batch, seconds),
        "computing alone": back_to_back(runners[0], batch, seconds),
    }


async def check_all(infer, answers):
    """Send every sample several times at once, and check each answer."""
    numbers = [number for number in range(len(answers.samples)) for _ in range(3)]
    found = await asyncio.gather(*(infer(answers.samples[number]) for number in numbers))
    for number, answer in zip(numbers, found, strict=True):
        answers.check(number, answer)


async def measure(device, subject, given):
    """Return all figures of one model."""
    start_ns = clock.now_ns()
    answers = Answers(path_of(subject, given), subject.samples())
    model = load(device, subject, given)
    free_nbytes = device.memory().free_nbytes
    async with AsyncExitStack() as stack:
        stack.callback(model.close)
        runners = [Runner(device, model, subject.rows_max) for _ in range(2)]
        for runner in runners:
            stack.callback(runner.close)
        session_nbytes = (free_nbytes - device.memory().free_nbytes) / 2
        engine = await stack.enter_async_context(
            asynctrt.open(
                model,
                device=device,
                contexts=given.contexts,
                max_rows=subject.rows_max,
                # They have these lengths only, so nothing is padded; but so the engine knows them.
                pad={"length": subject.lengths} if any(subject.lengths) else None,
            )
        )
        contenders = {"asynctrt": engine.infer}
        for name, batcher in (
            ("by hand", ByHand([runners[0].run], subject.rows_max)),
            ("async-batcher", async_batcher(runners[1])),
        ):
            if batcher is not None:
                stack.push_async_callback(batcher.aclose)
                contenders[name] = batcher.infer
        for infer in contenders.values():
            for _ in range(2):
                await check_all(infer, answers)
        # As in an application that is careful: with torch, a full collection stops the process for 0.15 s.
        freeze_gc()
        print(f"{subject.name}: loaded in {(clock.now_ns() - start_ns) / 1e9:.1f} s", flush=True)
        counted = engine.statistics()
        figures = {
            "session_mib": session_nbytes / 2**20,
            "batch_sizes": counted.batch_sizes,
            "graphs": counted.graphs,
            "loaded_s": (clock.now_ns() - start_ns) / 1e9,
        }
        figures["bare"] = [
            await asyncio.to_thread(bare, runners, answers, subject, given.seconds)
            for _ in range(given.repeats)
        ]
        figures["callers"] = await closed_loops(contenders, answers, given)
        figures["poisson"] = await at_random(contenders, answers, figures["callers"], given)
        statistics_ = engine.statistics()
        figures["engine"] = {
            "batches": statistics_.batches,
            "mean_batch_rows": statistics_.rows / max(statistics_.batches, 1),
            "failed": statistics_.failed,
        }
        figures["off_by_at_most"] = answers.worst
    return figures


async def closed_loops(contenders, answers, given):
    """Return figures for each number of callers, each contender, on either loop."""
    figures = {}
    # The first batch of each size is when algorithms are chosen, which takes many times as long as it.
    for count in map(int, given.callers.split(",")):
        for infer in contenders.values():
            await callers(infer, answers, count, WARM_UP_S, "idle")
    for kind in ("idle", "busy"):
        for count in map(int, given.callers.split(",")):
            runs = {name: [] for name in contenders}
            for _ in range(given.repeats):
                for name, infer in contenders.items():
                    runs[name].append(await callers(infer, answers, count, given.seconds, kind))
            figures[f"{kind}, {count}"] = {name: medians(found) for name, found in runs.items()}
            print_line(f"{kind}, {count}", figures[f"{kind}, {count}"])
    return figures


async def arrivals(infer, answers, rate, seconds):
    """Return the figures of requests that come at random, 20 at the least."""
    loop, start_cpu_ns = asyncio.get_running_loop(), clock.cpu_ns()
    engine = SimpleNamespace(submit=lambda rows: loop.create_task(infer(rows)))
    found = await Poisson(engine, answers.samples, rate, max(seconds, 20 / rate), 11).run()
    requests = max(int(rate * seconds), 20)
    return found | {"cpu_us_per_request": (clock.cpu_ns() - start_cpu_ns) / 1e3 / requests}


async def at_random(contenders, answers, closed, given):
    """Return latencies at shares of what the slower of the engine and the batcher by hand can do."""
    most = closed[f"idle, {given.callers.split(',')[-1]}"]
    capacity = min(most[name]["requests_per_s"] for name in ("asynctrt", "by hand"))
    figures = {"capacity": capacity}
    for share in SHARES:
        runs = {}
        for name, infer in contenders.items():
            if name == "async-batcher" and most[name]["requests_per_s"] < capacity * share * 1.05:
                continue  # Its queue would grow without end.
            runs[name] = await arrivals(infer, answers, capacity * share, 2 * given.seconds)
        figures[f"{share:.0%}"] = runs
        print_line(f"Poisson {share:.0%}", runs)
    return figures


def print_line(what, figures):
    parts = []
    for name, found in figures.items():
        rate = f"{found['requests_per_s']:,.0f}/s " if "requests_per_s" in found else ""
        parts.append(
            f"{name} {rate}p50 {found['p50_us'] / 1e3:.2f} p99 {found['p99_us'] / 1e3:.2f} ms "
            f"cpu {found['cpu_us_per_request']:.0f} µs"
        )
    print(f"  {what}: {' | '.join(parts)}", flush=True)


async def main():
    given = options()
    device = HostDevice(in_place="never", unified=False) if given.host else open_device("cuda:0")
    if not given.host:
        with said("exporting with torch"):
            given.models.mkdir(exist_ok=True)
            print(export(given.models) or "exported", flush=True)
    figures = {}
    wanted = [name for name in given.only.split(",") if name]
    # A CPU takes seconds for what a GPU computes in milliseconds.
    for subject in [replace(one, rows_max=2) for one in SUBJECTS] if given.host else SUBJECTS:
        path = path_of(subject, given)
        if (wanted and subject.name not in wanted) or not path.exists():
            continue
        try:
            with said(subject.name):
                figures[subject.name] = await measure(device, subject, given)
        except Exception as error:  # The others are of use all the same.
            print(f"{subject.name} FAILED: {type(error).__name__}: {error}", flush=True)
            figures[subject.name] = {"failed": f"{type(error).__name__}: {error}"}
            if device.lost is not None:
                break
        found = figures[subject.name]
        if "bare" in found:
            best = statistics.median(max(run.values()) for run in found["bare"])
            print(
                f"  bare: {found['bare']}; session {found['session_mib']:.0f} MiB; "
                f"off by {found['off_by_at_most']:.2g}; best {best:,.0f}/s"
            )
        settings = {name: str(value) for name, value in vars(given).items()}
        save(given.json, "ONNX Runtime on CUDA", {"settings": settings, "models": figures}, device)
    with suppress(Exception):
        device.close()


if __name__ == "__main__":
    uvloop.run(main())
