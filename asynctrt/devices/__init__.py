"""Devices: streams, events and memory. ``base`` has the protocols, ``host`` the CPU as a device."""
