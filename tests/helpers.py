"""What tests of every kind need: to wait with a bound, a port, a program that was installed."""

import asyncio
import os
import socket

import pytest

WAIT_S = 30


TURNS = 1000
"""So often a condition of what happens in this process is looked at, without a pause."""


async def until(condition):
    """Give the loop turns until the condition holds; with pauses in the end, in which other processes run."""
    async with asyncio.timeout(WAIT_S):
        turns = 0
        while not condition():
            turns += 1
            await asyncio.sleep(0 if turns < TURNS else 0.001)


def free_port():
    """A port that nobody listens on just now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def needed(is_here, message):
    """Fail in CI, where everything has to be installed, and skip elsewhere, unless something is here."""
    if not is_here:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse(message)


def installed(path):
    """Return the path of a program that .ci/packages installs."""
    needed(path.exists(), f"{path} is missing: run .ci/packages")
    return path
