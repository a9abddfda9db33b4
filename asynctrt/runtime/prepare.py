"""Preparation of a few batch sizes, if changing the batch size takes long.

Since 1.20, ONNX Runtime has cuDNN plan a convolution again whenever the batch size changes (its issue 23006).
That takes a tenth of a second for a model with many convolutions, and random arrivals make batches of every
size. If that is detected, each context gets a separate session for each of a few sizes, and batches are
padded to the next of them. All sizes are run before the first caller arrives.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Final, NamedTuple, TypeVar

from asynctrt._util import clock
from asynctrt._util.cancellation import Cancellation
from asynctrt.backends.base import Binding, Model, PreparedContext
from asynctrt.devices.base import Device, Event, Stream, mib
from asynctrt.errors import DeviceLostError, DeviceMemoryError, UsageError
from asynctrt.runtime.graphs import wait_for
from asynctrt.tensors import Array

PREPARE_S: Final = 600.0
"""The timeout of a batch, in seconds. ``torch.compile`` may search for minutes."""

CHANGE_NS_MIN: Final = 1_000_000
CHANGE_SHARE_MIN: Final = 0.5
"""Keep sizes apart if a change adds at least this time, and at least this share of a batch's time."""

ROUNDS: Final = 3
"""How often to measure a change, with two sizes."""

SHARE_MAX: Final = 0.5
"""The share of the device's free memory that sizes may take: others use the device too."""

FEWEST: Final = 4
"""Give up if fewer sizes than this do not fit."""

BETWEEN_MIN: Final = 16
"""From this power of two on, where a batch takes about as long as its rows, also run the size halfway to the
next one."""

logger = logging.getLogger("asynctrt")

T = TypeVar("T")


class Place(NamedTuple):
    """A context to run batches on: nothing else uses it, and it is bound to a slab of zeros."""

    context: PreparedContext
    binding: Binding
    stream: Stream
    end: Event
    """An event of the stream to wait with."""
    cancellation: Cancellation
    """Whether the opening of the engine was cancelled."""
    inputs: tuple[Array, ...] = ()
    """The inputs to set to zero before each batch, because a batch may change them."""


def sizes_up_to(rows_max: int, between_min: int = 2) -> tuple[int, ...]:
    """Return the powers of two below ``rows_max``, the sizes halfway from one to the next, and ``rows_max``.

    :param between_min: the power of two from which on to return the size halfway to the next one.
    """
    powers = [1 << bits for bits in range((rows_max - 1).bit_length())]
    between = [size * 3 // 2 for size in powers if size >= between_min and size * 3 // 2 < rows_max]
    return (*sorted(powers + between), rows_max)


def few_sizes(given: Sequence[int] | None, rows_max: int, between_min: int = BETWEEN_MIN) -> tuple[int, ...]:
    """Return the sizes below ``rows_max`` that are given, and ``rows_max``; by default 1, 2, 4, 8, 16, 24,
    32, 48 and so on.

    The default is for models whose shapes vary: there each size takes memory for each shape.

    :param between_min: as for :func:`sizes_up_to`.
    """
    if not given:
        return sizes_up_to(rows_max, between_min)
    return (*[size for size in given if size < rows_max], rows_max)


def prepare(device: Device, model: Model, places: Sequence[Place], rows_max: int) -> tuple[int, ...]:
    """Measure whether changes of the batch size take long, and if so prepare some sizes. Blocks.

    :param places: one for each context.
    :returns: the sizes that batches are padded to from now on, rising; empty if batches may have any size.
        A model with ``needs_sizes`` always gets its sizes.
    :raises DeviceLostError: if the device is lost. Other errors are logged.
    :raises UsageError: if the work of this thread was cancelled.
    """
    sizes = model.capabilities.batch_sizes
    must_pad = sizes if model.capabilities.needs_sizes else None
    try:
        if sizes is None:
            sizes = sizes_that_pay(model, places[0], rows_max)
        elif sizes:
            sizes = few_sizes(sizes, rows_max)
        if sizes:
            sizes = _keep_apart(device, model, places, sizes)
    except DeviceLostError:
        raise
    except Exception as error:
        if places[0].cancellation.is_cancelled:
            raise
        for place in places:
            place.context.keep_apart(())
        logger.warning(
            "%r: batches of zeros could not be run beforehand, so each batch of another size than %s may "
            "take long: %s",
            model.name,
            "the one before" if must_pad is None else "those before",
            error,
        )
        return must_pad or ()
    return sizes


def as_many_as_fit(
    name: str, sizes: tuple[int, ...], attempt: Callable[[tuple[int, ...]], T]
) -> tuple[tuple[int, ...], T]:
    """Try ``attempt`` with all sizes; as long as they do not fit, retry with every second one.

    :param name: the model's name.
    :returns: the sizes that fit, and the result of the attempt with them.
    :raises DeviceMemoryError: if even fewer than :data:`FEWEST` sizes do not fit.
    """
    while True:
        try:
            return sizes, attempt(sizes)
        except DeviceMemoryError as error:
            if len(sizes) < FEWEST:
                raise
            fewer = sizes[-1::-2][::-1]
            logger.info(
                "%r: there is no room for %d batch sizes, but perhaps for %d: %s",
                name,
                len(sizes),
                len(fewer),
                error,
            )
            sizes = fewer


def check_share(
    device: Device, room_nbytes: int, contexts: int, what: str, fix: str, limit_nbytes: int | None = None
) -> None:
    """Check that all contexts together fit into their share of memory, after one has allocated its part.

    :param room_nbytes: the free memory before.
    :param what: the subject of the error message; ``fix`` is its advice.
    :param limit_nbytes: their share. Default: :data:`SHARE_MAX` of what was free.
    :raises DeviceMemoryError: if they would take more than their share.
    """
    taken_nbytes = max(room_nbytes - device.memory().room_nbytes, 0)
    limit_nbytes = int(room_nbytes * SHARE_MAX) if limit_nbytes is None else limit_nbytes
    if not device.unified and taken_nbytes * contexts > limit_nbytes:
        raise DeviceMemoryError(
            f"{what} take {mib(taken_nbytes)} in one context, and in {contexts} of them more than their "
            f"share, {mib(limit_nbytes)} of {mib(room_nbytes)} that were free. {fix}, or use fewer contexts"
        )


def _keep_apart(
    device: Device, model: Model, places: Sequence[Place], sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Keep sizes apart and run them in every context: all of them, or as many as fit.

    :raises DeviceMemoryError: if even fewer than :data:`FEWEST` sizes do not fit.
    """
    room_nbytes = device.memory().room_nbytes

    def run_first(sizes: tuple[int, ...]) -> None:
        for place in places:
            place.context.keep_apart(sizes[:-1])  # The largest uses the existing session.
        _run_all(device, places[0], sizes)
        check_share(
            device,
            room_nbytes,
            len(places),
            f"{len(sizes)} batch sizes of {model.name!r}",
            "Give the sizes that matter most (batch_sizes in the option onnx)",
        )

    sizes, _ = as_many_as_fit(model.name, sizes, run_first)
    with ThreadPoolExecutor(len(places), "asynctrt-prepare") as pool:
        for done in [pool.submit(_run_all, device, place, sizes) for place in places[1:]]:
            done.result()
    logger.info("%r: batches are padded to %s", model.name, ", ".join(map(str, sizes)))
    return sizes


def sizes_that_pay(model: Model, place: Place, rows_max: int) -> tuple[int, ...]:
    """Return the sizes to keep apart; empty if that does not pay off."""
    if rows_max < 2:
        return ()
    pair = rows_max, rows_max // 2
    for rows in pair:
        _timed(place, rows)  # Do not measure one-time work.
    change = time_of_change(partial(_timed, place), pair)
    if change.extra_ns < max(CHANGE_NS_MIN, CHANGE_SHARE_MIN * change.same_ns):
        return ()
    logger.info(
        "%r: a batch of another size than the one before takes %.0f ms longer, so some sizes are kept apart "
        "in each context",
        model.name,
        change.extra_ns / 1e6,
    )
    return sizes_up_to(rows_max)


class Change(NamedTuple):
    """What a change of the batch size costs, in ns."""

    extra_ns: int
    """How much longer a batch takes after one of another size."""
    same_ns: int
    """How long it takes after one of the same size."""


def time_of_change(run: Callable[[int], int], sizes: Sequence[int], rounds: int = ROUNDS) -> Change:
    """Measure what changes from one batch size to another cost.

    :param run: runs a batch of some rows; returns how long that took, in ns.
    :param sizes: some sizes, each different from the one before, and the first from the one that ran last.
    """
    extras_ns, sames_ns = [], []
    for _ in range(rounds):
        for rows in sizes:
            changed_ns, same_ns = run(rows), run(rows)
            extras_ns.append(changed_ns - same_ns)
            sames_ns.append(same_ns)
    # The median ignores rounds in which the process was delayed.
    return Change(int(median(extras_ns)), int(median(sames_ns)))


def _run_all(device: Device, place: Place, sizes: Sequence[int]) -> None:
    """Run each size twice: the first run includes one-time work."""
    device.activate()
    for rows in reversed(sizes):
        for _ in range(2):
            _timed(place, rows)


def _timed(place: Place, rows: int) -> int:
    """Run a batch of zeros; return how long it took, in ns.

    :raises UsageError: if the opening of the engine was cancelled; nothing is run then.
    """
    if place.cancellation.is_cancelled:
        raise UsageError("batches of zeros are not run any more, since the opening was cancelled")
    for array in place.inputs:
        array[:rows] = 0
    start_ns = clock.now_ns()
    place.binding.enqueue(rows, profile=None, stream=place.stream, arena=None)
    wait_for(place.stream, place.end, f"a batch of {rows} rows of zeros", PREPARE_S)
    return clock.now_ns() - start_ns
