"""Files of models, looked at without running them: TensorRT plans and ONNX models.

``onnx_file`` and ``plan_file`` read a file; ``opened`` asks a runtime, which for a plan means to run its
code; ``inspection`` chooses, and ``text`` shows.
"""

from asynctrt.plans.inspection import inspect

__all__ = ["inspect"]
