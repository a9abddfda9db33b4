"""Preflight checks of a machine: what is, why it matters, and what to do.

``facts`` gathers what can be known, the risky parts in child processes (``children``, ``probes``); ``checks``
says what the facts mean, and touches nothing. :func:`diagnose` does both.
"""

from asynctrt.doctor.diagnosis import diagnose
from asynctrt.doctor.findings import SICK, Finding, Level, Report

__all__ = ["SICK", "Finding", "Level", "Report", "diagnose"]
