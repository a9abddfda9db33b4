"""A detector whose dimensions are all symbolic, as people export them: how fast it is as it opens by default.

``--model`` is the file, such as NudeNet's ``320n.onnx`` from its wheel; without it a small network with the
same dimensions is made. In one run: ONNX Runtime alone, by a loop of single runs and told its sizes; how long
it takes until the engine has contexts for the shape, and what others notice meanwhile; then callers who send
one row again and again, and callers who wait at random between two requests.
"""

import asyncio
import logging
import tempfile
from pathlib import Path

import numpy as np
import uvloop

import asynctrt
from asynctrt._util import clock
from asynctrt._util.process import freeze_gc
from asynctrt.devices.host import HostDevice
from tests.benchmarks.common import parser_of, quantiles_us, save
from tests.benchmarks.gpu.support import open_device
from tests.models import detector_onnx

CALLERS = (1, 8, 40, 128)
RANDOM_CALLERS, RANDOM_S = 100, 0.05


def options():
    parser = parser_of(
        __doc__,
        device="cuda:0",
        side=320,
        seconds=3.0,
        callers=",".join(map(str, CALLERS)),
        random=RANDOM_CALLERS,
        graphs="auto",
        contexts=0,
        known=False,  # Say the shape when the engine is opened.
        shapes=0,  # Also send this many other sides, one each.
    )
    parser.add_argument("--model", type=Path)
    return parser.parse_args()


def session_of(path, device, shape=None):
    """Return a session of ONNX Runtime; one that is told ``shape`` knows the sizes of its first input."""
    import onnxruntime as ort

    chosen = ort.SessionOptions()
    chosen.log_severity_level = 3
    if shape is not None:
        on_host = ort.InferenceSession(str(path), chosen, providers=["CPUExecutionProvider"])
        for dim, size in zip(on_host.get_inputs()[0].shape, shape, strict=True):
            if isinstance(dim, str):
                chosen.add_free_dimension_override_by_name(dim, size)
    on_gpu = ("CUDAExecutionProvider", {"cudnn_conv_algo_search": "HEURISTIC"})
    return ort.InferenceSession(
        str(path), chosen, providers=["CPUExecutionProvider" if device == "host" else on_gpu]
    )


def alone(path, given, images):
    """Return images a second of ONNX Runtime: by single runs, and told its sizes, in batches of some rows."""

    def rate(rows, *, told):
        batch = np.concatenate(images[:rows])
        session = session_of(path, given.device, batch.shape if told else None)
        sent = {session.get_inputs()[0].name: batch}
        session.run(None, sent)
        session.run(None, sent)
        start_ns, done = clock.now_ns(), 0
        while clock.now_ns() - start_ns < given.seconds / 4 * 1e9:
            session.run(None, sent)
            done += rows
        return done / (clock.now_ns() - start_ns) * 1e9

    return {"single runs": rate(1, told=False)} | {
        f"told, {rows} rows": rate(rows, told=True) for rows in (1, 8, 64)
    }


async def call(infer, images, count, seconds, wait_s=0.0):
    """Return images a second and latencies of callers, who may wait at random before each request."""
    latencies_ns, until_ns, start_ns = [], clock.now_ns() + int(seconds * 1e9), clock.now_ns()

    async def one(number):
        rng = np.random.default_rng(number)
        while clock.now_ns() < until_ns:
            if wait_s:
                await asyncio.sleep(rng.exponential(wait_s))
            sent_ns = clock.now_ns()
            await infer(images[(number * 7 + len(latencies_ns)) % len(images)])
            latencies_ns.append(clock.now_ns() - sent_ns)

    done = asyncio.get_running_loop().create_future()
    watching = asyncio.ensure_future(pauses(done))
    await asyncio.gather(*(one(number) for number in range(count)))
    done.set_result(None)
    pause_ms = await watching
    return {
        "pause_ms": pause_ms,
        "per_s": len(latencies_ns) / (clock.now_ns() - start_ns) * 1e9,
        **quantiles_us(latencies_ns),
    }


async def pauses(until):
    """Return the longest time for which the loop did not run, in ms, until a future is done."""
    longest_ns, last_ns = 0, clock.now_ns()
    while not until.done():
        await asyncio.sleep(0.0005)
        now_ns = clock.now_ns()
        longest_ns, last_ns = max(longest_ns, now_ns - last_ns), now_ns
    return longest_ns / 1e6


async def until_specialised(engine, infer, images, count=8, patience_s=90):
    """Return after how many s a shape has contexts of its own, and what callers notice until then."""
    start_ns, figures = clock.now_ns(), []
    while not engine.statistics().specialised and clock.now_ns() - start_ns < patience_s * 1e9:
        figures.append(await call(infer, images, count, 0.5))
    return {
        "after_s": (clock.now_ns() - start_ns) / 1e9,
        "pause_ms": max((one["pause_ms"] for one in figures), default=0.0),
        "p99_us": max((one["p99_us"] for one in figures), default=0.0),
        "max_us": max((one["max_us"] for one in figures[1:]), default=0.0),
        "per_s": [round(one["per_s"]) for one in figures],
    }


def line(name, found):
    print(
        f"  {name:22} {found['per_s']:8,.0f}/s  p50 {found['p50_us'] / 1e3:6.2f}  "
        f"p99 {found['p99_us'] / 1e3:6.2f}  longest {found['max_us'] / 1e3:6.1f}  "
        f"pause of the loop {found['pause_ms']:5.1f} ms",
        flush=True,
    )


def opening(path, given):
    """Return a device, and an engine on it that is to be opened."""
    is_host, settings = given.device == "host", {}
    # The host's sessions tell the shape of an output only if they have run when they are asked.
    device = HostDevice(in_place="always", unified=False) if is_host else open_device(given.device)
    if given.graphs != "auto":
        settings["graphs"] = given.graphs
    if given.contexts:
        settings["contexts"] = given.contexts
    if given.known:
        settings["onnx"] = {"shapes": {"images": (3, given.side, given.side)}}
    if not is_host:
        return device, asynctrt.open(path, device=device, **settings)
    from tests.backends.onnx_sessions import SpecialisedSessions

    settings |= {"contexts": 2, "max_rows": 8, "graphs": (1, 2, 4, 8)}
    return device, asynctrt.open(SpecialisedSessions(path), device=device, **settings)


async def ever_new(engine, path, given, rng):
    """Return images a second of images that each have another shape: by ONNX Runtime alone, by the engine."""
    count = given.shapes
    images = [rng.random((1, 3, 32 * (1 + n % 8), 32 * (1 + n // 8)), np.float32) for n in range(count)]
    session = session_of(path, given.device)
    name = session.get_inputs()[0].name
    start_ns = clock.now_ns()
    for image in images:
        session.run(None, {name: image})
    alone_ns = clock.now_ns() - start_ns
    start_ns = clock.now_ns()
    for number in range(0, count, 8):
        await asyncio.gather(*(engine.infer(image) for image in images[number : number + 8]))
    return {"alone": count / alone_ns * 1e9, "engine": count / (clock.now_ns() - start_ns) * 1e9}


async def differences(engine, images, expected):
    """Return how far answers are from those before the shape was specialised, as shares of the largest."""
    off = 0.0
    for image, before in zip(images, expected, strict=False):
        answers = await asyncio.gather(*(engine.infer(image) for _ in range(5)))
        for name, values in before.items():
            most = max(float(np.abs(values).max()), 1e-6)
            off = max([off, *(float(np.abs(one[name] - values).max()) / most for one in answers)])
    return off


async def measure(path, given):
    """Print and return all figures of a model, and the device."""
    rng = np.random.default_rng(1)
    images = [rng.random((1, 3, given.side, given.side), np.float32) for _ in range(64)]
    print(f"{path.name}, rows of 3x{given.side}x{given.side}")
    figures = {"alone": alone(path, given, images)}
    for name, rate in figures["alone"].items():
        print(f"  ONNX Runtime, {name:16} {rate:8,.0f}/s", flush=True)
    device, opened = opening(path, given)
    start_ns = clock.now_ns()
    async with opened as engine:
        figures["opened_s"] = (clock.now_ns() - start_ns) / 1e9
        print(f"  opened in {figures['opened_s']:.1f} s; padded to {engine.statistics().batch_sizes}")
        expected = [await engine.infer(image) for image in images[:4]]
        freeze_gc()  # As in an application that is careful.
        figures["general at random"] = await call(engine.infer, images, given.random, 0.5, RANDOM_S)
        line("until then, at random", figures["general at random"])
        figures["specialising"] = await until_specialised(engine, engine.infer, images)
        print(f"  specialised: {figures['specialising']}")
        for shape in engine.statistics().specialised:
            print(f"  {shape}", flush=True)
        for count in map(int, given.callers.split(",")):
            await call(engine.infer, images, count, given.seconds / 10)
            found = figures[f"{count} callers"] = await call(engine.infer, images, count, given.seconds)
            line(f"{count} callers", found)
        found = figures["at random"] = await call(engine.infer, images, given.random, given.seconds, RANDOM_S)
        line(f"{given.random} at random", found)
        figures["off_by"] = await differences(engine, images, expected)
        print(f"  answers are off by {figures['off_by']:.2g} of the largest at most")
        if given.shapes:
            found = figures["ever new"] = await ever_new(engine, path, given, rng)
            print(
                f"  {given.shapes} shapes, each new: {found['engine']:,.1f}/s, by ONNX Runtime alone "
                f"{found['alone']:,.1f}/s"
            )
    return figures, device


async def main():
    given = options()
    logging.basicConfig(level=logging.INFO, format="  %(message)s")
    logging.getLogger("asynctrt").setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        path = given.model or Path(detector_onnx(Path(folder) / "detector.onnx"))
        figures, device = await measure(path, given)
    settings = {name: str(value) for name, value in vars(given).items()}
    save(given.json, "a detector with symbolic dimensions", {"settings": settings, **figures}, device)
    device.close()


if __name__ == "__main__":
    uvloop.run(main())
