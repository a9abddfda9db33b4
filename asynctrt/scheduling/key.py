"""The key of a batch: which requests may share one, and which batches cost the same."""

from collections.abc import Hashable
from typing import Final, NamedTuple

SHAPES_MAX: Final = 4096
KEYS_KEPT_MAX: Final = 256
"""The most shapes about which an answer is remembered, and the most keys for which something larger is kept.
Both bound memory if shapes keep changing, and the numbers were not tuned."""

Shared = tuple[tuple[int, ...], bytes | tuple[str, ...]]
"""An input that all rows of a batch share: its shape, and its content as bytes or as strings."""


class BatchKey(NamedTuple):
    """What decides whether requests may share a batch: requests with equal keys may."""

    shape: Hashable = ()
    """The value of each dynamic dimension; empty for a model whose rows all have one shape. Batches of equal
    shape and size take equally long to compute."""
    on_device: bool = False
    """Whether some of the rows are on the device already."""
    outputs_on_device: bool = False
    """Whether the outputs stay on the device."""
    shared: tuple[Shared, ...] = ()
    """The value that all rows of a batch share, for each input without rows."""

    @property
    def copy_key(self) -> Hashable:
        """Return a key such that batches of one size and this key are copied in and out in equal times."""
        if self.on_device or self.outputs_on_device:
            return self.shape, self.on_device, self.outputs_on_device
        return self.shape


FIXED_SHAPE: Final = BatchKey()
"""The key of requests with arrays on the host, to a model whose rows all have one shape."""
