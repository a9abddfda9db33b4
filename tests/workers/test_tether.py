"""A child ends with its parent, whatever it is doing; and not before."""

import os
import select
import signal
import subprocess
import sys

import pytest

from asynctrt.workers.tether import Tether
from tests.helpers import WAIT_S

HANGS = "import ctypes; print(flush=True); ctypes.PyDLL(None).sleep(1000)"
IGNORES = (
    "import signal, time; signal.signal(signal.SIGIO, signal.SIG_IGN); print(flush=True); time.sleep(1000)"
)


def started(code):
    tether = Tether()
    child = subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[tether.child_end], stdout=subprocess.PIPE, text=True
    )
    tether.hold(child.pid)
    assert child.stdout.readline() == "\n"
    return tether, child


def check_ended(child):
    with child:
        assert child.wait(WAIT_S) == -signal.SIGKILL


@pytest.mark.parametrize("code", [HANGS, IGNORES])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_child_ends_with_its_tether_whatever_it_does(code, stopped):
    tether, child = started(code)
    if stopped:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert child.poll() is None
    tether.close()
    check_ended(child)


PARENT = f"""
import os, sys
from tests.workers.test_tether import HANGS, started
tether, child = started(HANGS)
if sys.argv[1] == "forks" and not os.fork():
    os.kill(os.getpid(), {int(signal.SIGSTOP)})
print(child.pid, flush=True)
os.read(0, 1)
"""


@pytest.mark.parametrize("forks", ["", "forks"])
def test_a_child_ends_with_its_parent_and_no_process_that_it_forked_keeps_it(forks):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, forks],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with parent:
        try:
            ended = os.pidfd_open(int(parent.stdout.readline()))
            parent.kill()
            assert select.select([ended], [], [], WAIT_S)[0], "it is still there"
            os.close(ended)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_a_tether_that_nobody_holds_is_closed_with_its_last_reference():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        Tether()
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_end_is_a_standard_stream_of_a_child():
    code = "import os; from asynctrt.workers.tether import Tether; os._exit(Tether().child_end)"
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(command, timeout=WAIT_S, check=False).returncode > 2
