"""What compares the double with the real TensorRT on a GPU: its scenarios run, and it finds differences."""

import json
import sys
from pathlib import Path

import pytest

from tests.gpu import differential
from tests.gpu.differential import Outcome, differences, read_outcome
from tests.gpu.scenarios import SCENARIOS
from tests.gpu.sides import OverError, Setting, Side

pytestmark = pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT:DeprecationWarning")


def note(step, value, **more):
    return json.dumps({"step": step, "value": value, **more})


def outcome(*lines, code=0):
    return read_outcome("\n".join(("a word of the library", *lines)), "", code)


def verdicts(real, double):
    return [(step, verdict) for step, _, _, verdict in differences("a scenario", real, double)]


DONE = json.dumps({"end": "done"})
UNDEFINED = outcome(note("one", 1), note("two", "undefined: said why"), json.dumps({"end": "undefined"}))


FOLDER = Path(differential.__file__).parent
RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("recorded*.json"))}
"""What real packages did on a GPU: of each step its value, the recorded and the logged errors."""

LATEST = RECORDED["recorded"]
BY_SCENARIO = [(file, name) for file, held in RECORDED.items() for name in held["scenarios"]]


def performed(name, folder, capsys, recorded=LATEST):
    """Run a scenario on the double."""
    has_lean_runtime = recorded["flavour"] != "tensorrt"
    setting = Setting("double" if has_lean_runtime else "tensorrt", "", "")
    side = Side("double", setting, recorded["version"], folder)
    try:
        SCENARIOS[name](side)
        last = DONE
    except OverError:
        last = json.dumps({"end": "undefined"})
    side.close()
    return read_outcome(capsys.readouterr().out + last, "", 0)


def differing(file, name, folder, capsys):
    """Return the steps of a scenario in which the double differs from what was recorded."""
    held, names = RECORDED[file], ("step", "value", "recorded", "logged")
    steps = tuple(dict(zip(names, step, strict=False)) for step in held["scenarios"][name])
    found = differences(name, Outcome(steps, "done"), performed(name, folder, capsys, held))
    return {(name, step) for step, *_ in found}


@pytest.mark.parametrize(("file", "name"), BY_SCENARIO)
def test_the_double_does_what_tensorrt_did(tmp_path, capsys, file, name):
    assert differing(file, name, tmp_path, capsys) <= differential.KNOWN.keys()


@pytest.mark.parametrize("name", sorted({name for name, _ in differential.KNOWN}))
def test_what_is_known_to_differ_does(tmp_path, capsys, name):
    files = [file for file, other in BY_SCENARIO if other == name]
    found = set().union(*(differing(file, name, tmp_path, capsys) for file in files))
    assert found == {key for key in differential.KNOWN if key[0] == name}


def test_what_a_process_did_before_it_crashed_is_kept():
    found = outcome(note("one", 1), json.dumps({"begins": "two"}), code=-11)
    assert found.text == "crash (SIGSEGV) at 'two'"
    assert [one["value"] for one in found.steps] == [1, "crash (SIGSEGV)"]
    assert outcome(note("one", 1), code=None).text == "hangs at 'between the steps'"


def test_a_crash_is_what_the_double_calls_undefined():
    crashed = outcome(note("one", 1), json.dumps({"begins": "two"}), code=-11)
    assert verdicts(crashed, UNDEFINED) == []


def test_the_double_may_be_stricter():
    ran = outcome(note("one", 1), note("two", True), note("three", 3), DONE)
    assert verdicts(ran, UNDEFINED) == [("two", "stricter")]
    assert verdicts(UNDEFINED, ran) == [("two", "differs")]


@pytest.mark.parametrize(
    "other",
    [
        note("one", 2),
        note("one", 1, recorded=["3 API Usage Error"]),
        note("another", 1),
        json.dumps({"begins": "one"}),
    ],
)
def test_another_value_report_or_end_is_a_difference(other):
    found = outcome(note("one", 1), DONE)
    assert [verdict for _, verdict in verdicts(found, outcome(other, code=1))][:1] == ["differs"]


def test_words_do_not_count():
    one, other = (outcome(note("one", 1, said=[words]), DONE) for words in ("some", "others"))
    assert verdicts(one, other) == []


def test_a_scenario_that_fails_on_both_sides_is_no_agreement():
    broken = outcome(json.dumps({"begins": "one"}), code=1)
    assert verdicts(broken, broken) == [("one", "differs")]


def test_a_known_difference_is_told_as_such(monkeypatch):
    monkeypatch.setattr(differential, "KNOWN", {("a scenario", "one"): "a reason"})
    one, other = (outcome(note("one", value), DONE) for value in (1, 2))
    assert verdicts(one, other) == [("one", "known")]
    assert isinstance(one, Outcome)


PROGRAM = """#!{python} -IS
import json, os, signal, sys
names, side = sys.argv[sys.argv.index("--perform") + 1 :][:2]
for name in names.split(","):
    if name == "second_logger":
        sys.exit("no room")
    print(json.dumps({{"scenario": name}}))
    print(json.dumps({{"begins": "end"}}), flush=True)
    if name == "addresses" and side == "real":
        os.kill(os.getpid(), signal.SIGSEGV)
    print(json.dumps({{"step": "end", "value": 1}}))
    print(json.dumps({{"end": "done"}}), flush=True)
"""


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """Have the processes of a comparison run a program that is quick, and does as it is told."""
    program = tmp_path / "program"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))


def test_scenarios_after_one_that_ends_their_process_run_in_another(processes, capsys):
    assert differential.main(["--flavour", "double", "--only", "^(addresses|capture|shapes)$", "--jobs", "2"])
    shown = capsys.readouterr()
    assert "crash (SIGSEGV) at 'end'" in shown.out
    assert "2 same, 0 stricter, 0 known, 1 differs, 0 not run" in shown.out
    assert "6 of 6: " in shown.err


def test_what_cannot_start_is_not_run(processes, capsys):
    assert differential.main(["--flavour", "double", "--only", "^second_logger$"]) == 1
    shown = capsys.readouterr().out
    assert "1 not run" in shown
    assert "second_logger on the real side: no room" in shown


def test_nothing_runs_without_time(capsys):
    assert differential.main(["--flavour", "double", "--within", "0"]) == 1
    assert f"0 differs, {len(SCENARIOS)} not run" in capsys.readouterr().out


@pytest.mark.tier2
def test_the_command_compares_the_double_with_itself(tmp_path, capsys):
    path = tmp_path / "found.json"
    only = "^(addresses|sizes_of_memory|lean_runtime_outlives_what_loaded_it)$"
    assert differential.main(["--flavour", "double", "--only", only, "--jobs", "2", "--json", str(path)]) == 0
    assert "3 same, 0 stricter, 0 known, 0 differs, 0 not run" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["scenarios"]) == 3
