"""The CPU as a device: streams are queues that share one thread per core, and events are flags.

The device works in staging memory directly. Three measures keep it fast beside a busy event loop, and all
three deal with Python's global interpreter lock (the GIL); docs/gil.md draws them:

- If permitted, work shorter than a hand-over to a thread, such as ONNX Runtime's, runs in place, in the
  launching thread. The device learns the duration per label, and forgets it as soon as a run turns out long.
  Functions stay in threads unless their author opts out.
- Streams share their threads, so a thread starts the next batch without waiting for the loop.
- An event loop that is never idle releases the GIL too briefly for another thread to acquire it, so a
  finished batch would be noticed late (tests/benchmarks/busy_loop.py). :meth:`HostEvent.nudge` therefore
  looks for a thread that is neither computing nor idle, and so wants the GIL, and yields the GIL until that
  thread has made progress.
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
