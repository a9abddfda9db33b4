"""``asynctrt simulate`` as a user types it: real processes, files that are wrong, Ctrl-C."""

import json
import os
import subprocess
import sys

import pytest

from tests.test_cli import WAIT_S, asynctrt_command, in_a_terminal

TABLE = {"batches": [{"rows": 1, "compute_ms": 1.0}, {"rows": 64, "compute_ms": 4.0}], "lanes": 2}
BROKEN = """
import sys
from asynctrt.scheduling.scheduler import Scheduler
Scheduler.cancel = lambda self, request: False
sys.argv[0] = "asynctrt"
from asynctrt.__main__ import main
main()
"""


@pytest.fixture
def latency(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(TABLE))
    return path


def simulate(*arguments):
    return asynctrt_command("simulate", *arguments)


def python(program, *arguments):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
        env={**os.environ, "COLUMNS": "160"},
    )
    return done.returncode, done.stdout, done.stderr


def test_a_load_is_predicted_and_written(latency, tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("time,rows\n" + "".join(f"{number / 1000},2\n" for number in range(500)))
    code, out, err = simulate(
        *("--arrivals", trace, "--latency", latency, "--contexts", "4", "--max-delay", "0.001"),
        *("--json", "-", "--slo", "p99<50ms"),
    )
    assert code == 0, err
    content = json.loads(out)
    assert content["answered"] == content["requests"] == 500
    assert content["settings"]["max_delay"] == 0.001
    assert content["slo"] == {"p99<50ms": True}
    assert content["simulated"]


@pytest.mark.tier2
def test_seeds_are_checked_and_a_prediction_is_drawn(latency, tmp_path):
    code, out, err = simulate("--seeds", "5", "--seed", "7")
    assert (code, err.strip()) == (0, "")
    assert "5 worlds, seeds 7 to 11: 0 broke a rule" in out
    for name in ("page.html", "one.png", "folder"):
        code, out, err = simulate(
            *("--arrivals", "poisson:2000", "--latency", latency, "--seconds", "1"),
            *("--devices", "3", "--slo", "p99<1us", "--plot", tmp_path / name),
        )
        assert code == 3, err
        assert "Predicted for poisson:2000" in out
        assert "missed" in out
    assert "<svg" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (tmp_path / "folder").iterdir()} >= {"latency.png", "batches.png"}


@pytest.mark.tier2
def test_a_seed_that_breaks_a_rule_is_shown_with_its_command():
    code, out, err = python(BROKEN, "simulate", "--seeds", "10")
    assert code == 1
    assert "repeat it with: asynctrt simulate --seeds 1 --seed " in out
    assert "shrunk from" in out
    assert "Traceback" not in out + err
    seed = out.partition("--seed ")[2].split()[0]
    assert python(BROKEN, "simulate", "--seeds", "1", "--seed", seed)[0] == 1


@pytest.mark.tier2
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--seeds", "0"], 1, "--seeds must be 1 or more"),
        (["--latency", "MODEL"], 1, "--latency belong to a load that is predicted: give --arrivals too"),
        (["--arrivals", "poisson:1"], 1, "--latency model.json. `asynctrt load MODEL --sweep"),
        (["--arrivals", "poisson:1", "--latency", "MODEL", "--seeds", "3"], 1, "leave --arrivals out"),
        (["--arrivals", "poisson:1", "--latency", "/no.json"], 1, "'/no.json' cannot be read"),
        (["--arrivals", "poisson:1", "--latency", "BROKEN"], 1, "line 1, column 2 is not JSON"),
        (["--arrivals", "poisson:0", "--latency", "MODEL"], 1, "must be above 0"),
        (["--arrivals", "/no.csv", "--latency", "MODEL"], 1, "'/no.csv' cannot be read"),
        (["--arrivals", "TRACE", "--latency", "MODEL"], 1, "line 3: time must be a number from 0"),
        (
            ["--arrivals", "poisson:1", "--latency", "MODEL", "--rows", "x"],
            1,
            "rows: 'x' are not whole numbers",
        ),
        (["--arrivals", "poisson:1", "--latency", "MODEL", "--contexts", "0"], 1, "contexts must be a whole"),
        (["--arrivals", "poisson:1", "--latency", "MODEL", "--warmup", "20"], 1, "warmup (20) must be below"),
        (["--arrivals", "poisson:9", "--latency", "MODEL", "--json", "/no/x"], 1, "cannot be written"),
        (["--arrivals", "poisson:9", "--latency", "MODEL", "--balance", "x"], 2, "Invalid value"),
        (["x"], 2, "unexpected extra argument"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(arguments, code, says, latency, tmp_path):
    broken, trace = tmp_path / "broken.json", tmp_path / "trace.csv"
    broken.write_text("{")
    trace.write_text("time\n1\nsoon\n")
    named = {"MODEL": latency, "BROKEN": broken, "TRACE": trace}
    returned, out, err = simulate(*(named.get(argument, argument) for argument in arguments))
    assert returned == code
    assert says in " ".join(err.split())
    assert "Traceback" not in out + err


@pytest.mark.tier2
def test_ctrl_c_ends_it_with_what_there_is(latency):
    code, screen = in_a_terminal("simulate", "--seeds", "1000000", interrupt_at=r"[1-9]\d*/1000000")
    assert code == 130
    assert "0 broke a rule" in screen
    load = ("--arrivals", "poisson:5000", "--seconds", "2000", "--latency", latency)
    # The bar is there before anything is simulated.
    code, screen = in_a_terminal("simulate", *load, interrupt_at=r"[1-9]\d*/100\b")
    assert code == 130
    assert "only what was measured until then is shown" in screen
    assert "throughput" in screen
    assert "Traceback" not in screen


@pytest.mark.tier2
def test_plots_name_the_extra_that_they_need(latency):
    program = "import sys; sys.modules['matplotlib'] = None; from asynctrt.__main__ import main; main()"
    flags = ("simulate", "--arrivals", "poisson:1", "--latency", latency)
    code, _, err = python(program, *flags, "--plot", "x.png")
    assert code == 1
    assert "pip install 'asynctrt[plots]'" in err
    assert python(program, *flags)[0] == 0, "figures alone need no plots"
