"""A process whose threads are gevent's, which share one of the system's."""

import subprocess
import sys

import pytest

pytest.importorskip("gevent")

PROGRAM = """
from gevent import monkey

monkey.patch_all()

import asyncio

import asynctrt


@asynctrt.batch
def double(x):
    return 2 * x


async def main():
    async with asyncio.timeout(30):
        print(await asyncio.gather(*map(double, range(3))))


asyncio.run(main())
"""


@pytest.mark.tier2
def test_functions_run_where_gevent_has_patched_threads():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[0, 2, 4]\n"
