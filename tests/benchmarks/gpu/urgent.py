"""What does a part of the device give an urgent request beside a flood of others?

ResNet-50 in half precision, uint8 images, torch as the engine. The flood: callers who fill three batches of
32 and send again as soon as they are answered. Beside it, one urgent image every 5 ms, whose latency counts
from the time at which it was due. In turn: urgent images alone; beside the flood with the highest priority,
which launches them first but cannot make them overtake what the GPU is computing; and beside it with a part
of the multiprocessors and an engine of their own. For each the urgent latency and the images a second of the
flood.

On the host device a model that sleeps stands in for it, and threads are shared.
"""

import asyncio
import contextlib
from functools import partial

import asynctrt
from asynctrt._util import clock
from tests.benchmarks.common import arguments, in_turn, medians, quantiles_us, report, save
from tests.benchmarks.gpu.resnet import Subject
from tests.benchmarks.gpu.support import open_device

ROWS = 32
BATCHES = 3
URGENT = 2
EVERY_S = 0.005
CASES = {
    "alone": (None, False),
    "priority": (None, True),
    "a share of 0.25": (0.25, True),
    "a share of 0.12": (0.12, True),
}


async def urgent_requests(engine, images, seconds, check):
    """Send an urgent image now and then, whatever became of those before; return the latencies in ns."""
    latencies_ns = []
    start_ns = clock.now_ns()

    async def send(number, due_ns):
        at = number % len(images)
        answer = await engine.infer(images[at], priority=URGENT)
        latencies_ns.append(clock.now_ns() - due_ns)
        if number % 50 == 0:
            check(at, answer)

    async with asyncio.TaskGroup() as group:
        for number in range(int(seconds / EVERY_S)):
            due_ns = start_ns + int(number * EVERY_S * 1e9)
            await asyncio.sleep(max(due_ns - clock.now_ns(), 0) / 1e9)
            group.create_task(send(number, due_ns))
    return latencies_ns


async def measure(device, subject, share, is_flooded, options):
    """Measure one case once."""
    images = subject.images
    model = subject.model.sized((1, 8, ROWS)) if device.name != "host" else subject.of_size(ROWS)
    is_over = False

    async def flood(image):
        while not is_over:
            await engine.infer(image)

    async with contextlib.AsyncExitStack() as stack:

        async def opened(part):
            return await stack.enter_async_context(
                asynctrt.open(model, device=part, contexts=4, max_rows=ROWS)
            )

        parts = () if share is None else device.partition(share)
        for part in parts:
            stack.callback(part.close)
        engine = await opened(parts[1] if parts else device)
        urgent = await opened(parts[0]) if parts else engine
        flooding = [
            asyncio.create_task(flood(images[number % len(images)]))
            for number in range(BATCHES * ROWS if is_flooded else 0)
        ]
        await urgent_requests(urgent, images, 0.3, subject.check)
        before, start_ns = engine.statistics(), clock.now_ns()
        latencies_ns = await urgent_requests(urgent, images, options.seconds, subject.check)
        after, seconds = engine.statistics(), (clock.now_ns() - start_ns) / 1e9
        is_over = True
        await asyncio.gather(*flooding)
    flooded = after.rows - before.rows - (len(latencies_ns) if urgent is engine else 0)
    return quantiles_us(latencies_ns) | {"flood_per_s": flooded / seconds}


def main():
    options = arguments(__doc__, device="cuda:0", seconds=2.0, repeats=3)
    device = open_device(options.device)
    subject = Subject(device, "float32" if device.name == "host" else "uint8")
    measures = {name: partial(measure, device, subject, *case, options) for name, case in CASES.items()}
    runs = in_turn(measures, options.repeats, "an urgent image")
    report(
        "an urgent image every 5 ms beside a flood in batches of 32",
        runs,
        device=device,
        p99_us=",.0f",
        p50_us=",.0f",
        max_us=",.0f",
        flood_per_s=",.0f",
    )
    figures = {name: medians(found) for name, found in runs.items()}
    save(options.json, __doc__, {"cases": figures}, device)


if __name__ == "__main__":
    main()
