"""Builds a plan of ``y = x`` with TensorRT for RTX, which needs no GPU for that.

How ``identity.rtx.plan`` in this folder was made::

    pip install 'asynctrt[rtx]'
    python tests/gpu/build_identity_plan.py tests/gpu/identity.rtx.plan

It takes ``x``, float32 with 1 to 64 rows of 4, on the GPUs that TensorRT for RTX supports by default. With
compute capabilities after the path (``SM80 SM89``), on those alone.
"""

import sys
from pathlib import Path

import tensorrt_rtx as trt


class Quiet(trt.ILogger):
    """Only errors are worth a line."""

    def __init__(self):
        trt.ILogger.__init__(self)

    def log(self, severity, msg):
        if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
            print(msg, file=sys.stderr)


def build(capabilities):
    log = Quiet()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    x = network.add_input("x", trt.float32, (-1, 4))
    y = network.add_identity(x).get_output(0)
    y.name = "y"
    network.mark_output(y)
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, 4), (8, 4), (64, 4))
    config.add_optimization_profile(profile)
    if capabilities:
        config.num_compute_capabilities = len(capabilities)
        for index, name in enumerate(capabilities):
            config.set_compute_capability(trt.ComputeCapability.__members__[name], index)
    return bytes(builder.build_serialized_network(network, config))


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(build(sys.argv[2:]))
