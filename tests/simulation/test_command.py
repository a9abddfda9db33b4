"""What the command makes of its flags, and how Ctrl-C becomes a flag."""

import io
import os
import signal

import pytest
from rich.console import Console

from asynctrt.errors import MissingExtraError, OptionsError
from asynctrt.simulation import command, terminal
from asynctrt.simulation.plan import simulate_plan


@pytest.fixture
def latency(tmp_path):
    path = tmp_path / "model.json"
    path.write_text('{"batches": [{"rows": 1, "compute_ms": 1.0}]}')
    return path


def test_seeds_are_counted_from_the_first():
    assert command.make_job({}).seeds == range(100)
    assert command.make_job({"seeds": 3, "seed": 7}).seeds == range(7, 10)
    with pytest.raises(OptionsError, match="--seed 0 or more"):
        command.make_job({"seed": -1})


def test_flags_reach_the_load_and_the_engine(latency):
    given = {"arrivals": "poisson:10", "latency": latency, "contexts": 3, "devices": 2, "seed": 4}
    plan = command.make_job(given).plan
    assert (plan.contexts, plan.settings.devices, plan.seed, plan.options.contexts) == (3, 2, 4, 3)
    with pytest.raises(OptionsError, match="--seed must be 0 or more"):
        command.make_job({**given, "seed": -1})


def test_a_missing_extra_is_told_before_anything_is_simulated(latency, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "NEEDED", ("no_such_package",))
    with pytest.raises(MissingExtraError, match=r"asynctrt\[plots\]"):
        command.make_job({"arrivals": "poisson:1", "latency": latency, "plot": tmp_path / "x.png"})


def test_the_first_ctrl_c_is_a_flag_and_the_second_an_exception():
    before = signal.getsignal(signal.SIGINT)
    with command.Interrupt() as interrupt:
        assert not interrupt.is_set
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.is_set
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_ends_the_check_after_the_seed_at_hand():
    def advance(_):
        os.kill(os.getpid(), signal.SIGINT)

    assert command.check(range(5), advance) == (1, [], True)
    assert command.check(range(1), advance) == (1, [], False)


def test_the_terminal_shows_what_is_known(latency):
    given = {
        "arrivals": "poisson:2000",
        "latency": latency,
        "timeout": 0.01,
        "cancel": 0.1,
        "slo": ("p50<1us",),
    }
    plan = command.make_job(given | {"max_rows": 1}).plan
    made, _ = simulate_plan(plan)
    console = Console(width=100, record=True, file=io.StringIO())
    terminal.show(console, plan, made, "poisson:2000")
    shown = console.export_text()
    for text in ("throughput", "goodput", "latency, p99", "shed", "deadline", "cancelled", "busy", "missed"):
        assert text in shown
    assert command.exit_status(made) == command.NOT_GOOD
