"""The tree of errors: typed by who has to act, with the codes that a server answers with."""

import inspect
import re

import pytest

import asynctrt
from asynctrt import errors

ALL = [
    value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__
]


def test_every_error_is_public_documented_and_under_one_root():
    for error in ALL:
        assert issubclass(error, errors.AsynctrtError)
        assert error.__doc__
        assert getattr(asynctrt, error.__name__) is error


def test_the_drawing_in_the_docstring_has_each_error_once():
    drawn = re.findall(r"\w+Error", errors.__doc__.partition("Each class")[0])
    builtin = {
        "ValueError",
        "RuntimeError",
        "FileNotFoundError",
        "ImportError",
        "TimeoutError",
        "MemoryError",
        "ConnectionError",
    }
    assert sorted(set(drawn) - builtin) == sorted(error.__name__ for error in ALL)


@pytest.mark.parametrize(
    ("error", "builtin", "http", "grpc"),
    [
        (errors.OptionsError, ValueError, 400, "INVALID_ARGUMENT"),
        (errors.InputError, ValueError, 400, "INVALID_ARGUMENT"),
        (errors.UsageError, RuntimeError, 400, "INVALID_ARGUMENT"),
        (errors.ModelNotFoundError, FileNotFoundError, 404, "NOT_FOUND"),
        (errors.MissingExtraError, ImportError, 500, "INTERNAL"),
        (errors.QueueFullError, Exception, 503, "UNAVAILABLE"),
        (errors.DeadlineError, TimeoutError, 503, "UNAVAILABLE"),
        (errors.EngineClosedError, Exception, 503, "UNAVAILABLE"),
        (errors.ModelNotReadyError, errors.LifecycleError, 503, "UNAVAILABLE"),
        (errors.RequestError, errors.CallerError, 400, "INVALID_ARGUMENT"),
        (errors.UnauthorizedError, errors.RequestError, 401, "UNAUTHENTICATED"),
        (errors.UnknownModelError, errors.RequestError, 404, "NOT_FOUND"),
        (errors.TooLargeError, errors.RequestError, 413, "RESOURCE_EXHAUSTED"),
        (errors.UnsupportedError, errors.RequestError, 501, "UNIMPLEMENTED"),
        (errors.ConnectionLostError, ConnectionError, 503, "UNAVAILABLE"),
        (errors.DeviceMemoryError, MemoryError, 500, "INTERNAL"),
        (errors.DeviceLostError, Exception, 503, "UNAVAILABLE"),
        (errors.ExecutionError, Exception, 500, "INTERNAL"),
    ],
)
def test_codes_and_the_built_in_kind(error, builtin, http, grpc):
    assert issubclass(error, builtin)
    assert (error.http_status, error.grpc_code) == (http, grpc)
    assert str(error("what happened")) == "what happened"
