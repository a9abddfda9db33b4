"""Every device there is, for the contract suites."""

from asynctrt.devices.host import HostDevice
from asynctrt.testing import LatchDevice


def open_latch(**kw):
    device = LatchDevice(**kw)
    device.open()
    return device


DEVICES = {
    "host": HostDevice,
    "host-in-place": lambda: HostDevice(in_place="always"),
    "host-threads": lambda: HostDevice(in_place="never"),
    "host-one-thread": lambda: HostDevice(in_place="never", threads=1),
    "host-separate-memory": lambda: HostDevice(in_place="never", unified=False),
    "latch": open_latch,
    "latch-separate-memory": lambda: open_latch(unified=False),
}
