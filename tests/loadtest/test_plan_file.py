"""A load test in a TOML file."""

import pytest

from asynctrt.cli.app import LOAD_FLAGS
from asynctrt.errors import OptionsError, UsageError
from asynctrt.loadtest import command
from asynctrt.loadtest.plan_file import FLAGS, read_plan_file


def read(tmp_path, text, **flags):
    path = tmp_path / "test.toml"
    path.write_text(text)
    return read_plan_file(path, flags)


def test_it_has_every_flag():
    assert set(FLAGS) == {name for name, *_ in LOAD_FLAGS}


def test_a_file_is_the_same_as_its_flags(tmp_path):
    (tmp_path / "items.csv").write_text("id\n1\n")
    target, given = read(
        tmp_path,
        """
        target = "http://127.0.0.1:1/items/${id}"
        inputs = "items.csv"
        body = "@body.json"
        rate = "10..100@30s,100@2m"
        slo = ["p99<50ms", "errors<0.1%"]
        header = "X-A: b"
        timeout = "2s"
        insecure = false
        report = "out/run.html"
        json = "-"
        """,
    )
    assert target == "http://127.0.0.1:1/items/${id}"
    planned = command.plan(target, given)
    job = planned.job
    assert job.target.headers == ("X-A: b",)
    assert job.target.body == f"@{tmp_path / 'body.json'}"
    assert job.settings.inputs == tmp_path / "items.csv"
    assert job.settings.slo == ("p99<50ms", "errors<0.1%")
    assert job.settings.answer_timeout == 2.0
    assert planned.prints_json
    assert planned.outputs == [tmp_path / "out" / "run.html"]


def test_flags_win(tmp_path):
    text = "target = 'model.onnx'\ncallers = 4\nseconds = 3"
    assert read(tmp_path, text, rate="100") == (
        str(tmp_path / "model.onnx"),
        {"rate": "100", "seconds": 3},
    )
    assert read(tmp_path, text, seconds=1.0)[1] == {"callers": 4, "seconds": 1.0}
    assert read(tmp_path, "target = 'package.module:model'")[0] == "package.module:model"
    assert read(tmp_path, "target = 'demo'")[0] == "demo"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rate = 1", "has no target"),
        ("target = 1", "target must be a string"),
        ("target =", "is not valid TOML"),
        ("target = 'm'\nrat = 1", "did you mean 'rate'"),
        ("target = 'm'\nsearch = 'yes'", "search must be True or False"),
        ("target = 'm'\nheader = 3", "header must be a string or several"),
        ("target = 'm'\nprecision = 'x'", "precision must be"),
        ("target = 'm'\nusers = 1\ncallers = 1", "callers is given twice"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, says):
    with pytest.raises(OptionsError, match=says):
        read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="cannot read the load test"):
        read_plan_file(tmp_path / "no.toml", {})
