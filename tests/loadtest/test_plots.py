"""Plots: what is drawn is what was measured, and what was not measured is not drawn."""

import json
import struct
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest

from asynctrt.loadtest import plots
from asynctrt.loadtest.histogram import Counts
from asynctrt.loadtest.report import BatchFigures, Comparison, Interval
from asynctrt.loadtest.views import odds
from tests.loadtest import reports
from tests.loadtest.reports import EVERY, IN_TIERS, XSS, make_report, make_run

# Drawing takes seconds of importing matplotlib.
pytestmark = pytest.mark.tier2
ROOT = Path(__file__).parent.parent.parent
SVG = "{http://www.w3.org/2000/svg}"
OVER_TIME = {"latency", "throughput", "percentiles"}
OF_BATCHES = {"batches", "time", "timeline"}


@cache
def plots_of(kind):
    return plots.figures(EVERY[kind]())


def names(report):
    return {plot.name for plot in plots.figures(report)}


def lines(figure, gid, axes=0):
    """The x and y of every line with a name."""
    found = [line for line in figure.axes[axes].lines if line.get_gid() == gid]
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in found]


def line(figure, gid, axes=0):
    (found,) = lines(figure, gid, axes)
    return found


def legend(figure, axes=0):
    shown = figure.axes[axes].get_legend()
    return [text.get_text() for text in shown.get_texts()] if shown else []


def texts(svg):
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


class TestWhatIsThere:
    @pytest.mark.parametrize(
        ("kind", "there"),
        [
            ("single", OVER_TIME | OF_BATCHES),
            ("repeats", OVER_TIME | OF_BATCHES),
            ("sweep", OVER_TIME | OF_BATCHES | {"throughput-latency"}),
            ("sweep_of_a_setting", OVER_TIME | OF_BATCHES | {"settings"}),
            ("search", OVER_TIME | OF_BATCHES | {"throughput-latency"}),
            ("compare", OVER_TIME | OF_BATCHES | {"ratios"}),
            ("few", OVER_TIME),
            ("unanswered", {"throughput"}),
            ("empty", set()),
        ],
    )
    def test_by_kind(self, kind, there):
        assert {plot.name for plot in plots_of(kind)} == there

    def test_without_moments(self):
        assert names(make_report(make_run(moments=()))) == {"percentiles"} | OF_BATCHES

    def test_without_batches(self):
        assert names(make_report(make_run(has_batches=False))) == OVER_TIME | {"timeline"}
        empty = BatchFigures(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, {})
        run = make_run(batches=empty)
        assert names(make_report(replace(run, latency={}))) == OVER_TIME | {"timeline"}

    def test_without_a_timeline(self):
        assert names(make_report(make_run(has_timeline=False))) == OVER_TIME | {"batches", "time"}

    def test_a_comparison_without_ratios(self):
        report = reports.compare()
        assert plots.ratios(replace(report, comparison=Comparison("a", "b", {}))) is None

    def test_several_runs_of_the_same_throughput_are_no_curve(self):
        assert plots.throughput_latency(reports.repeats()) is None

    @pytest.mark.parametrize("kind", IN_TIERS)
    def test_words(self, kind):
        for plot in plots_of(kind):
            assert plot.title
            assert plot.caption.endswith(".")
            assert plot.name.replace("-", "").isalpha()


class TestThroughputAndLatency:
    def test_the_points_are_the_figures(self):
        report = reports.sweep()
        figure = plots.throughput_latency(report)
        held = [run for run in report.runs if run.holds]
        fell = [run for run in report.runs if not run.holds]
        assert held
        assert fell
        for name in ("p50", "p99"):
            for state, runs in (("line", report.runs), ("holds", held), ("fails", fell)):
                x, y = line(figure, f"{name}-{state}")
                assert x == [run.throughput for run in runs]
                assert y == [run.latency[name] for run in runs]
        assert set(legend(figure)) == {"p50", "p99", "p99<20ms"}

    def test_a_search_is_drawn_by_its_rates(self):
        report = reports.search()
        figure = plots.throughput_latency(report)
        x, _ = line(figure, "p50-line")
        assert x == sorted(x)
        # The rate that was confirmed is two points, and once on the line.
        assert len(x) == 8
        assert len(line(figure, "p50-holds")[0]) + len(line(figure, "p50-fails")[0]) == 9

    def test_a_void_run_is_crossed_out_and_not_on_the_line(self):
        report = reports.long_sweep()
        figure = plots.throughput_latency(report)
        assert line(figure, "p50-void") == ([report.runs[-1].throughput], [report.runs[-1].latency["p50"]])
        assert len(line(figure, "p50-line")[0]) == len(report.runs) - 1
        # Few requests have no p99, and are no point.
        assert len(line(figure, "p99-line")[0]) == sum("p99" in run.latency for run in report.runs) - 1

    def test_the_target_is_a_line(self):
        figure = plots.throughput_latency(reports.sweep(slo=("p50<4ms, p99<20ms", "errors<1%")))
        limits = lines(figure, "limit")
        assert [y for _, (y, _) in limits] == [4.0, 20.0]
        assert not lines(plots.throughput_latency(reports.sweep(slo=())), "limit")

    def test_a_setting(self):
        report = reports.sweep_of_a_setting()
        figure = plots.by_setting(report)
        assert line(figure, "throughput")[1] == [run.throughput for run in report.runs]
        assert line(figure, "p99", axes=1)[1] == [run.latency["p99"] for run in report.runs]
        assert line(figure, "p99-line", axes=1) == line(figure, "p99", axes=1)
        assert [tick.get_text() for tick in figure.axes[1].get_xticklabels()] == ["0", "1", "2", "5", "10"]

    def test_a_setting_that_was_tried_again(self):
        report = reports.sweep_of_a_setting((0, 0, 5, 5))
        first, second, third, fourth = (run.latency["p99"] for run in report.runs)
        second, fourth = second + 1, fourth + 1
        runs = [
            replace(run, latency={**run.latency, "p99": value})
            for run, value in zip(report.runs, (first, second, third, fourth), strict=True)
        ]
        figure = plots.by_setting(make_report(*runs, kind="sweep"))
        assert line(figure, "p99", axes=1) == ([0, 0, 1, 1], [first, second, third, fourth])
        assert line(figure, "p99-line", axes=1) == ([0, 1], [(first + second) / 2, (third + fourth) / 2])
        assert [tick.get_text() for tick in figure.axes[1].get_xticklabels()] == ["0", "5"]

    def test_a_load_is_no_setting(self):
        assert plots.by_setting(reports.sweep()) is None
        assert plots.by_setting(reports.search()) is None


class TestOverTime:
    def test_the_lines_are_the_moments(self):
        report = reports.single()
        (run,) = report.runs
        latency, throughput = plots.latency_over_time(report), plots.throughput_over_time(report)
        middles = [moment.at_s + moment.seconds / 2 for moment in run.moments]
        assert len(middles) == 40
        for figure, gid, name in (
            (latency, "p50", "p50"),
            (latency, "p99", "p99"),
            (latency, "max", "max"),
            (latency, "late_p99", "late_p99"),
            (throughput, "due", "sent"),
            (throughput, "answered", "throughput"),
        ):
            assert line(figure, gid) == (middles, [getattr(moment, name) for moment in run.moments])
        assert line(latency, "steady")[0] == [run.steady_from_s, run.steady_from_s]
        assert not lines(latency, "errors")

    def test_a_gap_is_a_gap(self):
        report = reports.single()
        (run,) = report.runs
        moments = [
            replace(moment, p99=None) if n in (3, 5) else moment for n, moment in enumerate(run.moments)
        ]
        report = make_report(replace(run, moments=tuple(moments)))
        figure = plots.latency_over_time(report)
        _, y = line(figure, "p99")
        assert [place for place, value in enumerate(y) if np.isnan(value)] == [3, 5]

    def test_errors_are_marked_when_they_came(self):
        report = make_report(make_run(failing=0.0005))
        (run,) = report.runs
        came = [moment.at_s + 0.125 for moment in run.moments if moment.errors]
        assert 0 < len(came) < len(run.moments)
        assert line(plots.latency_over_time(report), "errors")[0] == came

    def test_what_is_never_steady_has_no_line(self):
        assert not lines(plots.latency_over_time(make_report(make_run(steady_from_s=None))), "steady")
        assert not lines(plots.latency_over_time(make_report(make_run(steady_from_s=0.0))), "steady")

    def test_repetitions_lie_over_each_other(self):
        figure = plots.latency_over_time(reports.repeats())
        assert len(lines(figure, "p99")) == 5
        assert len(lines(plots.throughput_over_time(reports.repeats()), "answered")) == 5

    def test_of_a_search_the_run_that_counts_is_drawn(self):
        report = reports.search()
        _, y = line(plots.latency_over_time(report), "p50")
        assert y == [moment.p50 for moment in report.runs[-1].moments]
        assert len(lines(plots.throughput_over_time(report), "answered")) == 1

    def test_a_comparison_names_both(self):
        figure = plots.throughput_over_time(reports.compare())
        assert len(lines(figure, "answered")) == 8
        assert legend(figure) == ["due", "A: as given", "B: max_rows=32"]
        assert legend(plots.latency_over_time(reports.compare())) == ["A, p99", "A, p50", "B, p99", "B, p50"]

    def test_a_comparison_without_p99_shows_p50(self):
        report = reports.compare()
        runs = tuple(
            replace(run, moments=tuple(replace(moment, p99=None) for moment in run.moments))
            for run in report.runs
        )
        figure = plots.latency_over_time(replace(report, runs=runs))
        assert legend(figure) == ["A", "B"]
        assert figure.axes[0].get_ylabel() == "p50 latency (ms)"

    def test_a_sweep_shows_what_most_of_it_has(self):
        figure = plots.latency_over_time(reports.long_sweep())
        assert figure.axes[0].get_ylabel() == "p50 latency (ms)"
        figure = plots.latency_over_time(reports.sweep())
        assert figure.axes[0].get_ylabel() == "p99 latency (ms)"


class TestPercentiles:
    @pytest.mark.parametrize("percent", [0.0, 50.0, 90.0, 99.0, 99.9])
    def test_the_curve_is_the_histogram(self, percent):
        report = reports.single()
        counts = Counts.decode(report.runs[0].histogram)
        x, y = lines(plots.percentiles(report), "curve")[0]
        assert y[x.index(odds(percent))] == counts.percentile(percent) / 1e6

    def test_it_ends_at_the_maximum_and_is_dotted_where_it_may_be_chance(self):
        report = reports.single()
        counts = Counts.decode(report.runs[0].histogram)
        (x, _), (tail_x, tail_y) = lines(plots.percentiles(report), "curve")
        assert tail_y[-1] == counts.percentile(100) / 1e6
        assert x[-1] == tail_x[0] <= len(counts) / 3
        assert tail_x[1] > len(counts) / 3 * (1 - 1e-9)

    def test_what_was_not_corrected_is_dots(self):
        report = reports.stalled()
        (run,) = report.runs
        x, y = line(plots.percentiles(report), "uncorrected")
        assert dict(zip(x, y, strict=True)) == {
            odds(float(name[1:])): value for name, value in run.uncorrected.items() if name[0] == "p"
        }
        assert run.uncorrected["p99"] < run.latency["p99"] / 10
        assert not lines(plots.percentiles(make_report(replace(run, uncorrected={}))), "uncorrected")

    def test_of_several_dots_are_drawn_only_where_they_say_something(self):
        assert not lines(plots.percentiles(reports.compare()), "uncorrected")
        runs = [make_run("a"), make_run("b", stall_s=(4.0, 1.2))]
        assert len(lines(plots.percentiles(make_report(*runs, kind="sweep")), "uncorrected")) == 1

    def test_of_many_runs_some_are_drawn(self):
        assert len(legend(plots.percentiles(reports.long_sweep()))) == 10
        assert legend(plots.percentiles(reports.compare())) == ["A: as given", "B: max_rows=32"]

    def test_one_answer(self):
        counts = Counts()
        counts.add(np.array([5_000_000]))
        report = make_report(make_run(histogram=counts.encoded(), answered=1, uncorrected={}))
        plots.as_svg(plots.percentiles(report))

    def test_a_run_without_answers_has_no_curve(self):
        figure = plots.percentiles(make_report(make_run("a"), reports.nothing("b"), kind="sweep"))
        assert legend(figure) == ["a", "from when it was sent"]


class TestBatches:
    def test_the_bars_are_the_counts(self):
        report = reports.single()
        by_rows = report.runs[0].batches.by_rows
        figure = plots.batches(report)
        bars = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in figure.axes[0].patches}
        assert bars == by_rows
        mean = line(figure, "mean")[0][0]
        assert mean == pytest.approx(report.runs[0].batches.mean_rows)

    def test_many_sizes_share_bars(self):
        by_rows = {rows: rows for rows in range(1, 1001)}
        run = make_run()
        figure = plots.batches(make_report(replace(run, batches=replace(run.batches, by_rows=by_rows))))
        heights = [bar.get_height() for bar in figure.axes[0].patches]
        assert len(heights) < 100
        assert sum(heights) == sum(by_rows.values())

    def test_short_times_are_in_microseconds(self):
        run = make_run(base_ms=0.02)
        axes = plots.where_time_goes(make_report(run)).axes[0]
        assert axes.get_xlabel() == "mean latency (µs)"
        (last,) = axes.containers[-1].patches
        assert last.get_x() + last.get_width() == pytest.approx(1000 * run.latency["mean"])

    def test_the_stages_are_the_mean_latency(self):
        report = reports.single()
        (run,) = report.runs
        axes = plots.where_time_goes(report).axes[0]
        its = run.batches
        widths = {bars.get_label(): bars.patches[0].get_width() for bars in axes.containers}
        assert widths == pytest.approx(
            {
                "queue": its.queue,
                "copy in": its.copy_in,
                "compute": its.compute,
                "copy out": its.copy_out,
                "rest": run.latency["mean"] - its.queue - its.copy_in - its.compute - its.copy_out,
            }
        )
        (last,) = axes.containers[-1].patches
        assert last.get_x() + last.get_width() == pytest.approx(run.latency["mean"])

    def test_a_stage_that_takes_no_time_is_not_there(self):
        run = make_run()
        run = replace(run, batches=replace(run.batches, copy_in=0.0, queue=run.latency["mean"]))
        assert legend(plots.where_time_goes(make_report(run))) == ["queue", "compute", "copy out"]

    def test_totals_far_apart_are_shares(self):
        axes = plots.where_time_goes(reports.sweep()).axes[0]
        assert "%" in axes.get_xlabel()
        for place in range(8):
            widths = [bars.patches[place].get_width() for bars in axes.containers]
            assert sum(widths) == pytest.approx(100)
        assert "(ms)" in plots.where_time_goes(reports.compare()).axes[0].get_xlabel()


class TestTimeline:
    def spans(self, figure, gid):
        (found,) = [item for item in figure.axes[0].collections if item.get_gid() == gid]
        return [(box.x0, box.x1) for box in (path.get_extents() for path in found.get_paths())]

    def test_the_bars_are_the_batches(self):
        report = reports.single()
        figure = plots.timeline(report)
        mine = [bar for bar in report.runs[0].timeline if bar.context == 1]
        for stage, ends in {
            "copy in": [(bar.begin, bar.copied_in) for bar in mine],
            "compute": [(bar.started, bar.computed) for bar in mine],
            "copy out": [(bar.computed, bar.end) for bar in mine],
        }.items():
            found = self.spans(figure, f"{stage}-1")
            assert 20 < len(found) <= 50
            first = next(place for place, span in enumerate(ends) if span == pytest.approx(found[0]))
            assert found == [pytest.approx(span) for span in ends[first : first + len(found)]]

    def test_rows_and_arenas_are_written_in_wide_bars(self):
        bars = list(reports.bars(np.random.default_rng(1), count=9))
        words = [
            text.get_text()
            for text in plots.timeline(make_report(make_run(timeline=tuple(bars)))).axes[0].texts
        ]
        assert words
        assert set(words) <= {f"{bar.rows}\na{bar.arena}" for bar in bars}
        bars = list(reports.bars(np.random.default_rng(1), count=9, arenas=None))
        words = [
            text.get_text()
            for text in plots.timeline(make_report(make_run(timeline=tuple(bars)))).axes[0].texts
        ]
        assert words
        assert all(word.isdecimal() for word in words)

    def test_narrow_bars_have_no_words(self):
        bars = [
            replace(bar, end=bar.end + 1000 * (n == 8))
            for n, bar in enumerate(reports.make_run().timeline[:9])
        ]
        assert not plots.timeline(make_report(make_run(timeline=tuple(bars)))).axes[0].texts


class TestRatios:
    def test_the_points_are_the_ratios(self):
        report = reports.compare()
        figure = plots.ratios(report)
        for place, (name, ratio) in enumerate(report.comparison.ratios.items()):
            assert line(figure, name) == ([ratio.mean], [place])
        spans = [list(line.get_xdata()) for line in figure.axes[0].lines if line.get_gid() is None]
        for ratio in report.comparison.ratios.values():
            assert [ratio.low, ratio.high] in spans

    def test_better_and_worse_are_written(self):
        ratios = {
            "p99": Interval(0.5, 0.4, 0.6, 4),
            "throughput": Interval(0.5, 0.4, 0.6, 4),
            "p50": Interval(1.0, 0.9, 4.2, 4),
        }
        figure = plots.ratios(replace(reports.compare(), comparison=Comparison("a", "b", ratios)))
        ends = [text.get_text().split("  ")[1] for text in figure.axes[0].texts]
        assert ends == ["better", "worse", "no certain difference"]


class TestFiles:
    @pytest.mark.parametrize("kind", IN_TIERS)
    def test_svg_is_xml_with_text_and_ids_of_its_own(self, kind):
        ids = []
        for plot in plots_of(kind):
            text = plots.as_svg(plot.figure)
            root = ElementTree.fromstring(text)
            assert root.tag == f"{SVG}svg"
            mine = [element.get("id") for element in root.iter() if element.get("id")]
            assert len(mine) == len(set(mine))
            ids += mine
            used = [
                value.partition("#")[2].rstrip(")")
                for element in root.iter()
                for name, value in element.attrib.items()
                if name.endswith("href") or name == "clip-path"
            ]
            assert set(used) <= set(mine)
            assert not root.findall(f"{SVG}metadata")
        assert len(ids) == len(set(ids)), "the plots of one page have no id in common"

    def test_text_is_text(self):
        words = texts(plots.as_svg(plots.throughput_latency(reports.sweep())))
        assert {"throughput (requests/s)", "latency (ms)", "p99<20ms", "1,000"} <= set(words)

    def test_names_are_text_whatever_they_are(self):
        svg = plots.as_svg(plots.percentiles(reports.sweep_of_hostile_names()))
        words = texts(svg)
        assert XSS[:31] + "…" in words
        assert "$x_1$ & 'y' \"z\"" in words
        assert 'bell \N{REPLACEMENT CHARACTER} id="a" url(#b)' in words
        assert "<script" not in svg

    def test_png(self):
        raw = plots.as_png(plots.throughput_latency(reports.sweep()))
        assert raw.startswith(b"\x89PNG\r\n\x1a\n")
        assert min(struct.unpack(">II", raw[16:24])) > 500
        assert b"Software" not in raw

    @pytest.mark.tier2
    def test_the_same_report_gives_the_same_bytes(self):
        program = (
            "import hashlib, json\n"
            "from asynctrt.loadtest import plots\n"
            "from tests.loadtest import reports\n"
            "made = [plot.figure for plot in plots.figures(reports.single(slo=()))]\n"
            "raw = [plots.as_svg(figure).encode() for figure in made] + [plots.as_png(made[0])]\n"
            "print(json.dumps([hashlib.sha256(each).hexdigest() for each in raw]))"
        )
        found = [
            subprocess.run(
                [sys.executable, "-W", "error", "-c", program],
                capture_output=True,
                text=True,
                check=True,
                cwd=ROOT,
                env={"PYTHONHASHSEED": seed, "PATH": "", "TZ": "UTC"},
            ).stdout
            for seed in ("1", "2")
        ]
        assert found[0] == found[1]
        assert len(json.loads(found[0])) == 7

    def test_the_application_s_own_style_changes_nothing_and_is_kept(self):
        report = reports.single()
        before = plots.as_svg(plots.percentiles(report))
        with mpl.rc_context(
            {
                "font.size": 30,
                "axes.grid": False,
                "svg.fonttype": "path",
                "axes.facecolor": "black",
                "xtick.direction": "in",
            }
        ):
            own = dict(mpl.rcParams)
            assert plots.as_svg(plots.percentiles(report)) == before
            assert dict(mpl.rcParams) == own


def test_a_missing_extra_is_named():
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from asynctrt.errors import MissingExtraError\n"
        "try:\n    import asynctrt.loadtest.plots\n"
        "except MissingExtraError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "matplotlib: pip install 'asynctrt[plots]'" in done.stdout
