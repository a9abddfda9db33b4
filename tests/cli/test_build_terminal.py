"""How far a build is: a bar in a terminal."""

import io

from rich.console import Console

from asynctrt.backends.tensorrt.builder import BuildStep
from asynctrt.cli.build_terminal import build_bar


def shown(*steps, is_terminal=True):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
    with build_bar(console) as report:
        for step in steps:
            report(step)
    return console.file.getvalue()


def test_a_build_has_a_bar_of_its_whole_steps_and_the_name_of_each_phase():
    text = shown(BuildStep("Building Engine", None, 1, 4), BuildStep("Tactics [x]", "Building Engine", 3, 9))
    assert "tactics [x]" in text
    assert "1/4" in text
    assert "3/9" not in text


def test_names_do_not_control_the_terminal():
    assert "\x1b[2J" not in shown(BuildStep("\x1b[2Jodd", None, 1, 4))


def test_a_file_gets_nothing():
    assert shown(BuildStep("Building Engine", None, 1, 4), is_terminal=False) == ""
