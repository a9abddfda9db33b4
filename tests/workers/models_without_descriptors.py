"""A module whose import is in want of a descriptor, as one of a process that has too many files open."""

import resource

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))

import this  # noqa: E402, F401
