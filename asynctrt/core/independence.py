"""The test, run when an engine is opened, of whether rows of different requests may share a batch.

A few made-up rows run on the engine's context, alone and in a batch with others; one of these is extreme.
If a row's answer depends on the other rows (a recurrent network whose first axis is time, scales computed
over a whole batch), each request runs alone. Padding is tested in the same way.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar, cast

from asynctrt._util import clock
from asynctrt.backends.base import CapableModel, Model
from asynctrt.backends.whole import run_alone
from asynctrt.core.inputs import InputCheck
from asynctrt.core.lengths import Found, Lengths, advice
from asynctrt.devices.base import Device
from asynctrt.errors import AsynctrtError, ModelError, OptionsError, describe
from asynctrt.options import Options
from asynctrt.runtime.contexts import UNDO_S
from asynctrt.runtime.probe import (
    SIZE_TOLERANCE,
    Probe,
    Ran,
    Sample,
    Stage,
    Verdict,
    differing,
    made_up,
    said_of,
)
from asynctrt.scheduling.key import BatchKey
from asynctrt.statistics import TRUSTED, Batching
from asynctrt.tensors import Array

P = TypeVar("P", bound="Parts")

Shape = tuple[tuple[str, int], ...]
"""The sizes of dynamic dimensions, as in the shape of a key."""

logger = logging.getLogger("asynctrt")


class Parts(Stage, Protocol):
    """The parts of an engine that a trial needs."""

    def create_check(
        self, options: Options, check_key: Callable[[BatchKey], object], *, rows_first: bool = False
    ) -> InputCheck: ...
    def close(self, timeout_s: float) -> int: ...


def structural(model: Model, options: Options) -> Batching:
    """Return whether shapes and options allow requests to share batches.

    :raises ModelError: if the options demand shared batches that the model does not allow.
    """
    alone = model.capabilities.alone
    fixed = model.capabilities.rows_fixed
    if alone and options.batching == "on":
        raise ModelError(
            f"{alone}, so requests to {model.name!r} cannot share batches. Leave batching='on' out"
        )
    if alone:
        return Batching(is_on=False, reason=alone)
    if options.batching == "off":
        return Batching(is_on=False, reason="it was opened with batching='off'")
    if fixed not in (None, 1) and options.max_rows is None and options.batching != "on":
        return Batching(
            is_on=False,
            reason=f"batches have exactly {fixed} rows (max_rows={fixed} fills each of them up to that)",
        )
    return TRUSTED


def is_alone(model: Model) -> bool:
    """Return whether each request to a model runs alone."""
    return model.capabilities.alone != ""


def alone_of(model: Model, reason: str) -> Model:
    """Return a model that runs each request alone: ``model`` itself if it already does."""
    return model if is_alone(model) else run_alone(model, reason)


class OnHost(NamedTuple):
    """What made-up rows on the host have shown."""

    batching: Batching
    ran: Ran | None = None
    """The rows that ran in one batch, to be run on the device as well."""
    lengths: Found = Found()


def begin_on_host(
    model: Model,
    device: Device,
    options: Options,
    batching: Batching,
    make_on_host: Callable[[Model], Parts],
    threads: Executor,
) -> "Future[OnHost] | None":
    """Begin to try a model on the host, in a thread, while its contexts on the device are created.

    Made-up rows may make a model fail, and libraries for GPUs do not always survive that.

    :param batching: the decision from shapes and options.
    :param make_on_host: creates the parts for another model on the host.
    :returns: the result to pass to :func:`prove`; ``None`` for a model without a twin on the host.
    """
    if not model.capabilities.has_host_twin or not _is_tried(model, device, options):
        return None
    twin_of = cast("CapableModel", model).host_twin
    # With the cancellation of this thread's work.
    return threads.submit(copy_context().run, _tried_on_host, model, options, batching, twin_of, make_on_host)


def prove(
    parts: Parts,
    options: Options,
    batching: Batching,
    make: Callable[[Model], Parts],
    on_host: "Future[OnHost] | None",
) -> tuple[Batching, Found]:
    """Test whether rows are independent, and whether padding changes answers. Blocks.

    Rows that ran on the host before are then compared on the device.

    :param batching: the decision from shapes and options.
    :param make: creates the parts for another model on the same device.
    :param on_host: the result of :func:`begin_on_host`.
    :raises OptionsError: if padding changes answers.
    :raises DeviceLostError: if the device is lost.
    """
    model = parts.model
    if not _is_tried(model, parts.device, options):
        return batching, Found()
    if on_host is None:
        start_ns = clock.now_ns()
        batching, _, lengths = _tried(parts, options, batching, make)
    else:
        batching, ran, lengths = on_host.result()
        start_ns = clock.now_ns() - batching.probe_ns
        if ran is not None and batching.is_on:
            batching, lengths = _confirmed(parts, options, batching, ran, lengths)
        else:
            lengths = Found()
    taken_ns = clock.now_ns() - start_ns
    batching = replace(batching, lengths=_said_of_lengths(model, lengths), probe_ns=taken_ns)
    logger.debug("%r: batching is %s (%.1f ms)", model.name, batching, taken_ns / 1e6)
    return batching, lengths


def _is_tried(model: Model, device: Device, options: Options) -> bool:
    is_safe = model.capabilities.is_pure or options.batching == "probe"
    return is_safe and not getattr(device, "holds_batches", False)


def _said_of_lengths(model: Model, found: Found) -> str:
    """Return whether rows of different sizes share batches, and why, after logging it; empty if unknown."""
    if found.padding is not None:
        names = ", ".join("=".join(dims) for dims in found.padding.chosen)
        said = f"rows of different sizes share batches: padding {names} changed no answer"
        logger.info("%r: %s", model.name, said)
        return said
    if not found.what:
        return ""
    said = f"rows of different sizes do not share batches: {found.what}"
    logger.warning("%r: %s. %s", model.name, said, advice(model))
    return said


def _tried_on_host(
    model: Model,
    options: Options,
    batching: Batching,
    twin_of: Callable[[], Model],
    make_on_host: Callable[[Model], Parts],
) -> OnHost:
    """Return the decision from made-up rows on the host."""
    start_ns = clock.now_ns()
    try:
        twin = make_on_host(twin_of())
    except AsynctrtError as error:
        what = f"made-up rows could not be run on the host: {said_of(error)}"
        verdict = _settled(Verdict(is_independent=None, what=what), model)
        return OnHost(_decided(verdict, model, options) if batching.is_on else batching)
    with closing_parts(twin):
        batching, ran, lengths = _tried(twin, options, batching, make_on_host, is_twin=True)
    return OnHost(replace(batching, probe_ns=clock.now_ns() - start_ns), ran, lengths)


@contextmanager
def closing_parts(parts: P) -> Iterator[P]:
    """Close ``parts`` on exit."""
    try:
        yield parts
    finally:
        parts.close(UNDO_S)


def _tried(
    parts: Parts,
    options: Options,
    batching: Batching,
    make: Callable[[Model], Parts],
    *,
    is_twin: bool = False,
) -> "tuple[Batching, Ran | None, Found]":
    """Return the decision from made-up rows, the rows that ran in one batch, and what may be padded."""
    probe, model, lengths = Probe(parts), parts.model, Found()
    try:
        if batching.is_on:
            batching = _judged(probe, model, options, make)
        is_as_decided = batching.is_on is not is_alone(model)  # If not, the parts are created again.
        if parts.padding is not None and is_as_decided:
            _prove_padding(probe, parts, options)
        if options.pad is None and not options.is_deterministic and batching.is_on and is_as_decided:
            lengths = _lengths_of(probe, parts, is_twin=is_twin).find()
    finally:
        probe.close()
    return batching, probe.ran, lengths


def _lengths_of(probe: Probe, parts: Parts, *, is_twin: bool = False) -> Lengths:
    on_host = parts.device.name == "host"
    return Lengths(probe, parts.model, parts.pool, parts.shapes, on_host=on_host, is_twin=is_twin)


def _confirmed(
    parts: Parts, options: Options, batching: Batching, ran: "Ran", lengths: Found
) -> tuple[Batching, Found]:
    """Return the decision after running on the device the rows that ran on the host."""
    probe = Probe(parts)
    try:
        verdict = probe.compare_again(ran)
        if verdict.is_independent and lengths.padding is not None:
            lengths = _lengths_of(probe, parts).confirm(lengths)
    finally:
        probe.close()
    if verdict.is_independent:
        return batching, lengths
    return _decided(verdict, parts.model, options), Found()


def _judged(probe: "Probe", model: Model, options: Options, make: Callable[[Model], Parts]) -> Batching:
    """Return the decision from the probe, or from doubts about the model if the probe is inconclusive."""
    verdict = _settled(probe.compare(), model)
    if options.batching != "on" and (error := _fails_as_row(model, make, probe.failed)) is not None:
        what = f"a row fails in a batch that does not fail alone: {said_of(error)}"
        verdict = Verdict(is_independent=False, what=what)
    return _decided(verdict, model, options)


def _settled(verdict: Verdict, model: Model) -> Verdict:
    """Return a verdict, or a negative one if it is inconclusive and there are doubts about the model."""
    if verdict.is_independent is not None or not model.capabilities.doubt:
        return verdict
    return Verdict(is_independent=False, what=f"{model.capabilities.doubt}, and {verdict.what}")


def _decided(verdict: "Verdict", model: Model, options: Options) -> Batching:
    """Return the decision that follows from a verdict.

    :raises ModelError: if ``batching="on"``, but outputs may not have one row per row of the inputs.
    """
    if verdict.is_independent is not False:
        return Batching(reason=verdict.what)
    if options.batching == "on" and model.capabilities.doubt:
        raise ModelError(
            f"{verdict.what}, so requests to {model.name!r} cannot share batches. Open it with "
            "batching='auto', and each request runs alone"
        )
    if options.batching == "on":
        logger.warning("%r batches, as batching='on' says, although %s", model.name, verdict.what)
        return Batching(reason=f"it was opened with batching='on', although {verdict.what}")
    choice = " (batching='on' shares batches regardless)" if verdict.is_choice else ""
    return Batching(is_on=False, reason=f"{verdict.what}{choice}")


def _fails_as_row(
    model: Model, make: Callable[[Model], Parts], failed: "Sequence[tuple[Sample, Exception]]"
) -> Exception | None:
    """Return the error of a row that failed in the probe but runs alone; ``None`` if there is no such row."""
    if not failed:
        return None
    try:
        parts = make(alone_of(model, "it is tried"))
    except AsynctrtError:
        return None
    with closing_parts(parts):
        probe = Probe(parts)
        try:
            return next((error for sample, error in failed if probe.runs(sample)), None)
        finally:
            probe.close()


def _prove_padding(probe: Probe, parts: Parts, options: Options) -> None:
    """Check that padding does not change the answers of rows.

    :raises OptionsError: if it does.
    """
    for arrays, given, padded in _padded_samples(probe, parts, options):
        try:
            as_given = probe.run_arrays(arrays, given)
            as_padded = probe.run_arrays(arrays, padded)
        except Exception as error:
            if probe.must_end(error):
                raise
            logger.debug("%r: padding was not tried: %s", parts.model.name, describe(error))
            continue
        found = differing(as_given, 0, as_padded, 0, SIZE_TOLERANCE)
        if not found:
            return
        before = dict(cast("Shape", given.shape))
        sizes = {dim: size for dim, size in cast("Shape", padded.shape) if before[dim] != size}
        what = f"padding changes the answers of {parts.model.name!r}: {found} when it was padded to {sizes}"
        if options.batching == "on":
            logger.warning("%s", what)
            return
        raise OptionsError(
            f"{what}. {_way_out(parts, options)}, or leave pad out (batching='on' pads regardless)"
        )


def _padded_samples(
    probe: Probe, parts: Parts, options: Options
) -> Iterator[tuple[tuple[Array, ...], BatchKey, BatchKey]]:
    """Return made-up rows that padding enlarges, with the keys of their batches without and with padding."""
    padding = parts.padding
    assert padding is not None
    check = parts.create_check(options, lambda _: None, rows_first=True)
    for sample in probe.samples():
        for part in (2, 4):
            symbols = {
                dim: max(1, size - size // part) if padding.pads(dim) else size
                for dim, size in sample.symbols.items()
            }
            filled = {filled.spec.name for filled in padding.filled}
            named = {
                spec.name: made_up(spec, dims, "a", sample)[None]
                for spec in parts.model.inputs
                if spec.name not in filled and (dims := spec.resolve(symbols)) is not None
            }
            try:
                arrays, _, padded = check.validate(named)
            except AsynctrtError:
                continue
            given = padded._replace(shape=tuple(symbols.items()))
            if given.shape != padded.shape:
                yield arrays, given, padded


def _way_out(parts: Parts, options: Options) -> str:
    """Return advice on making padding harmless: let the engine fill an input that marks the padding."""
    padding = parts.padding
    assert padding is not None
    said = options.pad_with or {}
    for spec in parts.model.inputs:
        if spec.name in said or spec.dtype.kind not in "biu":
            continue
        if any(isinstance(dim, str) and padding.pads(dim) for dim in spec.dims) and "mask" in spec.name:
            return f"Have the engine fill its mask: pad_with={{{spec.name!r}: 'mask'}}"
        if not spec.dims and "len" in spec.name:
            return f"Have the engine fill its lengths: pad_with={{{spec.name!r}: 'length'}}"
    return "It has no input for a mask or lengths, so rows of different lengths cannot share a batch"
