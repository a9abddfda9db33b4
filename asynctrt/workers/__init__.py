"""An engine in a process of its own, which may die: shared memory, supervision, another try.

A *front* is a process with an event loop and callers; it has no CUDA. A *worker* is a process with an engine:
device, contexts, scheduler and batch formation. Between them rows travel in shared memory, never pickled.
:mod:`engine` is what a front's callers see, :mod:`front` what it does, :mod:`child` the worker's side.
"""
