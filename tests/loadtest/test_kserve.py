"""Addresses. The rest is tried through the targets."""

import pytest

from asynctrt.errors import UsageError
from asynctrt.loadtest.kserve import Address, read_address
from asynctrt.loadtest.targets import TargetSpec


@pytest.mark.parametrize(
    ("where", "address"),
    [
        ("https://h:1/v2/models/m", ("https://h:1", "m", "")),
        ("http://h:1/v2/models/m/", ("http://h:1", "m", "")),
        ("http://h:1/v2/models/m/versions/2", ("http://h:1", "m", "2")),
        ("http://h:1/v2/models/m/versions/2/infer", ("http://h:1", "m", "2")),
        ("http://h:1/v2/models/m/infer", ("http://h:1", "m", "")),
        ("http://h:1/v2/models/infer", ("http://h:1", "infer", "")),
        ("http://h:1/v2/models/versions/2", ("http://h:1", "versions/2", "")),
        ("http://h:1/v2/models/a%2Fb%20c", ("http://h:1", "a/b c", "")),
        ("http://h:1/v2/models/a/b", ("http://h:1", "a/b", "")),
        ("http://[::1]:1/v2/models/m", ("http://[::1]:1", "m", "")),
        ("http://h:1/gate/v2/models/m", ("http://h:1/gate", "m", "")),
        ("wss://h:1/v2/models/m/ws", ("wss://h:1", "m", "")),
        ("ws://h:1/v2/models/m/versions/2/ws", ("ws://h:1", "m", "2")),
        ("ws://h:1/v2/models/m", ("ws://h:1", "m", "")),
        ("ws://h:1/v2/models/ws", ("ws://h:1", "ws", "")),
    ],
)
def test_addresses(where, address):
    assert read_address(TargetSpec(where)) == Address(*address)


@pytest.mark.parametrize(
    "where",
    [
        *("http://", "http://:1", "http://h:x", "http://h:70000", "http://h:0", "http://[h", "http://h/x"),
        *("http://h:1", "http://h/v2", "http://h:1/v2/models/", "ws://h:1/v2/ws"),
        *("http://h/v2/x", "http://h/v2/models", "http://h/v2/ws", "http://h/v2?x=1", "http://h/v2#x"),
        *("ws://h/ws", "ws://h/v2/infer", "http://h/v1/models/m", "http://h/v2x"),
    ],
)
def test_what_is_no_address(where):
    with pytest.raises(
        UsageError, match="is not the address of .*: write (http|ws)://HOST:PORT/v2/models/NAME"
    ):
        read_address(TargetSpec(where))


def test_addresses_of_grpc():
    for where, address in [
        ("grpcs://h:1/m", ("grpcs://h:1", "m", "")),
        ("grpc://[::1]:1/m", ("grpc://[::1]:1", "m", "")),
        ("grpc://h:1/a/b", ("grpc://h:1", "a/b", "")),
        ("grpc://h:1/a%2Fb/versions/3", ("grpc://h:1", "a/b", "3")),
    ]:
        assert read_address(TargetSpec(where)) == Address(*address)
    for where in ("h:1", "h:1/", "", "h", "h/m", ":1/m", "h:x/m", "h:1/m?x"):
        with pytest.raises(UsageError, match="grpc://HOST:PORT/NAME"):
            read_address(TargetSpec(f"grpc://{where}"))


def test_a_path_is_quoted():
    assert Address("", "a/b c").path == "/v2/models/a%2Fb%20c"
    assert Address("", "größe", "2").path == "/v2/models/gr%C3%B6%C3%9Fe/versions/2"
