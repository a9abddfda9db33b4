"""How far builds are: bars in a terminal, lines in a log."""

import io
import logging

import pytest
from rich.console import Console
from rich.progress import Progress

from asynctrt.backends.tensorrt.builder import BuildStep
from asynctrt.cli.build_terminal import LOGGER, _Bars, builds_shown, progress_on


@pytest.fixture
def console():
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def tell(said, model="/models/m.onnx", step=None):
    level = logging.INFO if step is None or step.parent is None else logging.DEBUG
    LOGGER.log(level, said, extra={"model": model, "step": step})


def bars_of(progress):
    return {task.description: (task.completed, task.total) for task in progress.tasks}


def test_a_build_has_a_bar_while_it_goes_on(console, caplog):
    with progress_on(console) as progress, builds_shown(console, progress):
        tell("building a plan from '/models/m.onnx'")
        assert bars_of(progress) == {"m.onnx: parsing the model": (0, None)}
        tell("", step=BuildStep("Building Engine", None, 1, 4))
        tell("", step=BuildStep("Tactics [x]", "Building Engine", 3, 9))
        assert list(bars_of(progress).values()) == [(1, 4)]
        tell("building another", model="n.onnx")
        assert len(bars_of(progress)) == 2
        tell("built a plan of 1 MiB", model="/models/m.onnx")
        assert list(bars_of(progress)) == ["n.onnx: parsing the model"]
        tell("", step=BuildStep("late", None, 4, 4))
    assert not bars_of(progress), "the other build failed"
    shown = console.file.getvalue()
    assert "building a plan from '/models/m.onnx'" in shown
    assert "built a plan of 1 MiB" in shown
    assert not caplog.records, "what is shown is not logged as well"
    assert not [one for one in LOGGER.handlers if isinstance(one, _Bars)]
    assert (LOGGER.level, LOGGER.propagate) == (logging.NOTSET, True)


def test_bars_of_its_own_go_with_the_builds(console, monkeypatch):
    ends = []
    stop = Progress.stop
    monkeypatch.setattr(Progress, "stop", lambda self: ends.append(stop(self)))
    with pytest.raises(ZeroDivisionError), builds_shown(console):
        tell("building")
        raise ZeroDivisionError
    assert ends


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("is_wanted", [True, False])
def test_without_a_terminal_and_where_a_program_reads_it_is_logged(terminal, is_wanted, caplog):
    console = Console(file=io.StringIO(), force_terminal=terminal)
    caplog.set_level(logging.INFO, "asynctrt")
    with builds_shown(console, is_wanted=is_wanted):
        tell("building")
    is_shown = terminal and is_wanted
    assert bool(console.file.getvalue()) == is_shown
    assert [record.getMessage() for record in caplog.records] == ([] if is_shown else ["building"])


def test_names_do_not_control_the_terminal(console):
    with builds_shown(console):
        tell("building '\x1b[2Jm.onnx'", model="\x1b[2Jm.onnx")
    assert "\x1b[2J" not in console.file.getvalue()
