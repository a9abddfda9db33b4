"""What a pipeline asks of its stages: what they take, what they raise, what the last one gives."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np

from asynctrt.errors import ExecutionError, UsageError, show
from asynctrt.tensors import Array, TensorSpec, cast

T = TypeVar("T")


def specs_of(what: str, given: TensorSpec | Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return what a pipeline takes or gives.

    :raises UsageError: for nothing, for anything but specs, and for a name that occurs twice.
    """
    specs = (given,) if isinstance(given, TensorSpec) else tuple(given)
    names = {spec.name for spec in specs if isinstance(spec, TensorSpec)}
    if not specs or len(names) < len(specs):
        raise UsageError(f"the {what} of a pipeline are TensorSpecs with different names, not {show(given)}")
    return specs


def takes_call(stage: Callable[..., Any]) -> bool:
    """Return whether a stage is called with a :class:`Call` as well.

    :raises UsageError: if it can be called with neither one argument nor two.
    """
    try:
        parameters = inspect.signature(stage).parameters.values()
    except (TypeError, ValueError):
        return False  # It is built in and does not say.
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = sum(one.default is one.empty for one in positional)
    is_open = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    keywords = [one for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
    if needed > 2 or keywords or not (positional or is_open):
        raise UsageError(
            f"a stage is called as stage(inputs) or stage(inputs, call), and {show(stage)} has the "
            f"parameters {inspect.signature(stage)}"
        )
    # An optional second parameter is the function's own, unless its name says otherwise.
    return needed == 2 or (len(positional) > 1 and positional[1].name == "call")


def outcome_of(function: Callable[[], T]) -> Callable[[], T]:
    """Call a function; return what gives its result or raises its error: a future takes not every error."""
    try:
        result = function()
    except BaseException as error:
        return partial(_raise, error)
    return lambda: result


def _raise(error: BaseException) -> NoReturn:
    try:
        raise error
    finally:
        del error  # Its traceback has this frame.


def first_of(error: BaseException) -> BaseException:
    """Return the first error of a task group's; any other as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def read_only(array: Array) -> Array:
    """Return a view that cannot be written to."""
    view = array.view()
    view.flags.writeable = False
    return view


def as_dtype(spec: TensorSpec, array: Array) -> Array:
    """Return an output in the dtype that it should have, if that changes no value but of a float's precision.

    :raises ExecutionError: if it would.
    """
    if spec.dtype.kind == "S" and array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8")
    if array.dtype == spec.dtype:
        return array
    is_text = spec.dtype.kind == "S"
    if is_text != (array.dtype.kind == "S") or not (
        is_text or np.can_cast(array.dtype, spec.dtype, "same_kind")
    ):
        raise ExecutionError(f"output {spec.name!r} is {array.dtype}, and should be {spec.dtype.name}")
    converted = cast(array, spec.dtype)
    if spec.dtype.kind in "iuS" and not np.array_equal(converted, array):
        raise ExecutionError(
            f"output {spec.name!r} is {array.dtype} with values that {spec.dtype} cannot hold: "
            + ("give it more bytes" if is_text else "give it a wider dtype")
        )
    return converted
