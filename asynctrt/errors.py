"""Every exception that asynctrt raises, ordered by who has to act.

::

    AsynctrtError
    ├── CallerError             400 INVALID_ARGUMENT   change the call
    │   ├── OptionsError        (ValueError)           an unknown or impossible option
    │   ├── InputError          (ValueError)           inputs that the model cannot take
    │   ├── UsageError          (RuntimeError)         wrong event loop, a slot used twice, ...
    │   ├── ModelError                                 a model that cannot be served as it is
    │   │   └── ModelNotFoundError (FileNotFoundError)  404 NOT_FOUND
    │   └── RequestError                               a message to a server that breaks its protocol
    │       ├── UnauthorizedError   401 UNAUTHENTICATED     the token is missing or wrong
    │       ├── UnknownModelError   404 NOT_FOUND           the server has no such model, version or page
    │       ├── TooLargeError       413 RESOURCE_EXHAUSTED  more bytes or tensors than the server takes
    │       └── UnsupportedError    501 UNIMPLEMENTED       a part of the protocol that is not there
    ├── MissingExtraError       (ImportError)          install the extra that it names
    ├── OverloadError           503 UNAVAILABLE        try again later, or shed load
    │   ├── QueueFullError                             the bounded queue had no room
    │   └── DeadlineError       (TimeoutError)         the timeout passed while queued
    ├── LifecycleError          503 UNAVAILABLE
    │   ├── EngineClosedError                          the engine is draining or closed
    │   └── ModelNotReadyError                         a server's model is not loaded
    ├── ConnectionLostError     (ConnectionError)      a client lost its server: connect again
    ├── TargetError                                    what a load test is aimed at cannot be measured
    ├── DeviceError             500 INTERNAL           look at the device or the model
    │   ├── DeviceUnavailableError                     no such device here
    │   ├── DeviceMemoryError   (MemoryError)          an allocation was refused
    │   ├── DeviceLostError     503 UNAVAILABLE        nothing on it can be trusted any more
    │   └── ExecutionError                             the model failed while it ran a batch
    └── InternalError           500 INTERNAL           a bug in asynctrt; please report it

Each class carries the status that a server answers with, so that no server needs a table of its own.
"""

from typing import ClassVar


class AsynctrtError(Exception):
    """The root. ``except asynctrt.AsynctrtError`` catches whatever asynctrt raises on purpose."""

    http_status: ClassVar[int] = 500
    """HTTP status code for this error."""
    grpc_code: ClassVar[str] = "INTERNAL"
    """Name of the gRPC status code for this error."""


class CallerError(AsynctrtError):
    """The call is wrong and will be wrong again: the caller has to change it."""

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"


class OptionsError(CallerError, ValueError):
    """An option is unknown, of the wrong type, out of range, or at odds with another."""


class InputError(CallerError, ValueError):
    """The inputs of one call do not fit the model. The message names tensor, expected and given."""


class UsageError(CallerError, RuntimeError):
    """The call came at the wrong place: another event loop, no loop, trio, or a released slot."""


class ModelError(CallerError):
    """The model cannot be read, or cannot be batched as it is."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """There is no file at the model's path."""

    http_status = 404
    grpc_code = "NOT_FOUND"


class RequestError(CallerError):
    """A message to a server breaks the protocol. It names the field, and what it should be."""


class UnauthorizedError(RequestError):
    """The server asks for a token, and there was none or a wrong one."""

    http_status = 401
    grpc_code = "UNAUTHENTICATED"


class UnknownModelError(RequestError):
    """The server has no such model, no such version of it, or no such page."""

    http_status = 404
    grpc_code = "NOT_FOUND"


class TooLargeError(RequestError):
    """A message has more bytes, headers or tensors than the server takes."""

    http_status = 413
    grpc_code = "RESOURCE_EXHAUSTED"


class UnsupportedError(RequestError):
    """A part of the protocol that this server does not have."""

    http_status = 501
    grpc_code = "UNIMPLEMENTED"


class MissingExtraError(AsynctrtError, ImportError):
    """An optional package is not installed. The message names the extra that brings it."""


class OverloadError(AsynctrtError):
    """The engine has more work than it can do in time. Retry later, or send less."""

    http_status = 503
    grpc_code = "UNAVAILABLE"


class QueueFullError(OverloadError):
    """The bounded queue had no room for the rows of this request. Nothing was queued."""


class DeadlineError(OverloadError, TimeoutError):
    """The request's timeout passed while it was still queued. It never reached the device."""


class LifecycleError(AsynctrtError):
    """The engine is not in a state to take this call."""

    http_status = 503
    grpc_code = "UNAVAILABLE"


class EngineClosedError(LifecycleError):
    """The engine is draining, closing or closed."""


class ModelNotReadyError(LifecycleError):
    """The server knows the model, but has not loaded it, or has unloaded it."""


class ConnectionLostError(AsynctrtError, ConnectionError):
    """A client's connection to its server is gone. Whether the request was computed is not known."""

    http_status = 503
    grpc_code = "UNAVAILABLE"


class TargetError(AsynctrtError):
    """The target of a load test is not there, does not answer, or answers what nobody can read."""


class DeviceError(AsynctrtError):
    """Something under the engine went wrong: the device, its memory or the model's execution."""


class DeviceUnavailableError(DeviceError):
    """The device that was asked for is not here or cannot be used."""


class DeviceMemoryError(DeviceError, MemoryError):
    """An allocation on the device, or of its staging memory, was refused."""


class DeviceLostError(DeviceError):
    """Work on the device ended in a way after which nothing on it can be trusted."""

    http_status = 503
    grpc_code = "UNAVAILABLE"


class ExecutionError(DeviceError):
    """The model failed while it ran this batch. The next batch is not affected."""


class InternalError(AsynctrtError):
    """asynctrt broke one of its own rules. Please report it with the traceback."""
