"""Doubles for an application's own tests, held to the same contract suite as the real thing.

``LatchDevice`` is a device whose batches end when the test says so; ``serve_locally`` is a server on a free
port; ``asynctrt.testing.plugin`` has them as fixtures of pytest.
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
    """Import what needs more than the core when it is used: a server needs the extra `serve`."""
    if name in ("LocalServer", "serve_locally"):
        from asynctrt.testing import server  # noqa: PLC0415

        return getattr(server, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
