"""The parts of answers besides outputs: the request's id, when to retry, why a model cannot be loaded."""

import itertools
import math
import re
import secrets
from typing import Final

from asynctrt.errors import AsynctrtError, DeadlineUnreachableError, QueueFullError, copy_for

OUR_ERROR: Final = "internal error; see the server's log"
STOPPING: Final = "the server is stopping: use another one"
"""The messages for an error of ours, and for a request that comes too late."""

# ---- ids: the client's X-Request-ID if it is safe to log, otherwise one that the server makes

ID_HEADER: Final = b"x-request-id"
ID_METADATA: Final = "x-request-id"
"""The same header in gRPC's metadata."""

ID_FIT: Final = re.compile(rb"[A-Za-z0-9._~:/+=@-]{1,128}")
"""Accepted ids of clients: safe in a header, a log and a shell."""


class RequestIds:
    """Gives each request of one server an id."""

    __slots__ = ("_form", "_next", "_prefix")

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(6).encode()
        self._form = self._prefix + b"-%x"
        self._next = itertools.count(1).__next__

    def __repr__(self) -> str:
        return f"<RequestIds {self._prefix.decode()}>"

    def of(self, headers: dict[bytes, bytes]) -> bytes:
        """Return the id of a request with these headers, which contain it from then on."""
        given = headers.get(ID_HEADER)
        if given is not None and ID_FIT.fullmatch(given) is not None:
            return given
        headers[ID_HEADER] = made = self._form % self._next()
        return made


# ---- when to retry, for a client that was refused for lack of room or time

PUSHBACK: Final = "grpc-retry-pushback-ms"
"""gRPC's name for the delay: clients with a retry policy wait exactly this long, without jitter."""


def retry_s_of(error: BaseException) -> float | None:
    """Estimate in how many seconds the work ahead will be done; ``None`` if that is unknown."""
    if isinstance(error, DeadlineUnreachableError | QueueFullError):
        return error.predicted_s
    return None


def retry_after(error: BaseException) -> tuple[tuple[str, str], ...]:
    """Return the header ``Retry-After``, in whole seconds; nothing if the delay is unknown."""
    retry_s = retry_s_of(error)
    return () if retry_s is None else (("Retry-After", str(max(1, math.ceil(retry_s)))),)


def pushback(error: BaseException) -> tuple[tuple[str, str], ...]:
    """Return gRPC's trailing metadata that says in how many ms to retry; nothing if that is unknown."""
    retry_s = retry_s_of(error)
    return () if retry_s is None else ((PUSHBACK, str(max(1, math.ceil(retry_s * 1e3)))),)


# ---- why a model cannot be loaded, without revealing where the server keeps its files

WORKING: Final = re.compile(r"[;,]? *the working directory is (?:'[^']*'|\"[^\"]*\")")
QUOTED: Final = re.compile(r"(['\"])(/(?:(?!\1).)*)\1")
"""An absolute path in quotes, which may contain spaces."""
BARE: Final = re.compile(r"(?<![\w.:/~-])/(?!v2/)[^\s'\":]+")
"""An absolute path without quotes; not part of a URL, and not one of the server's own URL paths."""
MODEL_FILE: Final = re.compile(r"[^/]+/(?:\d+/[^/]+|config\.pbtxt)\Z")
"""The end of a path within a model repository, which clients know by its names."""


def without_folders(text: str) -> str:
    """Replace absolute paths in a message by file names, remove the working directory, and make it UTF-8."""
    text = WORKING.sub("", text)
    for path in {found[2] for found in QUOTED.finditer(text)}:
        # Replace every occurrence: other libraries do not quote paths.
        text = text.replace(path, _name_of(path))
    text = BARE.sub(lambda found: _name_of(found[0]), text)
    # File names may be any bytes, and JSON cannot hold bytes that are not UTF-8.
    return text.encode(errors="backslashreplace").decode()


def _name_of(path: str) -> str:
    within = MODEL_FILE.search(path)
    if within is not None:
        return within[0]
    folder, _, name = path.rpartition("/")
    return name if folder else path


def told(error: AsynctrtError) -> AsynctrtError:
    """Return a copy of an error with a message that clients may read; the server's log has the full one."""
    copy = copy_for(error)
    copy.args = tuple(without_folders(item) if isinstance(item, str) else item for item in copy.args)
    return copy
