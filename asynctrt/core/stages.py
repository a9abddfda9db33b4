"""Helpers for the stages of a pipeline: their arguments, their errors, the outputs of the last stage."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np

from asynctrt._util.validation import takes_second
from asynctrt.errors import ExecutionError, UsageError, show
from asynctrt.tensors import Array, TensorSpec, cast

T = TypeVar("T")


def specs_of(what: str, given: TensorSpec | Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the specs of a pipeline's inputs or outputs.

    :raises UsageError: if there are no specs, for anything but specs, and for a name that occurs twice.
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
        return takes_second(stage, "call", if_unknown=False)
    except ValueError as error:
        raise UsageError(
            f"a stage is called as stage(inputs) or stage(inputs, call): for {show(stage)}, {error}"
        ) from None


def outcome_of(function: Callable[[], T]) -> Callable[[], T]:
    """Call a function; return a function that returns its result or raises its error.

    Futures do not accept every error.
    """
    try:
        result = function()
    except BaseException as error:
        return partial(_raise, error)
    return lambda: result


def _raise(error: BaseException) -> NoReturn:
    try:
        raise error
    finally:
        del error  # Breaks a cycle: its traceback holds this frame.


def first_of(error: BaseException) -> BaseException:
    """Return the first error of a task group's error; any other error unchanged."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def read_only(array: Array) -> Array:
    """Return a read-only view."""
    view = array.view()
    view.flags.writeable = False
    return view


def as_dtype(spec: TensorSpec, array: Array) -> Array:
    """Convert an output to its spec's dtype, if no value changes except in a float's precision.

    :raises ExecutionError: if a value would change.
    """
    if spec.dtype.kind == "S" and array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8")
    if array.dtype == spec.dtype:
        return array
    is_text = spec.dtype.kind == "S"
    if is_text != (array.dtype.kind == "S") or not (
        is_text or np.can_cast(array.dtype, spec.dtype, "same_kind")
    ):
        raise ExecutionError(f"output {spec.name!r} is {array.dtype}, but should be {spec.dtype.name}")
    converted = cast(array, spec.dtype)
    if spec.dtype.kind in "iuS" and not np.array_equal(converted, array):
        raise ExecutionError(
            f"output {spec.name!r} is {array.dtype} with values that {spec.dtype} cannot hold: "
            + ("give it more bytes" if is_text else "give it a wider dtype")
        )
    return converted
