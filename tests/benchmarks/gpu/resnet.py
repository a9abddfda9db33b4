"""ResNet-50 with torch as the test engine, its CUDA graphs replayed on our streams; and Poisson arrivals.

Half precision, channels last, random weights; one image a request, as float32 (600 KB) or uint8 (150 KB).
On the host device a model that sleeps stands in for it.
"""

import asyncio
from functools import partial

import numpy as np
import psutil

from asynctrt._util import clock
from asynctrt._util.alarm import Alarm
from asynctrt.errors import AsynctrtError
from tests.benchmarks.common import medians, quantiles_us, show
from tests.benchmarks.gpu.kernels import SpinModel, kernels_on
from tests.benchmarks.gpu.support import check

SIZES = (1, 2, 4, 8, 16, 32, 64)
IMAGES = 64
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
        self._alarm = Alarm(self._loop, self._send)
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


async def at_rate(engine, rows, rate, options):
    """Return what an engine does with requests at random, in the median of as many runs as are wanted."""
    await Poisson(engine, rows, rate, options.seconds / 3, 99).run()
    runs = []
    for seed in range(1, options.repeats + 1):
        before, cpu_ns, start_ns = engine.statistics(), clock.cpu_ns(), clock.now_ns()
        run = await Poisson(engine, rows, rate, options.seconds, seed).run()
        after = engine.statistics()
        run["rows_a_batch"] = (after.rows - before.rows) / max(after.batches - before.batches, 1)
        run["cores"] = (clock.cpu_ns() - cpu_ns) / (clock.now_ns() - start_ns)
        runs.append(run)
    return medians(runs)


def report_load(load, title, caption, device):
    """Print latencies by share of the capacity and by who answers."""
    lines = [
        (
            share,
            name,
            f"{case['p50_us'] / 1e3:.2f}",
            f"{case['p99_us'] / 1e3:.2f}",
            f"{case['p99_us'] / found['ideal']['p99_us']:.2f}",
            f"{case['rows_a_batch']:.1f}" if "rows_a_batch" in case else "",
            f"{case['cores']:.2f}" if "cores" in case else "",
            f"{case['stolen_ms']:.0f}" if "stolen_ms" in case else "",
            str(int(case.get("errors", 0)) or ""),
        )
        for share, found in load.items()
        for name, case in found.items()
    ]
    columns = (
        "load",
        "batcher",
        "p50 ms",
        "p99 ms",
        "/ ideal",
        "rows a batch",
        "cores",
        "stolen ms",
        "errors",
    )
    show(title, columns, lines, caption, device=device)
