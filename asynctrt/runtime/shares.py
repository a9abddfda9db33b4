"""Devices shared by weight, among the engines of one event loop that have a weight."""

import asyncio
import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakValueDictionary

from asynctrt.devices.base import Device
from asynctrt.scheduling.shares import DeviceShares, Share


class _Devices:
    """The shares of each device, by event loop and by the device's name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Only members hold a strong reference: shares refer to members and so to their loop, which must not
        # be kept alive.
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
    """Give an engine on ``loop`` its share of ``device``, as :meth:`DeviceShares.join` does."""
    shares = _devices.find(loop, device.whole.name)
    return shares.join(weight, width=device.concurrency, overlaps=overlaps, wake=wake)
