"""The pure half: what to launch, when, and for whom. No clock, no I/O, no asyncio, no numpy.

Time is an int of nanoseconds and is always passed in, so a seed and a loop can simulate millions of
events (``tests/simulation``).
"""
