"""The report as text, as JSON and as an exit status."""

import json

import pytest

from asynctrt.doctor.findings import SICK, Findings, Level, error, note, ok, warning

LONG = "word " * 40


def text(*findings, width=80):
    return [line for _, line in Findings(findings).lines(width)]


def test_lines_fit_and_say_what_and_how_to_fix_it():
    shown = text(ok("a", "It is well"), error("b", LONG, LONG))
    assert max(map(len, shown)) <= 80
    assert shown[0] == "ok       It is well"
    assert shown[1].startswith("error    word")
    assert [line[:13] for line in shown if ": word" in line] == ["         fix:"]
    assert shown[-1].startswith("1 error, 1 ok. Begin with the first error")


def test_paths_are_never_broken():
    path = "/" + "a-" * 60
    assert any(path in line for line in text(ok("a", f"It is in {path}, and fits")))


def test_levels_belong_to_lines():
    assert [level for level, _ in Findings((note("a", "b", "c"),)).lines()] == [Level.NOTE] * 2 + [None] * 2


def test_the_summary_counts_the_worst_first():
    findings = [ok("a", "b"), *[warning("a", "b", "c")] * 2, note("a", "b", "c")]
    assert " ".join(text(*findings)[-2:]).startswith("2 warnings, 1 note, 1 ok. It works")
    assert text(ok("a", "b"))[-1] == "1 ok. Nothing stands in the way."


@pytest.mark.parametrize(
    ("findings", "status"),
    [
        ([], 0),
        ([warning("a", "b", "c"), ok("a", "b"), note("a", "b", "c")], 0),
        ([error("a", "b", "c"), ok("a", "b")], SICK),
    ],
)
def test_the_status(findings, status):
    made = Findings(tuple(findings))
    assert made.status == json.loads(json.dumps(made.as_json()))["status"] == status


def test_json_has_all_of_a_finding():
    (finding,) = Findings((warning("a", "b", "c"),)).as_json()["findings"]
    assert finding == {"check": "a", "level": "warning", "what": "b", "fix": "c"}
