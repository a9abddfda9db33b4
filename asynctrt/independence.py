"""Whether rows of different requests may share a batch: found out by trying, when an engine is opened.

A few made-up rows run on the engine's own context, alone and in a batch with others, one of which is extreme.
If a row's answer depends on its company (a recurrent network whose first axis is time, scales taken over a
whole batch), requests are kept apart. Padding is tried in the same way.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol, cast

import numpy as np

from asynctrt import clock
from asynctrt.backends.base import Model, RangedModel
from asynctrt.backends.whole import run_alone
from asynctrt.cancellation import current
from asynctrt.devices.arenas import Arenas, GrowingBuffer
from asynctrt.devices.base import Buffer, Device
from asynctrt.errors import (
    AsynctrtError,
    DeviceLostError,
    ExecutionError,
    ModelError,
    OptionsError,
    UsageError,
    describe,
)
from asynctrt.inputs import InputCheck, content_of
from asynctrt.options import Options
from asynctrt.padding import Padding
from asynctrt.runtime.contexts import ContextPool
from asynctrt.runtime.inflight import InFlight
from asynctrt.scheduling.batch import Batch, Reason
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.request import Request
from asynctrt.scheduling.shapes import Shapes
from asynctrt.statistics import TRUSTED, Batching
from asynctrt.tensors import Array, Dims, TensorSpec, split_shared

PROBE_S: Final = 120.0
"""How long a batch may take."""

CLOSE_S: Final = 0.1
"""How long streams of what was tried may take to come to rest."""

SIZES: Final = (8, 32, 64, 320, 1)
"""Sizes to try for dimensions that vary: those of sequences, and of pictures with sides that 32 divides."""

INTEGERS: Final = 100
"""Whole numbers are below this, or 0 and 1 if the model refuses that: they may be indices."""

EXTREME: Final = 1000.0
"""How much larger the values of an extreme row are: small enough for float16."""

COMPANY_TOLERANCE: Final = 2e-4
COMPANY_TOLERANCE_OF_HALVES: Final = 5e-3
ON_GPU: Final = 10
"""How far a value may be off, relative to the largest of its output, where a row has other company in a batch
of the same size, in the same place: nothing, but for sums in no certain order, as GPUs make them."""

SIZE_TOLERANCE: Final = 0.05
"""The same where the size of the batch or the place of the row differ: libraries choose other algorithms
then, and a model that was given nonsense may make much of rounding."""

SHARE_MIN: Final = 0.99
"""How many values must be as near as that: a steep function makes much of little here and there."""

Shape = tuple[tuple[str, int], ...]
"""The sizes of dimensions that vary, as keys say them."""

logger = logging.getLogger("asynctrt")


class Parts(Protocol):
    """What an engine stands on, as far as it is needed to run made-up rows."""

    @property
    def model(self) -> Model: ...
    @property
    def device(self) -> Device: ...
    @property
    def pool(self) -> ContextPool: ...
    @property
    def arenas(self) -> Arenas | None: ...
    @property
    def shapes(self) -> Shapes: ...
    @property
    def padding(self) -> Padding | None: ...
    def create_check(
        self, options: Options, check_key: Callable[[BatchKey], object], *, rows_first: bool = False
    ) -> InputCheck: ...
    def close(self, timeout_s: float) -> int: ...


def structural(model: Model, options: Options) -> Batching:
    """Return whether requests can share batches as far as shapes and options say.

    :raises ModelError: if the options demand that they do, and they cannot.
    """
    alone = getattr(model, "alone", "")
    fixed = model.rows_fixed
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


def alone_of(model: Model, reason: str) -> Model:
    """Return a model with each request run alone: itself if it is one."""
    return model if getattr(model, "alone", "") else run_alone(model, reason)


def prove(parts: Parts, options: Options, batching: Batching, make: Callable[[Model], Parts]) -> Batching:
    """Find out whether rows are independent, and whether padding changes answers. Blocks.

    :param batching: what shapes and options say.
    :param make: makes what batches of another model need on the same device.
    :raises OptionsError: if padding changes answers.
    :raises DeviceLostError: if the device is lost.
    """
    model = parts.model
    is_tried = getattr(model, "is_pure", False) or options.batching == "probe"
    if not is_tried or getattr(parts.device, "holds_batches", False):
        return batching
    start_ns = clock.now_ns()
    probe = Probe(parts)
    try:
        if batching.is_on:
            batching = _judged(probe, model, options, make)
        if parts.padding is not None and batching.is_on is not bool(getattr(model, "alone", "")):
            _prove_padding(probe, options)
    finally:
        probe.close()
    taken_ns = clock.now_ns() - start_ns
    logger.debug("%r: batching is %s (%.1f ms)", model.name, batching, taken_ns / 1e6)
    return replace(batching, probe_ns=batching.probe_ns + taken_ns)


def _judged(probe: "Probe", model: Model, options: Options, make: Callable[[Model], Parts]) -> Batching:
    """Return what the probe and, where it cannot tell, what is known of the model says."""
    verdict = probe.compare()
    doubt = getattr(model, "doubt", "")
    if verdict.is_independent is None and doubt:
        verdict = Verdict(is_independent=False, what=f"{doubt}, and {verdict.what}")
    elif options.batching != "on" and (error := _fails_as_row(model, make, probe.failed)) is not None:
        what = f"a row fails in a batch that does not fail alone: {_shown(error)}"
        verdict = Verdict(is_independent=False, what=what)
    if verdict.is_independent is not False:
        return Batching(reason=verdict.what)
    if options.batching == "on" and doubt:
        raise ModelError(
            f"{verdict.what}, so requests to {model.name!r} cannot share batches. Open it with "
            "batching='auto', and each request runs alone"
        )
    if options.batching == "on":
        logger.warning("%r batches, as batching='on' says, although %s", model.name, verdict.what)
        return Batching(reason=f"it was opened with batching='on', although {verdict.what}")
    return Batching(is_on=False, reason=f"{verdict.what} (batching='on' shares batches all the same)")


def _fails_as_row(
    model: Model, make: Callable[[Model], Parts], failed: "Sequence[tuple[Sample, Exception]]"
) -> Exception | None:
    """Return why a made-up row failed that runs alone; ``None`` if there is none."""
    if not failed:
        return None
    try:
        parts = make(alone_of(model, "it is tried"))
    except AsynctrtError:
        return None
    probe = Probe(parts)
    try:
        return next((error for sample, error in failed if probe.runs(sample)), None)
    finally:
        probe.close()
        parts.close(CLOSE_S)


class Verdict(NamedTuple):
    """What a probe found."""

    is_independent: bool | None
    """``None`` if it could not find out."""
    what: str


class NoRowsError(ExecutionError):
    """An output does not have a row for each of the batch."""


class Sample(NamedTuple):
    """The sizes of dimensions that vary, and how values are made up."""

    symbols: dict[str, int]
    tame: bool


class Probe:
    """Runs made-up batches on the first context of an engine that is not open yet."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._context = parts.pool.contexts[0]
        self._cancellation = current()
        self._with_rows, self._shared = split_shared(parts.model.inputs)
        self.failed: list[tuple[Sample, Exception]] = []
        """Made-up rows that did not run, and why."""
        self._scratch: Buffer | None = None
        arenas = parts.arenas
        if arenas is not None and arenas.by_shapes:
            self._scratch = GrowingBuffer(parts.device)  # The arenas are to grow by what callers send.
        elif arenas is not None and arenas.is_shared:
            # Other engines may run in these arenas at any time.
            self._scratch = parts.device.allocate(arenas.arenas[0].memory.nbytes)
        parts.device.activate()

    def close(self) -> None:
        """Give back what it took."""
        if self._scratch is not None:
            self._scratch.close()

    def compare(self) -> Verdict:
        """Run rows alone and together, and say whether their answers are the same."""
        try:
            first = self._first_that_runs()
        except NoRowsError as error:
            return Verdict(is_independent=False, what=_shown(error))
        if first is None and any(self.runs(sample, "ab") for sample, _ in self.failed):
            return Verdict(
                is_independent=False, what="a batch of two rows runs, and one of a single row fails"
            )
        if first is None:
            what = f"made-up rows could not be run: {_shown(self.failed[0][1])}"
            return Verdict(is_independent=None, what=what)
        sample, alone_a = first
        limit = self._parts.shapes.limit(self._key(sample).shape)
        if limit == 1:
            return Verdict(is_independent=True, what="each row is a batch of its own")
        try:
            verdict = self._together(sample, alone_a, limit)
        except NoRowsError as error:
            return Verdict(is_independent=False, what=_shown(error))
        except Exception as error:
            if self.must_end(error):
                raise
            return Verdict(
                is_independent=False,
                what=f"a batch of several rows fails, and single rows do not: {_shown(error)}",
            )
        if verdict.is_independent is False and self._differs(alone_a, 0, self.run(sample, "a"), 0):
            return Verdict(is_independent=None, what="answers to one row differ from run to run")
        return verdict

    def _together(self, sample: Sample, alone_a: Mapping[str, Array], limit: int) -> Verdict:
        """Compare rows with how they are among copies of themselves, in the same place, and with how they are
        alone."""
        rows, found = self._company(sample, limit)
        together, differing = found or self.run(sample, rows), ""
        # Rows of equal or extreme values are not compared: norms make much of rounding where nothing varies.
        places = {row: place for place, row in enumerate(rows) if row in "ab"}
        for row, place in places.items():
            among_copies = self.run(sample, row * len(rows))
            differing = differing or self._differs(among_copies, place, together, place)
        alone = {row: alone_a if row == "a" else self.run(sample, row) for row in places}
        for rows_run in (None, *self._larger_sizes(sample, len(rows))):
            if rows_run is not None:
                together = self.run(sample, rows, rows_run)
            for row, place in places.items():
                differing = differing or self._differs(alone[row], 0, together, place, SIZE_TOLERANCE)
            if differing:
                what = f"rows of one batch see each other: {differing} beside {len(rows) - 1} others"
                return Verdict(is_independent=False, what=what)
        return Verdict(is_independent=True, what="made-up rows had the same answers alone and beside others")

    def _company(self, sample: Sample, limit: int) -> tuple[str, Mapping[str, Array] | None]:
        """Return the rows to run together, up to ``limit``, and their answers, if they were run.

        One is extreme, if the model takes that. If it is in doubt whether outputs have a row for each, there
        are zeros and ones among them: what gives a row for whatever it finds in all rows together finds more
        in some than in others.
        """
        rows = ("bzoea" if getattr(self._parts.model, "doubt", "") else "bea")[-limit:]
        found = self._attempt(sample, rows)
        if isinstance(found, Exception):
            return rows.replace("e", "c"), None  # Its values may be too extreme for an operator.
        return rows, found

    def _larger_sizes(self, sample: Sample, rows: int) -> list[int]:
        """Return what else a batch of ``rows`` may be padded to: the sizes that are captured or prepared."""
        least = self._parts.shapes.padded_rows(self._key(sample).shape, rows)
        pool = self._parts.pool
        return sorted({size for size in (*pool.captured.sizes, *pool.prepared) if size > least})

    def _first_that_runs(self) -> tuple[Sample, Mapping[str, Array]] | None:
        """Return the first made-up row that the model takes, and its answer; ``None`` if it takes none.

        :raises NoRowsError: if one has an answer that is not a row.
        """
        for sample in self.samples():
            found = self._attempt(sample, "a")
            if not isinstance(found, Exception):
                return sample, found
            self.failed.append((sample, found))
        return None

    def runs(self, sample: Sample, rows: str = "a") -> bool:
        """Return whether made-up rows run; dimensions that a sample does not know have the size 1."""
        symbols = {dim: sample.symbols.get(dim, 1) for dim in self._varying()}
        try:
            return not isinstance(self._attempt(Sample(symbols, sample.tame), rows), Exception)
        except NoRowsError:
            return False

    def samples(self) -> Iterator[Sample]:
        """Return what made-up rows may be like, the most telling first."""
        varying = self._varying()
        for size in SIZES if varying else (0,):
            symbols = {dim: self._size(dim, size) for dim in varying}
            for tame in (False, True):
                yield Sample(symbols, tame)

    def _varying(self) -> list[str]:
        specs = self._parts.model.inputs
        return list(dict.fromkeys(dim for spec in specs for dim in spec.dims if isinstance(dim, str)))

    def _size(self, dim: str, size: int) -> int:
        """Return a size for a dimension: near ``size``, and one that the model and the padding take."""
        model, padding = self._parts.model, self._parts.padding
        if isinstance(model, RangedModel) and (ranges := model.ranges_of(dim)):
            return max(ranges[0][0], min(size, ranges[0][1]))
        sizes = () if padding is None else padding.sizes_given(dim)
        return next((given for given in sizes if given >= size), sizes[-1]) if sizes else size

    def _key(self, sample: Sample) -> BatchKey:
        shared = tuple(
            content_of(_made_up(spec, dims, "s", tame=True))
            for spec in self._shared
            if (dims := spec.resolve(sample.symbols)) is not None
        )
        return BatchKey(tuple(sample.symbols.items()), shared=shared)

    def must_end(self, error: Exception) -> bool:
        """Return whether an error is not about what was tried."""
        return isinstance(error, DeviceLostError) or self._cancellation.is_cancelled

    def _attempt(self, sample: Sample, rows: str) -> Mapping[str, Array] | Exception:
        """Return the answers to made-up rows, or why they do not run.

        :raises NoRowsError: if the outputs do not have as many rows.
        """
        try:
            return self.run(sample, rows)
        except NoRowsError:
            raise
        except Exception as error:
            if self.must_end(error):
                raise
            return error

    def run(self, sample: Sample, rows: str, rows_run: int = 0) -> Mapping[str, Array]:
        """Return the answers to made-up rows, one for each letter, with rows first.

        :param rows_run: how many rows the batch is padded to. Default: as few as the model takes.
        """
        arrays = []
        for spec in self._with_rows:
            dims = spec.resolve(sample.symbols)
            assert dims is not None, "every dimension has a size"
            arrays.append(np.stack([_made_up(spec, dims, row, tame=sample.tame) for row in rows]))
        return self.run_arrays(tuple(arrays), self._key(sample), rows_run)

    def run_arrays(self, arrays: tuple[Array, ...], key: BatchKey, rows_run: int = 0) -> Mapping[str, Array]:
        """Return the answers to rows, padded as the key says.

        :raises NoRowsError: if the outputs do not have as many rows.
        :raises UsageError: if the opening of the engine was cancelled.
        :raises Exception: whatever the model raises.
        """
        if self._cancellation.is_cancelled:
            raise UsageError("made-up rows are not run any more, since the opening was cancelled")
        shapes, rows = self._parts.shapes, len(arrays[0])
        rows_run = rows_run or shapes.padded_rows(key.shape, rows)
        batch = Batch(
            number=0,
            key=key,
            requests=(Request(rows, key, 0, 0, payload=arrays),),
            rows=rows,
            rows_run=rows_run,
            profile=shapes.profile(key.shape, rows_run),
            context=0,
            arena=None,
            is_timed=False,
            reason=Reason.IDLE,
            launched_ns=0,
        )
        source = self._parts.pool.source(batch)
        source.stage()
        flight = InFlight(batch, self._context, source)
        self._context.enqueue(source, flight.events, scratch=self._scratch)
        if not flight.end.synchronize(PROBE_S):
            raise DeviceLostError(f"a batch of {rows} made-up rows did not end within {PROBE_S:g} s")
        error = flight.device_error()
        if error is not None:
            raise error
        try:
            outputs, _ = flight.outputs()
        except ExecutionError as refused:
            raise NoRowsError(str(refused)) from refused
        own = source.cut(outputs)[0]
        return {name: np.array(array) for name, array in own.items()}

    def _differs(
        self,
        found: Mapping[str, Array],
        row: int,
        other: Mapping[str, Array],
        place: int,
        tolerance: float | None = None,
    ) -> str:
        """Return how the answers to one row differ; empty if they do not.

        :param tolerance: relative to the largest value. Default: what company may make of a row.
        """
        factor = 1 if self._parts.device.name == "host" else ON_GPU
        return differing(found, row, other, place, tolerance, factor)


def differing(
    found: Mapping[str, Array],
    row: int,
    other: Mapping[str, Array],
    place: int,
    tolerance: float | None = None,
    factor: float = 1,
) -> str:
    """Return how row ``row`` of some outputs differs from row ``place`` of others; empty if it does not.

    :param tolerance: relative to the largest value. Default: one that suits the dtype, times ``factor``.
    """
    for name, array in found.items():
        ours, theirs = array[row], other[name][place]
        if ours.shape != theirs.shape:
            return f"output {name!r} of a row had shape {ours.shape} and then {theirs.shape}"
        is_half = ours.dtype.itemsize == 2
        usual = (COMPANY_TOLERANCE_OF_HALVES if is_half else COMPANY_TOLERANCE) * factor
        error = _error(ours, theirs, usual if tolerance is None else tolerance)
        if error:
            return f"output {name!r} of a row differed by {error:.2g} of its largest value"
    return ""


def _error(ours: Array, theirs: Array, tolerance: float) -> float:
    """Return the largest difference relative to the largest value; 0 if the tolerance explains it."""
    if not ours.size or ours.dtype.hasobject:
        return 0.0 if ours.tolist() == theirs.tolist() else 1.0
    wide = ours.astype(np.float64), theirs.astype(np.float64)
    if ours.dtype.kind in "biu":
        # What is rounded to few bits may be rounded the other way.
        slack = 1.0 if ours.dtype.itemsize == 1 and ours.dtype.kind in "iu" else 0.0
        off = np.abs(wide[0] - wide[1]) > slack
        return 0.0 if 1 - off.mean() >= SHARE_MIN else 1.0
    finite = np.abs(wide[0][np.isfinite(wide[0])])
    most = float(finite.max()) if finite.size else 0.0
    near = np.isclose(*wide, rtol=0, atol=tolerance * most, equal_nan=True)
    if near.mean() >= SHARE_MIN:
        return 0.0
    gaps = np.abs(wide[0] - wide[1])[~near]
    gaps = gaps[np.isfinite(gaps)]
    return float(gaps.max() / most) if gaps.size and most else 1.0


def _made_up(spec: TensorSpec, dims: Dims, row: str, *, tame: bool) -> Array:
    """Return made-up values of one row, the same for one letter: ``z`` zeros, ``o`` ones, ``e`` extreme."""
    rng = np.random.default_rng([ord(row), *spec.name.encode()])
    if spec.dtype.hasobject:
        return rng.choice(np.array(["a", "b", "c"], object), dims)
    if row in "zo":
        return np.full(dims, row == "o", spec.dtype)
    if spec.dtype.kind == "b" or (spec.dtype.kind in "iu" and spec.dtype.itemsize > 1):
        # They may be indices, or masks. What rows have in common is a number that is not 0, such as a rate.
        low, most = (1, 2) if row == "s" else (0, 2 if tame or spec.dtype.kind == "b" else INTEGERS)
        return rng.integers(low, most, dims).astype(spec.dtype)
    if spec.dtype.kind in "iu":
        return rng.integers(0, 128, dims).astype(spec.dtype)
    values = rng.random(dims) if tame else rng.standard_normal(dims)
    return np.asarray(values * (EXTREME if row == "e" else 1)).astype(spec.dtype)


def _prove_padding(probe: Probe, options: Options) -> None:
    """Check that rows have the same answers as they are and padded.

    :raises OptionsError: if not.
    """
    parts = probe._parts
    assert parts.padding is not None, "it pads"
    for arrays, given, padded in _padded_samples(probe, options):
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
            f"{what}. {_way_out(parts, options)}, or leave pad out (batching='on' pads all the same)"
        )


def _padded_samples(probe: Probe, options: Options) -> Iterator[tuple[tuple[Array, ...], BatchKey, BatchKey]]:
    """Return made-up rows that padding makes larger, with the keys of batches without it and with it."""
    parts = probe._parts
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
                spec.name: _made_up(spec, dims, "a", tame=sample.tame)[None]
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
    """Return what would make padding harmless: an input that says what is padding."""
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


def _shown(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
