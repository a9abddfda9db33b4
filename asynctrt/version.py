"""The version, where every module can see it."""

from typing import Final

__version__: Final = "0.1.0"
