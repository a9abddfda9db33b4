"""Decides what to launch, when, and for whom, without a clock, I/O, asyncio or numpy.

Times are integers in ns and are always passed in, so that a simulation can replay millions of events from a
seed (``tests/simulation``).
"""
