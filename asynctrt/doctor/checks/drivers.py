"""The NVIDIA driver: whether it is there, fits its other half in the kernel, and shows the GPUs."""

import re
from collections.abc import Iterator
from typing import Final

from asynctrt.doctor.children import Ending
from asynctrt.doctor.facts import Facts
from asynctrt.doctor.findings import Finding, error, note, ok, unknown, warning

CUDA_MIN: Final = (12, 0)
"""The oldest CUDA version of a driver that asynctrt runs on."""

CAUSES: Final = {
    3: ("the driver could not be initialised", "Look at the kernel's log (dmesg) for lines of NVRM"),
    34: (
        "a stub of libcuda was loaded, which only linkers can use",
        "Take the folder named stubs out of LD_LIBRARY_PATH",
    ),
    46: ("the GPU is busy or unavailable", "Look who uses it: nvidia-smi"),
    100: (
        "the driver shows no GPU",
        "Look at CUDA_VISIBLE_DEVICES; start a container with --gpus all; look at nvidia-smi",
    ),
    101: ("CUDA_VISIBLE_DEVICES or the request names no GPU that there is", "Look at nvidia-smi -L"),
    802: (
        "the system is not ready: GPUs with NVSwitch need the fabric manager",
        "Start it: systemctl start nvidia-fabricmanager",
    ),
    803: (
        "libcuda and the driver in the kernel are of different versions",
        "Restart the machine after an update of the driver; in a container take libcuda out of the image",
    ),
    804: (
        "libcuda of a cuda-compat package does not run on this kind of GPU",
        "Take the folder compat out of LD_LIBRARY_PATH, or update the driver",
    ),
    999: ("an unknown error", "Look at the kernel's log (dmesg); restart the machine"),
}
"""What ``cuInit`` returns, what it means and what to do."""

XIDS: Final = {
    13: ("a kernel broke a rule of the GPU: it was launched wrongly, or reached beyond its memory", False),
    31: ("a program reached memory on the GPU that is not its own", False),
    32: ("damaged commands reached the GPU", False),
    43: ("a program's work was stopped after a fault of its own", False),
    45: ("work was removed, mostly after an earlier fault or as the process ended", False),
    48: ("the GPU's memory had an error that cannot be corrected", True),
    61: ("the GPU's own microcontroller failed", True),
    62: ("the GPU's own microcontroller failed", True),
    63: ("a page or row of the GPU's memory was retired", True),
    64: ("a bad page or row of the GPU's memory could not be retired", True),
    74: ("an error of NVLink", True),
    79: ("the GPU fell off the bus", True),
    92: ("many errors of the GPU's memory were corrected", True),
    94: ("an error of the GPU's memory, confined to one program", True),
    95: ("an error of the GPU's memory that was not confined", True),
    119: ("the GPU's system processor does not answer", True),
}
"""Faults by their numbers: what they mean, and whether the hardware is the likely cause."""

NEEDS_NO_GPU: Final = "Without a GPU, models run on the host device: asynctrt.open(..., device='host')."


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what is known about the driver."""
    yield from _versions(facts)
    if facts.driver.has_answered:
        yield from _initialised(facts)
    else:
        yield _missing(facts)
    yield from _named(facts)
    yield from _faults(facts)


def _versions(facts: Facts) -> Iterator[Finding]:
    """Compare the two halves of the driver: the module in the kernel, and libcuda."""
    kernel = facts.machine.kernel_driver
    for one in facts.search_path.named("libcuda.so.1")[:1]:
        if kernel and one.version and "." in one.version and one.version != kernel:
            compat = "compat" in one.path.parts or (one.target is not None and "compat" in one.target.parts)
            make = note if compat else error
            yield make(
                "driver.mismatch",
                f"libcuda is {one.version} ({one.target}), and the driver in the kernel is {kernel}",
                "That is what a cuda-compat package is for, on data-centre GPUs alone; elsewhere CUDA does "
                "not start with it."
                if compat
                else "Two versions do not work together: CUDA does not start, or crashes later.",
                "Take the folder compat out of LD_LIBRARY_PATH if CUDA does not start"
                if compat
                else "Restart the machine after an update of the driver. In a container, take libcuda out of "
                "the image: the container's runtime mounts the machine's own",
            )


def _missing(facts: Facts) -> Finding:
    outcome, machine = facts.driver, facts.machine
    if outcome.ending in (Ending.CRASHED, Ending.HUNG, Ending.GARBLED):
        return error(
            "driver.broken",
            f"Asking libcuda for its devices ended badly: {outcome.said}",
            "Every program that uses CUDA will end in the same way.",
            "Reinstall the driver and restart the machine; see whether nvidia-smi works, and what the "
            "kernel's log says (dmesg | grep NVRM)",
        )
    if "cannot open shared object file" not in outcome.said:
        return error(
            "driver.broken",
            f"libcuda.so.1 is there but cannot be used: {outcome.said}",
            "Nothing that uses CUDA starts.",
            "Reinstall the driver; look below at what the loader takes and from where",
        )
    if machine.gpus_on_the_bus or machine.device_nodes:
        seen = ", ".join(machine.device_nodes[:3]) or f"{machine.gpus_on_the_bus} on the PCI bus"
        return error(
            "driver.missing",
            f"There is an NVIDIA GPU ({seen}), but no libcuda.so.1",
            "Nothing that uses CUDA starts without the driver's library.",
            "Install the NVIDIA driver, after which nvidia-smi works. In a container, start it with --gpus "
            "all and NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    make = error if facts.expects_gpu else note
    return make(
        "driver.missing",
        "There is no NVIDIA driver (libcuda.so.1), and no sign of an NVIDIA GPU",
        f"TensorRT plans need both. {NEEDS_NO_GPU}",
        "If there should be one: install the NVIDIA driver; start a container with --gpus all",
    )


def _initialised(facts: Facts) -> Iterator[Finding]:
    told, cuda = facts.driver.value, facts.cuda_version
    version = ".".join(map(str, cuda)) if cuda else "unknown"
    kernel = facts.machine.kernel_driver
    module = f", module {kernel}" if kernel else ""
    code = told["init"]["code"] or told.get("count", {}).get("code", 0)
    if facts.driver.ending is not Ending.ANSWERED:
        yield error(
            "driver.broken",
            f"Asking libcuda for its devices worked, but ended badly: {facts.driver.said}",
            "Programs that use CUDA may crash or hang when they end.",
            "Update the driver; look below for a library that is loaded from an unexpected place",
        )
    if code:
        cause, fix = CAUSES.get(code, ("CUDA does not start", "Look at nvidia-smi and at the kernel's log"))
        name = told["init"]["name"] or f"error {code}"
        hidden = _hidden(facts)
        make = error if facts.expects_gpu else note
        yield hidden or make(
            "driver.init",
            f"CUDA {version}{module}: {cause} ({name})",
            "Nothing that uses CUDA starts.",
            fix,
        )
        return
    if not facts.gpus:
        yield _hidden(facts) or error(
            "driver.no_gpu",
            f"CUDA {version}{module} starts, but shows no GPU",
            f"TensorRT plans need one. {NEEDS_NO_GPU}",
            "Look at nvidia-smi -L; start a container with --gpus all",
        )
        return
    if cuda and cuda < CUDA_MIN:
        yield error(
            "driver.old",
            f"The driver is for CUDA {version}",
            f"asynctrt needs at least CUDA {CUDA_MIN[0]}.{CUDA_MIN[1]}; newer libraries of CUDA and TensorRT "
            "need more. With an old driver they refuse to start, or crash later.",
            "Update the driver",
        )
    names = ", ".join(gpu["name"] for gpu in facts.gpus)
    yield ok(
        "driver", f"CUDA {version}{module}: {len(facts.gpus)} GPU{'s' * (len(facts.gpus) != 1)} ({names})"
    )
    hidden = _hidden(facts)
    if hidden:
        yield hidden


def _hidden(facts: Facts) -> Finding | None:
    """Return a finding about GPUs that a variable keeps from this process."""
    said = facts.env.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        return None
    nvml = facts.nvml.value or {}
    count = len(nvml.get("gpus", ())) or facts.machine.gpus_on_the_bus
    if facts.gpus and count <= len(facts.gpus):
        return None
    make = note if facts.gpus else error
    there = f" of {count}" if count else ""
    return make(
        "driver.hidden",
        f"CUDA_VISIBLE_DEVICES is {said!r}: CUDA shows {len(facts.gpus)}{there} GPUs",
        "GPUs that it does not name do not exist for this process, and the others are numbered anew from "
        "cuda:0. The list ends at the first number that there is not.",
        "Leave the variable out, or name the GPUs by the numbers or UUIDs of nvidia-smi -L",
    )


def _named(facts: Facts) -> Iterator[Finding]:
    """Check that the device that the user named is there."""
    found = re.fullmatch(r"cuda:(\d+)", facts.device or "")
    if found and facts.gpus and int(found[1]) >= len(facts.gpus):
        yield error(
            "device.missing",
            f"There is no {facts.device}: CUDA shows {len(facts.gpus)} GPUs, from cuda:0 on",
            "It cannot be opened.",
            "Name another one, or look at CUDA_VISIBLE_DEVICES",
        )


def _faults(facts: Facts) -> Iterator[Finding]:
    """Tell what the driver has written to the kernel's log."""
    if not facts.expects_gpu:
        return
    if not facts.kernel_log.has_answered:
        yield unknown(
            "driver.faults",
            f"Whether a GPU had faults: the kernel's log cannot be read ({facts.kernel_log.said})",
            "The driver writes a number (Xid) there for each fault: by a program, or of the hardware.",
            "dmesg | grep Xid, as root on the machine itself",
        )
        return
    for key, count in facts.kernel_log.value["xids"].items():
        number, _, gpu = key.partition(" ")
        meaning, is_hardware = XIDS.get(int(number), ("see NVIDIA's list of Xid errors", False))
        yield warning(
            "driver.faults",
            f"The kernel's log has Xid {number} of {gpu}, {count} times: {meaning}",
            "The hardware is the likely cause; answers and programs on this GPU may be lost."
            if is_hardware
            else "A fault like this takes the GPU away from its whole process: all calls fail with "
            "DeviceLostError until it is restarted. The program is the likely cause, not the machine.",
            "Look at nvidia-smi -q -d ECC,ROW_REMAPPER, and have the GPU examined if it goes on"
            if is_hardware
            else "Find the kernel with compute-sanitizer or CUDA_LAUNCH_BLOCKING=1. Plugins and kernels of "
            "your own come first; check shapes, types and sizes of what they are given",
        )
