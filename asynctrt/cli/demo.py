"""`asynctrt demo`: identify the files of a folder, and compare an engine with a 30-line batcher.

The files are identified with the ONNX model that magika ships. Only magika's data is used: the model, its
configuration and its table of content types. This module makes the inputs from each file's bytes, as the
configuration specifies.
"""

import asyncio
import json
import math
import os
import random
import sysconfig
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

import asynctrt
from asynctrt._util import clock
from asynctrt._util.files import open_regular
from asynctrt._util.validation import duration
from asynctrt.errors import MissingExtraError
from asynctrt.tensors import Array, TensorSpec

try:
    from threadpoolctl import threadpool_limits
except ImportError:
    threadpool_limits = None

FILES_MAX: Final = 500
"""The most files to identify: a random sample."""

LOOKED_AT_MAX: Final = 100_000
"""The maximum number of files to choose from: a folder may be a whole disk."""

CALLERS: Final = 64
LAYERS_ROWS: Final = 32
WIDTH: Final = 2048  # The length of the row for one file.
BLOCKED_S: Final = 0.005
SAME: Final = 1.1
"""The smallest ratio to report: a smaller one may be chance."""

HAND: Final = "a batcher by hand"
ENGINE: Final = "asynctrt"
ABOUT: Final = (
    "\nBelow, asynctrt is beside a batcher by hand: the 30 lines that one writes, written well (HandBatcher "
    "in asynctrt/cli/demo.py). It takes what waits at once, runs two batches at a time in threads, and skips "
    f"callers who left. The model has two layers of {WIDTH} by {WIDTH} weights, and the bytes of the files "
    f"as its input. The ways take turns. A ratio below {SAME} counts as no difference."
)
NEXT: Final = """
To try next:
  asynctrt demo ~/Downloads               # your own files
  asynctrt serve model.onnx               # a server with a dashboard
  asynctrt load model.onnx --callers 8    # a load test of your model
  asynctrt doctor                         # is this machine ready for a GPU?"""

Infer = Callable[..., Awaitable[object]]
Send = Callable[[], Coroutine[Any, Any, None]]
Measure = Callable[["Load", float], Awaitable[None]]


class ContentModel:
    """The model of the installed ``magika``, which tells the type of a file from its beginning and its end.

    :raises MissingExtraError: if magika is not installed.
    """

    def __init__(self) -> None:
        spec = find_spec("magika")
        if spec is None or spec.origin is None:
            raise MissingExtraError("the demo's model comes with magika: pip install 'asynctrt[demo]'")
        package = Path(spec.origin).parent
        self.path = max((package / "models").glob("*/model.onnx"))
        self.config: dict[str, Any] = json.loads((self.path.parent / "config.min.json").read_bytes())
        kinds: dict[str, Any] = json.loads((package / "config" / "content_types_kb.min.json").read_bytes())
        self.texts = frozenset(label for label, kind in kinds.items() if kind["is_text"])

    def row(self, path: Path) -> Array | None:
        """Return the model's input for a file, int32 ``(1, beginning + end)``.

        The beginning and the end of the file are stripped of white space, and padded in the middle if bytes
        are missing. Return ``None`` if the file cannot be read or is too small.
        """
        beginning, end = self.config["beg_size"], self.config["end_size"]
        try:
            with open_regular(path) as file:
                size = file.seek(0, os.SEEK_END)
                block = min(size, self.config["block_size"])
                file.seek(0)
                head = file.read(block).lstrip()[:beginning]
                file.seek(size - block)
                tail = file.read(block).rstrip()[-end:]
        except OSError:
            return None
        if len(head) < self.config["min_file_size_for_dl"]:
            return None
        row = np.full((1, beginning + end), self.config["padding_token"], np.int32)
        row[0, : len(head)] = np.frombuffer(head, np.uint8)
        row[0, row.shape[1] - len(tail) :] = np.frombuffer(tail, np.uint8)
        return row

    def label(self, scores: Array) -> str:
        """Return the most likely label; or "txt" or "unknown" if the model is not confident."""
        best = int(scores.argmax())
        label: str = self.config["target_labels_space"][best]
        shown: str = self.config["overwrite_map"].get(label, label)
        if scores[best] >= self.config["thresholds"].get(label, self.config["medium_confidence_threshold"]):
            return shown
        return "txt" if shown in self.texts else "unknown"


def default_folders() -> tuple[Path, ...]:
    """Return the folders of Python's standard library and of this package."""
    return Path(sysconfig.get_path("stdlib")), Path(asynctrt.__file__).parent


def find_files(folders: Sequence[Path], limit: int = FILES_MAX) -> list[Path]:
    """Return up to ``limit`` files below the folders: a random sample, the same each time.

    Blocks, for long in a large folder. Links and files that cannot be accessed are left out.
    """
    paths = (Path(at, name) for top in folders for at, _, names in os.walk(top) for name in names)
    found = set[Path]()
    for path in islice(paths, LOOKED_AT_MAX):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink():
                found.add(path)
    files = sorted(found)
    return sorted(random.Random(0).sample(files, min(limit, len(files))))  # noqa: S311  (a sample, not a secret)


class HandBatcher:
    """A good batcher of 30 lines, as an application would write it."""

    def __init__(self, predict: Callable[[Array], Array], max_rows: int) -> None:
        self._predict, self._max_rows = predict, max_rows
        self._waiting: asyncio.Queue[tuple[Array, asyncio.Future[Array]]] = asyncio.Queue()
        self.tasks = [asyncio.create_task(self._run()) for _ in range(2)]

    async def infer(self, row: Array, timeout: float | None = None) -> Array:
        """Return the model's answer to one row."""
        answer: asyncio.Future[Array] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((row, answer))
        async with asyncio.timeout(timeout):
            return await answer

    async def _run(self) -> None:
        while True:
            batch: list[tuple[Array, asyncio.Future[Array]]] = []
            while not batch or (len(batch) < self._max_rows and not self._waiting.empty()):
                row, answer = await self._waiting.get()
                if not answer.done():
                    batch.append((row, answer))
            try:
                computed = await asyncio.to_thread(self._predict, np.concatenate([row for row, _ in batch]))
            except Exception as error:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for number, (_, answer) in enumerate(batch):
                if not answer.done():
                    answer.set_result(computed[number : number + 1])

    async def end(self) -> None:
        """Stop computing."""
        for task in self.tasks:
            task.cancel()


class Layers:
    """Two layers of weights. A batch reads them once, whatever its size."""

    def __init__(self) -> None:
        self._weights = np.random.default_rng(0).standard_normal((2, WIDTH, WIDTH), np.float32) / WIDTH**0.5
        self.computed = 0

    def predict(self, rows: Array) -> Array:
        """Compute a batch, or raise if a row is not finite. Blocks the thread."""
        if not np.isfinite(rows).all():
            raise ValueError("a row is not finite")
        for matrix in self._weights:
            rows = np.maximum(rows @ matrix, 0)
        count = len(rows)  # Called first, so that no other thread runs between reading and writing the sum.
        self.computed += count
        return rows

    def open(self) -> "asynctrt.Opening":
        """Return an engine for the same computation."""
        x, y = (TensorSpec(name, "float32", (WIDTH,)) for name in "xy")
        model = asynctrt.FunctionModel(lambda inputs: self.predict(inputs["x"]), inputs=x, outputs=y)
        return asynctrt.open(model, max_rows=LAYERS_ROWS, timeout_until="answer")


@dataclass(slots=True)
class Load:
    """Requests that are sent in one way, and their results."""

    infer: Infer
    rows: Sequence[Array]
    sent: int = 0
    used: int = 0
    computed: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0

    async def send(
        self,
        timeout: float | None = None,
        *,
        row: Array | None = None,
        leaves_after: float | None = None,
        counts: bool = True,
    ) -> None:
        """Send a request. Count it as answered if the answer arrives in time.

        :param timeout: the batcher's timeout, in seconds.
        :param leaves_after: when the caller gives up, in seconds, without having said so beforehand.
        """
        begun_ns = clock.now_ns()
        self.sent += counts
        row = self.rows[self.sent % len(self.rows)] if row is None else row
        with suppress(Exception):  # An error of the model, or a missed deadline.
            async with asyncio.timeout(leaves_after):
                await self.infer(row, timeout=timeout)
            took_ms = (clock.now_ns() - begun_ns) / 1e6
            self.used += 1
            if counts and (timeout is None or took_ms <= timeout * 1e3):
                self.latencies_ms.append(took_ms)


def p99_ms(load: Load) -> float:
    """Return the time within which 99% of all requests were answered, in ms; infinite if fewer ever were.

    A percentile of the answered requests alone would improve as more of them fail.
    """
    unanswered = [math.inf] * (load.sent - len(load.latencies_ms))
    return float(np.percentile([*load.latencies_ms, *unanswered] or [0.0], 99, method="higher"))


COLUMNS: Final[Mapping[str, tuple[Callable[[Load], float], str]]] = {
    "answered": (lambda load: len(load.latencies_ms) / load.sent if load.sent else 0.0, "{:.0%}"),
    "failed": (lambda load: 1 - len(load.latencies_ms) / load.sent if load.sent else 0.0, "{:.0%}"),
    "answers/s": (lambda load: len(load.latencies_ms) / load.elapsed_s if load.elapsed_s else 0.0, "{:,.0f}"),
    "p99 ms": (p99_ms, "{:,.0f}"),
    "wasted": (lambda load: 1 - load.used / load.computed if load.computed else 0.0, "{:.0%}"),
}
"""The figures of a load, with their formats. Rows computed for callers who had left are wasted. A "p99 ms" of
inf says that more than 1% were never answered."""


async def closed(seconds: float, send: Send, blocked_s: float = 0.0) -> None:
    """Let each of several callers send requests one after the other, waiting for each answer.

    :param blocked_s: seconds for which other work blocks the loop at a time, for a fifth of the total time.
    """

    async def caller() -> None:
        while clock.now_ns() < end_ns:
            await send()

    async def block() -> None:
        while clock.now_ns() < end_ns:
            clock.sleep_s(blocked_s)
            await asyncio.sleep(4 * blocked_s)

    end_ns = clock.now_ns() + int(seconds * 1e9)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CALLERS):
            tasks.create_task(caller())
        if blocked_s:
            tasks.create_task(block())


async def offered(seconds: float, rate: float, *sends: Send) -> None:
    """Send requests at regular intervals, whether or not earlier ones were answered; rotate ``sends``."""
    begun_ns, sent = clock.now_ns(), 0
    async with asyncio.TaskGroup() as requests:
        while sent < seconds * rate - 1:
            due = int(min((clock.now_ns() - begun_ns) / 1e9, seconds) * rate)
            for number in range(sent, due):
                requests.create_task(sends[number % len(sends)]())
            sent = due
            await asyncio.sleep(0.001)


async def lost(infer: Infer, rows: Sequence[Array], end: Callable[[], Awaitable[object]]) -> str:
    """Shut down while requests are in flight; return how many were never answered, out of how many."""
    requests = [asyncio.ensure_future(infer(rows[number % len(rows)])) for number in range(4 * CALLERS)]
    await asyncio.sleep(0.03)
    await end()
    _, waiting = await asyncio.wait(requests, timeout=1.0)
    for request in waiting:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    return f"{len(waiting)} of {len(requests)}"


def compared(column: str, engine: float, hand: float) -> str:
    """Return the engine's figure over the hand-written batcher's, as text."""
    if math.isinf(engine) or math.isinf(hand):
        return f"{column} cannot be compared"
    ratio = 1.0 if engine == hand else engine / hand if hand else math.inf
    return f"{column} " + ("no difference" if 1 / SAME < ratio < SAME else f"x {ratio:.2f}")


@dataclass
class Course:
    """One run of the demo.

    :param files: the files that are identified.
    :param seconds: how long to measure each way.
    :param say: prints a line.
    :param note: shows the current activity until the next line.
    :raises OptionsError: if ``seconds`` are too few to measure anything.
    """

    files: Sequence[Path]
    seconds: float = 2.5
    say: Callable[[str], None] = print
    note: Callable[[str], object] = bool

    def __post_init__(self) -> None:
        self.seconds = duration(0.05)("seconds", self.seconds)

    async def run(self) -> None:
        """Run the demo. Show each result as soon as it is known, even if the demo is cancelled."""
        if threadpool_limits is None:
            raise MissingExtraError("the demo needs threadpoolctl: pip install 'asynctrt[demo]'")
        model = ContentModel()
        async with asynctrt.open(model.path) as engine:
            rows = await self._identify(model, engine)
        if not rows:
            self.say("No file could be identified: give a folder with other files.")
            return
        layers, vectors = Layers(), [row.astype(np.float32) / 256 for row in rows]
        # As on a server, several computations share the cores, and more BLAS threads would compete for them.
        with threadpool_limits(1, user_api="blas"):
            async with layers.open() as engine:
                await self._compare(layers, engine, vectors)
        self.say(NEXT)

    async def _identify(self, model: ContentModel, engine: asynctrt.Engine) -> list[Array]:
        """Identify the files' types with ``await engine.infer``, many at once; return their rows."""
        read = await asyncio.to_thread(lambda: [model.row(path) for path in self.files])
        rows = [row for row in read if row is not None]
        labels, waiting = Counter[str](), iter(rows)

        async def caller() -> None:
            for row in waiting:
                result = await engine.infer(row)
                labels[model.label(result[engine.outputs[0].name][0])] += 1
                self.note(f"identifying files {labels.total():,}/{len(rows):,}")

        try:
            async with asyncio.TaskGroup() as callers:
                for _ in range(CALLERS):
                    callers.create_task(caller())
        finally:
            if labels:
                shown = labels.most_common(6)
                if others := labels.total() - sum(files for _, files in shown):
                    shown.append(("other", others))
                kinds = ", ".join(f"{files:,} {label}" for label, files in shown)
                self.say(f"{labels.total():,} files, as the model of magika sees them: {kinds}.")
                self.say(f"Unreadable or too small: {len(self.files) - len(rows):,}.")
        return rows

    async def _compare(self, layers: Layers, engine: asynctrt.Engine, rows: Sequence[Array]) -> None:
        """Measure each part, alternating the ways, so that other load on the machine affects all of them."""
        batcher = HandBatcher(layers.predict, LAYERS_ROWS)
        loads: dict[str, Load] = {}

        async def in_the_coroutine(row: Array, **_: object) -> Array:
            await asyncio.sleep(0)  # Like a request that arrives over the network.
            return layers.predict(row)

        async def part(title: str, columns: str, measure: Measure, times: int = 1) -> None:
            ways: dict[str, Infer] = {"in the coroutine": in_the_coroutine} if not loads else {}
            ways |= {HAND: batcher.infer, ENGINE: engine.infer}
            loads.clear()
            loads.update((name, Load(infer, rows)) for name, infer in ways.items())
            try:
                for name, load in (*loads.items(), *reversed(loads.items())) * times:
                    self.note(f"{title.partition(':')[0]}: {name}")
                    computed, begun_ns = layers.computed, clock.now_ns()
                    try:
                        await measure(load, self.seconds / 2 / times)
                    finally:
                        load.elapsed_s += (clock.now_ns() - begun_ns) / 1e9
                        load.computed += layers.computed - computed
            finally:
                self._show(title, columns.split(", "), loads)

        def plain(load: Load, seconds: float) -> Awaitable[None]:
            return closed(seconds, load.send)

        def beside(load: Load, seconds: float) -> Awaitable[None]:
            return closed(seconds, load.send, BLOCKED_S)

        def overload(load: Load, seconds: float) -> Awaitable[None]:
            return offered(seconds, 2 * rate, partial(load.send, 3 * usual_s))

        def poisoned(load: Load, seconds: float) -> Awaitable[None]:
            bad = partial(load.send, row=np.full((1, WIDTH), np.nan, np.float32), counts=False)
            return offered(seconds, rate / 2, bad, *[load.send] * 99)

        def leaving(load: Load, seconds: float) -> Awaitable[None]:
            leaver = partial(load.send, leaves_after=usual_s, counts=False)
            return offered(seconds, 1.5 * rate, load.send, leaver)

        self.say(ABOUT)
        for infer in (batcher.infer, engine.infer):  # Warm up.
            await closed(self.seconds / 4, Load(infer, rows).send)
        about = f"1. Plain load: {CALLERS} callers, each with one request after the other"
        await part(about, "answers/s, p99 ms", plain, 4)
        # The capacity of the better way.
        rate = max(1.0, *(COLUMNS["answers/s"][0](loads[name]) for name in (HAND, ENGINE)))
        usual_s = CALLERS / rate
        about = f"2. Overload: requests at twice capacity, each due within {3e3 * usual_s:.0f} ms"
        await part(about, "answered, answers/s", overload)
        about = f"3. Callers who leave: half, after {1e3 * usual_s:.0f} ms, at 1.5 times capacity"
        await part(about, "answered, p99 ms, wasted", leaving)
        about = "4. Poison: the model raises for one request in 100. The other 99, at half load"
        await part(about, "failed, p99 ms", poisoned)
        about = f"5. Beside other work, which blocks the loop for {BLOCKED_S * 1e3:.0f} ms now and then"
        await part(about, "answers/s, p99 ms", beside, 4)
        self.say("\n6. Shutdown: requests on their way that are never answered")
        self.say(f"  {HAND:<20}{await lost(batcher.infer, rows, batcher.end):>16}")
        async with layers.open() as ending:
            self.say(f"  {ENGINE:<20}{await lost(ending.infer, rows, ending.drain):>16}")

    def _show(self, title: str, columns: Sequence[str], loads: Mapping[str, Load]) -> None:
        """Print a part's figures, even if it was interrupted."""
        begun = {name: load for name, load in loads.items() if load.sent}
        figures = {name: [COLUMNS[column][0](load) for column in columns] for name, load in begun.items()}
        self.say(f"\n{title}\n{'':26}" + "".join(f"{column:>12}" for column in columns))
        for name, values in figures.items():
            cells = [COLUMNS[column][1].format(value) for column, value in zip(columns, values, strict=True)]
            self.say(f"  {name:<24}" + "".join(f"{cell:>12}" for cell in cells))
        if {HAND, ENGINE} <= figures.keys():
            said = ", ".join(map(compared, columns, figures[ENGINE], figures[HAND]))
            self.say(f"  {ENGINE} / by hand: {said}")
