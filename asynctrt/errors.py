"""Every exception that asynctrt raises, ordered by who has to act: docs/errors.md has them in a table.

Each class carries the status for a server's answer, so servers need no table of errors.

An error from a model or an application may be of any class, so printing or copying it may raise.
:func:`describe`, :func:`copy_for` and :func:`copy_of` accept any exception and never raise.

No message is longer than ``MESSAGE_MAX``, whatever values or other messages it contains.
"""

import copy
from collections.abc import Callable
from typing import Any, ClassVar, Final, cast

MESSAGE_MAX: Final = 4000
"""The maximum number of characters in a message. A longer message loses its middle."""

DESCRIBED_MAX: Final = 2000
"""The maximum number of characters of another error's message inside a message."""

SHOWN_MAX: Final = 120
"""The maximum number of characters of a wrong value that a message shows."""


class AsynctrtError(Exception):
    """The root of all errors: ``except asynctrt.AsynctrtError`` catches every error that asynctrt raises."""

    http_status: ClassVar[int] = 500
    """HTTP status code for this error."""
    grpc_code: ClassVar[str] = "INTERNAL"
    """Name of the gRPC status code for this error."""

    def __str__(self) -> str:
        return bounded(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without calling ``__init__``, whose parameters a subclass may have changed."""
        _, args, *state = cast("tuple[Any, ...]", super().__reduce__())
        return (_restore, (type(self), args), *state)


class CallerError(AsynctrtError):
    """The call is wrong and would fail again: the caller has to change it."""

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"


class OptionsError(CallerError, ValueError):
    """An option is unknown, of the wrong type, out of range, or contradicts another one."""


class InputError(CallerError, ValueError):
    """A call's inputs do not fit the model. The message names the tensor, what it accepts and what it got."""


class UsageError(CallerError, RuntimeError):
    """The call was made in the wrong place: another event loop, no loop, or trio."""


class ModelError(CallerError):
    """The model cannot be read, or cannot be batched as it is."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """The model's path names no file."""

    http_status = 404
    grpc_code = "NOT_FOUND"


class UntrustedError(ModelError):
    """The plan is not trusted, and deserialising it would run its code."""


class BuildError(ModelError):
    """No plan could be built from the model. The message reports what the parser or the builder found."""


class RequestError(CallerError):
    """A message to a server breaks the protocol. The error names the field and what it should be."""


class UnauthorizedError(RequestError):
    """The token that the server requires is missing or wrong, or it refuses the host or page (403)."""

    http_status = 401
    grpc_code = "UNAUTHENTICATED"


class UnknownModelError(RequestError):
    """The server does not have this model, this version of it, or this page."""

    http_status = 404
    grpc_code = "NOT_FOUND"


class TooLargeError(RequestError):
    """A message has more bytes, headers or tensors than the server accepts."""

    http_status = 413
    grpc_code = "RESOURCE_EXHAUSTED"


class UnsupportedError(RequestError):
    """This server does not implement this part of the protocol."""

    http_status = 501
    grpc_code = "UNIMPLEMENTED"


class MissingExtraError(AsynctrtError, ImportError):
    """An optional package is not installed. The message names the extra that installs it."""


class OverloadError(AsynctrtError):
    """The engine has more work than it can finish in time. Retry later, or send less."""

    http_status = 503
    grpc_code = "UNAVAILABLE"


class QueueFullError(OverloadError):
    """The bounded queue had no room for the rows of this request. Nothing was queued."""

    predicted_s: float | None = None
    """Estimated seconds until the work ahead is done, if the server has sent an estimate."""


class DeadlineError(OverloadError, TimeoutError):
    """The request's timeout passed while it was still queued. It never reached the device."""


class DeadlineUnreachableError(DeadlineError):
    """By batch times so far, the request's timeout would pass before its turn. Nothing was queued."""

    predicted_s: float = 0.0
    """Estimated seconds until its launch or, with ``timeout_until="answer"``, until its answer."""


class LifecycleError(AsynctrtError):
    """The engine is not in a state that accepts this call."""

    http_status = 503
    grpc_code = "UNAVAILABLE"


class EngineClosedError(LifecycleError):
    """The engine is draining, closing or closed."""


class ModelNotReadyError(LifecycleError):
    """The server knows the model but has not loaded it, or has unloaded it."""


class ConnectionLostError(AsynctrtError, ConnectionError):
    """A client lost the connection to its server. The request may or may not have been computed."""

    http_status = 503
    grpc_code = "UNAVAILABLE"


class TargetError(AsynctrtError):
    """The target of a load test is missing, does not answer, or sends answers that cannot be read."""


class DeviceError(AsynctrtError):
    """Something under the engine failed: the device, its memory or the model's execution."""


class DeviceUnavailableError(DeviceError):
    """The requested device does not exist on this machine or cannot be used."""


class DeviceMemoryError(DeviceError, MemoryError):
    """An allocation on the device, or of its staging memory, was refused."""


class DeviceLostError(DeviceError):
    """Work on the device ended in a way that makes everything on the device untrustworthy."""

    http_status = 503
    grpc_code = "UNAVAILABLE"


class ExecutionError(DeviceError):
    """The model failed while it ran this batch. Later batches are not affected."""


class PoisonError(ExecutionError):
    """The request ended every worker process that computed it, the last one while it ran alone."""


class InternalError(AsynctrtError):
    """asynctrt broke one of its internal rules. Please report it with the traceback."""


def once_begun(error: BaseException) -> BaseException:
    """Return the error for a request that was partly begun when another part was refused.

    ``QueueFullError`` and ``ModelNotReadyError`` mean that nothing was begun, so clients retry such a
    request. They are replaced by an ``OverloadError`` or ``LifecycleError``, which does not mean that. Any
    other error is returned unchanged.
    """
    for kind, base in _NOT_BEGUN.items():
        if isinstance(error, kind):
            made = base(f"a part of the request had begun when another was refused: {error}")
            made.__cause__ = error
            return made
    return error


def describe(error: BaseException) -> str:
    """Return ``"ValueError: its message"``, bounded, for any exception, even one that cannot be printed."""
    name = _read(lambda: type(error).__name__, "an exception")
    text = _read(lambda: str(error), "(its message cannot be read: str() of it raises)")
    return bounded(f"{name}: {bounded(text, DESCRIBED_MAX)}" if text else name, DESCRIBED_MAX)


def show(value: Any) -> str:
    """Return a short ``repr`` of any value for a message. Never raises."""
    try:
        if isinstance(value, str | bytes | bytearray):
            value = value[:SHOWN_MAX]  # A model may have megabytes, and its repr about four times that.
        if getattr(value, "shape", ()) and hasattr(value, "dtype"):
            # NumPy may be configured to print every element of an array.
            text = f"a {type(value).__name__} of shape {value.shape} and dtype {value.dtype}"
        else:
            text = repr(value)
    except Exception:  # Foreign code ran; and an int of more than 4,300 digits has no repr.
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


def bounded(text: str, length_max: int = MESSAGE_MAX) -> str:
    """Return a text of at most ``length_max`` characters; cut the middle out of a longer one."""
    if len(text) <= length_max:
        return text
    left_out = f" … ({len(text):,} characters) … "
    kept = length_max - len(left_out)
    return f"{text[: kept - kept // 4]}{left_out}{text[len(text) - kept // 4 :]}"


def copy_for(error: BaseException) -> AsynctrtError:
    """Return a fresh copy of an error for one of several callers, whatever its class does.

    One instance raised in several places would collect all their tracebacks. The copy has the type,
    arguments, attributes and notes of ``error``, which becomes its cause if it was raised. An error that
    cannot be copied faithfully becomes an error of its nearest class in this module, or an
    ``ExecutionError`` if it has none, with :func:`describe` as the message. So does an error that asyncio
    would not raise unchanged in the caller (a ``StopIteration``, or an error that is also a
    ``CancelledError``).
    """
    made = _copy(error) if issubclass(type(error), AsynctrtError) else None
    return _nearest(error) if made is None else cast("AsynctrtError", made)


def copy_of(error: BaseException) -> Exception:
    """Return a fresh copy as :func:`copy_for` does, but keep the class of any ``Exception``."""
    made = _copy(error)
    return _nearest(error) if made is None else made


def _nearest(error: BaseException) -> AsynctrtError:
    """Return an error of the nearest class of this module, caused by ``error``."""
    nearest = next((kind for kind in _NEAREST if issubclass(type(error), kind)), ExecutionError)
    made = nearest(describe(error))
    made.__cause__ = error
    return made


def _copy(error: BaseException) -> Exception | None:
    """Copy an error by its own methods, or else without them; ``None`` if neither copy equals it."""
    for way in (copy.copy, _duplicate):
        try:
            made = _copy_by(way, error)
        except BaseException:  # Foreign code ran, and the caller must get an answer whatever it raised.
            made = None
        if made is not None:
            return made
    return None


def _copy_by(way: Callable[[Any], Any], error: BaseException) -> Exception | None:
    """Copy an error, which may raise; return ``None`` if the copy does not equal it."""
    if not isinstance(error, Exception) or any(_is_control_flow(kind) for kind in type(error).__mro__):
        return None
    made: Exception = way(error)
    if made is error or type(made) is not type(error) or describe(made) != describe(error):
        return None
    notes = getattr(error, "__notes__", None)
    if notes is not None:
        made.__notes__ = list(notes)  # A separate list, because each caller may add to it.
    made.__cause__ = error.__cause__ if error.__traceback__ is None else error
    return made


def _duplicate(error: BaseException) -> BaseException:
    """Copy an error of a class whose ``__init__`` takes other parameters than ``args``."""
    _, args, *state = cast("tuple[Any, ...]", _builtin(type(error)).__reduce__(error))
    made = _restore(type(error), args)
    for values in state:
        made.__setstate__(values)
    return made


def _is_control_flow(kind: type) -> bool:
    if kind in (BaseException, BaseExceptionGroup) or not issubclass(kind, BaseException):
        return False
    return not issubclass(kind, Exception) or issubclass(kind, StopIteration)


def _builtin(kind: type[BaseException]) -> Any:
    """Return the nearest built-in base of an error class."""
    builtin: Any = kind
    while builtin.__flags__ & _HEAPTYPE:
        builtin = builtin.__base__
    return builtin


def _restore(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Make an error from the result of its ``__reduce__``, by the nearest built-in class's ``__new__``."""
    made: BaseException = _builtin(kind).__new__(kind, *args)
    if not made.args:  # OSError leaves them to __init__ if a subclass has one.
        made.args = args
    return made


def _read(read: Callable[[], str], otherwise: str) -> str:
    """Return the result of ``read`` as a plain ``str``; ``otherwise`` if it raises or is not a string."""
    try:
        return str.__str__(read())
    except BaseException:  # Foreign code ran, which may raise anything.
        return otherwise


_NOT_BEGUN: Final = {
    QueueFullError: OverloadError,
    ModelNotReadyError: LifecycleError,
}

_HEAPTYPE: Final = 1 << 9
"""CPython's flag for classes that a class statement made."""

_NEAREST: Final = sorted(
    (kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, AsynctrtError)),
    key=lambda kind: -len(kind.__mro__),
)
"""Every class above, subclasses before their bases."""
