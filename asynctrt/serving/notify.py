"""Tell systemd that a service is ready, for units with ``Type=notify``."""

import logging
import os
import socket

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
