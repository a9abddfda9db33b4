"""Helpers that are independent of engines: clocks, files, loops, processes, checks of settings."""
