"""Models that people really have: from wheels and from exporters, opened and compared with ONNX Runtime."""
