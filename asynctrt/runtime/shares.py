"""Devices shared by weight, among the engines of one event loop that have a weight."""

import asyncio
import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakValueDictionary

from asynctrt.devices.base import Device
from asynctrt.scheduling.shares import DeviceShares, Share

# Only members hold a strong reference: shares refer to members and so to their loop, which must not be kept
# alive.
_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[str, DeviceShares]]
_by_loop = WeakKeyDictionary()
_lock = threading.Lock()


def join_device(
    loop: asyncio.AbstractEventLoop,
    device: Device,
    weight: float,
    *,
    overlaps: bool,
    wake: Callable[[], object],
) -> Share:
    """Give an engine on ``loop`` its share of ``device``, as :meth:`DeviceShares.join` does."""
    with _lock:
        by_name = _by_loop.setdefault(loop, WeakValueDictionary())
        shares = by_name.setdefault(device.whole.name, DeviceShares())
    return shares.join(weight, width=device.concurrency, overlaps=overlaps, wake=wake)
