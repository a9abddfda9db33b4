"""Each example runs, and says what it should."""

import asyncio
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import asynctrt
from asynctrt.devices.host import HostDevice
from tests.contract.devices import strict
from tests.doubles.tensorrt import EngineSpec

EXAMPLES = Path(__file__).parent.parent / "examples"
EXPECTED = {
    "batch_function.py": r"1000 answers of \(4,\) in \d\d calls\n0 drow \.\.\. ValueError\('there is",
    "quickstart.py": r"1000 answers of \(1, 4\)\n[\d.]+ rows a batch; the first: Timing\(queue_ns=\d+",
    "overload.py": r"(?s)ordinary: DeadlineError.*ordinary: QueueFullError.*urgent: answered.*refused=\d+",
    "load_test.py": r"(\d+) of \1 answered, 0% errors\nheld: True, p50 [\d.]+ ms, p99 [\d.]+ ms\n[\d.]+ rows",
    "testing_an_application.py": r"^sorry\n-2\.0\n$",
}


def test_every_example_is_expected_to_say_something():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*EXPECTED, "tensorrt_plan.py"}


FIRST = {"quickstart.py", "batch_function.py"}
"""Those that the first tier runs."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST else pytest.mark.tier2) for name in EXPECTED]
)
def test_example(name):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert re.search(EXPECTED[name], done.stdout), done.stdout


def test_the_example_of_a_plan(capsys):
    """On the strict double, which stands in for TensorRT."""
    example = runpy.run_path(str(EXAMPLES / "tensorrt_plan.py"))
    device = HostDevice()
    model = strict(device, EngineSpec())

    async def main():
        async with asynctrt.open(model, device=device, options=example["OPTIONS"]) as engine:
            await example["use"](engine)

    asyncio.run(main())
    model.close()
    printed = capsys.readouterr().out
    assert re.search(r"plan on host: (?s:.*)200 answers(?s:.*)16,896 bytes;.* 33,792\n", printed), printed
