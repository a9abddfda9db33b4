"""Two GPUs against one: two engines on one event loop, and workers with a GPU each.

The model is an encoder as large as BERT's base with random weights, which torch exports, or ``--model``: an
ONNX file with one input of token ids. One device that is named alone, such as the host, is used twice.

    python -m tests.benchmarks.gpu.two_gpus --device cuda:0,cuda:1
"""

import argparse
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import uvloop

import asynctrt
from asynctrt._util.process import freeze_gc
from tests.benchmarks.common import save
from tests.benchmarks.gpu.support import asked_again, open_device, quantiles_us
from tests.models import sequence_onnx

TOLERANCE = 5e-2
"""The encoder's answers are sums of normalised values, computed by other kernels for other batch sizes."""


def options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="cuda:0,cuda:1")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--callers", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


async def measure(engines, texts, expected, given):
    """Return answers a second and latencies of callers who are divided among ``engines``."""
    callers = [(engines[number % len(engines)], number % len(texts)) for number in range(given.callers)]

    async def infer(caller):
        engine, text = caller
        return next(iter((await engine.infer(texts[text])).values()))

    def check(caller, answer):
        right = expected[caller[1]]
        if not np.allclose(answer, right, atol=TOLERANCE, rtol=TOLERANCE):
            raise SystemExit(f"wrong answer: {np.abs(answer - right).max()} off")

    latencies_ns, took_ns, cpu_ns, *_ = await asked_again(infer, callers, given.seconds, check)
    return {
        "per_s": len(latencies_ns) / took_ns * 1e9,
        "cores": cpu_ns / took_ns,
        **quantiles_us(latencies_ns or [took_ns]),
    }


async def main():
    given = options()
    devices = (given.device.split(",") * 2)[:2]
    on_host = devices[0] == "host"
    rng = np.random.default_rng(3)
    with tempfile.TemporaryDirectory() as folder:
        path = given.model
        if path is None and on_host:
            path = Path(folder) / "sequence.onnx"
            sequence_onnx(path)
        elif path is None:
            from tests.benchmarks.gpu import onnx_models

            failed = onnx_models.export(Path(folder))
            path = Path(folder) / "encoder.onnx"
            if not path.exists():
                raise SystemExit(f"torch could not export the encoder: {failed}")
        tokens = rng.integers(0, 256, (32, 1, given.tokens))
        texts = list(tokens.astype(np.float32) if on_host and given.model is None else tokens)
        settings = {} if on_host else {"onnx": {"shapes": {"tokens": (given.tokens,)}}}
        ways = {
            "one engine": [{"device": devices[0]}],
            "two engines": [{"device": device} for device in devices],
            "one worker": [{"device": devices[0], "isolation": "process"}],
            "two workers": [{"device": ",".join(devices), "isolation": "process"}],
        }
        figures = {}
        expected = None
        for way, opened in ways.items():
            async with AsyncExitStack() as stack:
                engines = [
                    await stack.enter_async_context(asynctrt.open(path, **settings, **one)) for one in opened
                ]
                if expected is None:
                    expected = [next(iter((await engines[0].infer(text)).values())) for text in texts]
                runs = [await measure(engines, texts, expected, given) for _ in range(given.repeats)]
            figures[way] = sorted(runs, key=lambda run: run["per_s"])[len(runs) // 2]
            rates = [f"{run['per_s']:,.0f}" for run in runs]
            figures[way]["spread"] = [run["per_s"] for run in runs]
            print(
                f"  {way:12} {figures[way]['per_s']:8,.0f}/s ({', '.join(rates)})  "
                f"p50 {figures[way]['p50_us'] / 1e3:.1f}  p99 {figures[way]['p99_us'] / 1e3:.1f} ms  "
                f"{figures[way]['cores']:.2f} cores",
                flush=True,
            )
    for one, two in (("one engine", "two engines"), ("one worker", "two workers")):
        print(f"  {two} over {one}: {figures[two]['per_s'] / figures[one]['per_s']:.2f}", flush=True)
    save(given.json, "two GPUs", figures, open_device(devices[0]))


if __name__ == "__main__":
    freeze_gc()
    uvloop.run(main())
