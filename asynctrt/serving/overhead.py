"""Notice a client that sends little but the frames around its data: each costs as much as the data would."""

from typing import Final

NBYTES_MAX: Final = 16 << 10
"""Bytes of overhead that a client may be ahead: as much as Go's HTTP server accepts."""

RATIO: Final = 2
"""Bytes of overhead for each byte of data that are no overhead."""


class Overhead:
    """Count what comes on one connection beside data: heads of chunks and frames, pings, empty messages."""

    __slots__ = ("nbytes",)

    def __init__(self) -> None:
        self.nbytes = 0

    def __repr__(self) -> str:
        return f"<Overhead {self.nbytes}>"

    def add(self, nbytes: int, data_nbytes: int) -> bool:
        """Count ``nbytes``, of which some are data. Return whether there was too much overhead by now."""
        self.nbytes = max(0, self.nbytes + nbytes - (1 + RATIO) * data_nbytes)
        return self.nbytes > NBYTES_MAX

    def forgive(self, nbytes: int) -> None:
        """Count less, as time has passed: pings come for as long as a connection lives."""
        self.nbytes = max(0, self.nbytes - nbytes)
