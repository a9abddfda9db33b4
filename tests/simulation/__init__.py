"""The real scheduler in a simulated world, in virtual time, for ``asynctrt simulate``.

``timeline`` has the clock, ``engine`` what drives a scheduler, ``device`` what takes the time of a batch,
from the tables of ``latency``. With ``rules`` and ``scenario``, worlds with faults are checked at every step
(``check``); without them, what ``arrivals`` do is predicted (``plan``).
"""
