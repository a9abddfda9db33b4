"""An engine in a child process, which may die: shared memory, supervision, retries.

A *front* is a process with an event loop and callers; it has no CUDA. A *worker* is a process with an engine:
device, contexts, scheduler and batch formation. Rows travel between them in shared memory, never pickled.
:mod:`engine` is what a front's callers use, :mod:`front` does its work, :mod:`child` is the worker's side.
"""
