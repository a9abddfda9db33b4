"""The headers that a load test sends to any kind of target, unchanged."""

import re
from collections.abc import Sequence
from typing import Final

from asynctrt.errors import OptionsError
from asynctrt.loadtest.targets import TargetSpec

TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""Matches the name of a header or method."""

OURS: Final = frozenset(
    {"content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "expect"}
    | {"inference-header-content-length", "grpc-timeout", "grpc-encoding"}
)
"""Headers that describe how a message is sent, so only its sender can set them."""

Headers = list[tuple[str, str]]


def headers_of(spec: TargetSpec) -> Headers:
    """Return the headers of every request in the given order, followed by the token's, if there is one.

    :raises OptionsError: for an invalid header, a header that describes how a message is sent, or a second
        authorization.
    """
    found = [_header(text) for text in spec.headers]
    for name, _ in found:
        if name.lower() in OURS:
            raise OptionsError(f"the header {name!r} cannot be given: it says how the message is sent")
    if spec.token:
        if any(name.lower() == "authorization" for name, _ in found):
            raise OptionsError("token and the header Authorization say the same: give only one of them")
        found.append(("Authorization", f"Bearer {spec.token}"))
    return found


def has(headers: Sequence[tuple[str, str]], name: str) -> bool:
    """Return whether a header is present, ignoring case."""
    return any(given.lower() == name.lower() for given, _ in headers)


def _header(text: str) -> tuple[str, str]:
    name, mark, value = text.partition(":")
    if not mark or not TOKEN.fullmatch(name.strip()):
        raise OptionsError(f"{text!r} is not a header: write 'Name: value'")
    if not value.strip().isprintable():
        raise OptionsError(f"the header {name.strip()!r} has a line break, or another character that ends it")
    return name.strip(), value.strip()
