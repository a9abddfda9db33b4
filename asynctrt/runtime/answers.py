"""The errors that callers get when requests fail: each caller gets its own exception and message."""

from collections.abc import Callable, Sequence
from functools import partial

from asynctrt.errors import (
    AsynctrtError,
    DeadlineError,
    ExecutionError,
    InputError,
    QueueFullError,
    copy_for,
    describe,
)
from asynctrt.scheduling.request import NO_DEADLINE_NS, Request


def answer_error(request: Request, error: AsynctrtError) -> None:
    """Fail a request with an error, if its caller still waits."""
    future = request.future
    if future is not None and not future.done():
        future.set_exception(error)
    request.future = request.payload = None


def typed_errors(
    model: str, requests: Sequence[Request], error: BaseException
) -> Callable[[], AsynctrtError]:
    """Return a function that makes an error for one caller. A shared one would collect all tracebacks.

    :param requests: the requests of the batch that failed with ``error``.
    """
    if isinstance(error, AsynctrtError):
        return partial(copy_for, error)
    rows = sum(request.rows for request in requests)
    if len(requests) == 1:
        said = (
            f"{model} failed while it ran this request alone ({rows} row{'s' * (rows != 1)}): "
            f"{describe(error)}. Others are not affected"
        )
    else:
        said = (
            f"{model} failed while it ran a batch of {rows} rows from {len(requests)} requests: "
            f"{describe(error)}. Other batches are not affected. With idempotent=True such a batch is "
            "tried again in halves, so that only the requests at fault fail"
        )
    return partial(_caused, said, error)


def _caused(said: str, cause: BaseException) -> ExecutionError:
    failed = ExecutionError(said)
    failed.__cause__ = cause
    return failed


def displaced_error(request: Request) -> QueueFullError:
    """Return the error for a request that was evicted from a full queue."""
    return QueueFullError(
        f"the request, of priority {request.priority}, was taken out of a full queue to make room for a more "
        "urgent one. Retry later, give it a higher priority, or open the engine with a larger max_queue_rows"
    )


def deadline_error(request: Request, now_ns: int) -> DeadlineError:
    """Return the error for a request whose timeout passed in the queue."""
    assert request.deadline_ns != NO_DEADLINE_NS
    waited_ms = (now_ns - request.arrival_ns) / 1e6
    timeout_ms = (request.deadline_ns + request.reserve_ns - request.arrival_ns) / 1e6
    if request.reserve_ns:
        return DeadlineError(
            f"the request could not be answered any more within its timeout of {timeout_ms:.3f} ms, after "
            f"{waited_ms:.3f} ms in the queue: a batch takes {request.reserve_ns / 1e6:.3f} ms. It did not "
            "reach the device. Allow more time, or send less"
        )
    return DeadlineError(
        f"the timeout of {timeout_ms:.3f} ms passed after {waited_ms:.3f} ms in the queue; the request did "
        "not reach the device. Allow more time, or send less"
    )


def changed_error(error: Exception) -> InputError:
    """Return the error for a caller whose rows could not be copied, although they were checked."""
    refused = InputError(
        "the inputs changed between the call and their batch: "
        f"{type(error).__name__}. Leave arrays alone until infer has returned"
    )
    # Our frames that copied arrays explain nothing to a caller, and would keep the arrays alive.
    error.__context__ = None
    refused.__cause__ = error.with_traceback(None)
    return refused
