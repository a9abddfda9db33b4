"""Environment variables: which there are, and those that are misspelt."""

import pytest

from asynctrt.cli import app as cli
from asynctrt.cli.environment import check_values, misspelt
from asynctrt.errors import OptionsError, UsageError
from asynctrt.serving.settings import ServerSettings
from tests.cli.test_app import asynctrt_command
from tests.models import double_onnx

KNOWN = cli._variables()


def test_each_flag_has_one():
    for name in ("HTTP_PORT", "MAX_ROWS", "MODELS", "CONFIG", "DEVICE"):
        assert f"ASYNCTRT_SERVE_{name}" in KNOWN
    assert {"ASYNCTRT_ALLOWED_SIGNERS", "ASYNCTRT_LOAD_TOKEN"} <= set(KNOWN)
    assert {f"ASYNCTRT_SERVE_{name.upper()}" for name in ServerSettings.__slots__} <= set(KNOWN)


@pytest.mark.parametrize("name", ["HTTPPORT", "PORT", "MAX_BATCH_SIZE", "QQQQ"])
def test_a_misspelt_one_is_noticed(name):
    (line,) = misspelt({f"ASYNCTRT_SERVE_{name}": "1"}, KNOWN)
    assert line.startswith(f"ASYNCTRT_SERVE_{name} is not a variable of asynctrt")


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


@pytest.mark.parametrize("option", ["watch", "arena_size", "warmup"])
def test_one_of_a_removed_option_is_refused_as_its_flag_is(option):
    name = f"ASYNCTRT_SERVE_{option.upper()}"
    with pytest.raises(OptionsError, match=f"^{name}: .*'{option}'"):
        check_values({name: "1"}, KNOWN)
    check_values({f"ASYNCTRT_{option.upper()}": "1", f"SERVE_{option.upper()}": "1"}, KNOWN)


@pytest.mark.tier2
def test_they_set_what_the_flags_do_and_serve_warns_of_others(tmp_path, monkeypatch):
    path = double_onnx(tmp_path / "model.onnx")
    for name, value in {"HTTP_PORTS": "1", "TOKENS": "secret", "MAX_ROWS": "3", "MODELS": str(path)}.items():
        monkeypatch.setenv(f"ASYNCTRT_SERVE_{name}", value)
    code, _, err = asynctrt_command("serve", "--check")
    assert (code, "all is well: 1 model on host" in err) == (0, True), "the model came from the environment"
    assert "warning: ASYNCTRT_SERVE_HTTP_PORTS is not a variable of asynctrt" in err
