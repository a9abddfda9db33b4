"""An application's own model on the strict double of TensorRT: what its plan would do, without a GPU."""

import os

from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.devices.host import HostDevice
from asynctrt.tensorrt_options import TensorRTOptions
from asynctrt.testing.tensorrt import EngineSpec, StrictTensorRT, double_plan
from asynctrt.testing.tensorrt.spec import Flavour


class StrictModel(TensorRTModel):
    """A TensorRT model whose library is :class:`asynctrt.testing.tensorrt.StrictTensorRT`.

    ::

        model = StrictModel("model.onnx")
        async with asynctrt.open(model, device=model.device) as engine:
            ...
        assert not model.violations()

    :param source: an ONNX file, which ONNX Runtime computes, or an :class:`EngineSpec`, such as one with a
        NumPy function.
    :param device: the host device that it computes on. Default: one of its own; with a
        :class:`asynctrt.testing.LatchDevice` the test says when batches end.
    :param flavour: the package of TensorRT to imitate.
    :param options: what ``asynctrt.open`` would be given for a plan.
    :raises MissingExtraError: for an ONNX file, without ONNX Runtime.
    :raises ModelError: for a model whose rows cannot be batched.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | EngineSpec,
        *,
        device: HostDevice | None = None,
        flavour: Flavour = "tensorrt",
        options: TensorRTOptions | None = None,
    ) -> None:
        self.spec = source if isinstance(source, EngineSpec) else EngineSpec.from_onnx(source)
        device = HostDevice() if device is None else device
        self.double = StrictTensorRT(device, flavour=flavour)
        plan = double_plan(self.spec, flavour=flavour)
        super().__init__(plan, device=device, flavour=self.double, name=self.spec.name, options=options)

    def violations(self) -> tuple[str, ...]:
        """Return what was done that TensorRT leaves undefined. A right runtime does none of it."""
        return self.double.violations()
