"""ResNet-50 behind `await`: torch as the test engine, its CUDA graphs replayed on the engine's streams.

Half precision, channels last, random weights; one image per request, as float32 (600 KB) and as uint8
(150 KB). First, images per second at batches of 1, 8, 32 and 64 against raw loops of the same graphs and
copies (see saturation), in turn. Then Poisson arrivals at shares of the engine's throughput at 64: latency
from the time at which a request was due. Then the cost of the copies into the slab, including waits for the
thread that makes the large ones, and the longest time that the loop was held: a callback on each tick times
the ticks.

On the host device a model that sleeps stands in for it.
"""

import asyncio
import statistics
from functools import partial

import numpy as np
import psutil
import uvloop

import asynctrt
from asynctrt._util import clock
from asynctrt._util.alarm import create_alarm
from asynctrt.errors import AsynctrtError
from tests.benchmarks.common import arguments, save
from tests.benchmarks.gpu.kernels import SpinModel, kernels_on
from tests.benchmarks.gpu.raw import RawLoop
from tests.benchmarks.gpu.support import (
    check,
    closed_loop,
    open_device,
    quantiles_us,
    said,
    show,
    verdict,
    verdicts,
)

SIZES = (1, 2, 4, 8, 16, 32, 64)
IMAGES = 64
CONTEXTS = 4
SENT_A_TURN_MAX = 64


class Subject:
    """A model for any set of batch sizes, with images and the expected answers."""

    def __init__(self, device, dtype):
        self.dtype = dtype
        rng = np.random.default_rng(0)
        # Coarse patterns of rising strength, so that the answers differ from image to image by more than
        # half precision loses: the network is linear in it, nearly.
        strength = np.linspace(0.2, 1, IMAGES, dtype=np.float32).reshape(-1, 1, 1, 1)
        coarse = rng.random((IMAGES, 3, 7, 7), np.float32) * strength
        values = np.kron(coarse, np.ones((1, 1, 32, 32), np.float32)).astype(np.float32)
        images = (values * 255).astype(np.uint8) if dtype == "uint8" else values
        self.images = [image[np.newaxis].copy() for image in images]
        if device.name == "host":
            kernels = kernels_on(device)
            self.output = "output"
            self.answers = [2 * image for image in self.images]
            self.of_size = lambda rows: SpinModel(
                kernels, lambda rows: 200_000 + 20_000 * rows, row=(3, 224, 224), rows_max=rows
            )
            self.model = self.of_size(SIZES[-1])
        else:
            from tests.benchmarks.gpu.torch_model import ResNet50

            self.output = "logits"
            self.model = ResNet50(device, dtype, SIZES)
            # Batches of one size alone, which smaller ones are padded up to.
            self.of_size = lambda rows: self.model.sized((rows,))
            answers = self.model.expected(np.concatenate(self.images))["logits"]
            self.answers = list(answers[:, np.newaxis])

    def margin(self):
        """The smallest distance between the answers to two images, relative to the largest value."""
        flat = np.concatenate(self.answers).reshape(IMAGES, -1)
        apart = np.abs(flat[:, np.newaxis, :64] - flat[np.newaxis, :, :64]).max(axis=2)
        return float(apart[~np.eye(IMAGES, dtype=bool)].min() / np.abs(flat).max())

    def check(self, number, answer):
        """Check the answer to an image, within the half-precision error of other batch sizes."""
        found = answer[self.output]
        if self.output == "output":
            check(answer, {"output": self.answers[number]})
            return
        distances = [np.abs(found - expected).max() for expected in self.answers]
        most = 0.05 * np.abs(self.answers[number]).max()
        if int(np.argmin(distances)) != number or distances[number] > most:
            raise AssertionError(
                f"a wrong answer to image {number}: off by {distances[number]}, at most {most} are allowed; "
                f"nearest is the answer to image {int(np.argmin(distances))}"
            )

    def check_rows(self, rows, answer):
        """Return a check for callers that keep sending one of the images."""
        number = next(number for number, image in enumerate(self.images) if image is rows)
        self.check(number, answer)

    async def check_all(self, engine):
        """Send every image once, all at the same time."""
        answers = await asyncio.gather(*(engine.infer(image) for image in self.images))
        for number, answer in enumerate(answers):
            self.check(number, answer)


def opened(model, device, options):
    return asynctrt.open(
        model, device=device, contexts=CONTEXTS, waiting=options.waiting, max_rows=model.capabilities.rows_max
    )


def gather_us(images, slab, count=15):
    """Measure copying images into a slab as the engine does, with nothing else running."""
    times_ns = []
    for _ in range(count):
        start_ns = clock.now_ns()
        np.concatenate(images, out=slab[: len(images)])
        times_ns.append(clock.now_ns() - start_ns)
    return statistics.median(times_ns) / 1e3


async def saturation(device, subject, rows, options):
    """Measure images per second at one batch size: raw loops and the engine, in turn."""
    model = subject.of_size(rows)
    is_host = device.name == "host"
    raws = {
        "one stream": RawLoop(device, model, rows, depth=3, is_captured=False),
        "overlapped": RawLoop(device, model, rows, depth=4, is_overlapped=True, is_captured=False),
    }
    for raw in raws.values():
        raw.fill(np.concatenate(subject.images)[:rows])
    stages_us = raws["one stream"].stages_us()
    slab, images = raws["one stream"].batches[0].slab.inputs[0], subject.images[:rows]
    alone_us = gather_us(images, slab)
    runs = {name: [] for name in raws}
    engine_runs = []
    count = 3 * rows if rows > 1 else CONTEXTS
    callers = [subject.images[number % IMAGES] for number in range(count)]
    async with opened(model, device, options) as engine:
        await subject.check_all(engine)
        # A warm-up, for memory's first touch; and to take the times of every batch costs some.
        with engine.tracing() as trace:
            await closed_loop(engine, subject.check_rows, callers, options.seconds)
        for _ in range(options.repeats):
            for name, raw in raws.items():
                runs[name].append(raw.batches_per_s(options.seconds) * rows)
            engine_runs.append(
                await closed_loop(engine, subject.check_rows, callers, options.seconds, is_timed=True)
            )
        await subject.check_all(engine)
    if not is_host:
        answer = raws["one stream"].batches[0].answer()["logits"]
        for number in range(rows):
            subject.check(number, {"logits": answer[number : number + 1]})
    for raw in raws.values():
        raw.close()
    rates = [run["rows_per_s"] for run in engine_runs]
    # The device does not take the times of every batch.
    timed_us = [batch.copy_in_ns / 1e3 for batch in trace if batch.compute_ns and batch.rows == rows]
    in_engine_us = statistics.median(timed_us) - stages_us[0] if timed_us else None
    return {
        "rows": rows,
        "raw_images_per_s": {name: statistics.median(found) for name, found in runs.items()},
        "engine_images_per_s": statistics.median(rates),
        "ratio": {
            name: statistics.median(rate / raw for rate, raw in zip(rates, found, strict=True))
            for name, found in runs.items()
        },
        "device_us": dict(zip(("copy_in", "compute", "copy_out"), stages_us, strict=True)),
        "gather_alone_us": alone_us,
        "gather_in_engine_us": in_engine_us,
        **{
            name: statistics.median(run[name] for run in engine_runs)
            for name in ("rows_a_batch", "cpu_us_a_batch", "cpu_us_a_request", "cores", "p50_us", "p99_us")
        },
    }


def stolen():
    """Return for how many seconds so far this machine, if it is a virtual one, waited for its host's CPUs."""
    return getattr(psutil.cpu_times(), "steal", 0.0)


class Poisson:
    """Sends requests at random moments, regardless of earlier ones. Latency counts from those moments."""

    def __init__(self, engine, images, rate, seconds, seed):
        self._engine = engine
        self._images = images
        gaps = np.random.default_rng(seed).exponential(1e9 / rate, max(int(rate * seconds), 1))
        self._due_ns = (np.cumsum(gaps).astype(np.int64) + clock.now_ns() + 10_000_000).tolist()
        self._next = 0
        self._loop = asyncio.get_running_loop()
        self._alarm = create_alarm(self._loop, self._send, clock.now_ns)
        self._futures = []
        self._sent_all = self._loop.create_future()
        self.latencies_ns, self.late_ns, self.errors = [], [], 0

    async def run(self):
        """Send all of them; the first fifth is the warm-up."""
        stolen_s = stolen()
        self._alarm.set(self._due_ns[0])
        await self._sent_all
        for future in self._futures:
            if future is not None:
                await asyncio.wait([future])
        self._alarm.close()
        return quantiles_us(self.latencies_ns) | {
            "errors": self.errors,
            "sender_late_p99_us": float(np.percentile(self.late_ns, 99)) / 1e3,
            "stolen_ms": (stolen() - stolen_s) * 1e3,
        }

    def _send(self):
        now_ns = clock.now_ns()
        for _ in range(SENT_A_TURN_MAX):
            if self._next == len(self._due_ns) or self._due_ns[self._next] > now_ns:
                break
            due_ns = self._due_ns[self._next]
            self.late_ns.append(now_ns - due_ns)
            self._submit(due_ns)
            self._next += 1
        if self._next == len(self._due_ns):
            self._sent_all.set_result(None)
        elif self._due_ns[self._next] <= now_ns:
            self._loop.call_soon(self._send)
        else:
            self._alarm.set(self._due_ns[self._next])

    def _submit(self, due_ns):
        number = self._next
        try:
            future = self._engine.submit(self._images[number % len(self._images)])
        except AsynctrtError:  # The queue is full, say: counted, as any failure.
            self.errors += 1
            self._futures.append(None)
            return
        is_counted = number >= len(self._due_ns) // 5
        future.add_done_callback(partial(self._done, due_ns, number, is_counted))
        self._futures.append(future)

    def _done(self, due_ns, number, is_counted, future):
        self._futures[number] = None
        if future.exception() is not None:
            self.errors += 1
        elif is_counted:
            self.latencies_ns.append(clock.now_ns() - due_ns)


class Ticker:
    """Measures the time between ticks of the loop."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._last_ns = clock.now_ns()
        self.gaps_ns = []
        self._is_over = False
        self._loop.call_soon(self._tick)

    def _tick(self):
        now_ns = clock.now_ns()
        self.gaps_ns.append(now_ns - self._last_ns)
        self._last_ns = now_ns
        if not self._is_over:
            self._loop.call_soon(self._tick)

    def end(self):
        self._is_over = True
        found = np.array(self.gaps_ns)
        return {
            "p50_us": float(np.percentile(found, 50)) / 1e3,
            "p99_us": float(np.percentile(found, 99)) / 1e3,
            "max_us": float(found.max()) / 1e3,
            # The 99th percentile of ticks is of short ones mostly; how long a moment has to wait for one:
            "wait_p99_us": float(_weighted(found, 0.99)) / 1e3,
            "ticks": len(found),
        }


def _weighted(gaps_ns, share):
    """Return the gap such that this share of all time lies in gaps at most as long."""
    gaps_ns = np.sort(gaps_ns)
    return gaps_ns[np.searchsorted(np.cumsum(gaps_ns), share * gaps_ns.sum())]


async def under_load(device, subject, capacity, options, figures):
    """Measure Poisson arrivals, and once more while timing the loop's ticks."""
    async with opened(subject.model, device, options) as engine:
        await subject.check_all(engine)
        for share in map(float, options.shares.split(",")):
            before, cpu_ns, start_ns = engine.statistics(), clock.cpu_ns(), clock.now_ns()
            poisson = Poisson(engine, subject.images, share * capacity, options.load_seconds, 1)
            found = await poisson.run()
            after = engine.statistics()
            elapsed_ns = clock.now_ns() - start_ns
            figures["load"][f"{share:.0%}"] = found | {
                "rate": share * capacity,
                "rows_a_batch": (after.rows - before.rows) / max(after.batches - before.batches, 1),
                "cores": (clock.cpu_ns() - cpu_ns) / elapsed_ns,
            }
        ticker = Ticker()
        found = await Poisson(engine, subject.images, 0.8 * capacity, options.load_seconds / 2, 2).run()
        figures["ticks"]["at 80% load"] = ticker.end() | {"latency": found}
        ticker = Ticker()
        await asyncio.sleep(0.2)
        figures["ticks"]["idle"] = ticker.end()
        await subject.check_all(engine)


def report(figures, device):
    show(
        "images a second through infer, one image a request, over raw loops",
        (
            "images",
            "batch",
            "raw images/s",
            "engine",
            "/ one stream",
            "/ overlapped",
            "compute µs",
            "copy in µs",
            "gather µs",
            "in the engine",
            "rows a batch",
            "CPU µs an image",
        ),
        [
            (
                dtype,
                str(case["rows"]),
                f"{case['raw_images_per_s']['one stream']:,.0f}",
                f"{case['engine_images_per_s']:,.0f}",
                f"{case['ratio']['one stream']:.3f}",
                f"{case['ratio']['overlapped']:.3f}",
                f"{case['device_us']['compute']:,.0f}",
                f"{case['device_us']['copy_in']:,.0f}",
                f"{case['gather_alone_us']:,.0f}",
                "" if case["gather_in_engine_us"] is None else f"{case['gather_in_engine_us']:,.0f}",
                f"{case['rows_a_batch']:.1f}",
                f"{case['cpu_us_a_request']:.1f}",
            )
            for dtype, found in figures.items()
            for case in found["saturation"]
        ],
        "gather: a full batch into the slab on the CPU, alone, and in the engine with waits.",
        device=device,
    )
    show(
        "latency under Poisson arrivals, from when a request was due",
        (
            "images",
            "load",
            "images/s",
            "p50 ms",
            "p99 ms",
            "max ms",
            "rows a batch",
            "cores",
            "sender late p99 µs",
            "errors",
        ),
        [
            (
                dtype,
                share,
                f"{case['rate']:,.0f}",
                *(f"{case[q] / 1e3:.2f}" for q in ("p50_us", "p99_us", "max_us")),
                f"{case['rows_a_batch']:.1f}",
                f"{case['cores']:.2f}",
                f"{case['sender_late_p99_us']:.0f}",
                str(case["errors"]),
            )
            for dtype, found in figures.items()
            for share, case in found["load"].items()
        ],
        "load: of what the engine, or the raw loop if that is less, does at the largest batch.",
        device=device,
    )
    show(
        "µs between two ticks of the loop",
        ("images", "loop", "p50", "p99", "max", "p99 by time"),
        [
            (dtype, what, *(f"{ticks[q]:.0f}" for q in ("p50_us", "p99_us", "max_us", "wait_p99_us")))
            for dtype, found in figures.items()
            for what, ticks in found["ticks"].items()
        ],
        "p99 by time: the gap that a random moment is in.",
        device=device,
    )


def main():
    options = arguments(
        __doc__,
        device="cuda:0",
        seconds=0.4,
        repeats=3,
        load_seconds=3.0,
        batches="1,8,32,64",
        shares="0.5,0.8,0.95",
        dtypes="float32,uint8",
        waiting="adaptive",
    )
    device = open_device(options.device)
    figures = {}
    try:
        for dtype in ("float32",) if options.device == "host" else options.dtypes.split(","):
            with said(f"{dtype} images: the model"):
                subject = Subject(device, dtype)
            found = figures[dtype] = {
                "row_nbytes": subject.images[0].nbytes,
                "answers_apart": subject.margin(),
                "saturation": [],
                "load": {},
                "ticks": {},
            }
            for rows in map(int, options.batches.split(",")):
                with said(f"{dtype} images, batches of {rows}"):
                    found["saturation"].append(uvloop.run(saturation(device, subject, rows, options)))
            last = found["saturation"][-1]
            capacity = min(last["engine_images_per_s"], last["raw_images_per_s"]["one stream"])
            with said(f"{dtype} images, Poisson arrivals"):
                uvloop.run(under_load(device, subject, max(capacity, 100), options, found))
    finally:  # What was measured before something failed is worth having.
        report(figures, device)
        targets = [
            verdict(
                f"{dtype}, batch {case['rows']}, over one stream",
                case["ratio"]["one stream"],
                0.97,
                is_at_least=True,
                unit="",
            )
            for dtype, found in figures.items()
            for case in found["saturation"]
            if case["rows"] == 64
        ]
        save(options.json, __doc__, {"images": figures, "targets": verdicts(targets)}, device)


if __name__ == "__main__":
    main()
