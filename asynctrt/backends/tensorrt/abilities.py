"""What an engine can do under the library that runs it. Whatever depends on a version is decided here.

An engine has the abilities of the version that built it, even if a later one runs it. Under TensorRT 10.16 an
engine of 8.6 answers calls that came with 10.1 with 0 and an error, and one of them crashes the process.
"""

import re
from dataclasses import dataclass
from typing import Final

from asynctrt.backends.tensorrt.flavours import Flavour
from asynctrt.backends.tensorrt.plan import TAG_RTX, PlanHeader

SHARES_PROFILES: Final = (10, 0)
"""The first version whose engines can all have one profile in several contexts at once. Those of 8.6 can if
they were built with ``PreviewFeature.PROFILE_SHARING_0806``, which no call tells."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What one engine can do under one library."""

    shares_profiles: bool | None
    """Whether several contexts can have one profile at once; ``None`` if that has to be tried."""

    @classmethod
    def of(cls, flavour: Flavour, header: PlanHeader) -> "Abilities":
        """Return the abilities of an engine, by the versions of the library and of the plan."""
        if header.tag == TAG_RTX:
            return cls(shares_profiles=True)
        built, here = header.version, numbers_of(flavour.version)
        version = built if here is None else min(built, here)
        return cls(shares_profiles=True if version >= SHARES_PROFILES else None)


def numbers_of(version: str) -> tuple[int, ...] | None:
    """Return the four numbers of a library's version, without any suffix of the package."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else None
