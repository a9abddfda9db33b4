"""Others' words: each leads to a name that there is, at once, in Python and on the command line."""

import inspect
import json
import re

import pytest

from asynctrt import loadtest
from asynctrt._util.synonyms import ALL_SYNONYMS, COMMAND_SYNONYMS, SYNONYMS, nearest_name
from asynctrt.cli import app as cli
from asynctrt.errors import OptionsError
from asynctrt.options import Options
from tests.cli.test_app import asynctrt_command, asynctrt_commands
from tests.models import double_onnx

FLAGS = {name: set(inspect.signature(getattr(cli, f"_{name}")).parameters) for name in ("serve", "load")}
LOAD_TESTERS = {
    "users": "callers",
    "vus": "callers",
    "concurrency": "callers",
    "duration": "seconds",
    "rps": "rate",
    "qps": "rate",
    "max_batch_size": "max_rows",
}


def test_each_means_something_that_there_is_and_none_is_a_name_itself():
    names = set().union(*FLAGS.values())
    assert set(ALL_SYNONYMS.values()) <= names
    # Nothing is said twice: a word that both have means another thing in each.
    assert not SYNONYMS.items() & COMMAND_SYNONYMS.items()
    for command in ("serve", "load"):
        clashes = set(ALL_SYNONYMS) & FLAGS[command]
        assert clashes <= {"output"}, f"{clashes} are flags of {command}, and so need no synonym"


def test_workers_of_a_server_are_its_fronts_and_those_of_an_engine_are_processes():
    for given in ("workers", "worker"):
        assert nearest_name(given, FLAGS["serve"], ALL_SYNONYMS) == "fronts"
        assert nearest_name(given, FLAGS["load"], ALL_SYNONYMS) is None
    with pytest.raises(OptionsError, match="unknown option 'workers'; did you mean 'isolation'"):
        Options.from_settings(None, {"workers": 4})
    with pytest.raises(OptionsError, match="unknown option 'instance_count'; did you mean 'contexts'"):
        Options.from_settings(None, {"instance_count": 4})


@pytest.mark.parametrize(("theirs", "ours"), LOAD_TESTERS.items())
def test_load_testers_words_are_understood(theirs, ours):
    assert nearest_name(theirs, FLAGS["load"], ALL_SYNONYMS) == ours


def test_a_misspelt_synonym_is_understood_and_nonsense_is_not():
    assert nearest_name("max_batch_sise", FLAGS["serve"], ALL_SYNONYMS) == "max_rows"
    assert nearest_name("qqqq", FLAGS["serve"], ALL_SYNONYMS) is None


def test_a_synonym_of_a_name_that_a_command_lacks_is_not_suggested():
    assert nearest_name("model_repository", [*FLAGS["load"], "repository"], ALL_SYNONYMS) is None
    assert nearest_name("rps", FLAGS["serve"], ALL_SYNONYMS) is None


@pytest.mark.anyio
async def test_a_load_test_in_python_knows_them():
    with pytest.raises(OptionsError, match="unknown setting .*'stages'.*did you mean 'rate'"):
        await loadtest.run("x", stages=3)


def test_options_in_python_know_them():
    with pytest.raises(
        OptionsError, match="unknown option 'max_ongoing_requests'; did you mean 'max_queue_rows'"
    ):
        Options.from_settings(None, {"max_ongoing_requests": 3})


MEANT = [
    ("load", "--userz", "--callers"),
    ("load", "--max-batch-size", "--max-rows"),
    ("serve", "--max-batch-size", "--max-rows"),
    ("serve", "--gpus", "--device"),
    ("serve", "--workers", "--fronts"),
    ("load", "-c", "--callers"),
    ("load", "--users", "--callers"),
    ("load", "--vus", "--callers"),
    ("load", "--duration", "--seconds"),
    ("load", "--run-time", "--seconds"),
    ("load", "--rps", "--rate"),
    ("load", "--num-requests", "--requests"),
]
ALIKE = {
    "--rps": "No such option: --rps\n",
    "--bogus": "No such option: --bogus\n",
    "--latency-target": "max_delay",
}


@pytest.mark.tier2
@pytest.mark.timeout(240)
def test_the_command_line_knows_others_words():
    suggested = [(command, "model.onnx", flag, "3") for command, flag, _ in MEANT]
    alike = [("serve", "model.onnx", flag, "3") for flag in ALIKE]
    found = iter(asynctrt_commands(*suggested, *alike))
    for _, flag, meant in MEANT:
        code, _, err = next(found)
        assert code == 2
        assert re.findall(r"--?[a-z][\w-]*", err[err.index("No such") :]) == [flag, meant]
    for says in ALIKE.values():
        code, _, err = next(found)
        assert (code, says in err, "Possible options" in err) == (2, True, False)


def test_a_time_has_a_unit_where_one_is_given():
    assert [cli._seconds(text) for text in ("2", "2.5", "1e-3", "500ms", "1m30s", "inf", 0.5)] == [
        2, 2.5, 0.001, 0.5, 90, float("inf"), 0.5,
    ]  # fmt: skip
    for text in ("", "soon", "5 s", "3d"):
        with pytest.raises(
            cli.typer.BadParameter, match="is not a number of seconds, nor a time such as 2ms"
        ):
            cli._seconds(text)


@pytest.mark.tier2
@pytest.mark.parametrize("command", ["doctor", "serve", "load"])
def test_each_command_has_a_short_help_and_examples(command):
    code, out, _ = asynctrt_command(command, "-h", columns=80)
    assert code == 0
    assert f"asynctrt {command}" in out[out.index("Examples:") :]
    if command in ("serve", "load"):
        assert "<seconds>" in out


@pytest.mark.tier2
def test_a_configuration_is_checked_without_being_served(tmp_path):
    path = double_onnx(tmp_path / "model.onnx")
    code, _, err = asynctrt_command("serve", path, "--check")
    assert (code, "all is well: 1 model on host" in err) == (0, True)
    path.write_bytes(b"no model")
    code, _, err = asynctrt_command("serve", path, "--check")
    assert (code, "ModelError" in err) == (1, True)


@pytest.mark.tier2
def test_a_report_goes_to_standard_output(tmp_path):
    path = double_onnx(tmp_path / "model.onnx")
    code, out, _ = asynctrt_command("load", path, "--callers", "2", "--seconds", "0.2", "--json", "-")
    assert code in (0, 4)
    assert json.loads(out)["runs"]
