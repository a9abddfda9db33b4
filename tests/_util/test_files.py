"""Files are written completely or not at all."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from asynctrt._util import files
from asynctrt._util.cancellation import Cancellation, cancelled_by
from asynctrt._util.files import locked, write_whole
from asynctrt.errors import OptionsError, UsageError

ROOT = Path(__file__).parents[2]
WAIT_S = 30

WRITER = """
import os, sys
from pathlib import Path
from asynctrt._util.files import write_whole

def fsync(descriptor):
    print("half way", flush=True)
    sys.stdin.read(1)

os.fsync = fsync
write_whole(Path(sys.argv[1]), b"new")
"""


class Writer:
    """A process that stands still while it writes a file."""

    def __init__(self, path):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self.killer = threading.Timer(WAIT_S, self.process.kill)
        self.killer.start()
        assert self.process.stdout.readline() == b"half way\n"

    def end(self, number=None):
        """Kill it, or let it go on; return its exit status."""
        if number is not None:
            self.process.send_signal(number)
        self.process.communicate(b"\n" if number is None else None)
        self.killer.cancel()
        return self.process.returncode


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_writer_that_is_killed_leaves_the_old_file(tmp_path):
    path = tmp_path / "m.plan"
    path.write_bytes(b"old")
    assert Writer(path).end(signal.SIGKILL) == -signal.SIGKILL
    assert path.read_bytes() == b"old"


def test_of_two_writers_the_last_wins(tmp_path):
    path = tmp_path / "m.plan"
    writer = Writer(path)
    write_whole(path, b"mine")
    assert path.read_bytes() == b"mine"
    assert writer.end() == 0
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["m.plan"]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_try_lock", lambda descriptor: None)
    with pytest.raises(UsageError, match="has no locks"), locked(tmp_path / "lock"):
        pass


def test_who_waits_for_a_lock_can_be_interrupted(tmp_path):
    cancellation, said = Cancellation(), []

    def waiting():
        said.append("waiting")
        cancellation.cancel()

    with (
        locked(tmp_path / "lock"),
        cancelled_by(cancellation),
        pytest.raises(UsageError, match="interrupted"),
        locked(tmp_path / "lock", waiting),
    ):
        pass
    with locked(tmp_path / "lock", waiting):
        assert said == ["waiting"]


def test_a_cancellation_calls_once_and_only_while_it_is_asked_to():
    cancellation, said = Cancellation(), []
    with cancellation.calling(lambda: said.append("over")):
        pass
    with cancellation.calling(lambda: said.append("inside")):
        cancellation.cancel()
        cancellation.cancel()
    with cancellation.calling(lambda: said.append("late")):
        assert said == ["inside", "late"]
    assert cancellation.is_cancelled
    assert repr(cancellation) == "<Cancellation cancelled>"


@pytest.mark.parametrize("content", ["x = ", "x", "x = " + "[" * 10**5, "x = " + "{a=" * 10**5])
def test_text_that_is_not_toml_is_an_error_with_its_path(content, tmp_path):
    (tmp_path / "a.toml").write_text(content)
    with pytest.raises(OptionsError, match=r"a\.toml' is not valid TOML: "):
        files.read_toml(tmp_path / "a.toml", 1 << 20, "the file")


@pytest.mark.parametrize("line", ["{} = 1", "[{}]", "[[{}]]", "x = {{{} = 1}}"])
def test_a_key_of_many_parts_is_refused(line, tmp_path):
    """`tomllib` would need 8 bytes for each pair of them."""
    (tmp_path / "a.toml").write_text(line.format(".".join("a" * 10**5)))
    with pytest.raises(OptionsError, match="has a key of more than 100 parts"):
        files.read_toml(tmp_path / "a.toml", 1 << 20, "the file")


def test_long_texts_are_no_keys(tmp_path):
    prose, word = "A sentence. " * 200, "x" * 500_000
    (tmp_path / "a.toml").write_text(f'prose = "{prose}"\nword = "{word}"\nmany = [{"1.5," * 200}]\n')
    content = files.read_toml(tmp_path / "a.toml", 1 << 20, "the file")
    assert content == {"prose": prose, "word": word, "many": [1.5] * 200}
