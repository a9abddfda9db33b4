"""The batch sizes to capture or to prepare, and the preparation of a function's sizes.

Libraries such as PyTorch may prepare each batch size separately (``torch.compile``, ``cudnn.benchmark``). So
all sizes of a function that names some are run before the first caller arrives.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Final, NamedTuple

from asynctrt._util import clock
from asynctrt._util.cancellation import Cancellation
from asynctrt.backends.base import Binding, Model
from asynctrt.devices.base import Device, Event, Stream
from asynctrt.errors import DeviceLostError, UsageError
from asynctrt.runtime.graphs import wait_for
from asynctrt.tensors import Array

PREPARE_S: Final = 600.0
"""The timeout of a batch, in seconds. ``torch.compile`` may search for minutes."""

CHANGE_NS_MIN: Final = 1_000_000
"""A change of the batch size matters if it adds at least this time."""

ROUNDS: Final = 3
"""How often to measure a change, with two sizes."""

BETWEEN_MIN: Final = 16
"""From this power of two on, where a batch takes about as long as its rows, also run the size halfway to the
next one."""

logger = logging.getLogger("asynctrt")


class Place(NamedTuple):
    """A context to run batches on: nothing else uses it, and it is bound to a slab of zeros."""

    binding: Binding
    stream: Stream
    end: Event
    """An event of the stream to wait with."""
    cancellation: Cancellation
    """Whether the opening of the engine was cancelled."""
    inputs: tuple[Array, ...]
    """The inputs to set to zero before each batch, because a batch may change them."""


def sizes_up_to(rows_max: int, between_min: int = 2) -> tuple[int, ...]:
    """Return the powers of two below ``rows_max``, the sizes halfway from one to the next, and ``rows_max``.

    :param between_min: the power of two from which on to return the size halfway to the next one.
    """
    powers = [1 << bits for bits in range((rows_max - 1).bit_length())]
    between = [size * 3 // 2 for size in powers if size >= between_min and size * 3 // 2 < rows_max]
    return (*sorted(powers + between), rows_max)


def few_sizes(given: Sequence[int], rows_max: int) -> tuple[int, ...]:
    """Return the sizes below ``rows_max`` that are given, and ``rows_max``; by default 1, 2, 4, 8, 16, 24,
    32, 48 and so on.

    The default is for models whose shapes vary: there each size takes memory for each shape.
    """
    if not given:
        return sizes_up_to(rows_max, BETWEEN_MIN)
    return (*[size for size in given if size < rows_max], rows_max)


def prepare(device: Device, model: Model, places: Sequence[Place]) -> None:
    """Run all batch sizes of a model in every context. Blocks.

    :param places: one for each context.
    :raises DeviceLostError: if the device is lost. Other errors are logged.
    :raises UsageError: if the work of this thread was cancelled.
    """
    first, *others = places
    sizes = model.capabilities.batch_sizes
    try:
        _run_all(device, first, sizes)  # What it prepares for the process is there for the others.
        if others:
            with ThreadPoolExecutor(len(others), "asynctrt-prepare") as pool:
                for done in [pool.submit(_run_all, device, place, sizes) for place in others]:
                    done.result()
    except DeviceLostError:
        raise
    except Exception as error:
        if first.cancellation.is_cancelled:
            raise
        logger.warning(
            "%r: batches of zeros could not be run beforehand, so the first batch of each size may take "
            "long: %s",
            model.name,
            error,
        )
    else:
        logger.info("%r: batches are padded to %s", model.name, ", ".join(map(str, sizes)))


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
