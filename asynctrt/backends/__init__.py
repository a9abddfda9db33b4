"""Backends, which turn a file or a function into a model on a device. ``base`` has the protocols."""
