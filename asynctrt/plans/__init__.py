"""Plans of ONNX models: built, cached, and inspected together with models of other kinds.

``plan_file`` reads a plan without running it; ``opened`` asks a model's runtime, which for a plan means
running its code; ``text`` formats both.
"""
