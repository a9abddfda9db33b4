"""The documentation as a site: built offline with warnings as errors, read and searched in a browser."""

import functools
import http.server
import subprocess
import sys
import threading
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import pytest
from playwright.async_api import async_playwright, expect

from tests.helpers import needed
from tests.serving.support import CHROMIUM_FLAGS

pytestmark = [pytest.mark.tier2, pytest.mark.timeout(240)]
DOCS = Path(__file__).parent.parent / "docs"
WAIT_S = 30


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    needed(find_spec("sphinx") and find_spec("furo") and find_spec("myst_parser"), "pip install -e '.[docs]'")
    built = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(built)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return built


def test_every_page_is_there(site):
    pages = {page.stem for page in DOCS.glob("*.md")}
    assert len(pages) > 15
    assert {page.stem for page in site.glob("*.html")} >= pages
    assert "Raises<span" in (site / "api.html").read_text(), "docstrings are not read as reStructuredText"


def test_no_page_shows_a_value_of_the_machine_that_built_it(site):
    for page in site.glob("*.html"):
        text = page.read_text()
        assert str(DOCS.parent) not in text, page.name
        assert " at 0x" not in text, page.name
        assert "&lt;built-in" not in text, page.name


ELSEWHERE = {"Array", "Opening"}
"""Names that the reference leaves out: an alias, and what `open` returns until it is awaited."""


@pytest.mark.parametrize("name", ["", "client", "loadtest", "serving", "testing"])
def test_the_reference_has_every_public_name(site, name):
    module = import_module(f"asynctrt.{name}" if name else "asynctrt")
    page = (site / (f"api-{name}.html" if name else "api.html")).read_text()
    errors = (site / "errors.html").read_text()
    missing = {
        public
        for public in module.__all__
        if f'id="{module.__name__}.{public}"' not in page and f">{public}<" not in errors
    }
    assert missing <= ELSEWHERE


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, format, *args):  # noqa: A002
        pass


def test_pages_fit_a_search_finds_and_nothing_comes_from_elsewhere(site, chromium):
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            anyio.run(_look, server.server_port, chromium)
        finally:
            server.shutdown()


FOUND = {
    "idempotent": "Options",
    "silero": "Which requests",
    "scalar": "Which requests",
    "otel": "Metrics and spans",
    "kubernetes": "Deploying",
    "nginx": "Deploying",
}
"""What people look for, and the title of a page that a search must find."""


async def _look(port, chromium):
    asked, trouble = set(), []
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        page = await browser.new_page()
        page.on("request", lambda request: asked.add(urlsplit(request.url).hostname))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        for name in sorted(path.stem for path in DOCS.glob("*.md")):
            await page.goto(f"http://127.0.0.1:{port}/{name}.html")
            for width, scheme in ((390, "light"), (1280, "dark")):
                await page.set_viewport_size({"width": width, "height": 800})
                await page.emulate_media(color_scheme=scheme)
                assert await page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
        await page.goto(f"http://127.0.0.1:{port}/tutorial.html")
        assert await page.locator("button.copybtn").count() > 5
        for words, title in FOUND.items():
            await page.goto(f"http://127.0.0.1:{port}/search.html?q={words}")
            found = page.locator("ul.search a", has_text=title)
            await expect(found.first).to_be_visible(timeout=WAIT_S * 1000)
        await browser.close()
    assert asked == {"127.0.0.1"}
    assert not trouble
