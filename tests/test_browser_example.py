"""The browser example, in a browser: files go in, their kinds come out, the same as magika itself finds."""

import re
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from magika import Magika
from playwright.async_api import async_playwright, expect

from tests.helpers import free_port
from tests.serving.support import CHROMIUM_FLAGS

pytestmark = pytest.mark.timeout(240)
EXAMPLE = Path(__file__).parent.parent / "examples" / "browser" / "identify_files.py"
WAIT_S = 30
LIBRARY = Path(sysconfig.get_path("stdlib"))
FILES = [LIBRARY / name for name in ("json/decoder.py", "this.py", "asyncio/events.py", "html/entities.py")]


@contextmanager
def example():
    port = free_port()
    process = subprocess.Popen([sys.executable, str(EXAMPLE), str(port)])
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        assert process.wait(WAIT_S) in (0, -15)


def kinds(paths):
    judge = Magika()
    found = {path.name: str(judge.identify_path(path).output.label) for path in paths}
    return {**found, "tiny": "too small to tell"}


def test_files_are_identified_in_the_browser(chromium, tmp_path):
    (tmp_path / "tiny").write_text("x")
    (tmp_path / "page.txt").write_text(
        "   \n<!doctype html>\n<html><body><p>hello</p></body></html>\n" * 30 + "  \n"
    )
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 40)
    paths = [*FILES, *sorted(tmp_path.iterdir())]

    async def main():
        expected = kinds(paths)
        async with async_playwright() as driver:
            browser = await driver.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
            page = await browser.new_page(viewport={"width": 390, "height": 800})
            trouble = []
            page.on("console", lambda said: trouble.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: trouble.append(str(error)))
            with anyio.fail_after(WAIT_S):
                while True:
                    try:
                        await page.goto(url)
                        break
                    except Exception:
                        await anyio.sleep(0.1)
            await expect(page.locator("#state")).to_have_text("connected", timeout=WAIT_S * 1000)
            await page.set_input_files("#files", [str(path) for path in paths])
            await expect(page.locator("#rows tr")).to_have_count(len(paths), timeout=WAIT_S * 1000)
            lines = [
                await line.locator("td").all_inner_texts() for line in await page.locator("#rows tr").all()
            ]
            assert {name: kind for name, kind, *_ in lines} == expected
            assert all(
                re.fullmatch(r"[\d.]+ ms", after) for _, kind, _, after in lines if "small" not in kind
            )
            await expect(page.locator("#state")).to_contain_text(f"{len(paths)} of {len(paths)} files")
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390
            assert not trouble
            await browser.close()

    with example() as url:
        anyio.run(main)
