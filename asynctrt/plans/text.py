"""Format the result of an inspection as text."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from asynctrt._util.validation import printable
from asynctrt.backends.tensorrt.details import EngineDetails
from asynctrt.backends.tensorrt.manifest import Manifest
from asynctrt.devices.base import mib
from asynctrt.plans.opened import Opened
from asynctrt.plans.plan_file import PlanFile

WIDTH: Final = 80
LABEL: Final = 14
"""The width of the labels on the left, in characters."""

LAYERS_MAX: Final = 40


def lines_of_manifest(manifest: Manifest) -> Iterator[str]:
    """Yield lines about how a plan was built."""
    yield from _row("plan", f"{mib(manifest.plan_nbytes)}, sha256:{manifest.plan_digest}")
    yield from _row("model", f"{manifest.model}, sha256:{manifest.model_digest}")
    for name, digest in manifest.external.items():
        yield from _row("external", f"{name}, sha256:{digest}")
    yield from _row("built by", manifest.builder + (f" on {manifest.gpu}" if manifest.gpu else ""))
    yield from _tensors(manifest)
    for number, profile in enumerate(manifest.profiles):
        yield from _row(f"profile {number}", profile)
    if manifest.plugins:
        yield from _row("plugins", ", ".join(manifest.plugins))


def lines_of_opened(opened: Opened) -> Iterator[str]:
    """Yield lines about a model that a runtime has opened."""
    yield from _row("opened by", f"{opened.runtime} on {opened.device}")
    yield from _row("batching", opened.batching)
    yield from _tensors(opened, opened.unbound)
    low, high = opened.rows
    yield from _row("rows", f"{low} to {high or 'any number'}" if low != high else f"exactly {low}")
    for profile in opened.profiles:
        shapes = "; ".join(
            f"{name} {' / '.join(map(_shape, sizes))}" for name, sizes in profile.shapes.items()
        )
        yield from _row(f"profile {profile.index}", f"{shapes}; {mib(profile.enqueue_nbytes)} enqueue memory")
    if opened.engine is not None:
        engine = opened.engine
        yield from _row("layers", f"{engine.layers}, {engine.aux_streams} auxiliary streams")
        for name in engine.layer_names[:LAYERS_MAX]:
            yield from _row("", name)
        if len(engine.layer_names) > LAYERS_MAX:
            yield from _row("", f"and {len(engine.layer_names) - LAYERS_MAX} more: --json has all")
        yield from _row("weights", _weights(engine))
        yield from _row(
            "built for",
            f"hardware compatibility {engine.hardware_compatibility}, runtime {engine.capability}",
        )
    if opened.is_capturable is not None:
        yield from _row("CUDA graphs", "can be captured" if opened.is_capturable else "cannot be captured")
    yield from _lanes(opened)
    if opened.specialises:
        yield from _row(
            "shapes",
            "recurring ones get sessions specialised for their sizes, as CUDA graphs where possible; "
            "onnx={'shapes': {...}} names some beforehand",
        )


def _lanes(opened: Opened) -> Iterator[str]:
    for rows, lanes in opened.lanes.items():
        yield from _row("lanes", f"{lanes} for batches of up to {rows} rows")
    for rows in sorted({rows for rows, _, _ in opened.lane_rates}):
        rates = ", ".join(
            f"{rate:,.0f} in {lanes}" for size, lanes, rate in sorted(opened.lane_rates) if size == rows
        )
        yield from _row("", f"rows/s at {rows}: {rates}")


def lines_of_plan(found: PlanFile) -> Iterator[str]:
    """Yield lines about a plan's file."""
    yield from _row("file", f"{found.path}, {mib(found.nbytes)}")
    yield from _row("sha256", found.digest)
    yield from _row("kind", f"a plan of {found.kind} {found.version} (it begins with {found.tag!r})")
    if found.surplus_nbytes:
        yield from _row("surplus", f"{found.surplus_nbytes:,} bytes after the plan's end")
    if found.compute_capabilities is not None:
        gpus = ", ".join(found.compute_capabilities) or "none that is known here"
        yield from _row("GPUs", f"compute capability {gpus}")
    else:
        yield from _row("GPUs", "not in the header: the kind on which it was built, unless built for more")
    if found.manifest is not None:
        yield from _row("manifest", "beside it, not signed unless you have checked that; it says:")
        yield from lines_of_manifest(found.manifest)
    yield from _row(
        "the rest",
        "tensors, profiles, memory and weights are known once it is deserialised, which runs its code: "
        "--open, only if you trust it",
    )


def _weights(engine: EngineDetails) -> str:
    said = ["unknown" if engine.weights_nbytes is None else mib(engine.weights_nbytes)]
    if engine.stripped_nbytes:
        said.append(f"{mib(engine.stripped_nbytes)} stripped")
    said.append("can be refitted" if engine.is_refittable else "cannot be refitted")
    return ", ".join(said)


def _tensors(model: Manifest | Opened, unbound: Sequence[str] = ()) -> Iterator[str]:
    for kind, tensors in (("input", model.inputs), ("output", model.outputs)):
        for one in tensors:
            open_end = ": as large as the data says" if one.name in unbound else ""
            yield from _row(kind, f"{one.name}: {one.dtype}{_shape(one.dims)}{open_end}")


def _shape(dims: Iterable[Any]) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"


def _row(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        printable(text),  # Names come from untrusted files.
        WIDTH,
        initial_indent=label.ljust(LABEL),
        subsequent_indent=" " * LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )
