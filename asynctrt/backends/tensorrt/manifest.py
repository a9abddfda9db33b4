"""The file beside a plan, ``PLAN.json``: how the plan was built, and the names that plans do not keep.

It is for people and messages. It never decides what runs, and only applies to the plan with its digest.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Final

from asynctrt._util.files import CONFIG_NBYTES_MAX, read_regular
from asynctrt.errors import SHOWN_MAX, ModelError

FORMAT: Final = "asynctrt-plan-1"

SUFFIX: Final = ".json"

KINDS: Final[dict[str, type | UnionType]] = {
    **dict.fromkeys(("plan_digest", "model", "model_digest", "builder"), str),
    "plan_nbytes": int,
    **dict.fromkeys(("external", "options"), dict),
    "gpu": str | None,
}
"""The types of the parts of a manifest that are not checked individually."""

logger = logging.getLogger("asynctrt.tensorrt")


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """An input or output with the names of its dimensions."""

    name: str
    dtype: str
    """In a manifest TensorRT's name: ``FLOAT``."""
    dims: tuple[int | str, ...]
    """Sizes, or names of dimensions: ``INPUT.AXIS`` for unnamed ones."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """How a plan was built."""

    plan_digest: str
    """SHA-256 of the plan, in hexadecimal."""
    plan_nbytes: int
    model: str
    """The name of the file."""
    model_digest: str
    """SHA-256 of that file."""
    external: Mapping[str, str]
    """Files beside the model that hold weights, and the SHA-256 of each."""
    builder: str
    """``tensorrt_rtx 1.7.1.116``."""
    gpu: str | None
    """The GPU that the plan was built on, or ``None`` without one."""
    inputs: tuple[NamedTensor, ...]
    outputs: tuple[NamedTensor, ...]
    profiles: tuple[str, ...]
    """In text notation."""
    plugins: tuple[str, ...]
    """Libraries that are packed into the plan or needed by it."""
    options: Mapping[str, Any]

    def as_text(self) -> str:
        """Return the manifest as the text of the file beside its plan."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    def dimension_names(self) -> dict[tuple[str, int], str]:
        """Return the names of dimensions by input and axis."""
        names = {
            (tensor.name, axis): "".join(filter(str.isprintable, dim))[:SHOWN_MAX]
            for tensor in self.inputs
            for axis, dim in enumerate(tensor.dims)
            if isinstance(dim, str)
        }
        return {place: name for place, name in names.items() if name}


def manifest_path(plan: Path) -> Path:
    """Return the path of a plan's manifest."""
    return plan.with_name(plan.name + SUFFIX)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest."""
    try:
        content = json.loads(read_regular(path, CONFIG_NBYTES_MAX))
        if content.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        for side in ("inputs", "outputs"):
            content[side] = tuple(_tensor(one) for one in content[side])
        for name in ("profiles", "plugins"):
            content[name] = tuple(map(str, content[name]))
        # Earlier versions wrote more.
        made = Manifest(**{item.name: content[item.name] for item in fields(Manifest)})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"the manifest {str(path)!r} cannot be read: {error}. Build the plan again, or remove it"
        ) from error
    if not all(isinstance(getattr(made, name), kind) for name, kind in KINDS.items()):
        raise ModelError(f"the manifest {str(path)!r} is damaged. Build the plan again, or remove it")
    return made


def find_manifest(plan: Path | None, digest: str) -> Manifest | None:
    """Return the manifest of a plan, or ``None`` if there is none for exactly these bytes."""
    if plan is None or not manifest_path(plan).is_file():
        return None
    try:
        found = read_manifest(manifest_path(plan))
    except ModelError as error:
        logger.warning("%s", error)
        return None
    if found.plan_digest != digest:
        logger.warning(
            "the manifest %r is of another plan than %r, so its names are not used. Build the plan again",
            str(manifest_path(plan)),
            str(plan),
        )
        return None
    return found


def _tensor(given: Mapping[str, Any]) -> NamedTensor:
    dims = tuple(given["dims"])
    if not all(isinstance(dim, int | str) for dim in dims):
        raise TypeError("a dimension is neither a size nor a name")
    return NamedTensor(str(given["name"]), str(given["dtype"]), dims)
