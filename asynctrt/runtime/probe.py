"""Made-up rows, run on the contexts of an engine that is not open yet: alone, and in a batch with others."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from asynctrt._util.cancellation import current
from asynctrt.backends.base import Model, ranged_model
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.base import Buffer, Device
from asynctrt.errors import DeviceLostError, ExecutionError, UsageError
from asynctrt.runtime.contexts import ContextPool
from asynctrt.runtime.inflight import InFlight
from asynctrt.runtime.pad_sizes import Padding
from asynctrt.runtime.trial import SHARE_MIN, error_of
from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.request import Request
from asynctrt.scheduling.shapes import Shapes
from asynctrt.tensors import ALONE_FIX, Array, Dims, TensorSpec, cast, content_of, split_shared, varying_dims

PROBE_S: Final = 120.0
"""The timeout of a batch, in seconds."""

SIZES: Final = (8, 32, 64, 320, 1)
"""Sizes to try for dynamic dimensions: lengths of sequences, and sides of pictures, which 32 divides."""

INTEGERS: Final = 100
"""On the host, integers are below this, or 0 and 1 if the model refuses that: they may be indices."""

EXTREME: Final = 1000.0
"""The factor of the values of an extreme row: small enough for float16."""

COMPANY_TOLERANCE: Final = 2e-4
COMPANY_TOLERANCE_OF_HALVES: Final = 5e-3
ON_GPU: Final = 10
"""The allowed difference of a value, relative to the largest of its output, if a row has the same place in a
batch of the same size, but other rows beside it. Only sums of undefined order, as on GPUs, should differ."""

SIZE_TOLERANCE: Final = 0.05
"""The allowed difference if the size of the batch or the place of the row differs: libraries then choose
other algorithms, and a model may amplify rounding of made-up inputs."""


class Stage(Protocol):
    """The parts of an engine that made-up rows need."""

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


class Verdict(NamedTuple):
    """The result of a probe."""

    is_independent: bool | None
    """``None`` if the probe was inconclusive."""
    what: str
    is_choice: bool = False
    """Whether rows could still share batches."""


class NoRowsError(ExecutionError):
    """An output does not have one row for each row of the batch."""


class Sample(NamedTuple):
    """The sizes of dynamic dimensions, and the ranges of made-up values."""

    symbols: dict[str, int]
    tame: bool
    integers: int
    """Integers are below this."""


class Ran(NamedTuple):
    """Rows that ran in one batch, with a letter for each."""

    sample: Sample
    rows: str


def scratch_of(stage: Stage) -> Buffer | None:
    """Return enqueue memory for made-up batches; ``None`` if they may use the arenas."""
    arenas = stage.arenas
    if arenas is not None and arenas.is_shared:
        # Other engines may use these arenas at any time.
        return stage.device.allocate(arenas.arenas[0].memory.nbytes)
    return None


def staged(
    stage: Stage, key: BatchKey, each: Sequence[tuple[Array, ...]], rows_run: int = 0, context: int = 0
) -> InFlight:
    """Return a batch of made-up requests whose rows are in the slab of a context.

    :param each: the arrays of each request.
    :param rows_run: the rows to pad the batch to. Default: as few as the model allows.
    """
    shapes, rows = stage.shapes, sum(len(arrays[0]) for arrays in each)
    rows_run = rows_run or shapes.padded_rows(key.shape, rows)
    batch = Batch(
        key,
        tuple(Request(len(arrays[0]), key, 0, 0, payload=arrays) for arrays in each),
        rows=rows,
        rows_run=rows_run,
        profile=shapes.profile(key.shape, rows_run),
        context=context,
    )
    source = stage.pool.source(batch)
    source.stage()
    return InFlight(batch, stage.pool.contexts[context], source)


class Probe:
    """Runs made-up batches on the first context of an engine that is not open yet."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._context = stage.pool.contexts[0]
        self._cancellation = current()
        self._with_rows, self._shared = split_shared(stage.model.inputs)
        self.failed: list[tuple[Sample, Exception]] = []
        """The samples that did not run, with their errors."""
        self.ran: Ran | None = None
        """The rows that ran in one batch."""
        self._scratch = scratch_of(stage)
        stage.device.activate()

    def close(self) -> None:
        """Release the scratch memory."""
        if self._scratch is not None:
            self._scratch.close()

    def compare(self) -> Verdict:
        """Run rows alone and together, and return whether their answers agree."""
        try:
            first = self._first_that_runs(self.samples())
        except NoRowsError as error:
            return Verdict(is_independent=False, what=said_of(error))
        if first is None and any(self.runs(sample, "ab") for sample, _ in self.failed):
            return Verdict(
                is_independent=False, what="a batch of two rows runs, and one of a single row fails"
            )
        if first is None:
            what = f"made-up rows could not be run: {said_of(self.failed[0][1])}"
            return Verdict(is_independent=None, what=what)
        sample, alone_a = first
        limit = self._stage.shapes.limit(self.key(sample).shape)
        if limit == 1:
            return self._one_at_a_time(sample)
        return self._concluded(sample, alone_a, lambda: self._company(sample, limit))

    def _one_at_a_time(self, sample: Sample) -> Verdict:
        """Return whether outputs have one row for other dynamic sizes too.

        An axis that counts something else may have had the size 1 by chance.
        """
        try:
            self._first_that_runs(other for other in self.samples() if other.symbols != sample.symbols)
        except NoRowsError as error:
            return Verdict(is_independent=False, what=said_of(error))
        return Verdict(is_independent=True, what="each row is a separate batch")

    def compare_again(self, ran: Ran) -> Verdict:
        """Run rows that ran on another device, alone and together, and return whether their answers agree."""
        sample, rows = ran
        return self._concluded(sample, self.run(sample, "a"), lambda: (rows, self.run(sample, rows)))

    def _concluded(
        self,
        sample: Sample,
        alone_a: Mapping[str, Array],
        company: Callable[[], tuple[str, Mapping[str, Array]]],
    ) -> Verdict:
        try:
            rows, together = company()
            verdict = self._together(sample, alone_a, rows, together)
        except NoRowsError as error:
            return Verdict(is_independent=False, what=said_of(error))
        except Exception as error:
            if self.must_end(error):
                raise
            return Verdict(
                is_independent=False,
                what=f"a batch of several rows fails, and single rows do not: {said_of(error)}",
            )
        if verdict.is_independent is False and self._differs(alone_a, 0, self.run(sample, "a"), 0):
            return Verdict(is_independent=None, what="answers to one row differ from run to run")
        self.ran = Ran(sample, rows)
        return verdict

    def _together(
        self, sample: Sample, alone_a: Mapping[str, Array], rows: str, together: Mapping[str, Array]
    ) -> Verdict:
        """Compare the answers to rows with those among copies of themselves in the same place, and alone."""
        differing = ""
        # Do not compare rows of equal or extreme values: norms amplify rounding if nothing varies.
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
                return Verdict(is_independent=False, what=what, is_choice=True)
        return Verdict(is_independent=True, what="made-up rows had the same answers alone and beside others")

    def _company(self, sample: Sample, limit: int) -> tuple[str, Mapping[str, Array]]:
        """Return the rows to run together, up to ``limit``, and their answers.

        One row is extreme, if the model accepts it. If outputs may not have one row per row of the inputs,
        include rows of zeros and ones: a model that returns a row for each object that it finds in all rows
        finds more in some rows than in others.
        """
        rows = ("bzoea" if self._stage.model.capabilities.doubt else "bea")[-limit:]
        found = self._attempt(sample, rows)
        if isinstance(found, Exception):
            rows = rows.replace("e", "c")  # The values of "e" may be too extreme for an operator.
            found = self.run(sample, rows)
        return rows, found

    def _larger_sizes(self, sample: Sample, rows: int) -> list[int]:
        """Return the other captured or prepared sizes that a batch of ``rows`` rows may be padded to."""
        least = self._stage.shapes.padded_rows(self.key(sample).shape, rows)
        pool = self._stage.pool
        return sorted({size for size in (*pool.captured.sizes, *pool.prepared) if size > least})

    def _first_that_runs(self, samples: Iterable[Sample]) -> tuple[Sample, Mapping[str, Array]] | None:
        """Return the first sample that the model accepts, and its answer; ``None`` if it accepts no sample.

        :raises NoRowsError: if the answer to a row is not one row.
        """
        for sample in samples:
            found = self._attempt(sample, "a")
            if not isinstance(found, Exception):
                return sample, found
            self.failed.append((sample, found))
        return None

    def runs(self, sample: Sample, rows: str = "a") -> bool:
        """Return whether made-up rows run. Dimensions that the sample does not contain get the size 1."""
        symbols = {dim: sample.symbols.get(dim, 1) for dim in self._varying()}
        try:
            return not isinstance(self._attempt(sample._replace(symbols=symbols), rows), Exception)
        except NoRowsError:
            return False

    def samples(self) -> Iterator[Sample]:
        """Return the samples to try, the most conclusive first."""
        varying = self._varying()
        for size in SIZES if varying else (0,):
            symbols = {dim: self._size(dim, size) for dim in varying}
            if self._stage.device.name == "host":  # On GPUs an index out of range may be fatal.
                yield Sample(symbols, tame=False, integers=INTEGERS)
            yield Sample(symbols, tame=False, integers=2)
            yield Sample(symbols, tame=True, integers=2)

    def _varying(self) -> tuple[str, ...]:
        return varying_dims(self._stage.model.inputs)

    def _size(self, dim: str, size: int) -> int:
        """Return a size near ``size`` that the model and the padding support for a dimension."""
        model, padding = self._stage.model, self._stage.padding
        if (ranged := ranged_model(model)) and (ranges := ranged.ranges_of(dim)):
            return max(ranges[0][0], min(size, ranges[0][1]))
        sizes = () if padding is None else padding.sizes_given(dim)
        return next((given for given in sizes if given >= size), sizes[-1]) if sizes else size

    def key(self, sample: Sample) -> BatchKey:
        """Return the key of batches of a sample's sizes."""
        shared = tuple(
            content_of(made_up(spec, dims, "s", sample))
            for spec in self._shared
            if (dims := spec.resolve(sample.symbols)) is not None
        )
        return BatchKey(tuple(sample.symbols.items()), shared=shared)

    def must_end(self, error: Exception) -> bool:
        """Return whether an error must end the probe, as the made-up rows did not cause it."""
        return isinstance(error, DeviceLostError) or self._cancellation.is_cancelled

    def _attempt(self, sample: Sample, rows: str) -> Mapping[str, Array] | Exception:
        """Return the answers to made-up rows, or the error if they do not run.

        :raises NoRowsError: if the outputs do not have the same number of rows.
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

        :param rows_run: the rows to pad the batch to. Default: as few as the model allows.
        """
        arrays = []
        for spec in self._with_rows:
            dims = spec.resolve(sample.symbols)
            assert dims is not None, "every dimension has a size"
            arrays.append(np.stack([made_up(spec, dims, row, sample) for row in rows]))
        return self.run_arrays(tuple(arrays), self.key(sample), rows_run)

    def run_arrays(self, arrays: tuple[Array, ...], key: BatchKey, rows_run: int = 0) -> Mapping[str, Array]:
        """Return the answers to rows of one size, padded to the shape of the key. As :meth:`run_each`."""
        [found] = self.run_each([arrays], key, rows_run)
        return found

    def run_each(
        self, each: Sequence[tuple[Array, ...]], key: BatchKey, rows_run: int = 0
    ) -> list[Mapping[str, Array]]:
        """Return the answers to several requests in one batch, padded to the shape of the key.

        :raises NoRowsError: if the outputs do not have the same number of rows.
        :raises UsageError: if the opening of the engine was cancelled.
        :raises Exception: any error of the model.
        """
        if self._cancellation.is_cancelled:
            raise UsageError("made-up rows are not run any more, since the opening was cancelled")
        flight = staged(self._stage, key, each, rows_run)
        self._context.enqueue(flight.source, flight.events, scratch=self._scratch)
        flight.wait(f"a batch of {flight.batch.rows} made-up rows", PROBE_S)
        try:
            outputs, _ = flight.outputs()
        except ExecutionError as refused:
            raise NoRowsError(str(refused).removesuffix(f". {ALONE_FIX}")) from refused
        return [{name: np.array(array) for name, array in own.items()} for own in flight.source.cut(outputs)]

    def _differs(
        self,
        found: Mapping[str, Array],
        row: int,
        other: Mapping[str, Array],
        place: int,
        tolerance: float | None = None,
    ) -> str:
        """Return how the answers to one row differ; empty if they do not.

        :param tolerance: relative to the largest value. Default: that for a row with other rows beside it.
        """
        factor = 1 if self._stage.device.name == "host" else ON_GPU
        return differing(found, row, other, place, tolerance, factor)


def differing(
    found: Mapping[str, Array],
    row: int,
    other: Mapping[str, Array],
    place: int,
    tolerance: float | None = None,
    factor: float = 1,
    share: float = SHARE_MIN,
) -> str:
    """Return how row ``row`` of some outputs differs from row ``place`` of others; empty if it does not.

    :param tolerance: relative to the largest value. Default: one that suits the dtype, times ``factor``.
    :param share: the share of values that must be that close.
    """
    for name, array in found.items():
        ours, theirs = array[row], other[name][place]
        if ours.shape != theirs.shape:
            return f"output {name!r} of a row had shape {ours.shape} and then {theirs.shape}"
        is_half = ours.dtype.itemsize == 2
        usual = (COMPANY_TOLERANCE_OF_HALVES if is_half else COMPANY_TOLERANCE) * factor
        error = error_of(theirs, ours, usual if tolerance is None else tolerance, share)
        if error:
            return f"output {name!r} of a row differed by {error:.2g} of its largest value"
    return ""


def made_up(spec: TensorSpec, dims: Dims, row: str, sample: Sample) -> Array:
    """Return made-up values of one row, determined by its letter: ``z`` zeros, ``o`` ones, ``e`` extreme."""
    rng = np.random.default_rng([ord(row), *spec.name.encode()])
    if spec.dtype.hasobject:
        return rng.choice(np.array(["a", "b", "c"], object), dims)
    if row in "zo":
        return np.full(dims, row == "o", spec.dtype)
    if spec.dtype.kind == "b" or (spec.dtype.kind in "iu" and spec.dtype.itemsize > 1):
        # They may be indices, or masks. An input that rows share is 1: it may be a rate, which must not be 0.
        low, most = (1, 2) if row == "s" else (0, 2 if spec.dtype.kind == "b" else sample.integers)
        return rng.integers(low, most, dims).astype(spec.dtype)
    if spec.dtype.kind in "iu":
        return rng.integers(0, 128, dims).astype(spec.dtype)
    values = rng.random(dims) if sample.tame else rng.standard_normal(dims)
    return cast(np.asarray(values * (EXTREME if row == "e" else 1)), spec.dtype)


def said_of(error: Exception) -> str:
    """Return the beginning of an error's message, on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
