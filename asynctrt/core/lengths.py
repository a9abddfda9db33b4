"""The test, run when an engine is opened, of whether rows of different sizes may share a batch.

Made-up rows run as they are, and padded with zeros in one batch with longer ones. The dimensions whose
padding changes no answer are padded by default. How long the batches took says when padding pays.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from asynctrt._util import clock
from asynctrt.backends.base import Model, ranged_model
from asynctrt.runtime.contexts import ContextPool
from asynctrt.runtime.pad_sizes import Padding, Sizes
from asynctrt.runtime.probe import (
    INTEGERS,
    ON_GPU,
    SIZE_TOLERANCE,
    NoRowsError,
    Probe,
    Sample,
    differing,
    made_up,
    said_of,
)
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.shapes import Shapes
from asynctrt.tensors import Array, TensorSpec, split_shared

TOLERANCE: Final = 1e-3
TOLERANCE_OF_HALVES: Final = 2e-2
"""The allowed difference of a value on the host, relative to the largest of its output. Libraries choose
other algorithms for other sizes; padding that a model sees changes far more if there is much of it. For a row
of extreme values, which amplify rounding, it is :data:`SIZE_TOLERANCE`."""

GROWTH: Final = 4
"""The factor from one size that is tried to the next."""

LARGEST: Final = 512
"""The largest size to pad made-up rows to: the positions of most text encoders."""

RUN_NS_MAX: Final = 250_000_000
"""If a batch takes longer than this, no larger one is tried, so that opening takes seconds at most."""

TIMES: Final = 4
"""How often to run the smallest and the largest batch to measure their time: the first runs take longer."""

GROUPS_MAX: Final = 3
"""The most dimensions to try one by one if padding all of them changes answers."""


Guesses = tuple[tuple[str, int, str], ...]
"""The axes of outputs that are taken to have the size of a dimension."""


class Case(NamedTuple):
    """Rows of a few sizes that are padded to one, with a letter for the values of each."""

    sample: Sample
    """Its sizes are those to pad to."""
    rows: tuple[tuple[str, Mapping[str, int]], ...]
    """The letter and the sizes of each row."""
    wide: frozenset[str]
    """The inputs that accept integers up to :data:`INTEGERS`."""


class Found(NamedTuple):
    """The result of a test."""

    padding: Padding | None = None
    """What to pad by default; ``None`` for nothing."""
    what: str = ""
    """How padding changed an answer; empty if it did not, or if that is not known."""
    cases: tuple[Case, ...] = ()
    times: tuple[tuple[int, int], ...] = ()
    """The units and the time in ns of batches."""


class Lengths:
    """Tests the padding of a model's dimensions by made-up rows.

    :param probe: runs them. The padding of its pool is put back at the end.
    :param is_twin: whether batches run on another device later, so that their times do not matter here.
    """

    def __init__(
        self,
        probe: Probe,
        model: Model,
        pool: ContextPool,
        shapes: Shapes,
        *,
        on_host: bool,
        is_twin: bool = False,
    ) -> None:
        self._probe, self._model, self._pool, self._shapes = probe, model, pool, shapes
        self._on_host, self._is_twin = on_host, is_twin
        self._inputs = split_shared(model.inputs)[0]
        ranged = ranged_model(model)
        self._ranges_of = None if ranged is None else ranged.ranges_of
        self._times: list[tuple[int, int]] = []
        self._guesses: Guesses = ()

    def find(self) -> Found:
        """Return the dimensions to pad, after running made-up rows on a device where any row may run."""
        groups = Padding.groups_of(self._inputs, self._ranges_of)
        shared = split_shared(self._model.inputs)[1]
        if not groups or any(spec.dtype.hasobject or spec.kind != "tensor" for spec in self._model.inputs):
            return Found()
        if not all(spec.is_fixed for spec in shared):
            return Found()
        found = self._try(groups)
        if found.padding is not None or not 1 < len(groups) <= GROUPS_MAX or not found.what:
            return found
        alone = [group for group in groups if self._try([group]).padding is not None]
        return (self._try(alone) if len(alone) > 1 else self._try(alone[:1])) if alone else found

    def confirm(self, found: Found) -> Found:
        """Return what was found on another device, after running the same rows on this one."""
        assert found.padding is not None
        padding = found.padding
        self._pool.padding = padding
        try:
            what = ""
            for case in found.cases:
                what = what or self._compare(padding, case)[0]
            if what:
                return Found(what=what)
            return found._replace(times=self._measured(padding, found))
        except Exception as error:
            if self._probe.must_end(error):
                raise
            return Found(what=f"padded rows fail: {said_of(error)}")
        finally:
            self._pool.padding = None

    def _try(self, groups: Sequence[str]) -> Found:
        """Return the result of padding some dimensions together."""
        found = Found()
        for outputs, guesses in self._outputs(groups):
            self._guesses = guesses
            padding = Padding(
                self._model.name,
                self._inputs,
                outputs,
                {group: Sizes.within(group.split("="), self._ranges_of) for group in groups},
            )
            self._pool.padding = padding
            try:
                found = self._judge(padding)
            except Exception as error:
                if self._probe.must_end(error):
                    raise
                found = Found()  # Rows that ran before do not run any more, so nothing is known.
            finally:
                self._pool.padding = None
            if found.padding is not None:
                break
        return found

    def _outputs(self, groups: Sequence[str]) -> Iterator[tuple[Sequence[TensorSpec], Guesses]]:
        """Yield the outputs, first with guesses: dimensions whose names no input has are padded as well."""
        known = {dim for spec in self._inputs for dim in spec.dims}
        specs, follows = self._model.outputs, groups[0].partition("=")[0]

        def named(dim: int | str) -> int | str:
            return follows if isinstance(dim, str) and dim not in known else dim

        guessed = [dataclasses.replace(spec, dims=tuple(map(named, spec.dims))) for spec in specs]
        guesses = tuple(
            (spec.name, axis, follows)
            for spec in specs
            for axis, dim in enumerate(spec.dims, start=1)
            if named(dim) != dim
        )
        if len(groups) == 1 and guesses:
            yield guessed, guesses
        yield specs, ()

    def _judge(self, padding: Padding) -> Found:
        """Return whether padding to larger and larger sizes changes answers."""
        self._times = []
        base = self._base(padding)
        if base is None:
            return Found()
        cases: list[Case] = []
        case: Case | None = base
        while case is not None:
            what, took_ns = self._compare(padding, case)
            if what:
                return Found(what=what)
            cases.append(case)
            case = None if took_ns > RUN_NS_MAX else self._larger(padding, case)
        largest = cases[-1].sample.symbols
        for dims, sizes in padding.chosen.items():
            if sizes.largest is None:
                sizes.proven = largest[dims[0]]
        found = Found(padding, cases=(cases[0], *cases[1:][-1:]))  # The most telling ones.
        return found if self._is_twin else found._replace(times=self._measured(padding, found))

    def _base(self, padding: Padding) -> Case | None:
        """Return the smallest case whose rows run as they are and differ in their answers; ``None``: none."""
        for sample in self._probe.samples():
            if sample.tame or sample.integers != 2:  # Each input is tried with larger integers.
                continue
            target = {dim: self._padded(padding, dim, size) for dim, size in sample.symbols.items()}
            for less in (1, 0):
                sizes = {
                    dim: max(size // 2 - less, self._least(dim)) if padding.pads(dim) else size
                    for dim, size in target.items()
                }
                if sizes == target:
                    continue
                wide = self._wide(sample._replace(symbols=sizes))
                rows = (("a", sizes), ("n", sizes), ("p", sizes), ("e", sizes), ("b", target))
                case = Case(sample._replace(symbols=target), rows, wide)
                if self._is_alive(case):
                    return case
        return None

    def _wide(self, sample: Sample) -> frozenset[str]:
        """Return the inputs that accept large integers; on a GPU none is tried, as an index may be fatal."""
        if not self._on_host:
            return frozenset()
        found = []
        for spec in self._inputs:
            if spec.dtype.kind in "iu" and spec.dtype.itemsize > 1 and not is_mask(spec):
                case = Case(sample, (("a", sample.symbols),), frozenset([spec.name]))
                if self._alone(case, 0) is not None:
                    found.append(spec.name)
        return frozenset(found)

    def _is_alive(self, case: Case) -> bool:
        """Return whether rows run as they are, and their answers depend on nothing but their values."""
        first, *others = [self._alone(case, number) for number in (0, 0, 1, 2)]
        if first is None:
            return False
        differs = [
            other is not None and differing(first, 0, other, 0, self._tolerance(case, 0), share=1) != ""
            for other in others
        ]
        return not differs[0] and any(differs)

    def _larger(self, padding: Padding, case: Case) -> Case | None:
        """Return a case of larger sizes, whose longest row runs; ``None`` if there is none."""
        before = case.sample.symbols
        target = {
            dim: self._padded(padding, dim, max(min(GROWTH * size, LARGEST), size))
            for dim, size in before.items()
        }
        if target == before:
            return None
        short = case.rows[0][1]
        middle = {
            dim: max(size * 3 // 4, short[dim]) if padding.pads(dim) else size for dim, size in target.items()
        }
        rows = (("a", short), ("n", short), ("p", before), ("e", middle), ("b", target))
        larger = Case(case.sample._replace(symbols=target), rows, case.wide)
        return None if self._alone(larger, len(rows) - 1) is None else larger

    def _compare(self, padding: Padding, case: Case) -> tuple[str, int]:
        """Return how padding changes an answer, empty if it does not; and how long the batch took, in ns."""
        each = {number: self._alone(case, number) for number in range(len(case.rows))}
        alone_of = {number: answer for number, answer in each.items() if answer is not None}
        numbers = list(alone_of)
        key = self._key(case, case.sample.symbols)
        limit = self._shapes.limit(key.shape)
        took_ns = 0
        for start in range(0, len(numbers), limit):
            some = numbers[start : start + limit]
            start_ns = clock.now_ns()
            try:
                answers = self._probe.run_each([self._arrays(case, number) for number in some], key)
            except Exception as error:
                if self._probe.must_end(error):
                    raise
                return f"rows that are padded fail: {said_of(error)}", 0
            took_ns = clock.now_ns() - start_ns
            self._times.append((padding.units_of(key.shape) * len(some), took_ns))
            for number, answer in zip(some, answers, strict=True):
                alone = alone_of[number]
                for name, axis, dim in self._guesses:
                    if alone[name].shape[axis] != case.rows[number][1][dim]:
                        return f"output {name!r} has another size than {dim!r}", took_ns
                found = differing(alone, 0, answer, 0, self._tolerance(case, number), share=1)
                if found:
                    sizes = {dim: size for dim, size in case.sample.symbols.items() if padding.pads(dim)}
                    return f"{found} when it was padded to {sizes}", took_ns
        return "", took_ns

    def _measured(self, padding: Padding, found: Found) -> tuple[tuple[int, int], ...]:
        """Return the units and the times of the smallest and of the largest batches, run a few times each."""
        small, large = found.cases[0], found.cases[-1]
        key = self._key(large, large.sample.symbols)
        rows = min(len(large.rows), self._shapes.limit(key.shape))
        each = [self._arrays(large, len(large.rows) - 1)] * rows
        one = self._key(small, small.rows[0][1])
        for _ in range(TIMES):
            self._time(padding, [self._arrays(small, 0)], one)
        for _ in range(TIMES):
            if self._time(padding, each, key) > RUN_NS_MAX:
                self._times += [self._times[-1]] * TIMES
                break
        return tuple(self._times)

    def _time(self, padding: Padding, rows: Sequence[tuple[Array, ...]], key: BatchKey) -> int:
        start_ns = clock.now_ns()
        self._probe.run_each(rows, key)
        took_ns = clock.now_ns() - start_ns
        self._times.append((padding.units_of(key.shape) * len(rows), took_ns))
        return took_ns

    def _alone(self, case: Case, number: int) -> Mapping[str, Array] | None:
        """Return the answers to a row as it is; ``None`` if it does not run, or an answer is not finite."""
        key = self._key(case, case.rows[number][1])
        try:
            [answer] = self._probe.run_each([self._arrays(case, number)], key)
        except NoRowsError:
            return None
        except Exception as error:
            if self._probe.must_end(error):
                raise
            return None
        is_finite = all(array.dtype.kind not in "fc" or np.isfinite(array).all() for array in answer.values())
        return answer if is_finite else None

    def _key(self, case: Case, sizes: Mapping[str, int]) -> BatchKey:
        return self._probe.key(case.sample._replace(symbols=dict(sizes)))

    def _arrays(self, case: Case, number: int) -> tuple[Array, ...]:
        """Return one row of each input."""
        letter, sizes = case.rows[number]
        found = []
        for spec in self._inputs:
            dims = spec.resolve(sizes)
            assert dims is not None, "every dimension has a size"
            if is_mask(spec):
                found.append(np.ones((1, *dims), spec.dtype))
                continue
            integers = INTEGERS if spec.name in case.wide else 2
            values = made_up(spec, dims, letter, case.sample._replace(integers=integers))[None]
            if letter in "np" and spec.dtype.kind == "f":
                values = np.abs(values) + np.asarray(0.1, spec.dtype)
                values = values if letter == "p" else -values
            elif spec.dtype.kind in "iu" and (letter in "np" or integers > 2):
                values = np.maximum(values, 1)  # Unlike padding.
            found.append(values)
        return tuple(found)

    def _tolerance(self, case: Case, number: int) -> float:
        if case.rows[number][0] == "e":
            return SIZE_TOLERANCE
        is_half = any(spec.dtype.kind == "f" and spec.dtype.itemsize == 2 for spec in self._model.outputs)
        return (TOLERANCE_OF_HALVES if is_half else TOLERANCE) * (1 if self._on_host or is_half else ON_GPU)

    def _padded(self, padding: Padding, dim: str, size: int) -> int:
        """Return the size that a dimension is padded to, which is at most its largest one."""
        for dims, sizes in padding.chosen.items():
            if dim in dims:
                return sizes.rounded(size) or sizes.largest or size
        return size

    def _least(self, dim: str) -> int:
        """Return the smallest size of a dimension that the model supports."""
        ranges = () if self._ranges_of is None else self._ranges_of(dim)
        return min((least for least, _ in ranges), default=1)


def is_mask(spec: TensorSpec) -> bool:
    """Return whether an input is called a mask, so that callers send ones."""
    return "mask" in spec.name.lower() and spec.dtype.kind in "biuf"


def advice(model: Model) -> str:
    """Return what to do about a model whose answers padding changes."""
    has_mask = any(is_mask(spec) for spec in model.inputs)
    export = "" if has_mask else "Export the model with a mask as an input if padding should not matter; "
    return (
        "Each size has a separate queue, so requests of many sizes run in small batches. "
        f"{export}pad={{...}} gives sizes (docs/padding.md), and pad='off' says that this is intended"
    )
