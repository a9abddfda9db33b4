"""A worker starts no worker, whatever its model's module does when it is imported."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import asynctrt
from asynctrt._util import process
from asynctrt.errors import UsageError
from tests.helpers import WAIT_S

ROOT = Path(__file__).parent.parent.parent

MODEL = """
    import asyncio, os, sys, asynctrt
    with open("starts", "a") as starts:
        starts.write(f"{os.getpid()}\\n")
    X, Y = (asynctrt.TensorSpec(name, "float32", (1,)) for name in "xy")
    model = asynctrt.FunctionModel(lambda inputs: inputs["x"] + 1, inputs=X, outputs=Y)
    async def main(name="service:model"):
        async with asynctrt.open(name, isolation="process") as engine:
            print("answer", (await engine.infer([[41]]))["y"].item(), flush=True)
"""

MULTIPROCESSING = """
    import multiprocessing
    def work():
        asyncio.run(main())
    def start():
        child = multiprocessing.get_context(sys.argv[1]).Process(target=work)
        child.start()
        child.join()
        sys.exit(child.exitcode)
"""


def run(folder, service, *command):
    """Run a program with this module beside it: what it says, and how many processes imported the module."""
    (folder / "service.py").write_text(textwrap.dedent(service))
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return ended, len(set((folder / "starts").read_text().split()))


@pytest.mark.tier2
@pytest.mark.parametrize(
    "command",
    [["service.py"], ["-m", "service"], ["-c", "import service"]],
    ids=["script", "module", "-c"],
)
def test_a_module_that_opens_itself_is_refused(tmp_path, command):
    ended, starts = run(tmp_path, MODEL + "    asyncio.run(main())\n", *command)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("asynctrt.errors.ModelError: 'service:model'")
    assert "if __name__ == '__main__'" in last
    assert starts == 2


@pytest.mark.tier2
def test_a_module_that_opens_itself_in_a_thread_later_is_refused(tmp_path):
    """The worker is open by then, and the module goes on."""
    later = """
    import threading
    def late():
        try:
            asyncio.run(main())
        except asynctrt.errors.UsageError as error:
            print(type(error).__name__, flush=True)
    thread = threading.Timer(1.0 if "asynctrt.workers.child" in sys.orig_argv else 0.0, late)
    thread.daemon = "asynctrt.workers.child" in sys.orig_argv
    thread.start()
    """
    ended, starts = run(tmp_path, MODEL + later, "service.py")
    assert ended.returncode == 0
    assert "answer 42.0" in ended.stdout
    assert starts == 2


@pytest.mark.tier2
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_process_of_multiprocessing_may_have_workers(tmp_path, method):
    guarded = MODEL + MULTIPROCESSING + "    if __name__ == '__main__':\n        start()\n"
    ended, starts = run(tmp_path, guarded, "service.py", method)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["answer", "42.0"]
    assert starts <= 3


@pytest.mark.tier2
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_that_a_worker_has_started_is_refused(tmp_path, method):
    """In a worker the module is not the main one, so that multiprocessing refuses nothing there."""
    (tmp_path / "task.py").write_text(
        "import asyncio\ndef work():\n    import service\n    asyncio.run(service.main())\n"
    )
    starts_process = f"""
    if __name__ == "service" and multiprocessing.parent_process() is None:
        import task
        child = multiprocessing.get_context({method!r}).Process(target=task.work)
        child.start()
        child.join()
    """
    ended, starts = run(tmp_path, MODEL + MULTIPROCESSING + starts_process, "-c", "import service")
    assert ended.returncode == 0
    assert "an attempt was made to start a worker process" in ended.stderr
    assert "answer 42.0" in ended.stdout
    assert starts == 4


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["__main__:model", "__mp_main__:make.model"])
async def test_a_model_of_the_main_module_is_refused(name):
    with pytest.raises(UsageError, match=r"main module, .* open 'service:model'"):
        await asynctrt.open(name, isolation="process")


@pytest.mark.anyio
async def test_a_worker_and_what_it_starts_open_no_worker(monkeypatch):
    monkeypatch.setenv(process.IN_WORKER, "1")
    with pytest.raises(UsageError, match="if __name__ == '__main__'"):
        await asynctrt.open("service:model", isolation="process")
