"""Work with systemd: say when a service is ready (``Type=notify``), and listen on a socket that it passes."""

import logging
import os
import socket
from typing import Final

from asynctrt.errors import UsageError

FIRST_FD: Final = 3
"""The first file descriptor that systemd passes."""

logger = logging.getLogger("asynctrt.serving")


def notify_ready() -> None:
    """Send ``READY=1`` to the supervisor of this process, if it has one that waits for that."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # An abstract socket, which has no file.
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifying:
            notifying.sendto(b"READY=1", address)
    except OSError as error:
        logger.warning("cannot notify the supervisor at NOTIFY_SOCKET: %s", error)


def passed_socket() -> socket.socket | None:
    """Return the socket that a ``.socket`` unit passes to this process; ``None`` if there is none."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = os.environ.get("LISTEN_FDS", "")
    if count != "1":
        raise UsageError(
            f"the socket unit passes {count!r} sockets, and one is used, for HTTP: give it one ListenStream="
        )
    return socket.socket(fileno=FIRST_FD)
