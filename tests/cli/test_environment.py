"""Environment variables: which there are, and those that are misspelt."""

import re

import pytest

from asynctrt.cli import app as cli
from asynctrt.cli.environment import check_values, misspelt, shown
from asynctrt.errors import UsageError
from asynctrt.serving.settings import ServerSettings
from tests.cli.test_app import asynctrt_command
from tests.models import double_onnx

KNOWN = cli._variables()


def test_each_flag_has_one():
    for name in ("HTTP_PORT", "MAX_ROWS", "MODELS", "CONFIG", "DEVICE"):
        assert f"ASYNCTRT_SERVE_{name}" in KNOWN
    assert KNOWN["ASYNCTRT_ALLOWED_SIGNERS"] == "serve --tensorrt trust=signed"
    assert KNOWN["ASYNCTRT_LOAD_FAIL_IF"] == "load --fail-if"
    assert {f"ASYNCTRT_SERVE_{name.upper()}" for name in ServerSettings.__slots__} <= set(KNOWN)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("ASYNCTRT_SERVE_HTTPPORT", "ASYNCTRT_SERVE_HTTP_PORT"),
        ("ASYNCTRT_SERVE_PORT", "ASYNCTRT_SERVE_HTTP_PORT"),
        ("ASYNCTRT_SERVE_MAX_BATCH_SIZE", "ASYNCTRT_SERVE_MAX_ROWS"),
        ("ASYNCTRT_SERVER_HTTP_PORT", "ASYNCTRT_SERVE_HTTP_PORT"),
        ("ASYNCTRT_HTTP_PORT", "ASYNCTRT_SERVE_HTTP_PORT"),
        ("ASYNCTRT_LOAD_RPS", "ASYNCTRT_LOAD_RATE"),
        ("ASYNCTRT_LOAD_USERS", "ASYNCTRT_LOAD_CALLERS"),
    ],
)
def test_a_misspelt_one_is_noticed_and_the_right_one_named(given, meant):
    assert misspelt({given: "1"}, KNOWN) == [
        f"{given} is not a variable of asynctrt, and sets nothing: did you mean {meant}?"
    ]


def test_nonsense_is_noticed_without_a_guess():
    (line,) = misspelt({"ASYNCTRT_QQQQ": "1"}, KNOWN)
    assert line.endswith("asynctrt env --all lists those there are")


def test_what_is_right_or_of_others_is_not_mentioned():
    """Kubernetes sets the others for a service that is named asynctrt-serve."""
    links = {
        "ASYNCTRT_SERVE_SERVICE_HOST": "10.0.0.1",
        "ASYNCTRT_SERVE_SERVICE_PORT": "8000",
        "ASYNCTRT_SERVE_SERVICE_PORT_HTTP": "8000",
        "ASYNCTRT_SERVE_PORT": "tcp://10.0.0.1:8000",
        "ASYNCTRT_SERVE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "ASYNCTRT_SERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert misspelt({**links, "PATH": "/bin", **dict.fromkeys(KNOWN, "1")}, KNOWN) == []


@pytest.mark.parametrize("name", ["TOKENS", "TOKENS_FILE", "TLS_KEY", "HTTP_PORT"])
def test_one_that_is_set_and_empty_is_refused(name):
    check_values({f"ASYNCTRT_SERVE_{name}": "1", "ASYNCTRT_OTHER": ""}, KNOWN)
    with pytest.raises(UsageError, match=f"^ASYNCTRT_SERVE_{name}: set and empty"):
        check_values({f"ASYNCTRT_SERVE_{name}": ""}, KNOWN)


def test_secrets_are_not_shown():
    assert shown("ASYNCTRT_SERVE_TOKENS", "secret") == "(set, not shown)"
    assert shown("ASYNCTRT_SERVE_HTTP_PORT", "80") == "80"


@pytest.mark.tier2
def test_the_command_lists_them_and_serve_and_load_warn(tmp_path, monkeypatch):
    path = double_onnx(tmp_path / "model.onnx")
    for name, value in {"HTTP_PORTS": "1", "TOKENS": "secret", "MAX_ROWS": "3", "MODELS": str(path)}.items():
        monkeypatch.setenv(f"ASYNCTRT_SERVE_{name}", value)
    code, out, err = asynctrt_command("env", columns=80)
    assert (code, "secret" in out + err) == (0, False)
    assert "ASYNCTRT_SERVE_MAX_ROWS=3\n    asynctrt serve --max-rows\n" in out
    assert "ASYNCTRT_SERVE_HTTP_PORTS is not a variable" in err
    assert len(asynctrt_command("env", "--all")[1].splitlines()) == 2 * len(KNOWN)
    code, _, err = asynctrt_command("serve", "--check")
    assert (code, "all is well: 1 model on host" in err) == (0, True), "the model came from the environment"
    assert "warning: ASYNCTRT_SERVE_HTTP_PORTS is not a variable of asynctrt" in err
    _, _, err = asynctrt_command("load", path, "--seconds", "0.05", "--warmup", "0")
    assert re.search("Warning: ASYNCTRT_SERVE_HTTP_PORTS .* did you mean ASYNCTRT_SERVE_HTTP_PORT?", err)
