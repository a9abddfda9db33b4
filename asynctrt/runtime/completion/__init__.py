"""Finding out that batches are done, promptly and without burning the CPU.

The loop finds completions itself. A thread or a descriptor that is to tell a loop which is never idle comes
tens of milliseconds late, because the thread cannot get the GIL, so it only ever wakes a loop that sleeps.
docs/completion.md draws the states. There are three modes:

``adaptive``, the default, looks when a batch may be done:

- A device that can call (the host) wakes the loop. On a loop that is mostly busy, ``callbacks`` looks now and
  then whether the thread that would call needs help with the GIL.
- On a device that cannot call (CUDA, where a host function would hold up its stream), ``polling`` ends the
  sleep a margin before the expected end, and from there on looks every tick. A loop that other work keeps
  busy has ticks anyway, so there is a look in each of them, whatever is expected.

``spin`` looks every tick from launch to end: the promptest, at the price of a whole core.

``thread`` has a thread that blocks on the event and wakes the loop: the least CPU on a loop that is mostly
idle, and tens of milliseconds late on one that never is.
"""

from asynctrt.options import Waiting
from asynctrt.runtime.completion.reaper import Reaper

__all__ = ["Reaper", "Waiting"]
