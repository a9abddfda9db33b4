"""Models that workers open by name, and that do what their rows say."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from asynctrt.backends.function import FunctionModel
from asynctrt.tensors import TensorSpec

SEGFAULT, RAISE, HANG, STOP, WAIT, ONCE, LONG_ERROR, LOG, EXIT, INTERRUPT = map(float, range(-1, -11, -1))
"""What the first value of a row asks for; any other is doubled."""

RAISES = {
    RAISE: (ValueError, "a row is -2"),
    LONG_ERROR: (ValueError, "long " * 1_000_000),
    EXIT: (SystemExit, "a row is -9"),
    INTERRUPT: (KeyboardInterrupt, "a row is -10"),
}

GATE = "ASYNCTRT_TEST_GATE"
"""The environment variable with a path: a batch with WAIT waits until a file is there."""

ROW = TensorSpec("x", "float32", (4,))


def workers_left():
    """Return the workers of this process, and children that nobody waited for."""
    import psutil

    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE or "asynctrt.workers.child" in child.cmdline():
                found.append(child)
    return found


def behave(inputs):
    first = inputs["x"][:, 0]
    if SEGFAULT in first:
        os.kill(os.getpid(), signal.SIGSEGV)
    for asked, (kind, text) in RAISES.items():
        if asked in first:
            raise kind(text)
    if STOP in first:
        os.kill(os.getpid(), signal.SIGSTOP)
    if HANG in first:
        time.sleep(60)
    if LOG in first:
        import logging

        logging.getLogger("asynctrt").warning("told by the model")
    gate = Path(os.environ.get(GATE, "/nonexistent"))
    if WAIT in first:
        while not gate.exists():
            time.sleep(0.001)
    if ONCE in first and not gate.exists():
        gate.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * inputs["x"]


def kind():
    """Take rows of four values."""
    return FunctionModel(behave, inputs=ROW, outputs=TensorSpec("y", "float32", (4,)), name="kind")


def on_loop():
    """Do the same on the event loop."""
    return FunctionModel(
        behave, inputs=ROW, outputs=TensorSpec("y", "float32", (4,)), name="on_loop", run_on="loop"
    )


def slow():
    """Take 50 ms for a batch."""

    def double(inputs):
        time.sleep(0.05)
        return 2 * inputs["x"]

    return FunctionModel(double, inputs=ROW, outputs=TensorSpec("y", "float32", (4,)), name="slow")


def limited():
    """Answer with the bytes that this process may hold on a GPU."""
    from asynctrt.devices.cuda import context

    def look(inputs):
        return np.full_like(inputs["x"], context._limit_nbytes or -1)

    return FunctionModel(look, inputs=ROW, outputs=TensorSpec("y", "float32", (4,)), name="limited")


def collects():
    """Answer with how often garbage is collected, and how much never is."""
    import gc

    def look(inputs):
        return np.full_like(inputs["x"], [*gc.get_threshold(), gc.get_freeze_count()])

    return FunctionModel(look, inputs=ROW, outputs=TensorSpec("y", "float32", (4,)), name="collects")


def shapes():
    """Take two inputs whose rows vary in length, of several dtypes."""
    return FunctionModel(
        lambda inputs: {"sum": inputs["a"] + inputs["b"], "first": inputs["a"][:, :, 0] > 0},
        inputs=[TensorSpec("a", "int64", ("n", "m")), TensorSpec("b", "int64", ("n", 1))],
        outputs=[TensorSpec("sum", "int64", ("n", "m")), TensorSpec("first", "bool", ("n",))],
        name="shapes",
    )


def large():
    """Take rows of 1 MiB."""
    return FunctionModel(
        lambda inputs: inputs["x"] + 1,
        inputs=TensorSpec("x", "uint8", (1 << 20,)),
        outputs=TensorSpec("y", "uint8", (1 << 20,)),
        name="large",
    )


def dies():
    """End the process that opens it."""
    os._exit(3)


def refuses():
    """Raise an error that cannot be pickled."""

    class Local(Exception):
        pass

    raise Local(sys)


def refuses_at_length():
    """Raise an error that no message between processes can hold."""
    raise ValueError("long " * 100_000)


def refuses_and_stays():
    """Leave a thread behind, and raise."""
    threading.Thread(target=threading.Event().wait).start()
    raise ValueError("and stays")


def deadly():
    """End the process with the first batch, whatever it is."""

    def die(_inputs):
        os.kill(os.getpid(), signal.SIGKILL)

    return FunctionModel(die, inputs=ROW, outputs=TensorSpec("y", "float32", (4,)), name="deadly")


def rows(*firsts):
    """Return rows of four values that begin with these."""
    return np.array([[first, 1, 2, 3] for first in firsts], np.float32)


def found():
    """Take rows of any length, and return as many values of each as the data says."""
    import gc

    from asynctrt.devices.host import HostDevice
    from tests.contract.devices import strict
    from tests.doubles.tensorrt import EngineSpec, TensorIO

    spec = EngineSpec(inputs=(TensorIO("input", dims=(-1, -1)),), data_dependent=True)
    # Its weights belong to a device, and the engine has made its own already.
    (device,) = (one for one in gc.get_objects() if type(one) is HostDevice)
    return strict(device, spec)


def masked():
    """Take ids of any length, with a mask and their number, and show what the batch holds of each row."""
    return FunctionModel(
        lambda inputs: {
            "sum": np.where(inputs["mask"], inputs["ids"], 0).sum(1),
            "rest": np.where(inputs["mask"], 0, inputs["ids"]).sum(1),
            "length": inputs["count"],
            "same": inputs["ids"],
        },
        inputs=[
            TensorSpec("ids", "int64", ("length",)),
            TensorSpec("mask", "bool", ("length",)),
            TensorSpec("count", "int32", (1,)),
        ],
        outputs=[
            TensorSpec("sum", "int64"),
            TensorSpec("rest", "int64"),
            TensorSpec("length", "int32", (1,)),
            TensorSpec("same", "int64", ("length",)),
        ],
        name="masked",
    )


def prints_and_fails():
    """Leave something to be printed and a thread that never ends, and fail."""
    threading.Thread(target=threading.Event().wait).start()
    sys.stdout.write("x")
    raise ValueError("it fails")


def without_memory():
    """Leave this process hardly more address space than it has."""
    import resource

    import psutil

    nbytes = psutil.Process().memory_info().vms + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
    return kind()


def in_place():
    """Take rows of 128 KiB, add 1 where they lie, and then do what their first values asked for."""

    def add(inputs):
        given = inputs["x"]
        asked = given[:, :1].copy()
        given += 1
        behave({"x": asked})
        return given

    return FunctionModel(
        add,
        inputs=TensorSpec("x", "float32", (1 << 15,)),
        outputs=TensorSpec("y", "float32", (1 << 15,)),
        name="in_place",
    )


def whereabouts():
    """Take rows of 128 KiB, and say of each whether it lies in shared memory."""

    def look(inputs):
        at = inputs["x"].ctypes.data
        lines = [
            line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:asynctrt" in line
        ]
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
        return np.full((len(inputs["x"]), 1), any(start <= at < end for start, end in spans))

    return FunctionModel(
        look,
        inputs=TensorSpec("x", "float32", (1 << 15,)),
        outputs=TensorSpec("y", "bool", (1,)),
        name="whereabouts",
    )
