"""Retries and deadlines of requests, and the checks that all clients share."""

import asyncio
import math
import random
import re
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, TypeVar

from asynctrt import errors
from asynctrt._util.validation import duration
from asynctrt.errors import (
    AsynctrtError,
    ConnectionLostError,
    DeadlineError,
    DeviceLostError,
    LifecycleError,
    ModelNotReadyError,
    OverloadError,
    QueueFullError,
    UsageError,
    show,
)
from asynctrt.kserve.client import AnswerError, read_specs
from asynctrt.tensors import TensorSpec, convert

T = TypeVar("T")

SECONDS: Final = duration()

DELAY_S_MIN: Final = 0.05
DELAY_S_MAX: Final = 2.0
"""The maximum pause before a retry. It doubles each time, and a random part of up to half is left out."""


class RemoteError(AsynctrtError):
    """The server answered with an error that asynctrt has no class for."""

    status: int = HTTPStatus.INTERNAL_SERVER_ERROR.value
    """The HTTP status of the answer."""


class NotConnectedError(ConnectionLostError):
    """There is no connection to the server, so the request was not sent."""


NOT_BEGUN: Final = (NotConnectedError, QueueFullError, ModelNotReadyError)
"""Errors which mean that the server has not begun the request."""

TRANSIENT: Final = (ConnectionLostError, LifecycleError, OverloadError, DeviceLostError)
"""Errors after which a retry may help, although the request may have been computed. Deadline errors do not
count."""

GATEWAY: Final = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
"""Statuses with which proxies answer if a server is unreachable, whether or not it received the request."""


def may_repeat(error: AsynctrtError, *, is_idempotent: bool) -> bool:
    """Return whether a request that failed with ``error`` may be retried, and a retry may help."""
    if isinstance(error, NOT_BEGUN):
        return True
    if isinstance(error, RemoteError):
        return is_idempotent and error.status in GATEWAY
    return is_idempotent and isinstance(error, TRANSIENT) and not isinstance(error, DeadlineError)


def pauses(first_s: float = DELAY_S_MIN) -> Iterator[float]:
    """Yield the seconds to wait before each further attempt.

    Jitter: many clients that lost one server must not all retry at the same moment.
    """
    while True:
        yield random.uniform(first_s / 2, first_s)  # noqa: S311  (not a secret)
        first_s = min(max(2 * first_s, DELAY_S_MIN), DELAY_S_MAX)


async def in_time(answer: Awaitable[T], deadline: float) -> T:
    """Wait for an answer for up to ``deadline`` seconds."""
    limit = asyncio.timeout(deadline)
    try:
        async with limit:
            return await answer
    except TimeoutError as error:
        if not limit.expired() or isinstance(error, DeadlineError):
            raise
    finally:
        del limit  # It refers to the task, whose error's traceback may refer to this frame.
    # Raised outside the handler: otherwise the other error, which also refers to the task, stays its context.
    raise DeadlineError(f"no answer within the deadline of {deadline:g} s")


def check_names(model: object, version: object) -> None:
    """Check the model name and the version of a request."""
    for what, text in (("model", model), ("version", version)):
        try:
            str.encode(text)  # type: ignore[arg-type]  # This is the check.
        except (TypeError, UnicodeEncodeError):
            raise UsageError(f"{what} must be a text that UTF-8 can hold, not {show(text)}") from None


def without_credentials(url: str) -> str:
    """Return an address without its user and password, for messages."""
    return re.sub(r"//[^/]*@", "//", url, count=1)


def seconds_of(name: str, value: Any) -> float | None:
    """Return a number of seconds; ``None`` for no limit, and for infinity."""
    seconds: float | None = SECONDS.or_none(name, value)
    return None if seconds == math.inf else seconds


def queue_timeout(timeout: float | None, deadline: float | None) -> float | None:
    """Return how long a request may be queued on the server, in seconds, at most until its deadline."""
    timeout = seconds_of("timeout", timeout)
    if timeout is None or deadline is None:
        return deadline if timeout is None else timeout
    return min(timeout, deadline)


def remote_error(kind: object, status: object, text: str) -> AsynctrtError:
    """Return a server's error, of the class that the server names if asynctrt has that class."""
    found = getattr(errors, str(kind), None)
    if isinstance(found, type) and issubclass(found, AsynctrtError):
        return found(text)
    remote = RemoteError(text)
    if isinstance(status, int):
        remote.status = status
    return remote


def only_input(model: str, specs: Sequence[TensorSpec]) -> str:
    """Return the name of a model's only input, for a caller who gave an array without one."""
    if len(specs) != 1:
        listed = ", ".join(f"{spec.name!r}: rows" for spec in specs)
        raise UsageError(
            f"{model!r} has {len(specs)} inputs, so it takes a mapping: infer({model!r}, {{{listed}}})"
        )
    return specs[0].name


def input_specs(model: str, metadata: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """Return the specs of a model's inputs."""
    try:
        return read_specs(metadata["inputs"])
    except (KeyError, TypeError) as error:
        raise AnswerError(f"the metadata of {model!r} cannot be read: {metadata!s:.100}") from error


def is_plain(value: Any) -> bool:
    """Return whether a value has no dtype: a list or a Python number."""
    return isinstance(value, list | tuple | int | float)


def with_dtype(specs: Sequence[TensorSpec], name: str, value: Any) -> Any:
    """Convert a plain value for a numeric input to an array of its dtype; return others unchanged."""
    spec = next((spec for spec in specs if spec.name == name), None)
    if spec is None or spec.dtype.kind not in "biuf" or not is_plain(value):
        return value
    return convert(spec, value)
