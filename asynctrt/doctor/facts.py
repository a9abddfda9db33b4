"""Gather the facts about this machine, the risky ones in child processes, several at a time."""

import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

from asynctrt._util.cgroup import text_of
from asynctrt.backends.tensorrt_options import FLAVOURS
from asynctrt.doctor.children import ProbeOutcome, ask, kill

PACKAGES: Final = ("onnxruntime", "cuda.bindings.driver")
"""The packages whose import is tried, besides TensorRT's own."""

NVIDIA: Final = "0x10de"
"""NVIDIA's vendor id on the PCI bus."""

Ask = Callable[..., ProbeOutcome]


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that the checks interpret."""

    env: Mapping[str, str]
    device: str | None
    """The device that must work, if the user named one."""
    python: str
    """The version of Python."""
    gpu_signs: tuple[str, ...]
    """``/dev/nvidia*``, ``/dev/dxg`` of WSL, and the PCI paths of NVIDIA's GPUs."""
    distributions: Mapping[str, str]
    """The versions of installed packages, by name in lower case with hyphens."""
    driver: ProbeOutcome
    packages: Mapping[str, ProbeOutcome]
    """The outcome of importing each package of TensorRT and each of ``PACKAGES``."""
    engines: Mapping[str, ProbeOutcome]
    """The outcome of trying each device, and a ``worker``."""

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs that CUDA shows, as it describes them."""
        return list(self.driver.value["devices"]) if self.driver.has_answered else []

    @property
    def expects_gpu(self) -> bool:
        """Whether there is a GPU, or the user wants one."""
        is_named = (self.device or "").startswith("cuda")
        return bool(is_named or self.gpu_signs or self.gpus)


def find_gpu_signs(root: Path = Path("/")) -> Iterator[Path]:
    """Yield the files by which the operating system shows a GPU, even without a driver."""
    yield from sorted((root / "dev").glob("nvidia*"))
    yield from (root / "dev").glob("dxg")
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        # Classes 0x0300 and 0x0302: with a screen and without. A GPU has an audio device beside it.
        if text_of(device / "vendor") == NVIDIA and (text_of(device / "class") or "").startswith("0x03"):
            yield device


def gather(*, device: str | None = None, timeout_s: float, ask: Ask = ask) -> Facts:
    """Return the facts about this machine. Blocks; no probe takes longer than ``timeout_s``. Ctrl-C ends it.

    :param device: the device that must work: ``host``, ``cuda:0`` and so on. Default: all are tried.
    :param ask: runs a probe; for tests.
    """
    env = dict(os.environ)
    # The engine probe imports asynctrt from the same place as this process.
    place = str(Path(__file__).parents[2])
    ours = {**env, "PYTHONPATH": os.pathsep.join(filter(None, (place, env.get("PYTHONPATH"))))}
    running = set[subprocess.Popen[bytes]]()

    def run(probe: str, *args: str, env: Mapping[str, str] = env) -> ProbeOutcome:
        return ask(probe, *args, timeout_s=timeout_s, env=env, running=running)

    # In exclusive mode a GPU accepts one process at a time, so probes that use it run alone.
    with (
        ThreadPoolExecutor() as pool,
        ThreadPoolExecutor(1) as alone,
        _interruptible(running, pool, alone),
    ):
        driver = run("driver")
        gpus = [f"cuda:{ordinal}" for ordinal in range(len(driver.value["devices"]) if driver.value else 0)]
        # Without a GPU, no TensorRT runtime can be made; the findings about the driver cover that.
        runtime = ["runtime"] if gpus else []
        packages = {name: alone.submit(run, "package", name, *runtime) for name in FLAVOURS}
        packages |= {name: pool.submit(run, "package", name) for name in PACKAGES}
        names = dict.fromkeys(["host", *(gpus if device is None else [device]), "worker"])
        engines = {
            name: (alone if name.startswith("cuda") else pool).submit(run, "engine", name, env=ours)
            for name in names
        }
        return Facts(
            env=env,
            device=device,
            python=platform.python_version(),
            gpu_signs=tuple(map(str, find_gpu_signs())),
            distributions={
                str(one.metadata["Name"]).lower().replace("_", "-"): one.version for one in distributions()
            },
            driver=driver,
            packages={name: future.result() for name, future in packages.items()},
            engines={name: future.result() for name, future in engines.items()},
        )


@contextmanager
def _interruptible(running: set[subprocess.Popen[bytes]], *pools: ThreadPoolExecutor) -> Iterator[None]:
    """After Ctrl-C, kill the probes that run and start no more, instead of waiting for each to end."""
    try:
        yield
    except BaseException:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for child in tuple(running):
            kill(child)
        raise
