"""How near the latency under Poisson arrivals comes to the best that is possible.

ResNet-50 as in the benchmark of that name, one image of 150 KB a request. The rates are shares of the images
per second that the GPU computes at the largest batch when nothing else is in the way. Beside the engine, in
the same process and in turn:

- "hand-written": a queue, one executor thread that gathers, copies, replays a graph and waits; the next batch
  is whatever waits when it is done.
- "ideal": one server that takes whatever waits the moment it is free, for as long as the same graphs compute
  (measured first), with every copy hidden. No batcher that never waits on purpose can do better on average.
- "ideal, serial": the same, copies included, one after the other.

"stolen" is the time for which the host of a virtual machine kept CPUs from it. A few pauses of milliseconds
can make all of a p99, so only runs in which it is near 0 tell what the engine does.

On the host device a model that sleeps stands in for it.
"""

import statistics

import numpy as np
import uvloop

import asynctrt
from asynctrt._util import clock
from tests.benchmarks.common import arguments, asked_again, medians, save, show
from tests.benchmarks.gpu.batchers import ByHand
from tests.benchmarks.gpu.resnet import SIZES, Poisson, Subject, at_rate, report_load
from tests.benchmarks.gpu.support import closed_loop, open_device, said

CLOSED_LOOP_CALLERS = 64
SERVICE_ROUNDS = 30


class Graphs:
    """What a good engineer writes: pinned memory, a graph for each batch size, one thread."""

    def __init__(self, device, subject):
        import torch

        self._torch = torch
        model = subject.model
        shape = (SIZES[-1], *subject.images[0].shape[1:])
        dtype = torch.uint8 if subject.dtype == "uint8" else torch.float32
        self._staging = torch.empty(shape, dtype=dtype, pin_memory=True)
        self._rows = self._staging.numpy()
        self._images = torch.empty_like(self._staging, device=model.device)
        self._logits = torch.empty((SIZES[-1], 1000), device=model.device)
        self._answers = torch.empty((SIZES[-1], 1000), pin_memory=True)
        self._stream = torch.cuda.Stream()
        self._graphs = {}
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            for size in reversed(SIZES):
                with torch.cuda.stream(self._stream):
                    for _ in range(2):
                        self._logits[:size].copy_(model.forward(self._images[:size]))
                self._stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(
                    graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    self._logits[:size].copy_(model.forward(self._images[:size]))
                self._graphs[size] = graph

    def __call__(self, images):
        count = len(images)
        size = next(size for size in SIZES if size >= count)
        np.concatenate(images, out=self._rows[:count])
        with self._torch.cuda.stream(self._stream):
            self._images[:count].copy_(self._staging[:count], non_blocking=True)
            self._graphs[size].replay()
            self._answers[:count].copy_(self._logits[:count], non_blocking=True)
        self._stream.synchronize()
        return list(self._answers[:count].numpy()[:, np.newaxis].copy())

    def compute(self, size):
        """Replay one graph and wait for it."""
        with self._torch.cuda.stream(self._stream):
            self._graphs[size].replay()
        self._stream.synchronize()


class Sleeps:
    """The same for the host device."""

    def __init__(self, _device, subject):
        self._of = lambda count: 200_000 + 20_000 * count
        self._answers = subject.answers

    def __call__(self, images):
        np.concatenate(images)
        self.compute(next(size for size in SIZES if size >= len(images)))
        return [2 * image for image in images]

    def compute(self, size):
        """Sleep for as long as the model does."""
        end_ns = clock.now_ns() + self._of(size)
        while clock.now_ns() < end_ns:
            pass


def service_s(by_hand, images):
    """Return by batch size how long a batch takes with copies, and how long it computes."""
    found = {}
    for size in SIZES:
        batch = [images[number % len(images)] for number in range(size)]
        times = {}
        for name, call in (("all", lambda: by_hand(batch)), ("compute", lambda: by_hand.compute(size))):  # noqa: B023
            for _ in range(5):
                call()
            taken = []
            for _ in range(SERVICE_ROUNDS):
                start_ns = clock.now_ns()
                call()
                taken.append((clock.now_ns() - start_ns) / 1e9)
            times[name] = statistics.median(taken)
        found[size] = times
    return found


def ideal(service, which, rate, seconds, seed):
    """Return the latency of a server that is never late, as :class:`Poisson` counts it."""
    count = max(int(rate * seconds), 1)
    due = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    time_s, first = 0.0, 0
    latencies = np.empty(count)
    while first < count:
        time_s = max(time_s, due[first])
        last = min(int(np.searchsorted(due, time_s, side="right")), first + SIZES[-1])
        time_s += service[next(size for size in SIZES if size >= last - first)][which]
        latencies[first:last] = time_s - due[first:last]
        first = last
    p50, p99 = np.percentile(latencies[count // 5 :], [50, 99]) * 1e6
    return {"p50_us": float(p50), "p99_us": float(p99)}


async def by_hand_under_load(by_hand, subject, rate, seconds, seed):
    batcher = ByHand([by_hand], SIZES[-1])
    found = await Poisson(batcher, subject.images, rate, seconds, seed).run()
    await batcher.aclose()
    return found


async def engine_under_load(device, subject, contexts, rates, options, figures):
    settings = {"contexts": contexts, "max_rows": SIZES[-1], "batching": "on"}
    async with asynctrt.open(subject.model, device=device, **settings) as engine:
        await subject.check_all(engine)
        asynctrt.tune_process()
        for share, rate in rates.items():
            found = await at_rate(engine, subject.images, rate, options)
            figures["load"][share][f"engine, {contexts} contexts"] = found
        callers = [subject.images[number % len(subject.images)] for number in range(CLOSED_LOOP_CALLERS)]
        closed = await closed_loop(engine, subject.check_rows, callers, options.seconds)
        figures["closed loop"][f"engine, {contexts} contexts"] = closed
        await subject.check_all(engine)


async def by_hand_closed_loop(by_hand, subject, seconds):
    """Return the images per second of as many callers, each sending its image again and again."""
    batcher = ByHand([by_hand], SIZES[-1])
    callers = [subject.images[number % len(subject.images)] for number in range(CLOSED_LOOP_CALLERS)]
    latencies_ns, elapsed_ns, *_ = await asked_again(batcher.infer, callers, seconds, lambda *_: None)
    await batcher.aclose()
    # At least one, on a machine that is busy with something else.
    return {"rows_per_s": max(len(latencies_ns), 1) / elapsed_ns * 1e9}


def report(figures, device):
    report_load(
        figures["load"],
        "latency under Poisson arrivals, from when a request was due",
        f"load: of {figures['capacity']:,.0f} images/s.",
        device,
    )
    by_hand = figures["closed loop"]["hand-written"]["rows_per_s"]
    show(
        f"{CLOSED_LOOP_CALLERS} callers, each sending again when it is answered",
        ("batcher", "images/s", "/ hand-written"),
        [
            (name, f"{case['rows_per_s']:,.0f}", f"{case['rows_per_s'] / by_hand:.2f}")
            for name, case in figures["closed loop"].items()
        ],
        device=device,
    )


def main():
    options = arguments(
        __doc__,
        device="cuda:0",
        seconds=3.0,
        repeats=3,
        shares="0.2,0.4,0.6,0.8,0.9",
        contexts="4,1,2,8",
        dtype="uint8",
    )
    device = open_device(options.device)
    with said("the model"):
        subject = Subject(device, "float32" if options.device == "host" else options.dtype)
        by_hand = (Sleeps if options.device == "host" else Graphs)(device, subject)
        service = service_s(by_hand, subject.images)
    asynctrt.tune_process()  # Collections of what torch has loaded would hold the loop for 50 ms.
    capacity = SIZES[-1] / service[SIZES[-1]]["compute"]
    rates = {f"{share:.0%}": share * capacity for share in map(float, options.shares.split(","))}
    load = {share: {} for share in rates}
    figures = {"capacity": capacity, "service_s": service, "load": load, "closed loop": {}}
    print({size: {name: f"{s * 1e3:.2f} ms" for name, s in by.items()} for size, by in service.items()})
    seeds = range(1, options.repeats + 1)
    for share, rate in rates.items():
        for name, which in (("ideal", "compute"), ("ideal, serial", "all")):
            load[share][name] = medians(
                [ideal(service, which, rate, options.seconds, seed) for seed in seeds]
            )
        with said(f"hand-written at {share}"):
            runs = [
                uvloop.run(by_hand_under_load(by_hand, subject, rate, options.seconds, seed))
                for seed in seeds
            ]
        load[share]["hand-written"] = medians(runs)
    figures["closed loop"]["hand-written"] = uvloop.run(
        by_hand_closed_loop(by_hand, subject, options.seconds)
    )
    try:
        for contexts in map(int, options.contexts.split(",")):
            with said(f"{contexts} contexts"):
                uvloop.run(engine_under_load(device, subject, contexts, rates, options, figures))
    finally:  # What was measured before something failed is worth having.
        report(figures, device)
        save(options.json, __doc__, figures, device=device)


if __name__ == "__main__":
    main()
