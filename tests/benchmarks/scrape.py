"""How long a scrape of the metrics holds the event loop, with many models.

``python -m tests.benchmarks.scrape``: a callback that does nothing runs in every turn of the loop; the time
between two of them is what the loop was held for. Beside it the same without a scrape, as the machine has
pauses of its own.
"""

import asyncio
import contextlib
import statistics
import time

import asynctrt
from asynctrt._util.process import freeze_gc, shorten_switch_interval
from asynctrt.serving.api import Api
from asynctrt.serving.metrics import Metrics
from asynctrt.serving.repository import Repository
from tests.benchmarks.common import arguments, save, show
from tests.models import double_model, rows


class Watch:
    """Note the longest time between two turns of the loop."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self._is_stopped = False
        self.begin()
        self._turn()

    def begin(self):
        self.longest_ns = 0
        self._last_ns = time.monotonic_ns()

    def _turn(self):
        now_ns = time.monotonic_ns()
        self.longest_ns = max(self.longest_ns, now_ns - self._last_ns)
        self._last_ns = now_ns
        if not self._is_stopped:
            self.loop.call_soon(self._turn)

    def stop(self):
        self._is_stopped = True


async def measure(models, scrapes):
    async with contextlib.AsyncExitStack() as stack:
        repository = Repository()
        for number in range(models):
            engine = await stack.enter_async_context(asynctrt.open(double_model(), max_rows=32))
            repository.add(f"model-{number}", engine)
            for count in (1, 3, 32):
                await engine.infer({"input": rows(*range(count))})
        api = Api(repository, pages={"/metrics": Metrics(repository).page()})
        freeze_gc()
        watch = Watch()
        held, alone, took, nbytes = [], [], [], 0
        for _ in range(scrapes):
            watch.begin()
            began_ns = time.monotonic_ns()
            answer = await api.respond("GET", b"/metrics", {}, b"")
            took.append(time.monotonic_ns() - began_ns)
            held.append(watch.longest_ns)
            assert answer.status == 200
            nbytes = sum(map(len, answer.body))
            watch.begin()
            await asyncio.sleep(took[-1] / 1e9)
            alone.append(watch.longest_ns)
        return {
            "models": models,
            "scrape_nbytes": nbytes,
            "scrape_ms": statistics.median(took) / 1e6,
            "held_ms": [ns / 1e6 for ns in held],
            "alone_ms": [ns / 1e6 for ns in alone],
        }


def main():
    options = arguments(__doc__, models=64, scrapes=50)
    shorten_switch_interval()
    with asyncio.Runner() as runner:
        figures = runner.run(measure(options.models, options.scrapes))
    show(
        f"Metrics of {figures['models']} models, {figures['scrape_nbytes'] / 1e3:.0f} kB, "
        f"{figures['scrape_ms']:.1f} ms a scrape: the longest turn of the loop",
        ("", "median, ms", "most, ms"),
        [
            (name, f"{statistics.median(values):.2f}", f"{max(values):.2f}")
            for name, values in (
                ("during a scrape", figures["held_ms"]),
                ("as long without one", figures["alone_ms"]),
            )
        ],
    )
    save(options.json, __doc__, figures)


if __name__ == "__main__":
    main()
