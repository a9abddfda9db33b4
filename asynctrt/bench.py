"""``asynctrt bench``: the overhead of the engine, and its throughput beside that of the raw runtime.

The cases run in turn, and all are repeated (A B A B ...), so that a machine whose speed drifts favours none
of them. Medians and spreads are reported.
"""

import asyncio
import dataclasses
import platform
import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

import asynctrt
from asynctrt import clock
from asynctrt.backends.function import FunctionModel, FunctionRunsOn
from asynctrt.devices.host import HostDevice, InPlace, cores
from asynctrt.errors import ExecutionError, ModelError, OptionsError, describe
from asynctrt.independence import structural
from asynctrt.loading import PLAN_SUFFIXES, find_device
from asynctrt.onnx_options import OnnxOptions
from asynctrt.options import Options
from asynctrt.tensors import Array, TensorSpec

WARM_UP_S: Final = 0.15
RAW_SLICE_S: Final = 0.05
"""Interval at which a raw loop lets the event loop run, so that Ctrl-C works."""

OVERHEAD_DIM: Final = 16
CALLERS: Final = (1, 32, 256)
RAW_ROWS: Final = (1, 8, 32, 64)

Measures = dict[str, float]


@dataclass(slots=True)
class BenchCase:
    """Measure one thing: ``run(seconds)`` returns its figures."""

    name: str
    labels: dict[str, Any]
    run: Callable[[float], Awaitable[Measures]]
    runs: list[Measures] = field(default_factory=list)

    def median(self, figure: str) -> float | None:
        """Return the median over the runs so far; ``None`` before the first, or if they lack the figure."""
        values = [run[figure] for run in self.runs if figure in run]
        return statistics.median(values) if values else None

    def spread(self, figure: str) -> tuple[float, float] | None:
        """Return the smallest and the largest value so far."""
        values = [run[figure] for run in self.runs if figure in run]
        return (min(values), max(values)) if values else None


@dataclass(slots=True)
class BenchReport:
    """Hold all cases of one benchmark. It fills while they run, so that an interrupted one can be shown."""

    title: str
    settings: dict[str, Any]
    cases: list[BenchCase]
    repeats: int

    @property
    def is_complete(self) -> bool:
        """Whether every case ran as often as requested."""
        return all(len(case.runs) == self.repeats for case in self.cases)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "title": self.title,
            "complete": self.is_complete,
            "machine": describe_machine(),
            "settings": self.settings,
            "cases": [
                {
                    "name": case.name,
                    **case.labels,
                    "median": {figure: case.median(figure) for figure in case.runs[0]} if case.runs else {},
                    "runs": case.runs,
                }
                for case in self.cases
            ],
        }


async def run_cases(report: BenchReport, seconds: float, advance: Callable[[BenchCase], None]) -> None:
    """Run every case once, then all again, ``report.repeats`` times."""
    for _ in range(report.repeats):
        for case in report.cases:
            case.runs.append(await case.run(seconds))
            advance(case)


def describe_machine() -> dict[str, Any]:
    """Describe the machine and the versions on which figures were taken."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    versions = {"python": platform.python_version()}
    for package in ("asynctrt", "numpy", "uvloop", "onnxruntime"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    loaded = sys.modules.get("onnxruntime")
    if loaded is not None:
        # What runs is not always what that package says: onnxruntime-gpu installs the same module.
        versions["onnxruntime"] = loaded.__version__
    return {
        "cpu": cpu,
        "cores": cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
    }


# ---- the overhead of the engine itself


def echo_model(run_on: FunctionRunsOn = "thread") -> FunctionModel:
    """Return a model that only copies its float32[16] rows."""

    def echo(inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        outputs["output"][...] = inputs["input"]

    return FunctionModel(
        echo,
        inputs=TensorSpec("input", np.dtype("float32"), (OVERHEAD_DIM,)),
        outputs=TensorSpec("output", np.dtype("float32"), (OVERHEAD_DIM,)),
        run_on=run_on,
    )


def overhead_report(options: Options, repeats: int) -> BenchReport:
    """Return a report, still empty, on the throughput and the CPU time of requests to a no-op model.

    Its cases are 1, 32 and 256 callers of a function that runs on the event loop, on a host device that
    computes in place and on the default one, and in a thread, as functions do by default; and a lone caller
    with a configured delay of 2 ms.
    """
    devices: dict[str, tuple[InPlace, FunctionRunsOn]] = {
        "immediate": ("always", "loop"),
        "host": ("auto", "loop"),
        "thread": ("auto", "thread"),
    }
    cases = [
        BenchCase(
            f"{device}, {callers} callers" if callers > 1 else f"{device}, a lone caller",
            {"device": device, "callers": callers, "max_delay": options.max_delay},
            partial(_run_overhead, in_place, run_on, callers, options),
        )
        for callers in CALLERS
        for device, (in_place, run_on) in devices.items()
    ]
    delayed = Options.from_settings(options, {"max_delay": 0.002})
    cases.append(
        BenchCase(
            "host, a lone caller, max_delay=2 ms",
            {"device": "host", "callers": 1, "max_delay": 0.002},
            partial(_run_overhead, "auto", "loop", 1, delayed),
        )
    )
    settings = {"row": f"float32[{OVERHEAD_DIM}]", "max_rows": options.max_rows or 64}
    return BenchReport(
        "overhead of the engine, no-op model: on the event loop (immediate, host) and in a thread",
        settings,
        cases,
        repeats,
    )


async def _run_overhead(
    in_place: InPlace, run_on: FunctionRunsOn, callers: int, options: Options, seconds: float
) -> Measures:
    device = HostDevice(in_place=in_place)
    async with asynctrt.open(echo_model(run_on), device=device, options=options) as engine:
        rows = {"input": np.random.default_rng(0).random((1, OVERHEAD_DIM), np.float32)}
        measures, _ = await closed_loop(engine, [rows] * callers, seconds, timed=False)
    return measures


async def closed_loop(
    engine: asynctrt.Engine, inputs: Sequence[Mapping[str, Array]], seconds: float, *, timed: bool
) -> tuple[Measures, list[int]]:
    """Run one caller for each of ``inputs`` in a closed loop, for ``seconds`` after a warm-up.

    :param timed: also take the latency of each request, which reads the clock twice.
    :returns: the figures, and the latencies in ns.
    """
    is_over = False
    is_measured = False
    latencies_ns: list[int] = []

    async def caller(rows: Mapping[str, Array]) -> None:
        while not is_over:
            await engine.infer(rows)

    async def timed_caller(rows: Mapping[str, Array]) -> None:
        while not is_over:
            sent_ns = clock.now_ns()
            await engine.infer(rows)
            if is_measured:
                latencies_ns.append(clock.now_ns() - sent_ns)

    async with asyncio.TaskGroup() as group:
        for rows in inputs:
            group.create_task(timed_caller(rows) if timed else caller(rows))
        await asyncio.sleep(WARM_UP_S)
        is_measured = True
        before, start_ns, start_cpu_ns = engine.statistics(), clock.now_ns(), clock.cpu_ns()
        await asyncio.sleep(seconds)
        after, end_ns, end_cpu_ns = engine.statistics(), clock.now_ns(), clock.cpu_ns()
        is_measured = False
        is_over = True
    requests = after.succeeded - before.succeeded
    batches = after.batches - before.batches
    measures = {
        "requests_per_s": requests / (end_ns - start_ns) * 1e9,
        "cpu_us_per_request": (end_cpu_ns - start_cpu_ns) / max(requests, 1) / 1e3,
        "round_trip_us": (end_ns - start_ns) / max(requests, 1) / 1e3 * len(inputs),
        "mean_batch_rows": (after.rows - before.rows) / max(batches, 1),
    }
    return measures, latencies_ns


# ---- a model, against its raw runtime


def model_report(
    path: Path,
    options: Options,
    dims: Mapping[str, int],
    intra_op_threads: int | None,
    repeats: int,
    device: str = "host",
) -> BenchReport:
    """Return a report, still empty, on the rows/s of ONNX Runtime alone and of the engine under 1, 32 and 256
    callers.

    The raw runtime runs one batch at a time, with the engine's own session settings and with all cores; on a
    GPU by ``InferenceSession.run`` with the CUDA provider, which copies and waits.

    :param intra_op_threads: threads that compute one batch. Default: what ``options.onnx`` says, or 1.
    :raises OptionsError: when the model has dynamic dimensions that ``dims`` does not name.
    :raises ModelError: for a TensorRT plan, which has no raw runtime here to be compared with.
    """
    if path.suffix in PLAN_SUFFIXES:
        raise ModelError(
            f"{str(path)!r} is named like a TensorRT plan, and this benchmark compares ONNX models with ONNX "
            f"Runtime. Measure a plan under load: asynctrt load {path} --device cuda:0"
        )
    # Imported only when it is needed, because it loads ONNX Runtime.
    from asynctrt.backends.onnxruntime import OnnxModel  # noqa: PLC0415

    onnx = OnnxOptions.of(options.onnx)
    if device == "host":
        model = OnnxModel(path, onnx.with_threads(intra_op_threads))
        options = dataclasses.replace(options, onnx=None)  # The model has them.
    else:  # It is there for its names and shapes, and runs nothing.
        model = OnnxModel(path, dataclasses.replace(onnx, providers=(), session_config={}))
    missing = {dim for spec in model.inputs for dim in spec.dims if isinstance(dim, str) and dim not in dims}
    if missing:
        flags = " ".join(f"--dims {name}=..." for name in sorted(missing))
        raise OptionsError(f"{model.name!r} has dynamic dimensions: set their sizes with {flags}")
    sessions: dict[int, Any] = {model.intra_op_threads: model}
    if device != "host":
        from asynctrt.backends.onnxruntime_cuda import RawModel  # noqa: PLC0415

        sessions = {1: RawModel(path, find_device(device), onnx)}
    elif cores() not in sessions:
        sessions[cores()] = OnnxModel(path, onnx.with_threads(cores()))
    fixed = model.rows_fixed
    # A request that runs alone counts as one row.
    sizes = [(rows, rows) for rows in ([fixed] if fixed else RAW_ROWS)]
    if not structural(model, options).is_on:
        sizes = [(fixed or 1, 1)]
    cases = [
        BenchCase(
            f"raw, {threads} thread{'s' * (threads > 1)}, batch {rows}",
            {"kind": "raw", "threads": threads, "rows": rows},
            partial(_run_raw, raw, random_inputs(model.inputs, dims, size), rows),
        )
        for threads, raw in sessions.items()
        for size, rows in sizes
    ]
    cases += [
        BenchCase(
            f"engine, {callers} callers" if callers > 1 else "engine, a lone caller",
            {"kind": "engine", "callers": callers},
            partial(_run_engine, model, path, device, options, dims, callers),
        )
        for callers in CALLERS
    ]
    settings = {
        "device": device,
        "model": path.name,
        "inputs": [str(spec) for spec in model.inputs],
        "max_rows": options.max_rows or 64,
        "intra_op_threads": model.intra_op_threads,
    }
    return BenchReport(f"{model.name} against raw ONNX Runtime", settings, cases, repeats)


def random_inputs(
    specs: Sequence[TensorSpec],
    dims: Mapping[str, int],
    rows: int,
    rng: np.random.Generator | None = None,
) -> dict[str, Array]:
    """Return random rows that fit the specs: floats from -1 to 1, integers 0 and 1, letters.

    :param dims: the sizes of dynamic dimensions.
    :param rng: the source of the values; by default they are the same each time.
    """
    rng = rng or np.random.default_rng(rows)
    inputs: dict[str, Array] = {}
    for spec in specs:
        shape = [dims[dim] if isinstance(dim, str) else dim for dim in spec.shape(rows)]
        if spec.dtype.kind in "SO":
            letters = rng.integers(97, 123, (*shape, 1)).astype(np.uint8).view("S1")[..., 0]
            inputs[spec.name] = letters.astype(str).astype(spec.dtype)
        elif spec.dtype.kind in "fV":  # NumPy gives bfloat16 the kind V.
            inputs[spec.name] = rng.uniform(-1, 1, shape).astype(np.float32).astype(spec.dtype)
        else:
            inputs[spec.name] = rng.integers(0, 2, shape).astype(spec.dtype)
    return inputs


async def _run_raw(model: Any, inputs: Mapping[str, Array], rows: int, seconds: float) -> Measures:
    run = partial(model.session.run, None, dict(inputs))
    try:
        await _repeat(run, WARM_UP_S)
        batches, elapsed_ns, cpu_ns = await _repeat(run, seconds)
    except Exception as error:  # The runtime's own, of a model that refuses random values.
        raise ExecutionError(
            f"ONNX Runtime failed to run a batch of random values: {describe(error)}. Measure the model "
            "with values that it takes: asynctrt load"
        ) from error
    return {
        "rows_per_s": batches * rows / elapsed_ns * 1e9,
        "cpu_us_per_row": cpu_ns / (batches * rows) / 1e3,
        "batch_ms": elapsed_ns / batches / 1e6,
    }


async def _repeat(run: Callable[[], object], seconds: float) -> tuple[int, int, int]:
    """Run back to back for ``seconds``; return how often, and the time and the CPU time in ns."""
    count = elapsed_ns = used_ns = 0
    while elapsed_ns < seconds * 1e9:
        start_ns, start_cpu_ns = clock.now_ns(), clock.cpu_ns()
        end_ns = start_ns
        while end_ns - start_ns < RAW_SLICE_S * 1e9:
            run()
            count += 1
            end_ns = clock.now_ns()
        elapsed_ns += end_ns - start_ns
        used_ns += clock.cpu_ns() - start_cpu_ns
        await asyncio.sleep(0)
    return count, elapsed_ns, used_ns


async def _run_engine(
    model: Any,
    path: Path,
    name: str,
    options: Options,
    dims: Mapping[str, int],
    callers: int,
    seconds: float,
) -> Measures:
    is_host = name == "host"
    device = HostDevice(threads=max(1, cores() // model.intra_op_threads)) if is_host else name
    async with asynctrt.open(model if is_host else path, device=device, options=options) as engine:
        rows = model.rows_fixed or 1
        inputs = [random_inputs(model.inputs, dims, rows) for _ in range(callers)]
        measures, latencies_ns = await closed_loop(engine, inputs, seconds, timed=True)
    p50_ns, p99_ns = np.percentile(latencies_ns, [50, 99]) if latencies_ns else (0.0, 0.0)
    return {
        "rows_per_s": measures["requests_per_s"] * rows,
        "cpu_us_per_row": measures["cpu_us_per_request"] / rows,
        "mean_batch_rows": measures["mean_batch_rows"],
        "p50_ms": float(p50_ns) / 1e6,
        "p99_ms": float(p99_ns) / 1e6,
    }
