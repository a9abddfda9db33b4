"""``asynctrt load`` as a user types it: real processes, a server, a terminal, Ctrl-C, a full disk."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.test_app import asynctrt_command, asynctrt_commands, in_a_terminal
from tests.helpers import free_port
from tests.models import double_onnx, sequence_onnx
from tests.serving.test_perf_analyzer import Served

pytestmark = pytest.mark.timeout(240)
QUICK = ["--seconds", "0.5", "--warmup", "0.1"]


@pytest.fixture
def model(tmp_path):
    return double_onnx(tmp_path / "double.onnx")


def load(*arguments):
    return asynctrt_command("load", *arguments)


@pytest.mark.tier2
def test_a_model_is_measured_and_reported(model, tmp_path):
    files = {name: tmp_path / f"run.{name}" for name in ("json", "html")}
    code, out, err = load(
        *(model, *QUICK, "--rate", "500", "--slo", "p50<1s"),
        *("--json", files["json"], "--report", files["html"]),
    )
    assert code == 0, err
    assert "p50<1s is held" in out
    assert "Rows each" in out
    content = json.loads(files["json"].read_text())
    (run,) = content["runs"]
    assert run["answered"] == run["requests"] > 100
    assert sum(run["histogram"].values()) == run["answered"]
    assert run["batches"]["requests"] >= run["answered"] - 5
    assert "uPlot" in files["html"].read_text()
    assert "Traceback" not in err


@pytest.mark.tier2
def test_rows_may_be_padded(tmp_path):
    path = sequence_onnx(tmp_path / "sequence.onnx")
    code, out, err = load(path, *QUICK, "--rate", "100", "--dims", "length=20", "--pad", "length=16,32")
    assert code == 0, err
    assert "Rows each" in out


@pytest.mark.tier2
def test_a_second_start_measures_again_and_is_compared_with_the_first(model, tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    measuring = ("load", model, *QUICK, "--callers", "4", "--slo", "errors<1%", "--json")
    gate = ("compare", first, second, "--fail-if", "p50>+900%")
    said = asynctrt_commands(
        (*measuring, first), (*measuring, second), gate, (*gate, "--fail-if", "throughput>1")
    )
    assert [code for code, _, _ in said] == [0, 0, 0, 3]
    err = said[-1][2]
    assert "Failed: throughput>1: throughput is" in err


@pytest.mark.tier2
def test_a_target_that_is_missed_is_an_exit_status(model):
    code, out, _ = load(model, *QUICK, "--rate", "500", "--slo", "p50<1us")
    assert code == 3
    assert "The slo is not held\n  p50<1us: p50 is " in out


WRONG = [
    ([], 2, "Missing argument"),
    (["nothing.onnx"], 1, "ModelNotFoundError: there is no file 'nothing.onnx'"),
    (["nothing:model"], 1, "ModelNotFoundError: 'nothing:model': the module"),
    (["MODEL", "--rate", "0"], 1, "must be above 0"),
    (["MODEL", "--rate", "1e9"], 1, "at most 100,000,000"),
    (["MODEL", "--rate", "5", "--callers", "5"], 1, "give only one of them"),
    (["MODEL", "--processes", "2"], 1, "several processes can only send to a server"),
    (["MODEL", "--slo", "p99"], 1, "'p99' is not a criterion"),
    (["MODEL", "--inputs", "/no/such.npz"], 1, "'/no/such.npz' cannot be read"),
    (["MODEL", "--reader", "os:nothing"], 2, "'reader' was removed: make"),
    (["MODEL", "--json", "MODEL/x.json"], 1, "cannot be written"),
    (["MODEL", "--baseline", "/no/such.json"], 2, "'baseline' was removed: give"),
    (["MODEL", "--dims", "length"], 1, "is not a list of dimensions"),
    (["MODEL", "--dims", "length=3"], 1, "unknown: ['length']"),
    (["SEQUENCE"], 1, "missing: ['length']"),
    (["http://127.0.0.1:PORT/v2/models/x"], 1, "TargetError: "),
    (["grpc://127.0.0.1:PORT/x"], 1, "TargetError: "),
    (["ws://127.0.0.1:PORT/v2/models/x/ws"], 1, "TargetError: "),
    (["ftp://127.0.0.1/x"], 1, "unknown scheme 'ftp'"),
    (["http://127.0.0.1:PORT", "--max-rows", "4"], 1, "max_rows"),
]


@pytest.mark.tier2
def test_what_is_wrong_is_said_without_a_traceback(model, tmp_path):
    words = {"PORT": free_port(), "MODEL": model, "SEQUENCE": sequence_onnx(tmp_path / "sequence.onnx")}
    given = []
    for arguments, _, _ in WRONG:
        for name, meant in words.items():
            arguments = [word.replace(name, str(meant)) for word in arguments]
        given.append(["load", *arguments])
    for (arguments, code, says), (found, _, err) in zip(WRONG, asynctrt_commands(*given), strict=True):
        assert found == code, (arguments, err)
        assert says in err.replace("\n", " ").replace("│", ""), arguments
        assert "Traceback" not in err, arguments


@pytest.mark.tier2
def test_a_full_disk_costs_the_file_and_not_the_figures(model):
    """/dev/full is a disk that is full; the figures are on the screen all the same."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    program = (
        "import os, asynctrt._util.files as files\n"
        "full = lambda *where: (os.open('/dev/full', os.O_WRONLY), '/dev/full.x')\n"
        "files.tempfile.mkstemp = full\n"
        "from asynctrt.__main__ import main\n"
        "if __name__ == '__main__': main()\n"
    )
    path = model.parent / "full_disk.py"
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, path, "load", model, *QUICK, "--rate", "200", "--json", model.parent / "a.json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "COLUMNS": "160"},
    )
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert "requests/s" in done.stdout
    assert not (model.parent / "a.json").exists()


@pytest.mark.tier2
def test_figures_that_nothing_reads_do_not_cost_the_file(model, tmp_path):
    path = tmp_path / "run.json"
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "asynctrt", "load", model, *QUICK, "--rate", "200", "--json", path]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    subprocess.run(command, stdout=writing, env=environment, timeout=120, check=False)
    os.close(writing)
    assert json.loads(path.read_text())["runs"]


@pytest.mark.tier2
def test_ctrl_c_in_the_middle_gives_the_report_of_what_there_is(model, tmp_path):
    path = tmp_path / "cut.json"
    code, screen = in_a_terminal(
        "load", model, "--rate", "200", "--seconds", "100", "--warmup", "0.1", "--json", path,
        interrupt_at=r"so far",
    )  # fmt: skip
    assert code == 130, screen
    assert "Stopped early" in screen
    assert "Interrupted" in screen
    content = json.loads(path.read_text())
    assert content["complete"] is False
    (run,) = content["runs"]
    assert 0 < run["seconds"] < 60
    assert run["answered"] > 0
    assert "Traceback" not in screen


@contextmanager
def under_way(tmp_path, *flags, **how):
    """A load test as a process of its own group, which has sent some hundred requests."""
    (tmp_path / "target.py").write_text(
        "async def ask():\n    with open('asked', 'a') as file:\n        file.write('.')\n"
    )
    command = [
        sys.executable,
        "-m",
        "asynctrt",
        "load",
        "target:ask",
        "--rate",
        "200",
        "--warmup",
        "0",
        *flags,
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    settings = {"cwd": tmp_path, "env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        [*command, "--json", "run.json"], start_new_session=True, **settings, **how
    ) as process:
        asked = tmp_path / "asked"
        while not asked.exists() or asked.stat().st_size < 300:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        yield process
        code = process.wait(30)
        assert code in (0, 4, 130), process.stderr.read()


@pytest.mark.tier2
def test_a_signal_for_the_whole_group_gives_the_report_too(tmp_path):
    """``timeout`` sends its signal to the command, and then to all processes of its group."""
    with under_way(tmp_path, "--seconds", "100") as process:
        process.send_signal(signal.SIGTERM)
        os.killpg(process.pid, signal.SIGTERM)
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["complete"] is False
    assert content["runs"][0]["answered"] > 0


@pytest.mark.tier2
def test_under_nohup_a_closed_terminal_ends_nothing(tmp_path):
    with under_way(tmp_path, "--requests", "500", preexec_fn=ignore_hangups) as process:
        os.killpg(process.pid, signal.SIGHUP)
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["complete"] is True
    assert content["runs"][0]["requests"] == 500


def ignore_hangups():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.mark.tier2
def test_ctrl_c_before_anything_was_measured(model):
    code, screen = in_a_terminal("load", model, "--rate", "200", "--warmup", "50", interrupt_at=r"warming up")
    assert code == 130, screen
    assert "before anything was measured" in screen
    assert "Traceback" not in screen


@pytest.mark.tier2
def test_a_server_over_all_three_protocols(tmp_path):
    """What it counts is what was sent to it."""
    served = Served(tmp_path)
    try:
        http, grpc = served.addresses["http"], served.addresses["grpc"]
        targets = (
            f"http://{http}/v2/models/double",
            f"grpc://{grpc}/double",
            f"ws://{http}/v2/models/double/ws",
        )
        paths = [tmp_path / f"{number}.json" for number in range(len(targets))]
        measured = [
            ("load", target, *QUICK, "--rate", "200", "--json", path)
            for target, path in zip(targets, paths, strict=True)
        ]
        for code, _, err in (
            asynctrt_command(*measured[0], "--processes", "2"),
            *asynctrt_commands(*measured[1:]),
        ):
            assert code in (0, 4), err  # 4: beside other tests the processes may be late.
        for path in paths:
            (run,) = json.loads(path.read_text())["runs"]
            assert run["error_share"] == 0, run["errors"]
            assert run["answered"] == run["requests"] > 40
            assert run["batches"]["requests"] >= run["answered"]
    finally:
        served.stop()
