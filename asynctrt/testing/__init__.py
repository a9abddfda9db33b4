"""Doubles for an application's own tests, verified by the same contract suite as the real devices.

``LatchDevice`` is a device whose batches end when the test releases them; ``serve_locally`` runs a server on
a free port; ``asynctrt.testing.plugin`` provides both as pytest fixtures.
"""

from typing import TYPE_CHECKING, Any

from asynctrt.testing.latch import LatchDevice, LatchError

if TYPE_CHECKING:
    from asynctrt.testing.server import LocalServer, serve_locally

__all__ = [
    "LatchDevice",
    "LatchError",
    "LocalServer",
    "serve_locally",
]


def __getattr__(name: str) -> Any:
    """Import the server on first use, because it needs the extra `serve`."""
    if name in ("LocalServer", "serve_locally"):
        from asynctrt.testing import server  # noqa: PLC0415

        return getattr(server, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
