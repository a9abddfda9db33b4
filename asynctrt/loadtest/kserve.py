"""Code shared by the HTTP, gRPC and websocket targets: addresses, and descriptions of a server's models.

This module performs no I/O.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from asynctrt.errors import (
    RequestError,
    TooLargeError,
    UnauthorizedError,
    UnknownModelError,
    UnsupportedError,
    UsageError,
)
from asynctrt.loadtest.targets import BatchCounters, TargetSpec, without_password

MODELS: Final = "/v2/models/"
PAGE_S: Final = 10.0
"""Timeout for reading a model's description or statistics."""
REFUSALS: Final = (RequestError, UnauthorizedError, UnknownModelError, TooLargeError, UnsupportedError)
"""Errors for a server's refusals; each has an HTTP status and a gRPC code."""


@dataclass(frozen=True, slots=True)
class Address:
    """Name a model on a server.

    :param server: scheme, host, port, and the path before ``/v2``.
    :param version: the model's version; empty for the newest.
    """

    server: str
    model: str
    version: str = ""

    @property
    def shown(self) -> str:
        """The server's address for messages, without a password."""
        return without_password(self.server)

    @property
    def path(self) -> str:
        """The path of the model, starting with ``/v2``."""
        version = f"/versions/{quote(self.version, safe='')}" if self.version else ""
        return f"{MODELS}{quote(self.model, safe='')}{version}"


def read_address(spec: TargetSpec) -> Address:
    """Parse ``http://HOST:PORT/v2/models/NAME[/versions/VERSION]``, with ``/ws`` at the end for ``ws``, or
    ``grpc://HOST:PORT/NAME[/versions/VERSION]``.

    :raises UsageError: for anything else.
    """
    is_grpc = spec.scheme.startswith("grpc")
    verb = "" if is_grpc else "/ws" if spec.scheme.startswith("ws") else "/infer"
    example = f"{spec.scheme}://HOST:PORT{'/' if is_grpc else MODELS}NAME{verb.removesuffix('/infer')}"
    what = f"{without_password(spec.where)!r} is not the address of a model: write {example}"
    wrong = UsageError(what + ("" if is_grpc else ". A server without KServe needs --body, or --method GET"))
    try:
        parts = urlsplit(spec.where)
        is_right = bool(parts.hostname) and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:
        raise wrong from None
    if is_grpc and is_right and (parts.port is None or parts.username is not None):
        what = "has no port" if parts.port is None else "has a user, which gRPC cannot send"
        raise UsageError(f"{without_password(spec.where)!r} {what}: write {example}")
    before, found, path = ("", "/", parts.path[1:]) if is_grpc else parts.path.rpartition(MODELS)
    model, version = _model(path, verb)
    if not (is_right and found and model):
        raise wrong
    return Address(f"{parts.scheme}://{parts.netloc}{before}", model, version)


def _model(path: str, verb: str) -> tuple[str, str]:
    """Return name and version. Parse the path from its end, because a name may contain slashes."""
    parts = path.rstrip("/").removesuffix(verb).split("/")
    version = ""
    if len(parts) > 2 and parts[-2] == "versions":
        version = unquote(parts.pop())
        parts.pop()
    return unquote("/".join(parts)), version


# ---- a server's answers


def read_counters(models: Iterable[Any], get: Callable[[Any, str], Any] = getitem) -> BatchCounters:
    """Sum the statistics of a model (Triton's extension) over all its versions.

    :param get: how to read a field: by key from JSON, or by attribute from a message of protobuf.
    :raises TypeError: or another error of ``kserve.client.UNREADABLE``, if the statistics are malformed.
    """
    sums = dict.fromkeys(("success", "queue", "compute_input", "compute_infer", "compute_output"), 0)
    requests = rows = batches = 0
    by_rows: dict[int, int] = {}
    for model in models:
        rows += int(get(model, "inference_count"))
        batches += int(get(model, "execution_count"))
        durations = get(model, "inference_stats")
        requests += int(get(get(durations, "success"), "count"))
        for name in sums:
            sums[name] += int(get(get(durations, name), "ns"))
        # JSON may lack it.
        for item in model.get("batch_stats", ()) if isinstance(model, Mapping) else model.batch_stats:
            size = int(get(item, "batch_size"))
            by_rows[size] = by_rows.get(size, 0) + int(get(get(item, "compute_infer"), "count"))
    return BatchCounters(
        requests,
        rows,
        batches,
        queue_ns=sums["queue"],
        copy_in_ns=sums["compute_input"],
        compute_ns=sums["compute_infer"],
        copy_out_ns=sums["compute_output"],
        by_rows=dict(sorted(by_rows.items())),
    )
