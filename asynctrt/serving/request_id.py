"""Name requests: by the client's ``X-Request-ID`` if it is fit to be logged, else by one of our own."""

import itertools
import re
import secrets
from typing import Final

HEADER: Final = b"x-request-id"
METADATA: Final = "x-request-id"
"""The same in gRPC's metadata."""

FIT: Final = re.compile(rb"[A-Za-z0-9._~:/+=@-]{1,128}")
"""What is taken from a client: what is safe in a header, a log and a shell."""


class RequestIds:
    """Give each request of one server an id."""

    __slots__ = ("_form", "_next", "_prefix")

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(6).encode()
        self._form = self._prefix + b"-%x"
        self._next = itertools.count(1).__next__

    def __repr__(self) -> str:
        return f"<RequestIds {self._prefix.decode()}>"

    def of(self, headers: dict[bytes, bytes]) -> bytes:
        """Return the id of a request with these headers, where it stands from then on."""
        given = headers.get(HEADER)
        if given is not None and FIT.fullmatch(given) is not None:
            return given
        headers[HEADER] = made = self._form % self._next()
        return made
