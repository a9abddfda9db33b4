"""What is shown of a report: which runs stand for it, and numbers as words."""

from dataclasses import replace

import pytest

from asynctrt.loadtest.views import (
    GROUPS_MAX,
    MARKS,
    groups,
    main_run,
    marks_for,
    number,
    odds,
    rate_of,
    sizes,
)
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


class TestGroups:
    def test_repetitions_are_one(self):
        report = reports.repeats()
        (group,) = groups(report)
        assert (group.name, group.runs) == ("5 repetitions", report.runs)

    def test_one_run_has_no_name(self):
        assert [group.name for group in groups(reports.single())] == [""]
        assert groups(reports.empty()) == []

    def test_of_many_some_are_shown(self):
        report = reports.long_sweep()
        shown = groups(report)
        assert len(shown) == GROUPS_MAX == len({group.name for group in shown})
        assert shown[0].runs == report.runs[:1]
        assert shown[-1].runs == report.runs[-1:]
        assert shown[-1].name == f"{report.runs[-1].label} (void)"

    def test_runs_of_the_same_are_together(self):
        shown = groups(reports.search())
        assert [len(group.runs) for group in shown] == [1, 1, 1, 1, 2, 1, 1, 1]
        shown = groups(reports.sweep(rates=(500, 1000, 500, 1000)))
        assert [(group.name, len(group.runs)) for group in shown] == [("rate=500", 2), ("rate=1000", 2)]

    def test_a_search_is_in_the_order_of_its_rates(self):
        rates = [group.runs[0].offered for group in groups(reports.search())]
        assert rates == sorted(rates)


def test_sizes_of_batches_add_up():
    report = reports.repeats(3)
    found = sizes(report.runs)
    assert sum(found.values()) == sum(run.batches.batches for run in report.runs)
    assert list(found) == sorted(found)
    assert sizes(reports.few().runs) == {}


def test_rates_are_read_as_they_are_given():
    run = reports.make_run(rate=2000, parameters={"rate": "1500"})
    assert rate_of(run) == 1500
    assert rate_of(replace(run, parameters={"rate": "100..2000"})) == 2000
    assert rate_of(replace(run, parameters={}, offered=None)) == run.throughput


def test_the_percentiles_of_a_curve():
    assert (odds(0), odds(50), odds(99)) == (1, 2, 100)
    found = marks_for(1000)
    assert found == sorted(found)
    assert found[0] == 0
    assert odds(found[-1]) == pytest.approx(2000)
    assert {mark for mark in MARKS if mark <= 99.9} <= set(found)
    assert 99.99 not in found
    assert marks_for(1)[-1] == 50
