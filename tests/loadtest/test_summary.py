"""What is shown of a report: which runs stand for it, and numbers as words."""

from dataclasses import replace

import pytest

from asynctrt.loadtest.summary import main_run, number, rate_of
from tests.loadtest import reports


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (20, "20"),
        (2000.0, "2,000"),
        (3.0004, "3.00"),
        (0.012345, "0.0123"),
        (12.345, "12.3"),
        (99.96, "100"),
        (123.4, "123"),
        (1234567.8, "1,234,568"),
        (-15.8123, "-15.8"),
        (float("inf"), "∞"),
        (float("nan"), "?"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


class TestMainRun:
    def test_of_nothing(self):
        assert main_run(reports.empty()) is None

    def test_of_a_search_it_is_the_last_at_the_rate_that_was_found(self):
        report = reports.search()
        main = main_run(report)
        assert main is report.runs[-1]
        assert (main.offered, main.holds) == (report.search.holds, True)

    def test_of_a_search_a_rate_that_held_by_luck_is_not_taken(self):
        report = reports.search()
        report = replace(report, search=replace(report.search, holds=2828))
        assert main_run(report).offered == 2828

    def test_of_a_search_in_vain_it_is_the_last(self):
        report = reports.search_in_vain()
        assert main_run(report) is report.runs[-1]

    def test_of_a_sweep_it_is_the_fastest_that_holds(self):
        report = reports.sweep()
        fastest = max((run for run in report.runs if run.holds), key=lambda run: run.throughput)
        assert main_run(report) is fastest
        assert fastest.throughput < max(run.throughput for run in report.runs)

    def test_of_a_sweep_without_a_target_it_is_not_one_that_is_void(self):
        report = reports.sweep(slo=())
        assert main_run(report) is report.runs[-1]
        last = replace(report.runs[-1], void=("the generator fell behind",))
        assert main_run(replace(report, runs=(*report.runs[:-1], last))).label == "rate=3800"

    def test_of_a_setting_at_one_rate_it_is_the_quickest(self):
        assert main_run(reports.sweep_of_a_setting((10, 5, 0, 2))).label == "max_delay_ms=0"

    def test_of_callers_it_is_the_fastest(self):
        report = reports.sweep()
        runs = [replace(run, offered=None, parameters={"callers": 2**n}) for n, run in enumerate(report.runs)]
        assert main_run(replace(report, runs=tuple(runs))).label == "rate=3000"


def test_rates_are_read_as_they_are_given():
    run = reports.make_run(rate=2000, parameters={"rate": "1500"})
    assert rate_of(run) == 1500
    assert rate_of(replace(run, parameters={"rate": "100..2000"})) == 2000
    assert rate_of(replace(run, parameters={}, offered=None)) == run.throughput
