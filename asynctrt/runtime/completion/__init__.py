"""Detecting that batches are done, promptly and without burning the CPU.

The loop detects completions itself. If the loop is never idle, a thread or a file descriptor notifies it tens
of milliseconds late, because the thread cannot get the GIL, so they are only used to wake a sleeping loop.
docs/completion.md draws the states. There are three modes:

``adaptive``, the default, looks when a batch may be done:

- A device with callbacks (the host) wakes the loop. On a mostly busy loop, ``callbacks`` checks now and then
  whether the calling thread needs help with the GIL.
- On a device without callbacks (CUDA, where a host function would block its stream), ``polling`` ends the
  sleep a margin before the expected end, and from then on looks every tick. If other work keeps the loop
  busy, it has ticks anyway, so it looks in each of them, whatever the expected end.

``spin`` looks every tick from launch to end: the promptest mode, at the price of a whole core.

``thread`` uses a thread that blocks on the event and wakes the loop: the least CPU time on a mostly idle
loop, and tens of milliseconds late on a loop that is never idle.
"""

from asynctrt.options import Waiting
from asynctrt.runtime.completion.reaper import Reaper

__all__ = ["Reaper", "Waiting"]
