"""Tell a client that was refused for want of room or time when to come again, as far as can be foretold."""

import math
from typing import Final

from asynctrt.errors import DeadlineUnreachableError, QueueFullError

PUSHBACK: Final = "grpc-retry-pushback-ms"
"""gRPC's own name for it: clients with a retry policy wait for so long, and without jitter."""


def retry_s_of(error: BaseException) -> float | None:
    """Return in how many seconds what is ahead would be done; ``None`` if that is not known."""
    if isinstance(error, DeadlineUnreachableError | QueueFullError):
        return error.predicted_s
    return None


def retry_after(error: BaseException) -> tuple[tuple[str, str], ...]:
    """Return the header ``Retry-After``, which takes whole seconds, or nothing."""
    retry_s = retry_s_of(error)
    return () if retry_s is None else (("Retry-After", str(max(1, math.ceil(retry_s)))),)


def pushback(error: BaseException) -> tuple[tuple[str, str], ...]:
    """Return gRPC's trailing metadata that says in how many ms to try again, or nothing."""
    retry_s = retry_s_of(error)
    return () if retry_s is None else ((PUSHBACK, str(max(1, math.ceil(retry_s * 1e3)))),)
