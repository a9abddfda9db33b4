"""Doubles for an application's own tests, verified by the same contract suite as the real devices.

``LatchDevice`` is a device whose batches end when the test releases them; ``serve_locally`` runs a server on
a free port.
"""

from typing import TYPE_CHECKING, Any

from asynctrt.testing.latch import LatchDevice, LatchError

if TYPE_CHECKING:
    from asynctrt.testing.server import serve_locally

__all__ = ["LatchDevice", "LatchError", "serve_locally"]


def __getattr__(name: str) -> Any:
    """Import the server on first use, because it needs the extra `serve`."""
    if name == "serve_locally":
        from asynctrt.testing.server import serve_locally  # noqa: PLC0415

        return serve_locally
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
