"""Inspection of model files without running them: TensorRT plans and ONNX models.

``onnx_file`` and ``plan_file`` read a file; ``opened`` asks a runtime, which for a plan means running its
code; ``inspection`` chooses between them, and ``text`` formats the result.
"""
