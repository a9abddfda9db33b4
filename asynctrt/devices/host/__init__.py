"""The CPU as a device: streams are queues that share one thread per core, and events are flags.

The device works in staging memory. Three measures make it fit for a busy event loop, and all three are about
Python's global lock (the GIL); docs/gil.md draws them:

- Work that is allowed to, such as ONNX Runtime's, runs in place, in the thread that launches it, if it is
  shorter than a hand-over to a thread. How long it takes is learned per label, and forgotten as soon as a run
  turns out long. Functions stay in threads unless their author says otherwise.
- Streams share their threads, so a thread goes on with the next batch without waiting for the loop.
- A loop that is never idle releases the GIL for too short a time for another thread to get it, so a batch
  that is done would be noticed late (tests/benchmarks/busy_loop.py). :meth:`HostEvent.nudge` therefore finds
  a thread that is neither computing nor idle, and so wants the GIL, and hands the GIL over until that thread
  has moved on.
"""

from asynctrt.devices.host.device import HostDevice, cores
from asynctrt.devices.host.memory import HostBuffer
from asynctrt.devices.host.streams import (
    HostEvent,
    HostGraph,
    HostStream,
    InPlace,
    RunOn,
    Unfinished,
    Work,
    raise_on_loop,
    warn_if_held,
)

__all__ = [
    "HostBuffer",
    "HostDevice",
    "HostEvent",
    "HostGraph",
    "HostStream",
    "InPlace",
    "RunOn",
    "Unfinished",
    "Work",
    "cores",
    "raise_on_loop",
    "warn_if_held",
]
