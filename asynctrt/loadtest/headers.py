"""The headers that a load test sends to any kind of target, each as it was given."""

import re
from collections.abc import Sequence
from typing import Final

from asynctrt.errors import OptionsError
from asynctrt.loadtest.targets import TargetSpec

TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""What the names of headers and methods consist of."""

OURS: Final = frozenset(
    {"content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "expect"}
    | {"inference-header-content-length", "grpc-timeout", "grpc-encoding"}
)
"""Headers that say how a message is sent, which only its sender knows."""

Headers = list[tuple[str, str]]


def headers_of(spec: TargetSpec) -> Headers:
    """Return the headers of every request, in the order in which they were given, with the token.

    :raises OptionsError: for what is no header, for one that says how a message is sent, or for a second
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
    """Return whether a header is among some, however it is written."""
    return any(given.lower() == name.lower() for given, _ in headers)


def _header(text: str) -> tuple[str, str]:
    name, mark, value = text.partition(":")
    if not mark or not TOKEN.fullmatch(name.strip()):
        raise OptionsError(f"{text!r} is not a header: write 'Name: value'")
    if not value.strip().isprintable():
        raise OptionsError(f"the header {name.strip()!r} has a line break, or another character that ends it")
    return name.strip(), value.strip()
