"""A pipe by which the kernel ends a child process when its parent is gone, whatever the child is doing.

Only the parent has the write end. The child has the read end, for which the kernel is set to send the child
SIGKILL instead of SIGIO. When the write end is closed, as by the parent's death, the child ends, even if it
is stopped or hangs in native code with Python's lock. PR_SET_PDEATHSIG would not do: it depends on the thread
that made the child.
"""

import fcntl
import os
import signal
from contextlib import suppress
from typing import Final

from asynctrt._util.forks import in_child, seal

STDERR_FILENO: Final = 2


def beyond_std(fd: int) -> int:
    """Return a descriptor above the standard streams; a lower one is replaced by a copy and closed.

    A process that began without standard streams (a daemon) may use descriptors 0 to 2 for anything.

    :raises OSError: if the system refuses a descriptor.
    """
    if fd > STDERR_FILENO:
        return fd
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, STDERR_FILENO + 1)
    os.close(fd)
    return high


class Tether:
    """Both ends of the pipe until :meth:`hold`, then the parent's end.

    :raises OSError: if the pipe cannot be made.
    """

    child_end = _end = -1

    def __init__(self) -> None:
        self.child_end, self._end = os.pipe()
        try:
            self.child_end = beyond_std(self.child_end)
        except OSError:
            self.close()
            raise
        in_child(self, Tether._let_go)

    def __repr__(self) -> str:
        return f"<Tether {'cut' if self._end < 0 else 'held'}>"

    def __del__(self) -> None:
        self.close()

    def hold(self, pid: int) -> None:
        """Tie the child with this process id, which has inherited :attr:`child_end`, to this process.

        Where the kernel cannot do that, as in some sandboxes, the child must notice that it is an orphan.
        """
        with suppress(OSError):
            fcntl.fcntl(self.child_end, fcntl.F_SETOWN, pid)
            fcntl.fcntl(self.child_end, fcntl.F_SETSIG, signal.SIGKILL)
            flags = fcntl.fcntl(self.child_end, fcntl.F_GETFL)
            fcntl.fcntl(self.child_end, fcntl.F_SETFL, flags | fcntl.FASYNC)
        os.close(self.child_end)
        self.child_end = -1

    def _let_go(self) -> None:
        """Close the end in a forked process, which must not keep its parent's child alive."""
        seal(self._end)

    def close(self) -> None:
        """Close the pipe, which ends a held child. Idempotent."""
        for fd in (self.child_end, self._end):
            if fd >= 0:
                os.close(fd)
        self.child_end = self._end = -1
