"""The version, where every module can see it, and hatchling as well, which reads the line below."""

__version__ = "0.1.0"
