"""The tree of errors: typed by who has to act, with the codes that a server answers with."""

import asyncio
import copy
import inspect
import pickle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    ("error", "builtin", "http", "grpc"),
    [
        (errors.OptionsError, ValueError, 400, "INVALID_ARGUMENT"),
        (errors.InputError, ValueError, 400, "INVALID_ARGUMENT"),
        (errors.UsageError, RuntimeError, 400, "INVALID_ARGUMENT"),
        (errors.ModelNotFoundError, FileNotFoundError, 404, "NOT_FOUND"),
        (errors.UntrustedError, errors.ModelError, 400, "INVALID_ARGUMENT"),
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
        (errors.PoisonError, errors.ExecutionError, 500, "INTERNAL"),
    ],
)
def test_codes_and_the_built_in_kind(error, builtin, http, grpc):
    assert issubclass(error, builtin)
    assert (error.http_status, error.grpc_code) == (http, grpc)
    assert str(error("what happened")) == "what happened"


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("args", [(), ("what happened",), (2, "No such file"), (2, "No such file", "x.onnx")])
def test_every_error_is_copied_and_pickled_with_all_that_it_says(kind, args):
    error = kind(*args)
    error.hint = "look there"
    error.add_note("a note")
    for made in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(made) is kind
        assert str(made) == str(error)
        assert made.args == error.args
        assert (made.hint, made.__notes__) == ("look there", ["a note"])


class WithCode(errors.ExecutionError):
    """An application's own error, whose ``__init__`` does not take its ``args``."""

    def __init__(self, code, *, detail):
        super().__init__(f"{code}: {detail}")
        self.code = code


class WithoutServer(errors.ConnectionLostError):
    """The same over an ``OSError``, which leaves its ``args`` to ``__init__``."""

    def __init__(self, *, host):
        super().__init__(f"no {host}")


@pytest.mark.parametrize("error", [WithCode(7, detail="no"), WithoutServer(host="here")])
def test_an_error_with_parameters_of_its_own_is_copied_and_pickled(error):
    for made in (copy.copy(error), pickle.loads(pickle.dumps(error)), errors.copy_for(error)):
        assert type(made) is type(error)
        assert made is not error
        assert (made.args, vars(made)) == (error.args, vars(error))


def test_callers_get_copies_that_share_neither_traceback_nor_notes():
    try:
        raise WithCode(7, detail="no")
    except WithCode as caught:
        error = caught
    error.add_note("of the batch")
    first, second = errors.copy_for(error), errors.copy_for(error)
    first.add_note("of the first caller")
    assert first.__traceback__ is None
    assert first.__cause__ is second.__cause__ is error
    assert second.__notes__ == error.__notes__ == ["of the batch"]


def test_a_copy_of_an_error_that_was_never_raised_has_its_cause():
    error = errors.DeviceLostError("gone")
    assert errors.copy_for(error).__cause__ is None
    error.__cause__ = ValueError("why")
    assert errors.copy_for(error).__cause__ is error.__cause__


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no"), "ValueError: no"),
        (ValueError(), "ValueError"),
        (KeyError("x"), "KeyError: 'x'"),
        (ExceptionGroup("both", [ValueError(1), KeyError(2)]), "ExceptionGroup: both (2 sub-exceptions)"),
        (UnicodeDecodeError("utf8", b"x", 0, 1, "bad"), "UnicodeDecodeError: 'utf8' codec can't decode"),
        (asyncio.CancelledError(), "CancelledError"),
    ],
)
def test_describing_an_error(error, text):
    assert errors.describe(error).startswith(text)
    made = errors.copy_for(error)  # Not one of asynctrt's: the model failed.
    assert type(made) is errors.ExecutionError
    assert str(made) == errors.describe(error)
    assert made.__cause__ is error


@pytest.mark.parametrize("also", [StopIteration, asyncio.CancelledError, GeneratorExit, SystemExit])
def test_an_error_that_asyncio_takes_for_control_flow_reaches_the_caller_as_an_error(also):
    """A future refuses a ``StopIteration``, and a ``CancelledError`` would cancel the caller."""
    error = type("Mixed", (errors.DeviceMemoryError, also), {})("no memory")
    made = errors.copy_for(error)
    assert type(made) is errors.DeviceMemoryError
    assert str(made) == "Mixed: no memory"


class Text(str):
    """A ``str`` that cannot be formatted."""

    def __str__(self):
        raise KeyboardInterrupt

    __format__ = __add__ = __len__ = __eq__ = __hash__ = __str__


def raises(kind):
    def method(*_, **__):
        raise kind("on purpose")

    return method


RAISES = st.sampled_from([ValueError, AttributeError, TypeError, KeyboardInterrupt, SystemExit]).map(raises)
HOSTILE = {
    **dict.fromkeys(["__init__", "__new__", "__repr__", "__copy__", "__deepcopy__", "__reduce__"], RAISES),
    **dict.fromkeys(["__reduce_ex__", "__setstate__", "__getattribute__", "__setattr__"], RAISES),
    **dict.fromkeys(["__eq__", "__bool__", "add_note", "with_traceback"], RAISES),
    **dict.fromkeys(["args", "__dict__", "__class__", "__cause__", "__notes__"], RAISES.map(property)),
    "__slots__": st.just(("where",)),
    "__str__": RAISES | st.sampled_from([lambda _: 5, lambda _: Text("text"), lambda e: e.absent]),
}
RETURNS = {
    "__copy__": st.sampled_from([lambda e: e, lambda _: None, lambda _: ValueError("another")]),
    "__new__": st.just(lambda *_: ValueError("another")),
    "__reduce__": st.sampled_from([lambda _: (str, ("text",)), lambda _: None, lambda _: "text"]),
    "args": st.sampled_from([None, 5, (), ([],)]),
    "__notes__": st.sampled_from([None, 5, "text"]),
}


LOOP = asyncio.new_event_loop()
LOOP.close()  # Futures can still be made on it.


class Meta(type):
    """The class of classes that do not even tell their names."""

    __name__ = property(raises(RuntimeError))
    __mro__ = property(raises(RuntimeError))
    __subclasscheck__ = raises(RuntimeError)


@st.composite
def hostile(draw):
    """An exception whose class has some methods that raise or give nonsense."""
    base = draw(st.sampled_from([*ALL, ValueError, KeyError, OSError, ImportError, BaseException]))
    chosen = draw(st.lists(st.sampled_from(sorted(HOSTILE)), max_size=4, unique=True))
    methods = {name: draw(HOSTILE[name]) for name in chosen}
    for name in draw(st.lists(st.sampled_from(sorted(RETURNS)), max_size=2, unique=True)):
        methods[name] = draw(RETURNS[name])
    kind = draw(st.sampled_from([type, Meta]))("Hostile", (base,), methods)
    make = OSError.__new__ if issubclass(base, OSError) else BaseException.__new__
    return make(kind, *draw(st.sampled_from([(), ("text",), (b"\xff", 5)])))


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(hostile())
def test_whatever_an_error_does_it_is_described_and_copied(error):
    described = errors.describe(error)
    assert type(described) is str
    assert described
    made = errors.copy_of(error)
    assert made is not error
    assert issubclass(type(made), Exception)
    made = errors.copy_for(error)
    assert made is not error
    assert issubclass(type(made), errors.AsynctrtError)
    nearest = [kind for kind in ALL if issubclass(type(error), kind)]
    assert all(issubclass(type(made), kind) for kind in nearest)
    assert errors.describe(made) == described or str(made) == described
    future = LOOP.create_future()
    future.set_exception(made)
    assert future.exception() is made
