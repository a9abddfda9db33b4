"""A million batches: does the memory of the host or of the device grow?

Short kernels, one row per batch, eight callers; every answer is checked. With ``--runtime onnxruntime`` the
batches are those of an ONNX model that doubles its input. Memory is sampled ten times: the process's resident
memory, and the device memory in use by all processes (cuMemGetInfo).
"""

import asyncio
import gc
import os
import tempfile
from pathlib import Path

import numpy as np
import uvloop

import asynctrt
from asynctrt._util import clock
from tests.benchmarks.common import arguments, save, show
from tests.benchmarks.gpu.kernels import SpinModel, kernels_on
from tests.benchmarks.gpu.support import open_device

CALLERS = 8
LOOKS = 10


def resident_nbytes():
    """Return the resident memory of the process, after collecting garbage."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Looks:
    """Samples memory each time another tenth is done."""

    def __init__(self, device, engine):
        self._device = device
        self._engine = engine
        self._start_ns = clock.now_ns()
        self.found = []

    def look(self):
        memory = self._device.memory()
        look = {
            "batches": self._engine.statistics().batches,
            "seconds": (clock.now_ns() - self._start_ns) / 1e9,
            "resident_mib": resident_nbytes() / 2**20,
            "device_used_mib": (memory.total_nbytes - memory.free_nbytes) / 2**20,
            "device_held_mib": memory.held_nbytes / 2**20,
            "gc_objects": len(gc.get_objects()),
        }
        self.found.append(look)
        print(
            f"  {look['batches']:>9,} batches, {look['seconds']:6.1f} s: resident "
            f"{look['resident_mib']:,.1f} MiB, device {look['device_used_mib']:,.1f} MiB",
            flush=True,
        )


async def measure(device, model, options):
    """Send batches until there are enough, or the time is over."""
    limit_ns = clock.now_ns() + int(options.seconds * 1e9) if options.seconds else 2**63
    wanted = options.batches

    settings = {"contexts": 4, "max_rows": 1}
    if options.runtime == "kernels":
        settings["arenas"] = 1
    async with asynctrt.open(model, device=device, **settings) as engine:
        looks = Looks(device, engine)
        started = 0

        async def caller(number, until):
            nonlocal started
            rows = np.full((1, 512), number, np.float32)
            twice = 2 * rows
            while started < until and clock.now_ns() < limit_ns:
                started += 1
                answer = await engine.infer(rows)
                if not np.array_equal(answer["output"], twice):
                    raise AssertionError(f"a wrong answer for {rows}: {answer['output']}")

        # What is made once (caches, pools of NumPy's and of the interpreter) is there after a hundredth.
        steps = [max(wanted // 100, 1)] + [wanted * tenth // LOOKS for tenth in range(1, LOOKS + 1)]
        for until in steps:
            async with asyncio.TaskGroup() as group:
                for number in range(CALLERS):
                    group.create_task(caller(number + 1, until))
            looks.look()
            if clock.now_ns() >= limit_ns:
                break
    return looks.found


def run(device, options):
    """Return the samples of memory for the model that the options name."""
    if options.runtime == "kernels":
        return uvloop.run(measure(device, SpinModel(kernels_on(device), options.work_ns), options))
    from tests.models import double_onnx

    with tempfile.TemporaryDirectory() as folder:
        path = double_onnx(Path(folder) / "double.onnx", dims=(512,))
        return uvloop.run(measure(device, path, options))


def main():
    options = arguments(
        __doc__,
        device="cuda:0",
        batches=1_000_000,
        work_ns=5000,
        seconds=0.0,
        runtime="kernels",
    )
    device = open_device(options.device)
    looks = run(device, options)
    first, last = looks[0], looks[-1]
    half = looks[len(looks) // 2]
    figures = {
        "batches": last["batches"],
        "batches_wanted": options.batches,
        "batches_per_s": last["batches"] / last["seconds"],
        **{
            f"{name}_{since}": last[name] - at[name]
            for name in ("resident_mib", "device_used_mib", "device_held_mib", "gc_objects")
            for since, at in (("growth", first), ("growth_in_second_half", half))
        },
        "looks": looks,
    }
    show(
        f"memory over {last['batches']:,} batches of {options.batches:,}",
        ("", f"after {first['batches']:,}", f"after {half['batches']:,}", "at the end", "growth"),
        [
            (name, *(f"{look[key]:,.1f}" for look in (first, half, last)), f"{last[key] - first[key]:+,.2f}")
            for name, key in (
                ("resident MiB", "resident_mib"),
                ("device MiB in use", "device_used_mib"),
                ("device MiB held by the engine", "device_held_mib"),
                ("Python objects", "gc_objects"),
            )
        ],
        f"{figures['batches_per_s']:,.0f} batches/s.",
        device=device,
    )
    save(options.json, __doc__, figures, device)


if __name__ == "__main__":
    main()
