"""The real scheduler in a simulated world, in virtual time.

``timeline`` has the clock, ``engine`` what drives a scheduler, ``device`` what takes the time of a batch,
from the tables of ``latency``. With ``rules`` and ``scenario``, worlds with faults are checked at every step
(``check``); without them, ``load`` tells what ``arrivals`` do to a device.

Check the worlds of 1000 seeds with ``python -m tests.simulation.check 0 1000``.
"""
