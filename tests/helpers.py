"""What tests of every kind need: to wait with a bound, and a port."""

import asyncio
import socket

WAIT_S = 30


async def until(condition):
    """Give the loop turns until the condition holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0)


def free_port():
    """A port that nobody listens on just now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
