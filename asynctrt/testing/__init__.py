"""Doubles for an application's own tests, held to the same contract suite as the real thing.

``latch`` has a device whose batches end when the test says so; ``simulator`` runs the scheduler through
millions of events from a seed; ``tensorrt`` has a strict TensorRT, for the host device and for CUDA.
"""

from asynctrt.testing.latch import LatchDevice
from asynctrt.testing.simulator import Simulation, simulate

__all__ = ["LatchDevice", "Simulation", "simulate"]
