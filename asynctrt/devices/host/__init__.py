"""The CPU as a device: streams are queues that share one thread per core, and events are flags.

The device works in staging memory. Three measures make it fit for a busy event loop, and all three are about
Python's global lock (the GIL); docs/gil.md draws them:

- Work that is shorter than a hand-over to a thread runs in place, in the thread that launches it. How long
  work takes is learned per label, and forgotten as soon as a run turns out long.
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
    Unfinished,
    Work,
    raise_on_loop,
)

__all__ = [
    "HostBuffer",
    "HostDevice",
    "HostEvent",
    "HostGraph",
    "HostStream",
    "InPlace",
    "Unfinished",
    "Work",
    "cores",
    "raise_on_loop",
]
