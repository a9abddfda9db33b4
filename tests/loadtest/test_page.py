"""The page: what it says of each kind of report, and that it does so in a real browser, alone."""

import contextlib
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
from playwright.async_api import async_playwright

from asynctrt.loadtest.page import render
from asynctrt.loadtest.report import ErrorCount
from asynctrt.loadtest.summary import DASH, TOO_FEW, Banner, banners, flat, headline, share, tiles
from tests.loadtest import reports
from tests.loadtest.reports import EVERY, IN_TIERS, XSS, make_report, make_run, nothing
from tests.serving.support import CHROMIUM_FLAGS

ROOT = Path(__file__).parent.parent.parent
MINUS = "\N{MINUS SIGN}"


@cache
def page_of(kind):
    """A page without its charts."""
    return re.sub(r"<script\b.*?</script>", "", render(EVERY[kind]()), flags=re.DOTALL)


class Reader(HTMLParser):
    """Tags, tables and texts of a page; whether every tag that was opened is closed."""

    VOID = ("meta", "link", "br")

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.rows, self.titles, self.ids = [], [], [], {}, []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        given = dict(attrs)
        if "id" in given:
            self.ids.append(given["id"])
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.titles[len(self.rows) - 1, len(self.rows[-1]) - 1] = given.get("title")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    def column(self, head, name):
        """The cells under a name, of the table with this first heading, and their titles."""
        first = next(n for n, row in enumerate(self.rows) if row[0] == head and name in row)
        place = self.rows[first].index(name)
        width = len(self.rows[first])
        found = []
        for number in range(first + 1, len(self.rows)):
            if len(self.rows[number]) != width or self.rows[number][0] == head:
                break
            found.append((self.rows[number][place], self.titles[number, place]))
        return found


class TestHeadline:
    @pytest.mark.parametrize(
        ("kind", "words"),
        [
            ("single", r"p99 \d\.\d\d ms at 2,000 requests/s"),
            ("repeats", r"p99 \d\.\d\d ms at (1,999|2,000) requests/s"),
            ("sweep", r"At best 2,998 requests/s, with p99 \d\d\.\d ms"),
            ("search", r"3,438 requests/s hold p99<20ms"),
            ("search_in_vain", r"No rate was found that holds p99<1ms"),
            ("few", r"p90 \d\.\d\d ms at 8 requests/s"),
            ("unanswered", "Nothing was answered"),
            ("empty", "Nothing was measured"),
        ],
    )
    def test_by_kind(self, kind, words):
        assert re.fullmatch(words, headline(EVERY[kind]()))

    def test_repetitions_have_their_mean(self):
        runs = [make_run("a", seed=1), make_run("b", seed=1)]
        runs = [replace(run, latency={"p99": at}) for run, at in zip(runs, (2.0, 4.0), strict=True)]
        assert headline(make_report(*runs, kind="repeats")).startswith("p99 3 ms at")

    @pytest.mark.tier2
    def test_what_was_stopped_has_no_result_and_says_what_it_has(self):
        report = replace(reports.search(), search=None)
        assert headline(report).startswith("At best 3,432 requests/s, with p99")
        render(report)

    def test_a_run_without_any_percentile(self):
        run = make_run(latency={})
        assert headline(make_report(run)) == "2,000 requests/s"


class TestBanners:
    def levels(self, report):
        return [(banner.level, banner.title) for banner in banners(report)]

    def test_what_is_well_is_said_quietly(self):
        assert banners(reports.single()) == [Banner("good", "p99<20ms is held")]
        assert banners(reports.single(slo=())) == []
        assert banners(reports.sweep()) == banners(reports.search()) == []

    def test_all_that_can_be_wrong_with_a_run(self):
        void, stopped, missed, notes = banners(reports.void())
        assert void.level == stopped.level == missed.level == "bad"
        assert void.title == "This run is VOID: the generator was measured, not the target"
        assert void.reasons == ("the generator was 14.2 ms late at p99, more than a tenth of the latency",)
        assert stopped.title == "Stopped early"
        assert stopped.reasons[1] == "12 requests had neither been answered nor failed."
        assert missed.title == "The slo is not held"
        assert re.fullmatch(r"p99<20ms: p99 is \d\d\.\d ms", missed.reasons[0])
        assert notes.level == "note"

    def test_only_what_was_not_held_is_named(self):
        (banner,) = banners(reports.single(slo=("p99<2ms", "errors<0.1%")))
        assert banner.title == "The slo is not held"
        assert [reason.partition(":")[0] for reason in banner.reasons] == ["p99<2ms"]

    def test_of_repetitions_the_worst_is_named(self):
        runs = [
            make_run(str(n), seed=n, base_ms=base, slo=("p99<20ms",)) for n, base in enumerate((1, 9, 12))
        ]
        (banner,) = banners(make_report(*runs, kind="repeats"))
        worst = runs[2].latency["p99"]
        assert banner.reasons == (f"p99<20ms: p99 is {worst:.1f} ms at worst, in 2 of 3 runs",)

    def test_a_figure_that_is_not_known_holds_nothing(self):
        run = make_run(rate=8, seconds=5)
        run = replace(run, slo={"p99<20ms": False})
        (banner,) = banners(make_report(run))
        said = "p99<20ms: too many requests took longer, though they are too few to give p99"
        assert banner.reasons == (said,)
        run = replace(nothing(), slo={"p99<20ms": False})
        assert banners(make_report(run))[-1].reasons == ("p99<20ms: nothing was answered",)

    def test_too_few_requests_are_said_to_be_neither(self):
        why = "p99.9 needs 2,995 requests, and 100 ended"
        run = replace(make_run(slo=("p50<1s",)), unjudged={"p99.9<1s": why})
        report = make_report(run)
        (banner,) = banners(report)
        assert (banner.level, banner.reasons) == ("warn", (f"p99.9<1s: {why}",))
        assert "too few" in render(report)
        (banner,) = banners(replace(report, kind="sweep"))
        assert banner.level == "warn"

    def test_a_target_that_only_errors_miss(self):
        run = replace(make_run(failing=0.02), slo={"p99<20ms": False})
        (banner,) = banners(make_report(run))
        assert re.fullmatch(
            r"p99<20ms: p99 is \d\.\d\d ms among answered requests, but too many requests failed",
            banner.reasons[0],
        )

    def test_what_is_void_holds_nothing(self):
        run = make_run(slo=("p99<20ms",), void=("the generator was late",))
        assert [level for level, _ in self.levels(make_report(run))] == ["bad"]

    def test_nothing_answered_says_what_came_instead(self):
        (banner,) = banners(reports.unanswered())
        assert (banner.level, banner.title) == ("bad", "Nothing was answered")
        assert banner.reasons[0].startswith("ConnectionRefusedError: [Errno 111]")

    def test_a_sweep_that_ends_void_is_not_void(self):
        assert self.levels(reports.long_sweep())[0][0] == "warn"
        runs = [replace(run, void=("late",)) for run in reports.sweep().runs]
        assert self.levels(make_report(*runs, kind="sweep"))[0][0] == "bad"

    def test_of_a_sweep_or_a_search_one_run_has_to_hold(self):
        assert self.levels(reports.search_in_vain()) == [("bad", "p99<1ms is not held by any run")]


class TestFigures:
    def test_shares(self):
        assert [share(value) for value in (0, 1, 0.5, 0.0123, 0.00001, 0.999999, 0.9999999999)] == [
            "0%",
            "100%",
            "50%",
            "1.23%",
            "0.00100%",
            "99.9999%",
            "99.9999%",
        ]

    def test_intervals_are_those_over_the_repetitions(self):
        report = reports.repeats()
        by_name = {tile.name: tile for tile in tiles(report)}
        within = report.intervals["p99"]
        assert by_name["Latency p99"].more == f"95%: {within.low:.2f} to {within.high:.2f}"
        assert by_name["Latency p99"].value.text == f"{report.figure('p99'):.2f}"
        assert by_name["Errors"].more == "0 of 100,000"

    def test_rows_are_counted(self):
        (throughput, *_) = tiles(make_report(make_run(rows=4.0, throughput=500.0)))
        assert throughput.more == "2,000 rows/s"

    def test_what_is_missing_says_why(self):
        by_name = {tile.name: tile for tile in tiles(reports.few())}
        assert (by_name["Latency p99"].value.text, by_name["Latency p99"].more) == (DASH, TOO_FEW)
        assert "Goodput" not in by_name
        by_name = {tile.name: tile for tile in tiles(reports.unanswered())}
        assert by_name["Latency p50"].more == "nothing was answered"
        assert by_name["Errors"].value.level == "bad"
        assert tiles(reports.empty()) == []

    def test_what_is_nested_is_flat(self):
        given = {"a": {"b": [1, "c"], "d": None, "e": []}, "f": True, "g": 0.1 + 0.2, "h": Path("x"), "i": ""}
        assert list(flat(given)) == [("a.b", "1, c"), ("f", "yes"), ("g", "0.3"), ("h", "x")]


class TestPage:
    @pytest.mark.parametrize("kind", IN_TIERS)
    def test_it_is_whole_and_alone(self, kind):
        html = page_of(kind)
        read = Reader(html)
        assert not read.open
        assert html.startswith("<!doctype html>")
        assert headline(EVERY[kind]()) in read.text
        assert not {"script", "img", "iframe", "object", "form", "foreignobject"} & set(read.tags)
        assert len(read.ids) == len(set(read.ids))
        assert not re.findall(r"\son\w+=|javascript:|@import|url\((?!#)", html.partition("<body>")[0])
        assert not re.findall(r"https?://[^\s\"'<]+", html), "nothing that could be asked for"
        assert "{{" not in html
        assert "{%" not in html

    def test_what_came_from_elsewhere_is_text(self):
        html = page_of("hostile")
        read = Reader(html)
        assert read.text.count("<script>alert(1)</script>") >= 6
        assert read.column("Kind", "First message")[0][0].startswith(XSS)
        assert [cell for cell, _ in read.column("Kind", "Kind")][2] == "<b>bold</b>"
        assert "<b>" not in html
        html = page_of("sweep_of_hostile_names")
        assert "<script" not in html

    def test_a_missing_percentile_says_why(self):
        read = Reader(page_of("few"))
        assert read.column("Run", "p99") == [(DASH, TOO_FEW)]
        assert read.column("Run", "p50")[0][0] != DASH
        # An open loop's rate is not there in a closed one, and has no column.
        assert not any("Due" in row for row in read.rows)
        assert any("Due" in row for row in Reader(page_of("single")).rows)

    def test_the_table_has_the_figures(self):
        report = reports.sweep()
        read = Reader(page_of("sweep"))
        assert [cell for cell, _ in read.column("Run", "Run")][:8] == [run.label for run in report.runs]
        assert [cell for cell, _ in read.column("Run", "Verdict")] == ["holds"] * 5 + ["fails"] * 3
        assert read.column("Run", "Verdict")[-1][1] == "not held: p99<20ms"
        assert read.column("Run", "p99")[0][0] == f"{report.runs[0].latency['p99']:.2f}"
        assert [cell for cell, _ in read.column("Run", "Cores")] == ["0.840"] * 8

    def test_verdicts(self):
        read = Reader(page_of("void"))
        assert read.column("Run", "Verdict")[0][0] == "void"
        run = make_run(complete=False)
        assert Reader(render(make_report(run))).column("Run", "Verdict")[0][0] == "stopped"
        assert Reader(page_of("few")).column("Run", "Verdict")[0][0] == "complete"

    @pytest.mark.tier2
    def test_a_search(self):
        rows = Reader(page_of("search")).rows
        assert ["Highest rate that holds", "3,438 requests/s"] in rows
        assert ["Lowest rate that does not", "3,513 requests/s"] in rows
        assert ["Highest rate that holds", DASH] in Reader(page_of("search_in_vain")).rows

    def test_errors_of_all_runs_are_together(self):
        runs = [
            make_run(str(n), errors={"Late": ErrorCount(n + 1, f"example {n}"), "Rare": ErrorCount(1, "it")})
            for n in range(3)
        ]
        read = Reader(render(make_report(*runs, kind="repeats")))
        assert read.column("Kind", "Count") == [("6", None), ("3", None)]
        assert read.column("Kind", "First message")[0][0] == "example 0"
        assert not any(row[0] == "Kind" for row in Reader(page_of("single")).rows)

    def test_settings_target_and_machine(self):
        text = " ".join(Reader(page_of("single")).text.split())
        assert "options.max_rows32" in text
        assert "versions.tensorrt10.13.0" in text
        assert "resnet50.plan · cuda:0 · open loop, 2,000 requests/s, poisson · 10 s" in text

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"rate": "100..2000"}, "open loop, 100..2000 requests/s"),
            ({"rate": 1500.5}, "open loop, 1,500 requests/s"),
            ({"rate": None, "callers": 8}, "closed loop, 8 callers"),
            ({"rate": None}, "closed loop, 64 callers"),
        ],
    )
    def test_the_load(self, settings, words):
        assert words in Reader(render(make_report(make_run(), settings=settings))).text

    def test_the_same_report_gives_the_same_page(self):
        assert render(reports.single()) == render(reports.single())

    @pytest.mark.tier2
    def test_it_is_small(self):
        assert max(len(page_of(kind)) for kind in EVERY) < 50_000
        assert max(len(render(EVERY[kind]())) for kind in EVERY) < 500_000


@contextlib.asynccontextmanager
async def opened(chromium, path, width, **context):
    """The page, and all that it did beyond being there."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=list(CHROMIUM_FLAGS))
        try:
            page = await browser.new_page(viewport={"width": width, "height": 800}, **context)
            page.set_default_timeout(30_000)
            did = []
            page.on("console", lambda message: did.append(message.text))
            page.on("pageerror", lambda error: did.append(str(error)))
            page.on("dialog", lambda dialog: did.append(dialog.message))
            page.on("request", lambda request: did.append(request.url))
            await page.goto(path.as_uri())
            assert did.pop(0) == path.as_uri()
            yield page, did
        finally:
            await browser.close()


@pytest.mark.anyio
@pytest.mark.timeout(240)
class TestInBrowser:
    @pytest.fixture
    def anyio_backend(self):
        """One loop is enough: what is tested here runs in the browser."""
        return ("asyncio", {"use_uvloop": False})

    @pytest.mark.parametrize("kind", ["search", "sweep", "void", "hostile"])
    async def test_it_shows_its_verdict_and_fits_a_phone(self, chromium, tmp_path, kind):
        path = tmp_path / "report.html"
        path.write_text(page_of(kind), encoding="utf-8")
        async with opened(chromium, path, 400) as (page, did):
            level_one = page.get_by_role("heading", level=1)
            assert await level_one.inner_text() == headline(EVERY[kind]())
            assert await level_one.is_visible()
            for banner in banners(EVERY[kind]()):
                shown = page.locator(f".banner.{banner.level}", has_text=banner.title)
                assert await shown.first.is_visible()
            for width in (400, 1000):
                await page.set_viewport_size({"width": width, "height": 800})
                reach = await page.evaluate("document.documentElement.scrollWidth")
                assert reach == width, "only what is in a card of its own scrolls sideways"
            assert not did

    async def test_what_came_from_elsewhere_does_nothing(self, chromium, tmp_path):
        path = tmp_path / "report.html"
        path.write_text(page_of("hostile"), encoding="utf-8")
        async with opened(chromium, path, 1000) as (page, did):
            cell = page.get_by_role("row", name="HTTPError").get_by_role("cell").last
            assert (await cell.inner_text()).startswith(XSS)
            assert await page.locator("script").count() == 0
            # Were something not escaped after all, the page's own policy would still not run it.
            await page.evaluate(
                "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = true\">')"
            )
            assert await page.evaluate("window.ran") is None
            assert not [url for url in did if url.startswith("http")]

    async def test_it_can_be_read_without_seeing_it(self, chromium, tmp_path):
        path = tmp_path / "report.html"
        path.write_text(render(EVERY["search"]()), encoding="utf-8")
        async with opened(chromium, path, 1000) as (page, _):
            for name in ("Key figures of 3,438 requests/s", "Latency over time", "Runs", "How to read it"):
                assert await page.get_by_role("heading", level=2, name=name, exact=True).is_visible()
            assert await page.get_by_role("group", name="Runs").get_by_role("table").is_visible()
            assert await page.get_by_role("rowheader", name="Highest rate that holds").is_visible()
            assert await page.evaluate("document.documentElement.lang") == "en"
