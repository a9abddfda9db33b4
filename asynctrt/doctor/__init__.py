"""Examine a machine before anything runs on it, and say how to fix what is wrong.

``facts`` gathers facts, the risky ones in child processes (``children``, ``probes``); ``checks`` interprets
them and touches nothing else. :func:`diagnose` does both.
"""

from asynctrt.doctor.diagnosis import diagnose
from asynctrt.doctor.findings import SICK, Finding, Findings, Level

__all__ = ["SICK", "Finding", "Findings", "Level", "diagnose"]
