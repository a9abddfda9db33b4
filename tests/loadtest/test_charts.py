"""The charts of a page: their data, and that they are drawn in a real browser, by its own script."""

import json
import re

import anyio
import pytest

from asynctrt.loadtest.charts import RUNS_MAX, charts
from asynctrt.loadtest.page import render
from tests.loadtest.reports import EVERY, XSS, make_report, make_run
from tests.loadtest.test_page import opened


def page_of(kind):
    return render(EVERY[kind]())


@pytest.mark.tier2
@pytest.mark.parametrize("kind", EVERY)
def test_every_line_has_a_value_or_a_gap_at_each_place(kind):
    for chart in charts(EVERY[kind]()):
        data = json.loads(json.dumps(chart.data, allow_nan=False))
        assert chart.title
        assert chart.caption
        assert data["xs"] == sorted(data["xs"])
        assert data["series"]
        for one in data["series"]:
            assert len(one["values"]) == len(data["xs"])
            assert any(value is not None for value in one["values"])


@pytest.mark.tier2
def test_what_is_drawn_of_which_report():
    drawn = {kind: [chart.name for chart in charts(EVERY[kind]())] for kind in EVERY}
    assert drawn["single"] == ["latency", "throughput", "batches"]
    assert drawn["search"] == ["rate-latency", "latency", "throughput", "batches"]
    assert drawn["empty"] == []
    for kind in ("sweep_of_a_setting", "repeats"):
        runs = EVERY[kind]().runs
        (series,) = [chart.data["series"] for chart in charts(EVERY[kind]()) if chart.name == "runs"]
        assert [one["label"] for one in series] == [f"{run.label}, p99" for run in runs]
    assert len(EVERY["long_sweep"]().runs) > RUNS_MAX
    assert "runs" not in drawn["long_sweep"]


def test_what_is_one_thing_has_one_colour_in_all_charts():
    for kind in ("search", "sweep_of_a_setting", "sweep"):
        shown = [one for chart in charts(EVERY[kind]()) for one in chart.data["series"]]
        pairs = {(one["label"], one["colour"]) for one in shown if one["look"] != "thin"}
        assert len(pairs) == len({label for label, _ in pairs}) == len({colour for _, colour in pairs})


def test_a_chart_says_the_figures_of_its_report():
    report = EVERY["single"]()
    (latency,) = [chart.data for chart in charts(report) if chart.name == "latency"]
    (p50,) = [one["values"] for one in latency["series"] if one["label"] == "p50"]
    assert p50 == [moment.p50 for moment in report.runs[0].moments]


def test_a_ramp_has_its_latency_against_its_rate():
    report = make_report(make_run(), settings={"rate": "100..4000"})
    (chart, *_) = charts(report)
    assert chart.name == "rate-latency"
    assert sorted(chart.data["xs"]) == pytest.approx(sorted(one.sent for one in report.runs[0].moments))
    assert charts(make_report(make_run()))[0].name == "latency"


@pytest.mark.tier2
def test_which_runs_are_shown():
    def end(kind, name):
        (caption,) = [chart.caption for chart in charts(EVERY[kind]()) if chart.name == name]
        return caption.partition(" This is ")[2]

    assert end("single", "latency") == ""
    assert end("search", "latency") == "the run 3,438 requests/s."
    assert end("sweep", "batches") == "the run rate=3000."
    assert end("repeats", "throughput") == "the run repetition 1."
    assert end("long_sweep", "rate-latency") == ""


def test_only_its_own_scripts_may_run():
    html = page_of("single")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html).group(1)
    assert policy.startswith("default-src 'none'; ")
    assert len(re.findall(r"'sha256-[\w+/=]{44}'", policy)) == 2
    assert "unsafe" not in policy.partition("script-src")[2]
    assert "script" not in render(EVERY["empty"]())


@pytest.mark.parametrize("kind", ["search", "sweep", "hostile"])
def test_they_are_drawn_in_a_browser(chromium, tmp_path, kind):
    path = tmp_path / "report.html"
    path.write_text(page_of(kind), encoding="utf-8")
    expected = charts(EVERY[kind]())

    async def main():
        async with opened(chromium, path, 800) as (page, did):
            assert await page.locator(".chart canvas").count() == len(expected)
            assert await page.evaluate("document.documentElement.scrollWidth") == 800
            over = page.locator(f"#{expected[-1].name} .u-over")
            await over.scroll_into_view_if_needed()
            box = await over.bounding_box()
            legend = page.locator(f"#{expected[-1].name} .u-legend")
            before = await legend.inner_text()
            await page.mouse.move(box["x"] + box["width"] / 3, box["y"] + 40)
            assert await legend.inner_text() != before, "hovering shows the figures"
            drawn = [chart.data["series"] for chart in expected][-1]
            shown = await legend.locator(".u-series:visible").count()
            assert shown == 1 + len({one["label"] for one in drawn})
            name = legend.locator("th[role=button]:visible").first
            for is_shown in ("false", "true"):
                await name.press("Enter")
                assert await name.get_attribute("aria-pressed") == is_shown
                off = await legend.locator(".u-series.u-off:visible").count()
                assert off == (is_shown == "false")
            await page.set_viewport_size({"width": 400, "height": 800})
            assert await page.evaluate("document.documentElement.scrollWidth") == 400
            assert await page.evaluate("window.ran") is None
            assert not [url for url in did if url.startswith("http")]
            if kind == "hostile":
                assert XSS.split("<")[0] in await page.inner_text("body")

    anyio.run(main)
