"""The command as a user types it: real processes, a real terminal, Ctrl-C."""

import codecs
import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest
from rich.text import Text

import asynctrt
from asynctrt.cli import app as cli
from asynctrt.errors import OverloadError

WAIT_S = 50
QUICK = ["--seconds", "0.05", "--repeats", "1"]


def asynctrt_command(*arguments, columns=160):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "asynctrt", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * WAIT_S,
        env={**os.environ, "COLUMNS": str(columns)},
    )
    return done.returncode, done.stdout, done.stderr


ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys
from asynctrt.__main__ import main
found = []
for sys.argv[1:] in json.loads(sys.argv[1]):
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    found.append((code, out.getvalue(), err.getvalue()))
json.dump(found, sys.stdout)
"""


def asynctrt_commands(*commands):
    """Run several commands that end by themselves in one process, as starting one takes a second."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER, json.dumps([list(map(str, one)) for one in commands])],
        capture_output=True,
        text=True,
        timeout=4 * WAIT_S,
        env={**os.environ, "COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


HOSTILE = "busy \x1b[31mRED\x1b]0;title\x07\x1b[2J\x9b2J\u202e\udcff [bold]"


def test_what_others_say_does_not_control_the_terminal(monkeypatch, capsys):
    """Names in models and errors of servers are other people's, and styles are ours."""

    def fails():
        raise OverloadError(HOSTILE)

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit):
        cli.main()
    cli._say(HOSTILE)
    cli.out.print(f"[red]{HOSTILE.replace('[', '(')}[/]", Text(HOSTILE))
    cli.out.print_json(json.dumps({"said": HOSTILE[:-9]}, ensure_ascii=False))
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert "busy" in text
        assert all(letter.isprintable() or letter == "\n" for letter in text), text


def in_a_terminal(*arguments, interrupt_at):
    """Run the command in a terminal, press Ctrl-C when the screen shows ``interrupt_at``."""
    main, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "asynctrt", *map(str, arguments)],
        stdin=end,
        stdout=end,
        stderr=end,
        env={**os.environ, "COLUMNS": "160", "TERM": "xterm"},
        start_new_session=True,
        # Shells start what runs in the background with Ctrl-C ignored, these tests too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(end)
    screen, pressed = "", False
    decode = codecs.getincrementaldecoder("utf-8")().decode
    try:
        with contextlib.suppress(OSError):  # The terminal is gone when the process has ended.
            while chunk := os.read(main, 65536):
                screen += decode(chunk)
                if not pressed and re.search(interrupt_at, screen):
                    os.kill(process.pid, signal.SIGINT)
                    pressed = True
        assert pressed, screen
        return process.wait(WAIT_S), screen
    finally:
        os.close(main)
        process.kill()
        process.wait()


def test_version_and_help():
    assert asynctrt_command("--version") == (0, f"asynctrt {asynctrt.__version__}\n", "")
    code, out, _ = asynctrt_command("--help")
    assert code == 0
    assert "demo" in out
    assert "inspect" in out


@pytest.mark.tier2
@pytest.mark.parametrize("command", [["serve"], ["load"], ["inspect"], ["demo"]])
def test_the_help_of_a_command_fits_a_terminal_and_is_whole(command):
    code, out, _ = asynctrt_command(*command, "--help", columns=80)
    assert (code, max(map(len, out.splitlines())) <= 80) == (0, True)
    assert "Usage: python -m asynctrt " + " ".join(command) in out
    assert "…" not in out
    assert "asynctrt " + command[0] in out[out.index("Examples:") :]
    if command == ["serve"]:
        assert "tables of the file, [[models]], each with a path" in " ".join(out.split())
        assert "--model-control" in out


WRONG = [
    (["nonsense"], 2, "No such command"),
    (["simulate", "--seeds", "3"], 1, "`asynctrt simulate` was removed. Use `asynctrt load`"),
    (["load", "m.onnx", "--scenario", "server"], 2, "'scenario' was removed: single-stream"),
    (["load", "m.onnx", "--png", "x"], 2, "'png' was removed: --report FILE.html"),
    (["bench", "m.onnx"], 1, "`asynctrt bench` was removed. Use `asynctrt load MODEL --sweep"),
    (["load"], 2, "Missing argument"),
    (["load", "missing.onnx"], 1, "ModelNotFoundError: there is no file 'missing.onnx'"),
    (["load", __file__], 1, "ModelError"),
    (["load", "m.onnx", "--max-delay", "5"], 1, "OptionsError: max_delay must be a number of seconds"),
    (["demo", "--seconds", "10ms"], 1, "OptionsError: seconds must be"),
    (["serve", "m.onnx", "--max-delay", "2s"], 1, "seconds ≥ 0 and ≤ 1, not 2.0. For milliseconds"),
    (["serve", "m.onnx", "--log-format", "xml"], 2, "'xml' is not one of 'text', 'json'"),
    (["demo", "/no/such/folder"], 2, "does not exist"),
    (["demo", __file__], 2, "is a file"),
    (["load", "m.onnx", "--rows", "many"], 2, "Invalid value for '--rows'"),
    (["demo", "--seconds", "soon"], 2, "'soon' is not a number of seconds"),
    (["serve", "m.onnx", "--http-port", "y"], 2, "Invalid value for '--http-port'"),
    (["load", "localhost:8000"], 1, "'localhost:8000' is not a file. For a server, give the address"),
    (["inspect", __file__], 1, "is not a TensorRT plan"),
    (["keys", "new", "mine"], 1, "UsageError: `asynctrt keys` was removed. Make keys with `ssh-keygen"),
    (["build", "m.onnx", "--key", "k"], 2, "'key' was removed: sign the plan"),
    (["doctor", "--device", "gpu"], 1, "'gpu' is not a device"),
]


@pytest.mark.tier2
@pytest.mark.timeout(240)
def test_what_is_wrong_is_said_without_a_traceback():
    found = asynctrt_commands(*(arguments for arguments, _, _ in WRONG))
    for (arguments, code, says), (returned, out, err) in zip(WRONG, found, strict=True):
        assert returned == code, arguments
        assert says in re.sub(r"[\s│]+", " ", err), arguments
        assert "Traceback" not in out + err, arguments


INTERRUPTED_AT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # In the background of a shell it is ignored.
module, sys.argv[1:] = sys.argv[1], ["doctor", "--help"]
class Finder:
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from asynctrt.__main__ import main
main()
"""


@pytest.mark.tier2
@pytest.mark.parametrize("module", ["asynctrt.cli.app", "typer"])
def test_ctrl_c_while_the_command_is_imported_is_silent(module):
    command = [sys.executable, "-c", INTERRUPTED_AT, module]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


LARGE_FOLDER = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[1:] = ["demo", "."]
from asynctrt.__main__ import main
def walk(top):
    os.kill(os.getpid(), signal.SIGINT)
    for number in range(100_000):
        time.sleep(0.01)
        yield top, [], [f"missing-{number}"]
os.walk = walk
main()
"""


@pytest.mark.tier2
def test_ctrl_c_ends_the_search_of_a_large_folder():
    done = subprocess.run(
        [sys.executable, "-c", LARGE_FOLDER], capture_output=True, text=True, timeout=WAIT_S
    )
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (130, "", False)


@pytest.mark.tier2
def test_demo(tmp_path):
    """Without a terminal, and 80 columns wide: no line is cut or too long, and it ends by itself."""
    for number in range(30):
        (tmp_path / f"{number}.py").write_text(
            f"import os\n\n\ndef function_{number}():\n    return os.getcwd()\n"
        )
    (tmp_path / "tiny.py").write_text("a")
    code, out, err = asynctrt_command("demo", tmp_path, "--seconds", "0.05", columns=80)
    assert (code, err) == (0, "")
    assert re.search(r"30 files.*: 30 python", out)
    assert "too small: 1." in out
    for way, parts in (("in the coroutine", 1), ("a batcher by hand", 5), ("asynctrt", 5)):
        assert len(re.findall(rf"^  {way}( +([\d,.]+%?|inf)){{2,3}}$", out, re.MULTILINE)) == parts, way
    assert out.count("asynctrt / by hand: ") == 5
    assert re.search(r"a batcher by hand +\d+ of 256\n  asynctrt +0 of 256\n", out)
    assert max(map(len, out.splitlines())) <= 80
    assert "asynctrt serve model.onnx" in out[out.index("To try next") :]


def test_demo_of_an_empty_folder(tmp_path):
    code, out, _ = asynctrt_command("demo", tmp_path)
    assert code == 0
    assert "No file could be identified" in out


@pytest.mark.tier2
@pytest.mark.timeout(240)  # ONNX Runtime's threads spin, which is slow where other processes are busy.
@pytest.mark.parametrize(
    ("interrupt_at", "shows"),
    [
        (r"identifying files [1-9]\d*/\d", "the model of magika"),
        (r"Plain load: a batcher by hand", r"in the coroutine +\d"),
    ],
)
def test_ctrl_c_in_the_demo_shows_what_was_found(interrupt_at, shows):
    code, screen = in_a_terminal("demo", "--seconds", "0.2", interrupt_at=interrupt_at)
    assert code == 130
    assert "Interrupted" in screen
    assert "Traceback" not in screen
    assert re.search(shows, screen)
