"""Opens, captures and swaps models while another process fills the GPU, and must not end by it.

usage: python -m tests.gpu.full PLAN [MIB,...]

For each number of MiB that are left (by default for a small plan): what opening with many graphs came to, and
loading the model again while it is served. Each line of the output is an outcome; the last one is
``survived``. The environment names the package and the lean runtime: see :mod:`tests.gpu.differential`.
"""

import asyncio
import faulthandler
import subprocess
import sys
from collections import Counter

import numpy as np

import asynctrt
from asynctrt.errors import AsynctrtError
from asynctrt.serving.repository import Repository
from tests.contract.plans import OPTIONS

LEFT_MIB = "2000,200,60,42,20,3"
SIZES = (1000 << 20, 64 << 20, 4 << 20, 1 << 20)
CALLERS = 64
WAIT_S = 60
FILL = "fill"


def fill():
    """Take the GPU's memory until as many MiB are left as each line of the input says."""
    from cuda.bindings import runtime

    held = []
    for line in sys.stdin:
        while held:
            runtime.cudaFree(held.pop())
        left = int(line) << 20
        for size in SIZES if left else ():
            while runtime.cudaMemGetInfo()[1] > left + size:
                code, address = runtime.cudaMalloc(size)
                if int(code):
                    break
                held.append(address)
        print(runtime.cudaMemGetInfo()[1] >> 20, flush=True)


class Filler:
    """The other process."""

    def __init__(self):
        command = [sys.executable, "-m", "tests.gpu.full", FILL]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, **pipes)

    def leave(self, mib):
        """Leave so much memory, or give all back with 0; return how much is free then."""
        self._process.stdin.write(f"{mib}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


class Subject:
    """A plan with as many contexts and graphs as make it take memory in many places."""

    def __init__(self, path):
        self.path = path
        self.options = {"device": "cuda:0", "tensorrt": OPTIONS}

    def open(self, **kw):
        settings = {"contexts": 8, "arenas": 2, "graphs": "1,2,4,8,16,32,64", "max_rows": 64}
        return asynctrt.open(self.path, **self.options, **settings, **kw)

    async def ask(self, engine):
        """Ask for many answers at once; return how many came, and which errors."""
        (spec,) = engine.inputs
        rows = [
            np.full((1, *(16 if isinstance(dim, str) else dim for dim in spec.dims)), n + 1) for n in range(4)
        ]
        rows = [row.astype(spec.dtype) for row in rows]
        async with asyncio.timeout(WAIT_S):
            outcomes = await asyncio.gather(
                *[engine.infer({spec.name: rows[number % 4]}) for number in range(CALLERS)],
                return_exceptions=True,
            )
        return "answers " + ", ".join(
            f"{name} {count}" for name, count in Counter(map(outcome_of, outcomes)).items()
        )


def outcome_of(one):
    """Return ``answered``, the name of an error of ours, or what it was instead."""
    if isinstance(one, AsynctrtError):
        return type(one).__name__
    return "answered" if not isinstance(one, BaseException) else f"UNTYPED {type(one).__name__}: {one}"


async def capture(subject, filler, mib):
    """Open with graphs while little is left."""
    free = filler.leave(mib)
    try:
        async with subject.open() as engine:
            said = await subject.ask(engine)
            statistics = engine.statistics()
            print(f"capture, {free} MiB left: graphs of {statistics.graphs}, {said}", flush=True)
    except BaseException as error:
        print(f"capture, {free} MiB left: {outcome_of(error)}: {str(error)[:160]}", flush=True)
    filler.leave(0)


async def swap(subject, filler, mib):
    """Load a model that is served once more while little is left, and ask it all the while."""
    repository, version = Repository(), [1]

    async def opened():
        return await subject.open()

    repository.add("m", opener=opened, mark=lambda: version[0])
    await repository.load("m")
    first = repository.find("m").engine
    free = filler.leave(mib)
    asked = asyncio.create_task(subject.ask(first))
    version[0] += 1
    try:
        await repository.load("m")
        loaded = "the same engine" if repository.find("m").engine is first else "swapped"
    except BaseException as error:
        loaded = f"{outcome_of(error)}: {str(error)[:160]}"
    meanwhile = await asked
    then = await subject.ask(repository.find("m").engine)
    print(f"swap, {free} MiB left: {loaded}; {meanwhile}; then {then}", flush=True)
    await repository.aclose()
    filler.leave(0)


async def main(path, left_mib=LEFT_MIB):
    subject, filler = Subject(path), Filler()
    try:
        for mib in map(int, left_mib.split(",")):
            await capture(subject, filler, mib)
            await swap(subject, filler, mib)
    finally:
        filler.close()
    print("survived", flush=True)


if __name__ == "__main__":
    faulthandler.enable()
    if sys.argv[1] == FILL:
        fill()
    else:
        asyncio.run(main(*sys.argv[1:]))
