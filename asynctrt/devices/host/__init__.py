"""The CPU as a device: streams are queues that share one thread per core, and events are flags.

The device works in staging memory directly. docs/gil.md says what keeps it fast beside a busy event loop:
work shorter than a hand-over to a thread runs in place, and :meth:`HostEvent.nudge` lends the GIL to a thread
that wants it.
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
