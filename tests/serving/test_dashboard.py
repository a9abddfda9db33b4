"""The dashboard: its pages as a client gets them, and the page itself in a real browser."""

import asyncio
import contextlib
import json
import re
import shlex
from urllib.parse import urlsplit

import numpy as np
import pytest
from playwright.async_api import async_playwright, expect

import asynctrt
from asynctrt.errors import ModelError
from asynctrt.serving.api import Api
from asynctrt.serving.dashboard import FILES, RECENT, STATIC, dashboard_pages
from asynctrt.serving.openapi import ask_of, docs_pages
from asynctrt.serving.repository import Repository
from asynctrt.serving.sampler import MODEL_FIELDS, Sampler
from asynctrt.serving.settings import ServerSettings
from asynctrt.testing import LatchDevice
from tests.models import double_model
from tests.serving.support import CHROMIUM_FLAGS as FLAGS
from tests.serving.support import metrics_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]
WAIT_S = 30
WAIT_MS = 30_000
SECOND_NS = 1_000_000_000


@pytest.fixture
def anyio_backend():
    """One loop is enough: what is tested here runs in the browser."""
    return ("asyncio", {"use_uvloop": False})


class Clock:
    """Stands still until a second is let pass."""

    ns = 400 * SECOND_NS

    def __call__(self):
        return self.ns


class Site:
    """A repository with its pages, behind a server that speaks just enough HTTP for a browser."""

    def __init__(self, *models, **settings):
        self.clock = Clock()
        self.repository = Repository()
        for name, engine in models:
            self.repository.add(name, engine)
        self.api = Api(self.repository, ServerSettings(**settings))
        self.start_sampling()
        self.asked = []
        self.port = 0
        self.server = None
        self.tasks = set()

    def start_sampling(self):
        self.sampler = Sampler(
            self.repository,
            self.clock,
            connections=lambda: 7,
            in_flight=lambda: self.api.in_flight,
            lag_ns=lambda: 0,
            cpu_ns=self.clock,
        )
        self.api.pages.update(dashboard_pages(self.repository, self.sampler, ask_of))
        self.api.pages.update(docs_pages(self.api))
        self.api.pages["/metrics"] = metrics_of(self.repository, self.sampler).page()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/"

    async def start(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self):
        self.server.close()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.server.wait_closed()

    async def __aenter__(self):
        await self.start()
        return self

    async def __aexit__(self, *_):
        await self.stop()

    async def serve(self, reader, writer):
        self.tasks.add(task := asyncio.current_task())
        try:
            async with asyncio.timeout(5):
                first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
            method, path, _ = first.split(b" ")
            pairs = (line.partition(b":") for line in lines)
            headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
            self.asked.append(path.decode())
            answer = await self.api.respond(method.decode(), path, headers, b"")
            body = b"".join(answer.body)
            head = [f"HTTP/1.1 {answer.status} Answer", f"Content-Length: {len(body)}", "Connection: close"]
            head += [f"{name}: {value}" for name, value in answer.headers]
            writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
            await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass  # A browser opens connections that it then does not use.
        finally:
            self.tasks.discard(task)
            writer.close()

    async def infer(self, rows=1, name="double", took_ns=2_000_000):
        """A request, as the server answers it; how long it took is the test's to say."""
        served = self.repository.find(name)
        data = np.ones((rows, 4)).tolist()
        inputs = [{"name": "input", "datatype": "FP32", "shape": [rows, 4], "data": data}]
        path = f"/v2/models/{name}/infer".encode()
        answer = await self.api.respond("POST", path, self.headers, json.dumps({"inputs": inputs}).encode())
        assert answer.status == 200
        served.latencies_ns[-1] = took_ns

    @property
    def headers(self):
        tokens = self.api.settings.tokens
        return {b"authorization": b"Bearer " + tokens[0].encode()} if tokens else {}

    def second(self, key="double:1"):
        """Let a second pass and sample it; the model's figures by name."""
        self.clock.ns += SECOND_NS
        self.sampler.sample()
        figures = self.sampler.history()["samples"][-1]["models"].get(key)
        return figures and dict(zip(MODEL_FIELDS, figures, strict=True))

    async def get(self, path, **headers):
        given = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
        return await self.api.respond("GET", path.encode(), given, b"")


@contextlib.asynccontextmanager
async def browser(chromium, width=1280, height=900, **context):
    """A page, and what went wrong in it: errors of the console, and requests to other hosts."""
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        try:
            page = await started.new_page(viewport={"width": width, "height": height}, **context)
            page.set_default_timeout(WAIT_MS)
            wrong = []
            page.on(
                "console", lambda message: wrong.append(message.text) if message.type == "error" else None
            )
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on(
                "request",
                lambda request: (
                    wrong.append(request.url) if urlsplit(request.url).hostname != "127.0.0.1" else None
                ),
            )
            yield page, wrong
        finally:
            await started.close()


@contextlib.asynccontextmanager
async def watching(chromium, *size, engine=None, may_go_wrong=False, **settings):
    """A page in a browser, its site, and the engine of its model ``double``, with options ``engine``."""
    async with (
        asynctrt.open(double_model(), **(engine or {})) as opened,
        Site(("double", opened), **settings) as site,
        browser(chromium, *size) as (page, wrong),
    ):
        yield page, site, opened
        assert may_go_wrong or not wrong


async def shows(page, selector, content):
    await expect(page.locator(selector)).to_have_text(content, timeout=WAIT_MS)


async def is_there(page, selector, *, there=True):
    await expect(page.locator(selector)).to_be_visible(visible=there, timeout=WAIT_MS)


def shown(value):
    """A figure as the page writes it."""
    return f"{float(f'{value:.3g}'):g}"


class TestPages:
    async def test_what_is_static_is_open_and_safe(self):
        site = Site(tokens=("secret",))
        for path, (name, content_type) in FILES.items():
            answer = await site.get(path)
            headers = dict(answer.headers)
            assert answer.status == 200
            assert b"".join(answer.body) == (STATIC / name).read_bytes()
            assert headers["Content-Type"] == content_type
            assert "default-src 'self'" in headers["Content-Security-Policy"]
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Cache-Control"] == "no-cache"

    async def test_the_figures_need_the_token(self):
        site = Site(tokens=("secret",))
        for path in ("/dashboard/data", "/dashboard/recent"):
            assert (await site.get(path)).status == 401
            answer = await site.get(path, authorization="Bearer secret")
            assert answer.status == 200
            assert dict(answer.headers)["Cache-Control"] == "no-store"

    async def test_the_page_needs_nothing_but_what_the_server_has(self):
        text = (STATIC / "index.html").read_text()
        wanted = re.findall(r'(?:src|href)="([^"#]+)"', text)
        assert len(wanted) > 4
        site = Site()
        for path in wanted:
            assert (await site.get(f"/{path}")).status == 200, path
        assert not re.findall(r"<script(?![^>]*src=)|<style| style=| on\w+=", text), "nothing inline"
        for name in ("index.html", "dashboard.js", "dashboard.css"):
            assert "//" not in re.sub(r"^\s*//.*$", "", (STATIC / name).read_text(), flags=re.MULTILINE), name

    async def test_the_figures_are_all_or_the_newest(self):
        async with asynctrt.open(double_model(), max_rows=8) as engine:
            site = Site(("double", engine))
            for _ in range(RECENT + 5):
                await site.infer(3)
                site.second()
            everything = json.loads(b"".join((await site.get("/dashboard/data")).body))
            assert [sample["number"] for sample in everything["samples"]] == list(range(1, RECENT + 6))
            recent = json.loads(b"".join((await site.get("/dashboard/recent")).body))
            assert recent["samples"] == everything["samples"][-RECENT:]
            (model,) = recent["models"]
            assert (model["name"], model["version"], model["answered"]) == ("double", "1", RECENT + 5)
            assert (model["rows"], model["batch_bounds"]) == (3 * (RECENT + 5), [1, 2, 4, 8])

    async def test_five_minutes_of_a_model_are_no_more_than_they_have_to_be(self):
        async with asynctrt.open(double_model()) as engine:
            site = Site(("double", engine))
            for _ in range(301):
                await site.infer(3, took_ns=1_234_567)
                site.second()
            assert sum(len(piece) for piece in (await site.get("/dashboard/data")).body) < 80_000
            assert sum(len(piece) for piece in (await site.get("/dashboard/recent")).body) < 8_000


class TestInABrowser:
    async def test_the_figures_are_those_of_the_server(self, chromium):
        async with watching(chromium, 360, 800, engine={"max_rows": 8}) as (page, site, engine):
            for rows in (1, 3, 8):
                await site.infer(rows, took_ns=rows * 1_000_000)
            figures = site.second()
            await page.goto(site.url)
            await shows(page, "#status", "Live")
            await self.check(page, site, engine, figures)
            await site.infer(2, took_ns=123_456_789)
            await site.api.respond("POST", b"/v2/models/double/infer", {}, b"{}")
            figures = site.second()
            await shows(page, "#tiles-p50 .value", "123")
            await self.check(page, site, engine, figures)
            await shows(page, "#numbers-other td:last-child", "1")
            assert await page.evaluate("document.documentElement.scrollWidth") <= 360

    async def check(self, page, site, engine, figures):
        done = engine.statistics()
        await shows(page, "#tiles-rate .value", shown(figures["answers_per_s"]))
        await shows(page, "#tiles-p50 .value", shown(figures["p50_ms"]))
        await shows(page, "#tiles-p99 .value", shown(figures["p99_ms"]))
        await shows(page, "#tiles-batch .value", shown(figures["batch_rows"]))
        await shows(page, "#tiles-queued .value", "0")
        await shows(page, "#tiles-in-flight .value", "0")
        await shows(page, "#tiles-failures .value", shown(figures["failures_per_s"]))
        await shows(page, "#numbers-answered td:last-child", str(done.succeeded))
        await shows(page, "#numbers-rows td:last-child", str(done.rows))
        await shows(page, "#numbers-batches td:last-child", str(done.batches))
        for reason, launched in done.launched.items():
            await shows(page, f"#numbers-launched-{reason} td:last-child", str(launched))
        for name in ("queue", "copy-in", "compute", "copy-out"):
            took = shown(figures[f"{name.replace('-', '_')}_ms"])
            await shows(page, f"#numbers-{name} td:nth-child(2)", f"{took} ms")
        await shows(page, "#resources-contexts td", str(done.contexts))
        await shows(page, "#resources-arenas td", str(done.arenas))
        await shows(page, "#server-tiles-connections .value", "7")
        await shows(page, "#server-tiles-cpu .value", "100")

    async def test_what_waits_and_what_runs(self, chromium):
        device = LatchDevice(concurrency=1)
        async with watching(chromium, engine={"device": device, "max_rows": 2, "contexts": 1}) as (
            page,
            site,
            engine,
        ):
            tasks = [asyncio.create_task(site.infer(2))]
            async with asyncio.timeout(WAIT_S):
                while engine.statistics().in_flight_batches < 1:
                    await asyncio.sleep(0)
                tasks += [asyncio.create_task(site.infer(2)) for _ in range(2)]
                while engine.statistics().queued_requests < 2:
                    await asyncio.sleep(0)
            site.second()
            await page.goto(site.url)
            await shows(page, "#tiles-queued .value", "2")
            await shows(page, "#tiles-queued .more", "4 rows")
            await shows(page, "#tiles-in-flight .value", "1")
            await shows(page, "#server-tiles-requests .value", "3")
            await shows(page, "#tiles-p50 .value", "\u2013")
            device.open()
            await asyncio.gather(*tasks)
            site.second()
            await shows(page, "#tiles-queued .value", "0")
            await shows(page, "#tiles-rate .value", "3")

    async def test_several_models_have_an_overview_whose_names_choose_one(self, chromium):
        async with (
            asynctrt.open(double_model()) as one,
            asynctrt.open(double_model()) as two,
            Site(("one", one), ("two: <b>bold</b>/é", two)) as site,
            browser(chromium) as (page, wrong),
        ):
            await site.infer(2, name="one")
            site.second()
            await page.goto(site.url)
            await shows(page, "#model-title", "one")
            await shows(page, "#tiles-rate .value", "1")
            table = page.get_by_role("table", name="Models")
            await expect(table.get_by_role("row")).to_have_count(3)
            await expect(table.get_by_role("row", name="one, version 1")).to_contain_text("open")
            cells = table.get_by_role("row", name="one, version 1").get_by_role("cell")
            assert await cells.all_text_contents() == ["1", "2", "2", "2", "0", "0", "0", "open"]
            link = table.get_by_role("link", name="two: <b>bold</b>/é, version 1")
            await expect(link).not_to_have_attribute("aria-current", "true")
            await link.click()
            await shows(page, "#model-title", "two: <b>bold</b>/é")
            await expect(link).to_have_attribute("aria-current", "true")
            await shows(page, "#tiles-rate .value", "0")
            await is_there(page, "#quiet")
            await page.reload()
            await shows(page, "#model-title", "two: <b>bold</b>/é")
            assert not wrong

    async def test_a_second_between_seconds_without_requests_is_seen(self, chromium):
        """No line goes to its latency, so a first request with curl would leave the chart empty."""
        async with watching(chromium) as (page, site, _):
            site.second()
            await page.goto(site.url)
            drawn = "document.querySelectorAll('#charts canvas')[1].toDataURL()"
            await shows(page, "#tiles-p50 .value", "\u2013")
            empty = await page.evaluate(drawn)
            await site.infer(2)
            site.second()
            site.second()
            await shows(page, "#numbers-answered td:last-child", "1")
            await page.wait_for_function(f"before => {drawn} !== before", arg=empty, timeout=WAIT_MS)
            colours = """() => {
                const { width, height } = document.querySelectorAll('#charts canvas')[1];
                const pixels = document.querySelectorAll('#charts canvas')[1].getContext('2d');
                const { data } = pixels.getImageData(0, 0, width, height);
                let coloured = 0;
                for (let at = 0; at < data.length; at += 4) {
                    coloured += data[at + 3] > 200 && Math.abs(data[at] - data[at + 2]) > 80;
                }
                return coloured;
            }"""
            assert await page.evaluate(colours) > 10

    async def test_a_pipeline_has_no_bars_for_sizes_that_are_not_used(self, chromium):
        """It takes requests of up to 16,384 rows, and the names of 15 bars would cover each other."""

        async def same(inputs):
            return inputs

        spec = asynctrt.TensorSpec("x", "float32", (4,))
        async with (
            asynctrt.Pipeline(same, inputs=spec, outputs=spec, max_in_flight=16384) as pipeline,
            Site(("same", pipeline)) as site,
            browser(chromium) as (page, wrong),
        ):
            for rows, bars in ((2, 7), (300, 10)):
                await pipeline.infer(np.zeros((rows, 4), np.float32))
                site.second()
                if rows == 2:
                    await page.goto(site.url)
                chart = page.get_by_label(re.compile("batches of the last five minutes by their rows"))
                await expect(chart).to_have_attribute("aria-label", re.compile(rf"(rows: .*){{{bars}}}"))
                said = await chart.get_attribute("aria-label")
                assert said.count("rows: ") == bars
                assert (
                    len(pipeline.statistics().launched)
                    == await page.locator("[id^=numbers-launched]").count()
                )
            await expect(page.locator("#about")).to_contain_text("16,384 rows in a request")
            assert not wrong

    async def test_a_line_for_curl_asks_the_model(self, chromium):
        async with (
            asynctrt.open(double_model()) as engine,
            Site(("it's", engine)) as site,
            browser(chromium) as (page, wrong),
        ):
            site.second()
            await page.goto(site.url)
            await is_there(page, "#ask")
            link = page.get_by_role("link", name="All requests, to read and try")
            assert (await site.get("/" + await link.get_attribute("href"))).status == 200
            words = shlex.split(await page.locator("#curl").text_content())
            assert words[:2] == ["curl", "-s"]
            assert words[2] == f"{site.url}v1/models/it%27s/versions/1:predict"
            assert json.loads(words[4]) == {"instances": [[0, 0, 0, 0]]}
            path = "/" + words[2].removeprefix(site.url)
            answer = await site.api.respond("POST", path.encode(), {}, words[4].encode())
            assert (answer.status, json.loads(answer.body[0])) == (200, {"predictions": [[0, 0, 0, 0]]})
            assert not wrong

    async def test_no_model_then_one_that_is_loaded(self, chromium):
        broken = True

        async def opener():
            if broken:
                raise ModelError("graph.onnx: it has no inputs")
            return await asynctrt.open(double_model())

        async with Site() as site, browser(chromium) as (page, wrong):
            site.second()
            await page.goto(site.url)
            await is_there(page, "#none")
            await is_there(page, "#unserved", there=False)
            site.repository.add("double", opener=opener)
            with pytest.raises(ModelError):
                await site.repository.load("double")
            await shows(page, "#unserved-list li", "double, version 1: graph.onnx: it has no inputs")
            broken = False
            await site.repository.load("double")
            site.second()
            await is_there(page, "#model")
            await is_there(page, "#none", there=False)
            await shows(page, "#tiles-p50 .value", "\u2013")
            await shows(page, "#quiet", "No request has been answered yet.")
            await is_there(page, "#overview", there=False)
            await site.infer(1)
            site.second()
            await is_there(page, "#quiet", there=False)
            await site.repository.unload("double")
            site.second()
            await is_there(page, "#none")
            assert not wrong

    async def test_a_server_that_goes_away_and_comes_back(self, chromium):
        async with watching(chromium, may_go_wrong=True) as (page, site, _):
            await site.infer(1)
            site.second()
            await page.goto(site.url)
            await shows(page, "#numbers-answered td:last-child", "1")
            await is_there(page, "#banner", there=False)
            await site.stop()
            await is_there(page, "#banner")
            await expect(page.locator("#banner")).to_contain_text("the server does not answer")
            await shows(page, "#status", "No connection")
            await shows(page, "#numbers-answered td:last-child", "1")
            asked = len(site.asked)
            for _ in range(RECENT * 2):
                await site.infer(1)
                site.second()
            await site.start()
            await is_there(page, "#banner", there=False)
            await shows(page, "#status", "Live")
            await shows(page, "#numbers-answered td:last-child", str(RECENT * 2 + 1))
            assert "/dashboard/data" in site.asked[asked:], "the newest alone are not all that it missed"
            # Another server at the same place counts from the beginning.
            await site.stop()
            await is_there(page, "#banner")
            site.clock.ns += SECOND_NS
            site.start_sampling()
            await site.infer(1)
            await site.infer(1)
            site.second()
            await site.start()
            await shows(page, "#tiles-rate .value", "2")
            await is_there(page, "#banner", there=False)

    async def test_a_server_that_drains(self, chromium):
        async with watching(chromium) as (page, site, _):
            site.second()
            await page.goto(site.url)
            await shows(page, "#status", "Live")
            await site.repository.drain()
            await shows(page, "#status", "Draining")
            await expect(page.locator("#banner")).to_contain_text("takes no new requests")

    async def test_the_token_is_asked_for_and_kept(self, chromium):
        async with watching(chromium, tokens=("secret",), may_go_wrong=True) as (page, site, _):
            await site.infer(1)
            site.second()
            await page.goto(site.url)
            await is_there(page, "#locked")
            await is_there(page, "#model", there=False)
            await page.get_by_label("Token", exact=True).fill("nön")
            await page.get_by_role("button").click()
            await expect(page.locator("#token-error")).to_contain_text("ASCII")
            await page.get_by_label("Token", exact=True).fill("wrong")
            await page.get_by_role("button").click()
            await shows(page, "#token-error", "The server refused that token.")
            await page.get_by_label("Token", exact=True).fill("secret")
            await page.keyboard.press("Enter")
            await shows(page, "#numbers-answered td:last-child", "1")
            await is_there(page, "#locked", there=False)
            assert await page.evaluate("sessionStorage.getItem('asynctrt-token')") == "secret"
            assert await page.evaluate("localStorage.length") == 0
            await page.reload()
            await shows(page, "#numbers-answered td:last-child", "1")
            await is_there(page, "#locked", there=False)

    async def test_a_tab_that_nobody_sees_asks_for_nothing(self, chromium):
        hide = """hidden => {
            Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }"""
        async with watching(chromium) as (page, site, _):
            site.second()
            await page.clock.install()
            await page.goto(site.url)
            await shows(page, "#status", "Live")
            await page.evaluate(hide, True)
            asked = len(site.asked)
            await page.clock.run_for(30_000)
            assert len(site.asked) <= asked + 1, "but for one that was on its way"
            await site.infer(1)
            site.second()
            await page.evaluate(hide, False)
            await shows(page, "#tiles-rate .value", "1")
            async with asyncio.timeout(WAIT_S):
                asked = len(site.asked)
                while len(site.asked) < asked + 3:
                    await page.clock.run_for(1000)
