"""The page about clients: every block of Python runs as it stands, against a server."""

import asyncio
import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.serving.support import serving

PAGE = (Path(__file__).parent.parent / "docs" / "clients.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TWICE = r"\[\[2\. 2\. 2\. 2\.\]"
SAID = [TWICE, r"^9900\.0$", TWICE, "^$"]


@pytest.mark.parametrize("number", range(4))
def test_a_block_runs_as_it_stands(number):
    def work(address):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(BLOCKS[number].replace("127.0.0.1:8000", address), {})
        return said.getvalue().strip()

    async def main():
        async with serving() as server:
            return await asyncio.to_thread(work, server.http_url.removeprefix("http://"))

    assert len(BLOCKS) == len(SAID)
    assert re.search(SAID[number], asyncio.run(main()))
