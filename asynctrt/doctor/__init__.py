"""Examine a machine before anything runs on it, and say what to do about what is wrong.

``facts`` gathers what can be known, the risky parts in child processes (``children``, ``probes``); ``checks``
interprets the facts and touches nothing else. :func:`diagnose` does both.
"""

from asynctrt.doctor.diagnosis import diagnose
from asynctrt.doctor.findings import SICK, Finding, Level, Report

__all__ = ["SICK", "Finding", "Level", "Report", "diagnose"]
