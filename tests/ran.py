"""What ran on what: `pytest --ran FILE` notes how many tests of each kind passed, and on which machine.

The files in `tests/benchmarks/results/` whose names begin with `ran-` become the table in docs/tested.md.
"""

import json
import re
from collections import Counter
from pathlib import PurePosixPath

from asynctrt.loadtest.making import describe_machine
from tests.benchmarks.common import describe_gpu
from tests.gpu.support import gpu_is_here

KINDS = (
    ("two GPUs of one host", ("tests/gpu/test_two_gpus.py",)),
    (
        "real `tensorrt_lean`, `tensorrt_dispatch`, `tensorrt_rtx`: with our callbacks, refusing plans",
        ("tests/gpu/test_tensorrt_real.py",),
    ),
    (
        "the same packages: names, arguments, enums against the double's; plans that RTX builds",
        ("tests/doubles/test_surface.py", "tests/backends/tensorrt/test_real.py"),
    ),
    (
        "workers that are killed, hang, or write where they must not",
        ("tests/gpu/test_workers.py",),
    ),
    (
        "ONNX models through ONNX Runtime's CUDA provider",
        ("tests/gpu/test_onnxruntime.py",),
    ),
    ("memory, streams, graphs, arrays of PyTorch, kernels that are compiled at run time", ("tests/gpu",)),
    ("the contract suites: devices, engines, profiles, hangs, lost devices", ("tests/contract",)),
    (
        "the TensorRT adapter over the strict double, and the double",
        ("tests/backends/tensorrt", "tests/doubles"),
    ),
    ("runtime and devices", ("tests/runtime", "tests/devices")),
    ("all else: scheduler, server, clients, load tests, examples", ("tests",)),
)
"""What a test shows, by where it is; the first that fits."""


def kind_of(nodeid):
    """Return what a test shows, and what it ran on: `cuda` or `host`."""
    path, _, name = nodeid.partition("::")
    parts = PurePosixPath(path)
    kind = next(kind for kind, places in KINDS if any(parts.is_relative_to(place) for place in places))
    is_contract = parts.is_relative_to("tests/contract") and re.search(r"\[.*\b(cuda|plans)\b.*\]", name)
    return kind, "cuda" if is_contract or parts.is_relative_to("tests/gpu") else "host"


def note(path, stats):
    """Write what passed, failed and was skipped, with the machine, from pytest's reports by their outcome."""
    counts = {}
    for outcome in ("passed", "failed", "skipped"):
        found = Counter(kind_of(report.nodeid) for report in stats.get(outcome, ()))
        counts[outcome] = [[kind, on, number] for (kind, on), number in sorted(found.items())]
    machine = describe_machine()
    if gpu_is_here():
        # Not before it is needed: it loads CUDA's bindings.
        from asynctrt.devices.cuda import CudaDevice

        machine["gpu"] = describe_gpu(CudaDevice())
    path.write_text(json.dumps({"machine": machine, **counts}, indent=1) + "\n")
