"""Open the object that ``asynctrt serve module:attribute`` names."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import partial
from os import PathLike
from types import UnionType
from typing import Any, Final, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

import asynctrt
from asynctrt._util.loops import in_thread
from asynctrt.core.loading import Made, make, owned
from asynctrt.engine import Engine
from asynctrt.errors import AsynctrtError, ExecutionError, ModelError, OptionsError, describe, show
from asynctrt.options import Options
from asynctrt.tensors import TensorSpec

ACCEPTED: Final = (
    "a model, an engine, a pipeline, a path, an asynchronous context manager of one of them, a function or "
    "coroutine function that returns one of them, or a function that asynctrt.batch decorates"
)

DTYPES: Final[Mapping[Any, Any]] = {bool: bool, float: np.float64, int: np.int64, str: object}
"""Types of items that fully determine a tensor: one number or text for each row."""


async def open_attribute(where: str, device: str, settings: Mapping[str, Any]) -> Engine:
    """Return an engine for ``module:attribute``. Anything else opened for it is closed after it."""
    thing = await in_thread(partial(make, where))
    async with AsyncExitStack() as stack:
        try:
            thing = owned(await _resolved(thing, stack), where)
        except AsynctrtError:
            raise
        except Exception as error:
            raise ModelError(f"{where!r} raised {describe(error)}") from error
        if isinstance(thing, Made | str | PathLike):
            engine = await asynctrt.open(cast("Any", thing), device=device, options=Options(**settings))
        elif not isinstance(thing, Engine):
            raise ModelError(f"{where!r} is {show(thing)}, which cannot be served. It must be {ACCEPTED}")
        elif settings:
            await thing.aclose()
            raise OptionsError(
                f"{where!r} makes its engine itself, which is where {', '.join(settings)} must be said"
            )
        else:
            engine = thing
        _close_after(engine, stack.pop_all())
    return engine


async def _resolved(thing: Any, stack: AsyncExitStack) -> Any:
    """Await a coroutine function, enter a context manager, or make a pipeline of a decorated function."""
    if inspect.iscoroutinefunction(thing) and not isinstance(thing, asynctrt.Batched):
        thing = await thing()
    if inspect.isawaitable(thing):  # For example the result of asynctrt.open.
        thing = await thing
    if isinstance(thing, AbstractAsyncContextManager) and not isinstance(thing, Engine | asynctrt.Batched):
        thing = await stack.enter_async_context(thing)
    return await _pipeline_of(thing, stack) if isinstance(thing, asynctrt.Batched) else thing


def _close_after(engine: Engine, stack: AsyncExitStack) -> None:
    """Make an engine's ``aclose`` also close what the engine depends on, afterwards."""
    close = engine.aclose

    async def aclose() -> None:
        await close()
        await stack.aclose()

    vars(engine)["aclose"] = aclose


async def _pipeline_of(batched: "asynctrt.Batched[..., Any]", stack: AsyncExitStack) -> Engine:
    """Return a pipeline that calls a decorated function once for each row."""
    hints = get_type_hints(batched.__wrapped__)
    inputs = [_spec(batched, name, hints.get(name)) for name in inspect.signature(batched).parameters]
    output = _spec(batched, "output", hints.get("return"))
    await stack.enter_async_context(batched)
    if not hasattr(batched, "engine"):  # With batch_sizes, a first call opens it.
        with suppress(ExecutionError):  # The function refuses zeros, or empty texts, and a warning said so.
            await batched(*["" if spec.is_text else np.zeros(1, spec.dtype).tolist()[0] for spec in inputs])

    async def stage(given: Mapping[str, Any]) -> dict[str, Any]:
        items = zip(*(given[spec.name].tolist() for spec in inputs), strict=True)
        answers = await asyncio.gather(*(batched(*item) for item in items))
        return {output.name: np.array(answers, output.dtype)}

    rows_max = batched.engine.options.max_queue_rows
    return asynctrt.Pipeline(
        stage, inputs=inputs, outputs=output, name=batched.__name__, max_in_flight=rows_max
    )


def _spec(batched: Callable[..., Any], name: str, hint: Any) -> TensorSpec:
    """Return the tensor of a function's parameter or results, annotated as ``list[str]`` or similar."""
    item = get_args(hint)[0] if get_origin(hint) is list else hint
    if get_origin(item) in (UnionType, Union):  # Some results may be exceptions.
        (item, *_) = [one for one in get_args(item) if one not in (Exception, BaseException)]
    if item not in DTYPES:
        raise ModelError(
            f"{batched!r} can be served if its annotations say what one row is: list[str], list[float], "
            f"list[int] or list[bool] for each parameter and the result, and {name!r} has {show(hint)}. For "
            "rows of arrays, serve an asynctrt.FunctionModel, which has their shapes"
        )
    return TensorSpec(name, DTYPES[item])
