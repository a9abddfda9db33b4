"""Delays of the event loop are measured."""

import asyncio
import time

import pytest

from asynctrt.serving.latency import BEAT_S, BOUNDS_NS, LoopDelays

pytestmark = pytest.mark.anyio


async def test_a_loop_that_is_held_is_late():
    delays = LoopDelays()
    time.sleep(2 * BEAT_S)  # noqa: ASYNC251  (what should not be done)
    while not sum(delays.counts[:-1]):
        await asyncio.sleep(0)
    delays.close()
    least_ns = int(BEAT_S * 0.9e9)
    assert sum(delays.counts[: BOUNDS_NS.index(25_000_000) + 1]) == 0
    assert delays.counts[-1] >= least_ns
    assert delays.take_longest_ns() >= least_ns
    assert delays.take_longest_ns() == 0
