"""The version, for every module and for hatchling, which reads the line below."""

__version__ = "0.1.0"
