"""A pipe by which the kernel ends a child process when its parent is gone, whatever the child is doing.

The parent alone has the end that is written to. The child has the other one, of which the kernel is told to
send it SIGKILL instead of SIGIO. When the first end is closed, be it by the parent's death, the child ends:
also one that is stopped, or hangs in native code with Python's lock. (PR_SET_PDEATHSIG goes by the thread
that made the child.)
"""

import fcntl
import os
import signal
from contextlib import suppress
from typing import Final

from asynctrt.forks import in_child, seal

STDERR_FILENO: Final = 2


class Tether:
    """Both ends, until :meth:`hold`; then the parent's.

    :raises OSError: if there can be no pipe.
    """

    child_end = _end = -1

    def __init__(self) -> None:
        self.child_end, self._end = os.pipe()
        try:
            if self.child_end <= STDERR_FILENO:
                # A process without standard streams has these for anything, and no child gets them.
                low, self.child_end = (
                    self.child_end,
                    fcntl.fcntl(self.child_end, fcntl.F_DUPFD_CLOEXEC, STDERR_FILENO + 1),
                )
                os.close(low)
        except OSError:
            self.close()
            raise
        in_child(self, Tether._let_go)

    def __repr__(self) -> str:
        return f"<Tether {'cut' if self._end < 0 else 'held'}>"

    def __del__(self) -> None:
        self.close()

    def hold(self, pid: int) -> None:
        """Have the child with this process id end with this process. It has inherited :attr:`child_end`.

        Where the kernel cannot do that, as in some sandboxes, a child has to find out that it is an orphan.
        """
        with suppress(OSError):
            fcntl.fcntl(self.child_end, fcntl.F_SETOWN, pid)
            fcntl.fcntl(self.child_end, fcntl.F_SETSIG, signal.SIGKILL)
            flags = fcntl.fcntl(self.child_end, fcntl.F_GETFL)
            fcntl.fcntl(self.child_end, fcntl.F_SETFL, flags | fcntl.FASYNC)
        os.close(self.child_end)
        self.child_end = -1

    def _let_go(self) -> None:
        """In a process that was forked: do not keep the child of its parent alive."""
        seal(self._end)

    def close(self) -> None:
        """Let go of it, which ends a child that is held. Idempotent."""
        for fd in (self.child_end, self._end):
            if fd >= 0:
                os.close(fd)
        self.child_end = self._end = -1
