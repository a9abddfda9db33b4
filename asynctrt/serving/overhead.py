"""Detect a client that sends little but framing around its data: framing costs as much as data would."""

from typing import Final

NBYTES_MAX: Final = 16 << 10
"""Bytes of overhead that a client may have in advance: as many as Go's HTTP server accepts."""

RATIO: Final = 2
"""Bytes per byte of data that do not count as overhead."""


class Overhead:
    """A count of a connection's bytes other than data: heads of chunks and frames, pings, empty messages."""

    __slots__ = ("nbytes",)

    def __init__(self) -> None:
        self.nbytes = 0

    def __repr__(self) -> str:
        return f"<Overhead {self.nbytes}>"

    def add(self, nbytes: int, data_nbytes: int) -> bool:
        """Count ``nbytes``, some of them data. Return whether there is too much overhead now."""
        self.nbytes = max(0, self.nbytes + nbytes - (1 + RATIO) * data_nbytes)
        return self.nbytes > NBYTES_MAX

    def forgive(self, nbytes: int) -> None:
        """Lower the count as time passes, because pings come for as long as a connection lives."""
        self.nbytes = max(0, self.nbytes - nbytes)
