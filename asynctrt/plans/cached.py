"""``runtime="tensorrt"``: run an ONNX model with TensorRT, using a plan from the plan cache."""

import dataclasses
import os
from pathlib import Path
from typing import Final

from asynctrt.backends.base import Model
from asynctrt.backends.build_options import BuildOptions
from asynctrt.backends.onnx_objects import OnnxObject, shown
from asynctrt.backends.onnx_options import OnnxOptions
from asynctrt.backends.registry import PLAN_SUFFIXES
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.backends.tensorrt_options import TensorRTOptions
from asynctrt.core.loading import load_model
from asynctrt.devices.base import Device
from asynctrt.errors import DeviceUnavailableError, ModelError, OptionsError
from asynctrt.options import Options
from asynctrt.plans.cache import PlanCache

ONNX_SUFFIX: Final = ".onnx"


def load_for(model: str | os.PathLike[str] | OnnxObject | Model, device: Device, options: Options) -> Model:
    """Return a model for the runtime that the options name. Blocks; a build may take long.

    :raises OptionsError: if the options do not fit the model or each other.
    :raises AsynctrtError: whatever building or loading it raises.
    """
    tensorrt, onnx = options.tensorrt, options.onnx
    assert tensorrt is None or isinstance(tensorrt, TensorRTOptions), "it was converted by its check"
    assert onnx is None or isinstance(onnx, OnnxOptions), "it was converted by its check"
    suffix = Path(model).suffix if isinstance(model, str | os.PathLike) else ""
    if options.runtime == "tensorrt" and isinstance(model, str | os.PathLike) and suffix == ONNX_SUFFIX:
        return _load_built(Path(model), device, options, tensorrt or TensorRTOptions())
    if options.runtime == "tensorrt" and suffix not in PLAN_SUFFIXES:
        raise OptionsError(
            f"runtime is 'tensorrt', and {shown(model)} is neither an .onnx file nor a plan. Leave "
            "runtime out"
        )
    if tensorrt is not None and tensorrt.build is not None:
        raise OptionsError(
            f"build says how a plan is built, and {shown(model)} needs none. It goes with an .onnx model and "
            "runtime='tensorrt'; leave it out"
        )
    return load_model(model, device, tensorrt, options.runtime, onnx)


def _load_built(model: Path, device: Device, options: Options, tensorrt: TensorRTOptions) -> Model:
    if device.name == "host":
        raise DeviceUnavailableError(
            f"TensorRT (runtime='tensorrt') needs a GPU to run {str(model)!r}: open it with device='cuda:0', "
            "or leave runtime out to run it on the host"
        )
    build = tensorrt.build or BuildOptions()
    assert isinstance(build, BuildOptions), "it was converted by its check"
    if options.max_rows is not None and not build.profiles and build.max_rows == BuildOptions().max_rows:
        # Unless the build options set profiles or rows, build for the engine's max_rows.
        build = dataclasses.replace(build, max_rows=options.max_rows)
    # A plan from the cache is run only if this user built it. The other kinds of trust are for plans from
    # elsewhere.
    trusted = dataclasses.replace(tensorrt, trust=("built-here",))
    cache = PlanCache.of_user()
    found = cache.plan_for(model, device, tensorrt.flavour, build)
    try:
        return TensorRTModel(found.plan, device=device, options=trusted)
    except ModelError as error:
        if not found.is_hit:
            raise
        # Something has changed that is not a part of the entry's name.
        cache.forget(found, str(error))
    again = cache.plan_for(model, device, tensorrt.flavour, build)
    return TensorRTModel(again.plan, device=device, options=trusted)
