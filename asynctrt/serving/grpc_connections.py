"""Close connections of gRPC, which owns their sockets: those beyond the limit, and unfair clients' ones."""

import asyncio
import ctypes
import os
import resource
import socket
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Final
from urllib.parse import unquote

from asynctrt._util.loops import in_thread

End = bytes
"""The other end of a connection: its port, and its IPv4 or IPv6 address, in network order."""

MAPPED: Final = bytes(10) + b"\xff\xff"
"""How the IPv6 form of an IPv4 address begins."""

NETWORK_NBYTES: Final = 8
"""Bytes of an address that tell clients apart: all of IPv4's, or the /64 network of IPv6's."""

SOCKADDR_NBYTES: Final = 28
"""Bytes of ``sockaddr_in6``; ``sockaddr_in`` has fewer."""

ROOM_FACTOR: Final = 2
"""Factor by which gRPC accepts more connections than the limit, until a look closes the surplus. There are
several looks a second, so that having 4,096 more before the second look closes them takes 8,000 a second."""


def end_of(peer: str) -> End:
    """Return the other end of a connection from gRPC's text form, such as ``ipv4:127.0.0.1:1234``."""
    family, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    address = host.strip("[]").partition("%")[0]
    packed = socket.inet_pton(socket.AF_INET if family == "ipv4" else socket.AF_INET6, address)
    return int(port).to_bytes(2) + packed.removeprefix(MAPPED)


def descriptors() -> Collection[int]:
    """Return the open files of this process."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208  (paths would take longer)
    except OSError:
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # None is left to read the list with.


class _Sockets:
    """The system's functions for sockets, which need no object and no further descriptor for each."""

    def __init__(self) -> None:
        # Python's sockets would take ten times longer, during which the event loop waits for the GIL.
        self._library = ctypes.PyDLL(None)
        self._room, self._nbytes = ctypes.create_string_buffer(SOCKADDR_NBYTES), ctypes.c_uint32()

    def end(self, descriptor: int, *, own: bool = False) -> End:
        """Return the other end of a connection, or its own; empty if it is another file."""
        ask = self._library.getsockname if own else self._library.getpeername
        self._nbytes.value = SOCKADDR_NBYTES
        if ask(descriptor, self._room, ctypes.byref(self._nbytes)):
            return b""
        found = self._room.raw
        match int.from_bytes(found[:2], sys.byteorder):
            case socket.AF_INET:
                return found[2:8]
            case socket.AF_INET6:
                return found[2:4] + found[8:24].removeprefix(MAPPED)
        return b""

    def shut_down(self, end: End, descriptor: int) -> None:
        """Close a connection, unless gRPC has closed it, and its descriptor is another file by now."""
        if self.end(descriptor) == end:
            self._library.shutdown(descriptor, socket.SHUT_RDWR)


def connections(port: int) -> dict[End, int]:
    """Return this process's connections that were accepted at ``port``: other ends, and file descriptors.

    The descriptors belong to gRPC, which may have closed them by now.
    """
    sockets, wanted, found = _Sockets(), port.to_bytes(2), {}
    for descriptor in descriptors():
        if sockets.end(descriptor, own=True)[:2] == wanted and (other := sockets.end(descriptor)):
            found[other] = descriptor
    return found


def surplus(
    ends: Iterable[End], known: AbstractSet[End], busy: AbstractSet[End], connections_max: int
) -> list[End]:
    """Return the connections to close so that ``connections_max`` are left.

    First those without a request yet, then idle ones, then busy ones; of each, each time one of the client
    with the most.

    :param ends: the connections that may be closed.
    :param known: the ends of connections on which there was a request.
    :param busy: the ends of connections with requests in progress.
    """

    def rank(end: End) -> int:
        return 0 if end in busy else 1 if end in known else 2

    held: Counter[bytes] = Counter()
    ranked = []
    for end in sorted(ends, key=rank):
        client = end[2 : 2 + NETWORK_NBYTES]
        held[client] += 1
        ranked.append((rank(end), held[client], end))
    ranked.sort(key=lambda one: one[:2], reverse=True)
    return [end for _, _, end in ranked[: max(0, len(ranked) - connections_max)]]


class GrpcConnections:
    """The connections that gRPC has accepted at one port.

    Beyond its own limit, gRPC refuses new connections, so one client could take them all and shut out the
    others. Here the client with the most connections loses some instead.
    """

    def __init__(self, connections_max: int) -> None:
        self.port = 0
        """The port that gRPC listens on, once it does."""
        self.accepted_max = ROOM_FACTOR * connections_max
        self._connections_max = connections_max
        self._known: set[str] = set()
        """Peers that had a request, by gRPC's name for them."""
        self._seen: set[End] = set()
        """The connections at the latest look. Newer ones are spared: their first requests may be arriving."""
        self._looking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<GrpcConnections port={self.port} known={len(self._known)}>"

    def know(self, peer: str) -> None:
        """Note that a client sent a request that its token allows. Its connection is among the last to go."""
        self._known.add(peer)

    def look(self, busy: Iterable[str]) -> None:
        """Close connections beyond the limit, in a thread, if there may be any.

        :param busy: peers with requests in progress, whose connections are the last to go.
        """
        is_over = self._looking is None or self._looking.done()
        # All open files: counting only this port's connections would take a hundred times longer.
        count = max(len(descriptors()), len(self._known) // ROOM_FACTOR)
        if is_over and count > self._connections_max:
            work = partial(self._close_surplus, self._known.copy(), set(busy))
            self._looking = asyncio.get_running_loop().create_task(self._look(work))

    async def _look(self, work: "partial[set[str]]") -> None:
        self._known -= await in_thread(work)

    def _close_surplus(self, known: set[str], busy: set[str]) -> set[str]:
        """Close connections beyond the limit, and return known peers whose connections have ended."""
        sockets, found = _Sockets(), connections(self.port)
        closable = self._seen.intersection(found)
        self._seen = set(found)
        known_ends = {end_of(peer): peer for peer in known}
        room = self._connections_max - (len(found) - len(closable))
        for end in surplus(closable, known_ends.keys(), set(map(end_of, busy)), max(0, room)):
            sockets.shut_down(end, found[end])
        return known - {known_ends[end] for end in found.keys() & known_ends.keys()}

    def shut_down(self, peers: Collection[str]) -> None:
        """Close the connections of these peers."""
        found = connections(self.port) if peers else {}
        for end in map(end_of, peers):
            if end in found:
                _Sockets().shut_down(end, found[end])
