"""Open every model of the zoo, compare answers with direct ones, and measure: `python -m tests.zoo.run`.

64 callers ask an engine, opened with its defaults, for answers to requests of mixed sizes. Beside it a loop
runs the same requests one after the other, directly with ONNX Runtime, in the same process and in turn.
Models of wheels are downloaded into a cache first. The table that is printed is that of docs/models.md.
"""

import argparse
import asyncio
import statistics
import textwrap
from pathlib import Path
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.progress import Progress

import asynctrt
from asynctrt.errors import AsynctrtError
from tests.benchmarks.common import save
from tests.benchmarks.tables import markdown, zoo_lines
from tests.zoo.compare import ask, difference, direct_answer, direct_session, is_same
from tests.zoo.models import ENTRIES, SIZES

CALLERS = 64
COMPARED_MAX = 200
REQUESTS_MAX = 5000
SECONDS_MAX = 5
"""What a loop over the requests takes at most: slow models get fewer than there are callers."""
REASON_LENGTH = 110


def parsed(arguments=None):
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--models", default="", metavar="NAME,NAME", help="these only; a part of a name will do"
    )
    parser.add_argument("--cache", type=Path, default=Path("build/zoo"), metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=1, help="how long a loop over the requests takes")
    parser.add_argument("--repeats", type=int, default=3, help="how often each is measured, in turn")
    return parser.parse_args(arguments)


def shortened(text):
    """Return the first sentence, or what fits of it."""
    sentence = " ".join(str(text).split()).partition(". ")[0]
    return textwrap.shorten(sentence, REASON_LENGTH, placeholder=" …")


def requests_for(entry, session, seconds):
    """Return requests of mixed sizes, as many as a loop answers in the given time."""
    rng = np.random.default_rng(0)
    tried = [entry.request(rng, size) for size in range(SIZES)]
    for request in tried:
        session.run(None, request)
    began = perf_counter()
    for request in tried:
        session.run(None, request)
    each = (perf_counter() - began) / SIZES
    count = int(min(max(CALLERS, seconds / each), REQUESTS_MAX, max(SIZES, SECONDS_MAX / each)))
    return [entry.request(rng, int(size)) for size in rng.integers(0, SIZES, count)]


async def measured(entry, cache, args):
    """Return what is known of one model after it was tried."""
    path = entry.path(cache)
    found = {"from": entry.origin, "settings": sorted(entry.settings)}
    session = direct_session(path)
    requests = requests_for(entry, session, args.seconds)
    began = perf_counter()
    try:
        engine = await asynctrt.open(path, **entry.settings)
    except AsynctrtError as error:
        return found | {"opens_as": "refused", "reason": shortened(error)}
    found["open_s"] = perf_counter() - began
    async with engine:
        batching = engine.batching
        found |= {"opens_as": "batched" if batching.is_on else "alone"}
        found |= {"reason": shortened(batching.reason), "probe_ms": batching.probe_ns / 1e6}
        try:
            found |= await compared(entry, engine, session, requests[:COMPARED_MAX])
            found |= await rates(engine, path, session, requests, args.repeats)
        except* Exception as errors:  # The table shows it, and the other models are tried.
            found["failed"] = shortened(errors.exceptions[0])
    return found


async def compared(entry, engine, session, requests):
    """Return how far answers to concurrent callers are from direct ones."""
    answers = await ask(engine, requests, CALLERS)
    both = [(ours, direct_answer(session, one)) for ours, one in zip(answers, requests, strict=True)]
    worst = max(difference(*pair) for pair in both)
    return {
        "compared": len(both),
        "difference": worst if worst < float("inf") else None,
        "is_within_tolerance": worst <= entry.tolerance,
        "same_bit_for_bit": sum(is_same(*pair) for pair in both),
    }


async def rates(engine, path, session, requests, repeats):
    """Return requests/s of the engine and of two loops, measured in turn, and the rows of a batch."""
    loops = {"loop_1_thread": session, "loop_default_threads": direct_session(path, 0)}
    times = {name: [] for name in ("engine", *loops)}
    before = engine.statistics()
    for _ in range(repeats):
        began = perf_counter()
        await ask(engine, requests, CALLERS)
        times["engine"].append(perf_counter() - began)
        for name, direct in loops.items():
            began = perf_counter()
            for request in requests:
                direct.run(None, request)
            times[name].append(perf_counter() - began)
    after = engine.statistics()
    per_s = {name: len(requests) / statistics.median(taken) for name, taken in times.items()}
    batches = after.batches - before.batches
    return {
        "requests": len(requests),
        "batch_rows": (after.rows - before.rows) / batches if batches else 0.0,
        "requests_per_s": per_s,
        "times_s": times,
    }


def main():
    """Try the models one after the other and print the table."""
    args = parsed()
    wanted = [name.strip() for name in args.models.split(",") if name.strip()]
    entries = [one for one in ENTRIES if not wanted or any(name in one.name for name in wanted)]
    figures = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(entries))
        for entry in entries:
            progress.update(task, description=entry.name)
            figures[entry.name] = asyncio.run(measured(entry, args.cache, args))
            found = figures[entry.name]
            opened = f", opened in {found['open_s']:.3f} s" if "open_s" in found else ""
            progress.console.print(f"{entry.name}: {found['opens_as']}{opened}")
            progress.advance(task)
    print(markdown(zoo_lines(figures)))
    save(args.json, "The zoo of models", figures)


if __name__ == "__main__":
    main()
