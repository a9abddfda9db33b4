"""Two GPUs against one: two engines on one event loop, and workers with a GPU each.

The model is an encoder as large as BERT's base with random weights, which torch exports, or ``--model``: an
ONNX file with one input of token ids. One device that is named alone, such as the host, is used twice.

    python -m tests.benchmarks.gpu.two_gpus --device cuda:0,cuda:1
"""

import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import uvloop

import asynctrt
from asynctrt._util.process import freeze_gc
from tests.benchmarks.common import median, parser_of, report, requests_of, save
from tests.benchmarks.gpu.support import open_device
from tests.models import sequence_onnx

TOLERANCE = 5e-2
"""The encoder's answers are sums of normalised values, computed by other kernels for other batch sizes."""


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

    return await requests_of(infer, callers, given.seconds, check)


async def main():
    parser = parser_of(__doc__, device="cuda:0,cuda:1", tokens=64, callers=512, seconds=4.0, repeats=3)
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
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
                figures[way] = [await measure(engines, texts, expected, given) for _ in range(given.repeats)]
    device = open_device(devices[0])
    formats = {"requests_per_s": ",.0f", "p50_us": ",.0f", "p99_us": ",.0f", "cores": ".2f"}
    report(f"{given.callers} callers", figures, device=device, **formats)
    for one, two in (("one engine", "two engines"), ("one worker", "two workers")):
        ratio = median(figures[two], "requests_per_s") / median(figures[one], "requests_per_s")
        print(f"{two} over {one}: {ratio:.2f}", flush=True)
    save(given.json, "two GPUs", figures, device)


if __name__ == "__main__":
    freeze_gc()
    uvloop.run(main())
