"""Parse large JSON in pieces, none of which holds Python's lock for long.

A parser in C holds the lock from a document's beginning to its end, so that a thread that parses one stops
the event loop all the same. So a document is cut where a list or an object has a comma, and each piece is
parsed by itself. Where those commas are, NumPy finds without the lock.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from asynctrt.errors import RequestError
from asynctrt.tensors import Array

PIECE_NBYTES: Final = 16 << 10
"""Bytes that are parsed at a time: 0.2 ms."""

DEPTH_MAX: Final = 64
"""The deepest nesting of JSON that is cut into pieces."""

Pause = Callable[[], None]
"""Called between pieces of work, to let the event loop run if it is another thread's."""

_QUOTE: Final = ord('"')
_ESCAPE: Final = ord("\\")
_COMMA: Final = ord(",")
_COLON: Final = ord(":")
_OPENS: Final = b"[{"
_CLOSES: Final = b"]}"
_BLANKS: Final = b" \t\r\n"


def no_pause() -> None:
    """Do nothing between pieces of work: there are too few of them to hold anybody up."""


def loads_in_pieces(raw: bytes, loads: Callable[[bytes], Any], pause: Pause) -> Any:
    """Parse a JSON document as ``loads`` does, in pieces.

    :raises RequestError: if it nests too deep, or is no JSON where it is cut.
    :raises ValueError: what ``loads`` raises for a piece that is no JSON.
    """
    return _Document(raw, loads, pause).value(0, len(raw))


class _Document:
    """A document, and where its structure is: brackets, commas and colons outside of strings."""

    def __init__(self, raw: bytes, loads: Callable[[bytes], Any], pause: Pause) -> None:
        self._raw = raw
        self._loads = loads
        self._pause = pause
        self._at, self._kinds, self._depths = _structure(raw)
        if len(self._depths) and int(self._depths.max()) > DEPTH_MAX:
            raise RequestError(f"large JSON may nest {DEPTH_MAX} deep, and this nests deeper")

    def value(self, start: int, end: int) -> Any:
        """Parse the value between two positions."""
        if end - start <= PIECE_NBYTES:
            return self._parsed(self._raw[start:end])
        low, high = np.searchsorted(self._at, (start, end))
        if high - low < 2:
            return self._parsed(self._raw[start:end])  # One long string.
        first, last = int(self._at[low]), int(self._at[high - 1])
        opens, closes = self._raw[first : first + 1], self._raw[last : last + 1]
        depths = self._depths[low : high - 1]
        depth = int(depths[0])
        if (
            _OPENS.find(opens) < 0
            or _OPENS.find(opens) != _CLOSES.find(closes)
            or int(self._depths[high - 1]) != depth - 1
            or int(depths.min()) < depth
            or (self._raw[start:first] + self._raw[last + 1 : end]).strip(_BLANKS)
        ):
            raise RequestError(f"it is not valid JSON near byte {start}: brackets do not match")
        if high - low == 2 and not self._raw[first + 1 : last].strip(_BLANKS):
            return [] if opens == b"[" else {}
        is_own = depths == depth
        kinds = self._kinds[low : high - 1]
        commas = self._at[low : high - 1][is_own & (kinds == _COMMA)]
        if opens == b"[":
            return self._list(first + 1, last, commas)
        colons = self._at[low : high - 1][is_own & (kinds == _COLON)]
        return self._object(first + 1, last, commas, colons)

    def _list(self, start: int, end: int, commas: Array) -> list[Any]:
        values: list[Any] = []
        for begin, stop, count in _cuts(start, end, commas):
            if count == 1 and stop - begin > PIECE_NBYTES:
                values.append(self.value(begin, stop))
                continue
            found = self._parsed(b"[%b]" % self._raw[begin:stop])
            if len(found) != count and (count > 1 or len(commas)):
                raise RequestError(f"it is not valid JSON near byte {begin}: a value is missing")
            values += found
        return values

    def _object(self, start: int, end: int, commas: Array, colons: Array) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for begin, stop, count in _cuts(start, end, commas):
            if count == 1 and stop - begin > PIECE_NBYTES:
                number = int(np.searchsorted(colons, begin))
                if number == len(colons) or colons[number] >= stop:
                    raise RequestError(f"it is not valid JSON near byte {begin}: a name is missing")
                colon = int(colons[number])
                name = self._parsed(self._raw[begin:colon])
                if not isinstance(name, str):
                    raise RequestError(f"it is not valid JSON near byte {begin}: names are strings")
                values[name] = self.value(colon + 1, stop)
                continue
            found = self._parsed(b"{%b}" % self._raw[begin:stop])
            if not found and len(commas):
                raise RequestError(f"it is not valid JSON near byte {begin}: a value is missing")
            values |= found
        return values

    def _parsed(self, piece: bytes) -> Any:
        self._pause()
        return self._loads(piece)


def _cuts(start: int, end: int, commas: Array) -> list[tuple[int, int, int]]:
    """Return pieces of a list's inside: where each begins and ends, and how many values it has.

    Each is as large as fits into :data:`PIECE_NBYTES`, or is one value.
    """
    ends = np.append(commas, end)
    cuts = []
    number = 0
    while number < len(ends):
        fits = int(np.searchsorted(ends, start + PIECE_NBYTES, side="right"))
        following = max(fits, number + 1)
        stop = int(ends[following - 1])
        cuts.append((start, stop, following - number))
        start, number = stop + 1, following
    return cuts


def _structure(raw: bytes) -> tuple[Array, Array, Array]:
    """Return the positions of brackets, commas and colons outside of strings, what they are, and how many
    brackets are open after each."""
    characters = np.frombuffer(raw, np.uint8)
    quotes = np.flatnonzero(characters == _QUOTE)
    if b"\\" in raw:
        quotes = quotes[~_are_escaped(characters)[quotes]]
    at = np.flatnonzero(_MARKS[characters])
    # A mark is in a string if the number of quotes before it is odd.
    at = at[np.searchsorted(quotes, at) % 2 == 0]
    kinds = characters[at]
    return at, kinds, np.cumsum(_STEPS[kinds], dtype=np.int64)


def _are_escaped(characters: Array) -> Array:
    """Return which characters follow an odd number of backslashes."""
    slashes = np.flatnonzero(characters == _ESCAPE)
    begins = np.diff(slashes, prepend=-2) != 1
    # The first of each run of backslashes escapes, the second is escaped, and so on.
    first = np.maximum.accumulate(np.where(begins, slashes, 0))
    escaped = np.zeros(len(characters) + 1, bool)
    escaped[slashes[(slashes - first) % 2 == 0] + 1] = True
    return escaped[:-1]


def _table(marks: dict[str, int], dtype: Any) -> Array:
    table = np.zeros(256, dtype)
    for mark, value in marks.items():
        table[ord(mark)] = value
    return table


_MARKS: Final = _table(dict.fromkeys("[]{},:", 1), bool)
_STEPS: Final = _table({"[": 1, "{": 1, "]": -1, "}": -1}, np.int8)
