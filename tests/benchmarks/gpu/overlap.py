"""Do copies and computing overlap? A model whose copy in, computing and copy out take about the same time.

Batches per second relative to two serial loops: the raw one (launch a batch, wait, launch the next), and the
engine with one context and one caller. The kernel is made to take as long as the copies, which are measured
first. A timeline is drawn from the events of each batch.

"device": several engines of one context each share one arena. Their model has a fixed batch size, and a
request of one row is padded up to it, so all bytes go to the GPU and back, but the CPU copies almost none:
this is the pipeline by itself (requests to one engine would be batched together). "slots": callers write
whole batches into slabs of one engine, and the CPU copies the answers out. "arrays": the CPU copies both
ways.
"""

import asyncio
import contextlib
import dataclasses
import statistics
from pathlib import Path

import numpy as np
import uvloop

import asynctrt
from asynctrt._util import clock
from tests.benchmarks.common import arguments, save
from tests.benchmarks.gpu.kernels import SpinModel, kernels_on
from tests.benchmarks.gpu.raw import RawLoop
from tests.benchmarks.gpu.support import WARM_UP_S, check, open_device, said, show, verdict, verdicts

ROWS = 1024
IN_FLIGHT = 6
TRACED_S = 0.05
TRACED_LOOKS_MAX = 100
COLOURS = {"copy in": "#4c78a8", "compute": "#f58518", "copy out": "#54a24b"}


def serial_batches_per_s(raw, kernels, seconds):
    """One batch at a time, waited for in the promptest way."""
    batch = raw.batches[0]
    finish = kernels.create_finish(batch.stream)
    count, start_ns = 0, clock.now_ns()
    while clock.now_ns() - start_ns < seconds * 1e9:
        batch.launch()
        finish()
        count += 1
    return count / (clock.now_ns() - start_ns) * 1e9


def stages_us(device, kernels, row, work_ns):
    """What copy in, computing and copy out of a whole batch take on the device, alone."""
    model = SpinModel(kernels, work_ns, row=row, rows_fixed=ROWS)
    raw = RawLoop(device, model, ROWS, depth=1, is_captured=device.prefers_graphs)
    found = raw.stages_us()
    raw.close()
    return found


class Callers:
    """Ways to send batches of the same model."""

    def __init__(self, engine, model, row):
        self.engine = engine
        self.model = model
        self.row = row
        self.is_over = False

    async def one_row(self, number):
        """Send requests of one row, which are padded up to the fixed size."""
        rows = np.full((1, *self.row), number, np.float32)
        while not self.is_over:
            answer = await self.engine.infer(rows)
        check(answer, self.model.expected(rows))

    async def arrays(self, number):
        """Send requests that fill the batch."""
        rows = np.full((ROWS, *self.row), number, np.float32)
        while not self.is_over:
            answer = await self.engine.infer(rows)
        check(answer, self.model.expected(rows))

    async def slots(self, number):
        """Send batches from slots. Each slab is written only once, since that is the caller's time."""
        written = set()
        while not self.is_over:
            async with self.engine.slot(rows=ROWS) as slot:
                view = slot["input"]
                if view.ctypes.data not in written:
                    written.add(view.ctypes.data)
                    view[...] = 1
                answer = await slot.infer()
        check(answer, {"output": np.full((ROWS, *self.row), 2, np.float32)})


async def batches_per_s(engine, model, row, way, callers, seconds):
    """Return the batches per second of such callers, and the trace of the last batches."""
    sending = Callers(engine, model, row)
    async with asyncio.TaskGroup() as group:
        for number in range(callers):
            group.create_task(getattr(sending, way)(number + 1))
        await asyncio.sleep(WARM_UP_S)
        before, start_ns = engine.statistics().batches, clock.now_ns()
        await asyncio.sleep(seconds)
        after, end_ns = engine.statistics().batches, clock.now_ns()
        # Apart from the measurement: a trace makes the device time every batch, and events with times make
        # streams wait for each other.
        with engine.tracing(batches=64) as trace:
            for _ in range(TRACED_LOOKS_MAX):
                await asyncio.sleep(TRACED_S)
                if trace:
                    break
        sending.is_over = True
    return (after - before) / (end_ns - start_ns) * 1e9, list(trace)


async def pipeline_per_s(model, device, engines, seconds):
    """Do the same with several engines in one arena, each with one caller of one row."""
    arenas = asynctrt.Arenas(device, 1)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(arenas.close)
        opened = [
            await stack.enter_async_context(
                asynctrt.open(model, device=device, contexts=1, shared_arenas=arenas, max_rows=ROWS)
            )
            for _ in range(engines)
        ]
        row = model.inputs[0].dims
        found = await asyncio.gather(
            *[batches_per_s(engine, model, row, "one_row", 1, seconds) for engine in opened]
        )
        traces = [
            dataclasses.replace(batch, context=number)
            for number, (_, trace) in enumerate(found)
            for batch in trace
        ]
        return sum(rate for rate, _ in found), sorted(traces, key=lambda batch: batch.launched_ns)


def opened(model, device, contexts):
    return asynctrt.open(model, device=device, contexts=contexts, arenas=1, max_rows=ROWS, graphs=(ROWS,))


async def measure(device, kernels, row, work_ns, options):
    """All loops in turn, medians."""
    models = {
        fixed: SpinModel(kernels, work_ns, row=row, rows_fixed=ROWS if fixed else None)
        for fixed in (True, False)
    }
    is_captured = device.prefers_graphs
    raw = RawLoop(device, models[True], ROWS, depth=1, is_captured=is_captured)
    overlapped = RawLoop(
        device, models[True], ROWS, depth=IN_FLIGHT, is_overlapped=True, is_captured=is_captured
    )
    runs, traces = {}, {}

    def note(name, rate):
        runs.setdefault(name, []).append(rate)

    for _ in range(options.repeats):
        note("raw serial", serial_batches_per_s(raw, kernels, options.seconds))
        note("raw overlapped", overlapped.batches_per_s(options.seconds))
        for engines in (1, IN_FLIGHT):
            rate, trace = await pipeline_per_s(models[True], device, engines, options.seconds)
            note(f"engine {'serial' if engines == 1 else 'overlapped'}, device", rate)
            if engines > 1:
                traces["device"] = trace
        for way in ("slots", "arrays"):
            for contexts in (1, IN_FLIGHT + 1):
                async with opened(models[False], device, contexts) as engine:
                    callers = 1 if contexts == 1 else IN_FLIGHT + 2
                    rate, trace = await batches_per_s(
                        engine, models[False], row, way, callers, options.seconds
                    )
                note(f"engine {'serial' if contexts == 1 else 'overlapped'}, {way}", rate)
                if contexts > 1:
                    traces[way] = trace
    raw.close()
    overlapped.close()
    return {name: statistics.median(rates) for name, rates in runs.items()}, traces


def spans_of(trace):
    """Yield when each stage of each batch was, in µs since the first launch: (context, stage, begin, length).

    Copying in begins at the launch and copying out ends at the answer; computing ends where copying out
    begins, since both are in one stream. In between, a batch waited for the arena; at the end, for the loop.
    """
    # The device does not time every batch.
    trace = [batch for batch in trace if batch.compute_ns]
    since_ns = min((batch.launched_ns for batch in trace), default=0)
    for batch in trace:
        out_ns = batch.answered_ns - batch.copy_out_ns
        begins = {
            "copy in": (batch.launched_ns, batch.copy_in_ns),
            "compute": (out_ns - batch.compute_ns, batch.compute_ns),
            "copy out": (out_ns, batch.copy_out_ns),
        }
        for stage, (begin_ns, length_ns) in begins.items():
            yield batch.context, stage, (begin_ns - since_ns) / 1e3, length_ns / 1e3


def busy_stages(spans):
    """Return how many stages were under way on average, while any was."""
    edges = sorted(
        edge for _, _, begin, length in spans for edge in ((begin, 1), (begin + length, -1)) if length > 0
    )
    total = busy = 0.0
    running, last = 0, edges[0][0]
    for at, change in edges:
        total += running * (at - last)
        busy += (at - last) * (running > 0)
        running, last = running + change, at
    return total / max(busy, 1e-9)


def draw(path, title, spans):
    """The timeline: a line for each context."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    contexts = sorted({context for context, *_ in spans})
    figure = Figure(figsize=(12, 1.4 + 0.5 * len(contexts)), layout="constrained")
    axes = figure.subplots()
    for context, stage, begin, length in spans:
        axes.barh(contexts.index(context), length, left=begin, height=0.7, color=COLOURS[stage])
    axes.set_yticks(range(len(contexts)), [f"context {context}" for context in contexts])
    axes.invert_yaxis()
    axes.set_xlabel("µs")
    axes.set_title(title, fontsize=10)
    axes.legend(
        handles=[Patch(color=colour, label=stage) for stage, colour in COLOURS.items()],
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def report(rates, stages, nbytes, busy, device):
    show(
        f"batches a second, {nbytes / 2**20:g} MiB in and as much out; alone on the device: copy in "
        f"{stages[0]:.0f}, compute {stages[1]:.0f}, copy out {stages[2]:.0f} µs",
        ("loop", "batches/s", "µs a batch", "/ raw serial", "/ the same, serial", "stages at once"),
        [
            (
                name,
                f"{rate:,.0f}",
                f"{1e6 / rate:.0f}",
                f"{rate / rates['raw serial']:.2f}",
                f"{rate / rates[name.replace('overlapped', 'serial')]:.2f}",
                f"{busy[name.partition(', ')[2]]:.2f}" if name.startswith("engine overlapped") else "",
            )
            for name, rate in rates.items()
        ],
        "stages at once: by the trace, of 3.",
        device=device,
    )


def main():
    options = arguments(
        __doc__, device="cuda:0", seconds=0.3, repeats=3, mib=16.0, picture="", work_us=0, batches=12
    )
    # More batches than by default are to be on the GPU at once, though they are not full.
    device = open_device(options.device, concurrency=IN_FLIGHT)
    kernels = kernels_on(device)
    row = (int(options.mib * 2**20) // ROWS // 4,)
    work_us = options.work_us
    if not work_us:
        copy_in, _, copy_out = stages_us(device, kernels, row, 1000)
        work_us = (copy_in + copy_out) / 2
    stages = stages_us(device, kernels, row, int(work_us * 1000))
    with said("all loops"):
        rates, traces = uvloop.run(measure(device, kernels, row, int(work_us * 1000), options))
    spans = {name: list(spans_of(trace[-options.batches :])) for name, trace in traces.items()}
    busy = {name: busy_stages(found) for name, found in spans.items()}
    nbytes = ROWS * row[0] * 4
    report(rates, stages, nbytes, busy, device)
    overlapped = rates["engine overlapped, device"]
    targets = [
        verdict(f"engine, device, over {what}", overlapped / rates[what], 2.5, is_at_least=True, unit="")
        for what in ("raw serial", "engine serial, device")
    ]
    if options.picture:
        title = f"{nbytes / 2**20:g} MiB in, {stages[1]:.0f} µs of computing, {nbytes / 2**20:g} MiB out"
        on = device.gpu if hasattr(device, "gpu") else "host"
        title = f"{on}: {title}; {overlapped / rates['raw serial']:.2f} times the serial loop"
        draw(Path(options.picture), title, spans["device"])
    figures = {
        "row_nbytes": nbytes // ROWS,
        "batch_nbytes": nbytes,
        "stages_us": dict(zip(COLOURS, stages, strict=True)),
        "batches_per_s": rates,
        "stages_at_once": busy,
        "timeline_us": spans["device"],
        "targets": verdicts(targets),
    }
    save(options.json, __doc__, figures, device)


if __name__ == "__main__":
    main()
