"""Which engines divide a device by weight: those on one event loop that run there and were given a weight."""

import asyncio
import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakValueDictionary

from asynctrt.devices.base import Device
from asynctrt.scheduling.shares import DeviceShares, Share


class _Devices:
    """What is divided of each device, by event loop and by the device's name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Members keep what they divide, as they lead back to their loop, which nothing may keep.
        self._by_loop: WeakKeyDictionary[
            asyncio.AbstractEventLoop, WeakValueDictionary[str, DeviceShares]
        ] = WeakKeyDictionary()

    def find(self, loop: asyncio.AbstractEventLoop, name: str) -> DeviceShares:
        with self._lock:
            by_name = self._by_loop.setdefault(loop, WeakValueDictionary())
            return by_name.setdefault(name, DeviceShares())


_devices = _Devices()


def join_device(
    loop: asyncio.AbstractEventLoop,
    device: Device,
    weight: float,
    *,
    overlaps: bool,
    wake: Callable[[], object],
) -> Share:
    """Let an engine on ``loop`` have its part of ``device``. As :meth:`DeviceShares.join`."""
    shares = _devices.find(loop, device.whole.name)
    return shares.join(weight, width=device.concurrency, overlaps=overlaps, wake=wake)
