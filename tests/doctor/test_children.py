"""Probes in child processes: whatever becomes of one, there is an outcome in time."""

import os
import select
import signal

import pytest

from asynctrt.doctor.children import Ending, ask

WAIT_S = 20


@pytest.fixture
def probe(tmp_path):
    def make(body, *args, timeout_s=WAIT_S, **kwargs):
        path = tmp_path / "probe.py"
        path.write_text(f"import ctypes, os, signal, sys\n{body}\n")
        return ask(path, *args, timeout_s=timeout_s, **kwargs)

    return make


def test_an_answer(probe):
    outcome = probe("def probe(a, b): print('noise'); return {'said': a + b}", "x", "y")
    assert (outcome.ending, outcome.value) == (Ending.ANSWERED, {"said": "xy"})


@pytest.mark.tier2
def test_noise_on_every_output_is_no_answer(probe):
    outcome = probe(
        "def probe():\n os.write(1, b'{\"wrong\": 1}' * 100_000); os.write(2, b'\\xff' * 1_000_000); return 7"
    )
    assert (outcome.ending, outcome.value) == (Ending.ANSWERED, 7)


def test_an_exception_is_told_by_its_last_line(probe):
    outcome = probe("def probe(): raise OSError('libx.so: cannot open')")
    assert (outcome.ending, outcome.said) == (Ending.FAILED, "OSError: libx.so: cannot open")
    assert not outcome.has_answered


def test_a_crash_names_the_signal(probe):
    outcome = probe("def probe(): ctypes.string_at(0)")
    assert outcome.ending is Ending.CRASHED
    assert outcome.said.startswith("SIGSEGV")


def test_a_crash_after_the_answer_keeps_the_answer(probe):
    outcome = probe("import atexit\ndef probe():\n atexit.register(os.abort); return [1]")
    assert (outcome.ending, outcome.value) == (Ending.CRASHED, [1])
    assert outcome.said.startswith("SIGABRT once it had answered")


def hung(probe, body, has_begun):
    """Return the outcome of a probe that hangs, and its time limit: a longer one if it had not begun to hang.

    Python may take longer than that to start.
    """
    for timeout_s in (0.4, 2, WAIT_S):
        outcome = probe(body, timeout_s=timeout_s)
        if has_begun(outcome):
            break
    return outcome, timeout_s


def test_a_hang_ends_in_time_with_all_that_it_started(probe, tmp_path):
    note = tmp_path / "pid"
    body = f"""
def probe():
    pid = os.fork()
    if pid:
        with open({str(note)!r} + ".new", "w") as file:
            file.write(str(pid))
        os.rename(file.name, {str(note)!r})
        os.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()
"""
    outcome, timeout_s = hung(probe, body, lambda _: note.exists())
    assert (outcome.ending, outcome.said) == (Ending.HUNG, f"it did not end within {timeout_s} s")
    assert ended(int(note.read_text()))


def ended(pid):
    """Wait for the end of any process; a signal may take a moment."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], WAIT_S)[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("body", ["os.write(int(sys.argv[1]), b'garbage'); os._exit(0)", "os._exit(0)"])
def test_garbage_and_silence(probe, body):
    outcome = probe(f"def probe(): {body}")
    assert outcome.ending is Ending.FAILED
    assert not outcome.has_answered


def test_the_environment_is_the_given_one(probe):
    outcome = probe("def probe(): return dict(os.environ)", env={"LD_LIBRARY_PATH": "/nowhere"})
    assert outcome.value["LD_LIBRARY_PATH"] == "/nowhere"
    assert "HOME" not in outcome.value


def test_files_beside_a_probe_are_no_modules(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "probe.py").write_text("import json\ndef probe(): return 1")
    assert ask(tmp_path / "probe.py", timeout_s=WAIT_S).value == 1


@pytest.mark.tier2
def test_a_hang_after_the_answer_keeps_the_answer(probe):
    body = "import atexit\ndef probe():\n atexit.register(signal.pause); return [1]"
    outcome, _ = hung(probe, body, lambda outcome: outcome.has_answered)
    assert (outcome.ending, outcome.value) == (Ending.HUNG, [1])
    assert "once it had answered" in outcome.said


def test_what_a_probe_leaves_behind_does_not_hold_up_the_outcome(probe, tmp_path):
    """A process in a session of its own is not found and ended, but nobody waits for it."""
    note = tmp_path / "pid"
    body = f"""
def probe():
    ready, told = os.pipe()
    pid = os.fork()
    if not pid:
        os.setsid()
        os.write(told, b"x")
        signal.pause()
    os.read(ready, 1)
    open({str(note)!r}, "w").write(str(pid))
    return 1
"""
    outcome = probe(body)
    os.kill(int(note.read_text()), signal.SIGKILL)
    assert outcome.ending is Ending.ANSWERED
