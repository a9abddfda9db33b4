"""What `batch_sizes` saves a PyTorch function from: the first batches of each size.

A network of the size of ResNet-50 (half precision, channels last, random weights), 100 callers who each send
an image, wait for the answer and then for 50 ms on average, so that batches have all sizes. With
`cudnn.benchmark` and then with `torch.compile`, each with and without `batch_sizes`: how long the engine
took to open, and images per second and latencies in the first seconds after that. Then 64 callers without
pauses, as a bound. Each case is a process of its own, since PyTorch keeps what it has prepared.

On the host device a function that sleeps at each new size in each thread stands in for it.
"""

import asyncio
import json
import random
import subprocess
import sys
import threading

import numpy as np

import asynctrt
from asynctrt._util import clock
from tests.benchmarks.common import parser_of, quantiles_us, save, show
from tests.benchmarks.gpu.support import open_device

SIZES = (1, 2, 4, 8, 16, 32, 64)
CALLERS = 100
PAUSE_S = 0.05
CONTEXTS = 2
CHILD_LIMIT_S = 240
FIRST_S = 0.02
"""What the stand-in takes for a new size."""


def network():
    """Return a network with the layers of ResNet-50: 53 convolutions, 25.5 million weights."""
    from torch import nn

    class Bottleneck(nn.Module):
        def __init__(self, before, width, stride):
            super().__init__()
            after = 4 * width
            self.body = nn.Sequential(
                nn.Conv2d(before, width, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, after, 1, bias=False),
                nn.BatchNorm2d(after),
            )
            is_same = stride == 1 and before == after
            self.beside = nn.Identity() if is_same else nn.Conv2d(before, after, 1, stride, bias=False)

        def forward(self, x):
            return nn.functional.relu(self.body(x) + self.beside(x))

    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Bottleneck(before, width, 1 if number else stride))
            before = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


class OnGpu:
    """Computes images on a GPU, each thread on a stream of its own, from pinned memory of its own."""

    image = (3, 224, 224)

    def __init__(self, *, compiles):
        import torch

        self.torch = torch
        torch.backends.cudnn.benchmark = True
        torch.manual_seed(0)
        self.network = network().eval().half().to("cuda", memory_format=torch.channels_last)
        if compiles:
            self.network = torch.compile(self.network)
        self.local = threading.local()

    def __call__(self, inputs):
        torch, local = self.torch, self.local
        if not hasattr(local, "stream"):
            local.stream = torch.cuda.Stream()
            local.pinned = torch.empty((SIZES[-1], *self.image), dtype=torch.uint8, pin_memory=True)
        with torch.inference_mode(), torch.cuda.stream(local.stream):
            pinned = local.pinned[: len(inputs["image"])]
            pinned.copy_(torch.from_numpy(inputs["image"]))
            images = pinned.to("cuda", non_blocking=True).half().div_(255)
            logits = self.network(images.contiguous(memory_format=torch.channels_last))
            return logits.float().cpu().numpy()


class StandIn:
    """Sleeps at each size that is new in its thread."""

    image = (3, 4, 4)

    def __init__(self, *, compiles):
        self.local = threading.local()

    def __call__(self, inputs):
        rows = len(inputs["image"])
        seen = vars(self.local).setdefault("seen", set())
        if rows not in seen:
            seen.add(rows)
            threading.Event().wait(FIRST_S)
        return np.zeros((rows, 1000), np.float32)


async def measure(device, *, compiles, sizes, seconds):
    """Open an engine, and return the figures of its first seconds."""
    function = (StandIn if device == "host" else OnGpu)(compiles=compiles)
    model = asynctrt.FunctionModel(
        function,
        inputs=asynctrt.TensorSpec("image", "uint8", function.image),
        outputs=asynctrt.TensorSpec("logits", "float32", (1000,)),
        batch_sizes=sizes or None,
    )
    image = np.random.default_rng(0).integers(0, 256, (1, *function.image), np.uint8)
    start_ns = clock.now_ns()
    async with asynctrt.open(model, contexts=CONTEXTS, batch_timeout=None, max_rows=SIZES[-1]) as engine:
        opened_ns = clock.now_ns()

        async def calls(pause_s, until_ns, seed):
            rng, took_ns = random.Random(seed), []
            while clock.now_ns() < until_ns:
                if pause_s:
                    await asyncio.sleep(rng.expovariate(1 / pause_s))
                sent_ns = clock.now_ns()
                await engine.infer(image)
                took_ns.append(clock.now_ns() - sent_ns)
            return took_ns

        async def together(callers, pause_s, seconds):
            begun_ns = clock.now_ns()
            until_ns = begun_ns + int(seconds * 1e9)
            each = await asyncio.gather(*(calls(pause_s, until_ns, seed) for seed in range(callers)))
            times_ns = [took_ns for took in each for took_ns in took]
            passed_s = (clock.now_ns() - begun_ns) / 1e9
            return {"images_per_s": len(times_ns) / passed_s, **quantiles_us(times_ns)}

        first = await together(CALLERS, PAUSE_S, seconds)
        later = await together(CALLERS, PAUSE_S, seconds)
        full = await together(SIZES[-1], 0, seconds)
    return {"open_s": (opened_ns - start_ns) / 1e9, "first": first, "later": later, "full": full}


CASES = {
    "cudnn.benchmark": {"compiles": False, "sizes": ()},
    "cudnn.benchmark, batch_sizes": {"compiles": False, "sizes": SIZES},
    "torch.compile": {"compiles": True, "sizes": ()},
    "torch.compile, batch_sizes": {"compiles": True, "sizes": SIZES},
}


def in_child(name, args):
    """Run a case in a process of its own; return its figures."""
    command = [sys.executable, "-m", "tests.benchmarks.gpu.function_sizes", "--case", name]
    command += ["--device", args.device, "--seconds", str(args.seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=CHILD_LIMIT_S, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    args = parser_of(__doc__, device="cuda:0", seconds=4.0, case="").parse_args()
    if args.case:
        print(json.dumps(asyncio.run(measure(args.device, seconds=args.seconds, **CASES[args.case]))))
        return
    device, found = open_device(args.device), {name: in_child(name, args) for name in CASES}
    show(
        "100 callers at random after the engine has opened",
        (
            "",
            "opens in s",
            f"images/s, first {args.seconds:g} s",
            "p50 ms",
            "p99 ms",
            "max ms",
            f"images/s, next {args.seconds:g} s",
            "p99 ms",
            "images/s, 64 at once",
        ),
        [
            (
                name,
                f"{figures['open_s']:.2f}",
                f"{figures['first']['images_per_s']:,.0f}",
                *(f"{figures['first'][what] / 1e3:,.1f}" for what in ("p50_us", "p99_us", "max_us")),
                f"{figures['later']['images_per_s']:,.0f}",
                f"{figures['later']['p99_us'] / 1e3:,.1f}",
                f"{figures['full']['images_per_s']:,.0f}",
            )
            for name, figures in found.items()
        ],
        device=device,
    )
    save(args.json, __doc__, found, device)


if __name__ == "__main__":
    main()
