"""Detecting that batches are done, promptly and without burning the CPU.

The loop detects completions itself. If the loop is never idle, a thread or a file descriptor notifies it tens
of milliseconds late, because the thread cannot get the GIL, so they are only used to wake a sleeping loop.
docs/completion.md draws the states. The loop looks when a batch may be done:

- A device with callbacks (the host) wakes the loop. On a mostly busy loop, ``callbacks`` checks now and then
  whether the calling thread needs help with the GIL.
- On a device without callbacks (CUDA, where a host function would block its stream), ``polling`` ends the
  sleep a margin before the expected end, and from then on looks every tick. If other work keeps the loop
  busy, it has ticks anyway, so it looks in each of them, whatever the expected end.
"""

from asynctrt.runtime.completion.reaper import Reaper

__all__ = ["Reaper"]
