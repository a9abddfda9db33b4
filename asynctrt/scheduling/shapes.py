"""The batches a model takes of each shape: the most rows, the sizes to pad to, and the optimisation
profile."""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from asynctrt.errors import AsynctrtError, ExecutionError
from asynctrt.scheduling.key import SHAPES_MAX

T = TypeVar("T")


class Profiles(Protocol):
    """Says which optimisation profile takes which rows. It is asked once for each shape and batch size."""

    def row_ranges(self, shape: Hashable) -> Sequence[tuple[int, int]]:
        """Return the smallest and the largest batch of each profile that takes rows of this shape.

        :raises InputError: if no profile does.
        """

    def profile_of(self, shape: Hashable, rows: int) -> int:
        """Return the profile for a batch of ``rows``.

        :raises InputError: if no profile takes it.
        """


class Shapes:
    """The batch sizes and profiles of each shape. The model is asked before a request leaves its queue.

    :param rows_max: the most rows of a batch of the engine.
    :param rows_fixed: the only batch size of the model, if it has just one.
    :param profiles: for a model with optimisation profiles.
    :param fills_batches: whether every batch is padded to the most rows of its shape.
    :param nbytes_max: the most bytes of a batch. One row, or the fewest rows of a profile, may take more.
    :param row_nbytes: returns the bytes of one row of a shape; ``None`` if all rows have one shape.
    """

    def __init__(
        self,
        *,
        rows_max: int,
        rows_fixed: int | None = None,
        profiles: Profiles | None,
        fills_batches: bool = False,
        nbytes_max: int = 0,
        row_nbytes: Callable[[Hashable], int] | None = None,
    ) -> None:
        self._fills_batches = fills_batches
        self._rows_max = rows_max
        self._rows_fixed = rows_fixed
        self._profiles = profiles
        self._nbytes_max = nbytes_max
        self._row_nbytes = row_nbytes
        self._sizes: tuple[int, ...] = ()
        self._sizes_of: dict[Hashable, tuple[int, ...]] = {}
        self.may_specialise = False
        """Whether :meth:`specialise` may be called later."""
        if profiles is not None:
            self._ranges_of = _asked_once(lambda shape: _checked(profiles.row_ranges(shape)))
            self._profile_of = _asked_once(lambda shape, rows: int(profiles.profile_of(shape, rows)))
        self._limits: dict[Hashable, int] = {}

    @property
    def has_profiles(self) -> bool:
        """Return whether the model takes some shapes and refuses others."""
        return self._profiles is not None

    @property
    def limit_varies(self) -> bool:
        """Return whether the most rows of a batch depend on its shape."""
        return self._profiles is not None or (self._row_nbytes is not None and self._rows_fixed is None)

    @property
    def runs_as_many_as_it_takes(self) -> bool:
        """Return whether every batch is executed as it is: neither padded nor with a profile."""
        return (
            self._profiles is None
            and self._rows_fixed is None
            and not self._fills_batches
            and not self._sizes
            and not self.may_specialise
        )

    def restrict(self, sizes: Sequence[int]) -> None:
        """Run only these batch sizes, rising, up to the most rows of a batch; all sizes if empty."""
        self._sizes = tuple(sizes)

    def specialise(self, shape: Hashable, sizes: Sequence[int]) -> None:
        """Run only these batch sizes of one shape, rising; if empty, the same sizes as of other shapes."""
        if sizes:
            self._sizes_of[shape] = tuple(sizes)
        else:
            self._sizes_of.pop(shape, None)

    def is_specialised(self, shape: Hashable) -> bool:
        """Return whether :meth:`specialise` gave a shape other sizes."""
        return shape in self._sizes_of

    def limit(self, shape: Hashable) -> int:
        """Return the most rows of a batch of this shape.

        :raises InputError: for a shape that no profile of the model takes.
        :raises ExecutionError: if the model fails to say which batches it takes.
        """
        if not self.limit_varies:
            return self._rows_max
        limit = self._limits.get(shape)
        if limit is None:
            if len(self._limits) >= SHAPES_MAX:
                self._limits.clear()
            limit = self._limits[shape] = self._limit_of(shape)
        return limit

    def rows_held(self, shape: Hashable) -> int:
        """Return the rows that memory for any batch of this shape must hold, padding included.

        They are more than :meth:`limit` if every profile takes only larger batches.

        :raises InputError, ExecutionError: as :meth:`limit`.
        """
        return max(self.limit(shape), self.padded_rows(shape, self.limit(shape)))

    def padded_rows(self, shape: Hashable, rows: int) -> int:
        """Round ``rows`` up to the fixed batch size, to an allowed batch size, or to the smallest batch that
        a profile takes.

        :raises ExecutionError: if the model fails to say which batches it takes.
        """
        if self._rows_fixed is not None:
            return self._rows_fixed
        if self._fills_batches:
            rows = self.limit(shape)
        else:
            sizes = self._sizes_of.get(shape, self._sizes)
            if sizes and rows <= sizes[-1]:
                rows = sizes[bisect_left(sizes, rows)]
                if self.limit_varies and self._profiles is None:
                    rows = min(rows, self.limit(shape))
        if self._profiles is None:
            return rows
        return self._padded(shape, rows)

    def _padded(self, shape: Hashable, rows: int) -> int:
        fitting = [max(rows, least) for least, most in self._ranges_of(shape) if rows <= most]
        if not fitting:
            raise ExecutionError(f"no profile of the model takes {rows} rows of the shape {shape!r}")
        return min(fitting)

    def profile(self, shape: Hashable, rows: int) -> int | None:
        """Return the profile for a batch of ``rows``; ``None`` for a model without profiles.

        :raises ExecutionError: if the model fails to say which one.
        """
        return None if self._profiles is None else self._profile_of(shape, rows)

    def _limit_of(self, shape: Hashable) -> int:
        most = self._rows_max
        if self._profiles is not None:
            most = min(most, max(most for _, most in self._ranges_of(shape)))
        if self._row_nbytes is None or self._rows_fixed is not None:
            return most
        fitting = max(1, min(most, self._nbytes_max // max(1, self._row_nbytes(shape))))
        if self._profiles is not None:
            # Padding rows take as much memory as rows of callers.
            fitting = min(most, self._padded(shape, fitting))
        return fitting


def _asked_once(question: Callable[..., T]) -> Callable[..., T]:
    """Return a function that asks the model's code once for each shape, and raises its errors as ours."""

    @lru_cache(SHAPES_MAX)
    def ask(*what: Hashable) -> T:
        try:
            return question(*what)
        except (AsynctrtError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise ExecutionError(
                f"the model failed to say which of its profiles takes a batch: {type(error).__name__}. "
                "Mend its rows_of and profile_of"
            ) from error

    return ask


def _checked(ranges: Any) -> tuple[tuple[int, int], ...]:
    whole = tuple((int(least), int(most)) for least, most in ranges)
    if not whole or any(not 1 <= least <= most for least, most in whole):
        raise ValueError(f"{ranges!r} are not batch sizes")
    return whole
