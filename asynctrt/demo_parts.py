"""Show what the engine is for: equal load with and without it, in three parts, and then the dashboard."""

import asyncio
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

import asynctrt
from asynctrt import clock, demo
from asynctrt.comparison import Measured, Predict, Way, measure, ways_to
from asynctrt.devices.host import cores
from asynctrt.errors import AsynctrtError, MissingExtraError, UsageError
from asynctrt.loading import find_device
from asynctrt.tensors import Array, TensorSpec

if TYPE_CHECKING:
    from asynctrt.client import Client

try:
    from threadpoolctl import threadpool_limits
except ImportError:
    threadpool_limits = None

WIDTH: Final = 1536
DEPTH: Final = 4
LAYERS_CALLERS: Final = 64
LAYERS_ROWS: Final = 32
OWN_WORK_S: Final = 0.0005
PORT: Final = 8000
"""The dashboard's port; another one, if this is taken."""

COST_REPEATS: Final = 20
ABOUT_BUSY: Final = (
    "An application has work of its own for the event loop. Here a task computes for "
    f"{OWN_WORK_S * 1e3:.1f} ms, lets others have a turn, and computes again."
)

LIGHT_LOAD: Final = {"filetypes": 25.0, "layers": 150.0}
"""Requests a second of each model while the dashboard is shown."""


@dataclass(slots=True)
class Part:
    """One part of the demo: a load, and what each way made of it."""

    title: str
    about: str
    callers: int
    own_work_s: float = 0.0
    results: dict[str, Measured] = field(default_factory=dict)

    def compared(self) -> tuple[float, str] | None:
        """Return the engine's answers a second over the best of the others', and that one's name.

        ``None`` unless all were measured, and had answers.
        """
        others = dict(self.results)
        engine = others.pop("asynctrt", None)
        if engine is None or not others:
            return None
        best = max(others, key=lambda name: others[name].answers_per_s)
        rate = others[best].answers_per_s
        return (engine.answers_per_s / rate, best) if rate else None


class View(Protocol):
    """Shows the demo while it runs."""

    def begin(self, what: str, total: int) -> Callable[[], None]:
        """Begin a job of ``total`` steps; return what notes one."""

    def show_files(self, found: demo.Found, model: demo.ContentModel) -> None:
        """Show what the files are."""

    def show_part(self, part: Part) -> None:
        """Show a part, also one that was interrupted."""

    def show_dashboard(self, url: str | None) -> None:
        """Show where the dashboard is, or how to get one, and what to try."""


@dataclass(frozen=True, slots=True)
class Course:
    """What the demo is to do.

    :param seconds: how long each way is measured.
    :param dashboard: serve the dashboard at the end, until SIGINT or SIGTERM.
    """

    folders: tuple[Path, ...]
    limit: int = 500
    seconds: float = 3.0
    device: str = "host"
    dashboard: bool = False

    async def run(self, model: demo.ContentModel, view: View) -> None:
        """Run it. What was measured is shown as soon as it is, and also when it is cancelled."""
        if threadpool_limits is None:
            raise MissingExtraError("the demo needs threadpoolctl: pip install 'asynctrt[demo]'")
        found = demo.Found()
        rows = await asyncio.to_thread(self._read, model, found, view)
        async with AsyncExitStack() as stack:
            # As on servers: several computations share the cores, and threads of each would be in their way.
            stack.enter_context(threadpool_limits(1, user_api="blas"))
            engine = await stack.enter_async_context(
                asynctrt.open(model.path, device=self.device, max_rows=demo.MAX_ROWS)
            )
            try:
                await demo.identify(engine, model, rows, found, view.begin("identifying them", len(rows)))
            finally:
                view.show_files(found, model)
            if not rows:
                return
            files = [row for _, row in rows]
            predict = await asyncio.to_thread(_predict_by_hand, model.path, self.device)
            part = Part(
                "1. A model that gains little from batches", await _about_files(predict, files), demo.CALLERS
            )
            await self._compare(part, ways_to(predict, engine, demo.MAX_ROWS), files, view)
            stacked = await asyncio.to_thread(layers, WIDTH, DEPTH)
            wide = await stack.enter_async_context(asynctrt.open(layers_model(stacked), max_rows=LAYERS_ROWS))
            vectors = list(np.random.default_rng(1).random((LAYERS_CALLERS, 1, WIDTH), np.float32))
            ways = ways_to(stacked, wide, LAYERS_ROWS)
            part = Part(
                "2. A model that gains from batches", await _about_layers(stacked, vectors), LAYERS_CALLERS
            )
            await self._compare(part, ways, vectors, view)
            part = Part("3. The same, on a loop that is kept busy", ABOUT_BUSY, LAYERS_CALLERS, OWN_WORK_S)
            await self._compare(part, ways, vectors, view)
            if self.dashboard:
                await serve_dashboard({"filetypes": (engine, files), "layers": (wide, vectors)}, view)
            else:
                view.show_dashboard(None)

    def _read(self, model: demo.ContentModel, found: demo.Found, view: View) -> list[tuple[Path, Array]]:
        paths = demo.find_files(self.folders, self.limit)
        advance = view.begin("reading files", len(paths))
        rows = []
        for path in paths:
            row = demo.read_row(model, path)
            if row is not None:
                rows.append((path, row))
            advance()
        found.skipped = len(paths) - len(rows)
        return rows

    async def _compare(self, part: Part, ways: Mapping[str, Way], rows: Sequence[Array], view: View) -> None:
        advance = view.begin(part.title, len(ways))
        try:
            for name, way in ways.items():
                part.results[name] = await measure(
                    way, rows, callers=part.callers, seconds=self.seconds, own_work_s=part.own_work_s
                )
                advance()
        finally:
            view.show_part(part)


def layers(width: int, depth: int) -> Predict:
    """Return a model of ``depth`` layers of ``width`` by ``width`` weights, for rows of ``width`` float32.

    A batch reads the weights once, whatever its size.
    """
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((width, width)).astype(np.float32) / width**0.5 for _ in range(depth)]

    def predict(rows: Array) -> Array:
        for matrix in weights:
            rows = np.maximum(rows @ matrix, 0)
        return rows

    return predict


def layers_model(predict: Predict) -> asynctrt.FunctionModel:
    """Return what :func:`layers` returns as a model."""
    x, y = (TensorSpec(name, "float32", (WIDTH,)) for name in "xy")
    return asynctrt.FunctionModel(lambda inputs: predict(inputs["x"]), inputs=x, outputs=y)


async def serve_dashboard(engines: Mapping[str, tuple[asynctrt.Engine, Sequence[Array]]], view: View) -> None:
    """Serve the engines with a dashboard until SIGINT or SIGTERM, under a light load of their own rows."""
    try:
        from asynctrt.client import connect  # noqa: PLC0415  (another extra)
        from asynctrt.serving import Repository, Server, ServerSettings  # noqa: PLC0415
    except MissingExtraError:
        view.show_dashboard(None)
        return
    repository = Repository()
    for name, (engine, _) in engines.items():
        repository.add(name, engine)
    # What holds the loop of a demo is no news.
    settings = ServerSettings(http_port=PORT, grpc=False, max_pause=60.0)
    server = Server(repository, settings)
    try:
        await server.start()
    except UsageError:  # The port is taken.
        server = Server(repository, dataclasses.replace(settings, http_port=0))
        await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop)
        tasks = [asyncio.create_task(server.serve())]  # From here on, Ctrl-C ends the server.
        try:
            url = server.http_url
            client = await stack.enter_async_context(connect(f"ws{url.removeprefix('http')}/v2/ws"))
            for name, (_, rows) in engines.items():
                tasks.append(asyncio.create_task(_send(client, name, rows, LIGHT_LOAD[name])))
            view.show_dashboard(url)
            await tasks[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _send(client: "Client", name: str, rows: Sequence[Array], rate: float) -> None:
    """Send requests at random times, ``rate`` a second."""
    source = random.Random(0)  # noqa: S311  (a load, not a secret)

    async def infer(row: Array) -> None:
        with suppress(AsynctrtError):  # Others may load the server meanwhile, and it ends before its load.
            await client.infer(name, row)

    async with asyncio.TaskGroup() as requests:
        while True:
            await asyncio.sleep(source.expovariate(rate))
            requests.create_task(infer(source.choice(rows)))


def _predict_by_hand(path: Path, device: str) -> Predict:
    """Return the model as ONNX Runtime alone runs it, with the settings that it has by itself."""
    # Imported only when they are needed, because they load ONNX Runtime.
    if device == "host":
        from asynctrt.backends.onnxruntime import OnnxModel  # noqa: PLC0415

        session = OnnxModel(path, {"intra_op_num_threads": cores()}).session
    else:
        from asynctrt.backends.onnxruntime_cuda import RawModel  # noqa: PLC0415

        session = RawModel(path, find_device(device)).session
    name = session.get_inputs()[0].name

    def predict(rows: Array) -> Array:
        answer: Array = session.run(None, {name: rows})[0]
        return answer

    return predict


async def _cost_ms(predict: Predict, rows: Sequence[Array], count: int) -> float:
    """Return how long a batch of ``count`` rows takes alone, the median of some."""
    batch = np.concatenate([rows[number % len(rows)] for number in range(count)])

    def run() -> float:
        took_ns = []
        for _ in range(COST_REPEATS):
            begun_ns = clock.now_ns()
            predict(batch)
            took_ns.append(clock.now_ns() - begun_ns)
        return median(took_ns) / 1e6

    return await asyncio.to_thread(run)


async def _about_files(predict: Predict, rows: Sequence[Array]) -> str:
    one, four = await _cost_ms(predict, rows, 1), await _cost_ms(predict, rows, demo.MAX_ROWS)
    return (
        f"The model that told the types of the files: a row alone takes {one:.1f} ms, a batch of "
        f"{demo.MAX_ROWS} {four:.1f} ms."
    )


async def _about_layers(predict: Predict, rows: Sequence[Array]) -> str:
    one, many = await _cost_ms(predict, rows, 1), await _cost_ms(predict, rows, LAYERS_ROWS)
    return (
        f"{DEPTH} layers of {WIDTH} by {WIDTH} weights in NumPy, on one core: a row alone takes "
        f"{one:.1f} ms, a batch of {LAYERS_ROWS} {many:.1f} ms, as it reads the weights once."
    )
