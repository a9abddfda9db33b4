"""Gather all that can be known about this machine, the risky parts in child processes, several at a time."""

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

from asynctrt.doctor.children import Ending, Outcome, ask
from asynctrt.doctor.libraries import SearchPath, read_search_path
from asynctrt.doctor.machine import Machine, read_machine
from asynctrt.tensorrt_options import FLAVOURS

CHILDREN_MAX: Final = 4
"""Probes that run at once."""

DISTRIBUTIONS: Final = ("tensorrt", "nvidia-", "cuda-", "onnxruntime", "nvidia_ml", "numpy")
"""How the names of packages begin whose versions matter."""

Ask = Callable[..., Outcome]


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the checks look at."""

    env: Mapping[str, str]
    device: str | None
    """The device that has to work, if the user named one."""
    machine: Machine
    search_path: SearchPath
    distributions: Mapping[str, str]
    """The versions of installed packages, by name in lower case with hyphens."""
    libraries: Mapping[str, Outcome]
    """For each name that a program may ask the loader for, the file that it gets."""
    driver: Outcome
    nvml: Outcome
    kernel_log: Outcome
    packages: Mapping[str, Outcome]
    """For each flavour of TensorRT, ``onnxruntime`` and ``cuda.bindings.driver``: how its import ended."""
    engines: Mapping[str, Outcome]
    """For each device: how a round trip and a request ended."""
    worker: Outcome
    """How an engine in a worker process did, whose worker was killed."""

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """What CUDA tells about each GPU that it shows."""
        return list(self.driver.value["devices"]) if self.driver.has_answered else []

    @property
    def cuda_version(self) -> tuple[int, int] | None:
        """The CUDA version that the driver supports."""
        version = self.driver.value["version"] if self.driver.has_answered else 0
        return (version // 1000, version % 1000 // 10) if version else None

    @property
    def expects_gpu(self) -> bool:
        """Whether there is a GPU, or the user wants one."""
        machine = self.machine
        return bool(
            (self.device or "").startswith("cuda")
            or machine.gpus_on_the_bus
            or machine.device_nodes
            or self.gpus
        )


def gather(
    *,
    device: str | None = None,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    on_done: Callable[[str], None] = lambda _: None,
    ask: Ask = ask,
) -> Facts:
    """Return all that can be known about this machine. Blocks; no probe takes longer than ``timeout_s``.

    :param device: the device that has to work: ``host``, ``cuda:0`` and so on. Others are looked at too.
    :param env: the environment of the probes. Default: that of this process.
    :param on_done: called with the name of each probe that has ended, from several threads.
    :param ask: runs a probe; for tests.
    """
    env = dict(os.environ if env is None else env)
    search_path = read_search_path(env)

    def run(probe: str, *args: str, env: Mapping[str, str] = env) -> Outcome:
        outcome = ask(probe, *args, timeout_s=timeout_s, env=env)
        on_done(" ".join((probe, *args))[:40])
        return outcome

    with ThreadPoolExecutor(CHILDREN_MAX) as pool:
        driver = pool.submit(run, "driver")
        nvml = pool.submit(run, "nvml")
        kernel_log = pool.submit(run, "kernel_log")
        packages = {
            name: pool.submit(run, "package", name)
            for name in (*FLAVOURS, "onnxruntime", "cuda.bindings.driver")
        }
        libraries = pool.submit(_load_all, run, search_path.names())
        found = driver.result()
        names = ["host"] if device == "host" else ["host", *_devices(device, found)]
        engines = {name: pool.submit(run, "engine", name, "1", env=_with_us(env)) for name in names}
        worker = pool.submit(run, "worker", env=_with_us(env))
        return Facts(
            env=env,
            device=device,
            machine=read_machine(),
            search_path=search_path,
            distributions=_distributions(),
            libraries=libraries.result(),
            driver=found,
            nvml=nvml.result(),
            kernel_log=kernel_log.result(),
            packages={name: future.result() for name, future in packages.items()},
            engines={name: future.result() for name, future in engines.items()},
            worker=worker.result(),
        )


def _devices(device: str | None, driver: Outcome) -> list[str]:
    """Return the GPUs to try: the one that was named, or all."""
    if device is not None:
        return [device]
    count = len(driver.value["devices"]) if driver.has_answered else 0
    return [f"cuda:{ordinal}" for ordinal in range(count)]


def _load_all(run: Callable[..., Outcome], names: tuple[str, ...]) -> dict[str, Outcome]:
    """Load libraries in one child, or each in its own if that ends badly."""
    together = run("library", json.dumps(names))
    if together.ending is Ending.ANSWERED:
        return {name: Outcome(Ending.ANSWERED, together.value[name]) for name in names}
    found = {}
    for name in names:
        alone = run("library", json.dumps([name]))
        value = alone.value[name] if alone.has_answered else None
        found[name] = Outcome(alone.ending, value, alone.said)
    return found


def _with_us(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python finds asynctrt where this process has found it."""
    ours = str(Path(__file__).parents[2])
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (ours, env.get("PYTHONPATH"))))}


def _distributions() -> dict[str, str]:
    found = {}
    for one in distributions():
        name = (one.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith(DISTRIBUTIONS):
            found[name] = one.version
    return found
