"""What a server can be told, and what it cannot."""

import dataclasses

import pytest

from asynctrt._util.validation import docs_of
from asynctrt.errors import OptionsError
from asynctrt.options import Options
from asynctrt.serving.settings import ServerSettings


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"http_port": -1}, "http_port"),
        ({"grpc_port": 65536}, "grpc_port"),
        ({"metrics_port": "8002"}, "metrics_port"),
        ({"http_port": True}, "http_port"),
        ({"max_body": 0}, "max_body"),
        ({"max_connections": 1.5}, "max_connections"),
        ({"idle_timeout": -1}, "idle_timeout"),
        ({"drain_delay": float("nan")}, "drain_delay"),
        ({"request_timeout": "10"}, "request_timeout"),
        ({"tokens": "one"}, "tokens"),
        ({"tokens": ("two words",)}, "tokens"),
        ({"tokens": ("",)}, "tokens"),
        ({"tokens": ("t\u00f6ken",)}, "tokens"),
        ({"allow_origins": "https://a"}, "allow_origins"),
        ({"allow_origins": ("https://a.example/",)}, "allow_origins"),
        ({"allow_origins": ("https://A.example",)}, "allow_origins"),
        ({"allow_origins": ("a.example",)}, "allow_origins"),
        ({"tls_key": "key.pem"}, "tls_certificate"),
    ],
)
def test_impossible_settings(settings, says):
    with pytest.raises(OptionsError, match=says):
        ServerSettings(**settings)


def test_lists_become_tuples_and_tokens_are_not_shown():
    settings = ServerSettings(tokens=["s3cret"], allow_origins=["*"])
    assert (settings.tokens, settings.allow_origins) == (("s3cret",), ("*",))
    assert "s3cret" not in repr(settings)


@pytest.mark.parametrize("cls", [ServerSettings, Options])
def test_every_setting_is_explained(cls):
    texts = docs_of(cls)
    assert set(texts) == {item.name for item in dataclasses.fields(cls)}
    assert all(text.endswith(".") for text in texts.values())
