"""The strict double against the real TensorRT on a GPU: the same scenarios on both.

With a package, plans that it runs, and the lean runtime of these if they are of an older version::

    export ASYNCTRT_TEST_FLAVOUR=tensorrt_lean  # 10.16
    export ASYNCTRT_TEST_PLANS=FOLDER  # Of mlp-vcx.plan and encoder2-vcx.plan, of TensorRT 8.6.
    export ASYNCTRT_TEST_LEAN_RUNTIME=libnvinfer_lean.so.8
    python -m tests.gpu.differential --json differences.json

With the full library (``tensorrt``, plans of its version), leave the lean runtime out.

It prints a table, writes what each step did, and exits with 1 if something differs that is not known. What
may end a process is done last, in a process of its own. Without a GPU, ``--flavour double`` puts the double
on both sides.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from asynctrt.errors import DeviceError
from tests.gpu.scenarios import RISKY, SCENARIOS
from tests.gpu.sides import OverError, Setting, Side

ROOT = Path(__file__).parents[2]
SIDES = ("real", "double")
STEP_S = 30
"""Seconds for one step, the start of a process included."""

JOBS = 4
LINE_MAX = 1 << 24
STDERR_MAX = 3000

KNOWN = {
    ("plan_of_a_later_version", "deserialise"): (
        "the lean runtime of 8.6 does not look at the version in the header, which no build writes wrongly"
    ),
    ("lean_runtime_outlives_what_loaded_it", "deserialise"): "the documentation forbids it",
    ("enqueue_after_a_shape_that_was_refused", "enqueue"): (
        "it runs with the shapes before, which are not those of the inputs that were meant"
    ),
    ("enqueue_on_the_default_stream", "enqueue"): (
        "it works, and waits for all other streams: the double's devices have no such stream"
    ),
    ("engine_of_one_profile", "profile 0"): "the plan under 8.6 was built for 64 rows, and not for 16",
    (
        "address_that_is_not_aligned",
        "set",
    ): "8.6 refuses what is not aligned to one value, and takes the rest",
    ("allocator_refuses_a_context", "context 0"): "8.6.0 answers None, and 10.16 crashes",
    ("allocator_refuses_a_context_without_memory", "context 0"): "as above",
    ("allocator_answers_none", "context 0"): "the bindings only print that None is no address",
    (
        "graph_after_other_shapes_and_back",
        "next call",
    ): "the documentation leaves undefined what was computed",
    (
        "auxiliary_streams_that_are_the_same",
        "set",
    ): "8.6 reports it, and the double ends the test that did it",
    ("recorder_that_is_gone", "an error"): "what a destroyed object does is luck",
}
"""Differences that stay, each with the reason: by the scenario, or by the scenario and the step."""


@dataclass(frozen=True)
class Outcome:
    """What became of a scenario on one side."""

    steps: tuple
    end: str
    """``done``, ``undefined`` after a violation, or how the process ended."""
    stderr: str = ""

    @property
    def text(self):
        last = self.steps[-1]["step"] if self.steps else "the start"
        return self.end if self.end == "done" else f"{self.end} at {last!r}"


def perform(names, side, setting, version):
    """Run scenarios in this process, and note their steps; end early once the GPU is of no use any more."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            here = Side(side, setting, version, Path(folder))
            print(json.dumps({"scenario": name}), flush=True)
            try:
                SCENARIOS[name](here)
                end = "done"
            except OverError:
                end = "undefined"
            if name not in RISKY:
                here.close()
            # On a line of its own, whatever the library has printed.
            print("\n" + json.dumps({"end": end}), flush=True)
        if is_lost(here.device):
            break
    sys.stdout.flush()
    os._exit(0)  # What a library does when its process ends is none of the scenarios.


def is_lost(device):
    """Return whether a device is of no use any more, which its next call tells."""
    with contextlib.suppress(DeviceError):
        device.memory()
    return device.lost is not None


class Comparison:
    """Runs scenarios in processes, and has what became of each."""

    def __init__(self, arguments, version):
        self.arguments = arguments
        self.version = version
        self.names = [name for name in SCENARIOS if not arguments.only or re.search(arguments.only, name)]
        self.outcomes = {}
        self.slots = asyncio.Semaphore(arguments.jobs)
        self.until_s = time.monotonic() + arguments.within

    async def run(self):
        """Run all scenarios on both sides: those that may end a process after the others, each alone."""
        harmless = [name for name in self.names if name not in RISKY]
        groups = max(1, self.arguments.jobs - 1)
        real = [self._run(harmless[at::groups], "real") for at in range(groups)]
        await asyncio.gather(self._run(self.names, "double"), *real)
        await asyncio.gather(*(self._run([name], "real") for name in self.names if name in RISKY))

    async def _run(self, names, side):
        """Run scenarios in one process, and go on in another after one that ended it."""
        while names:
            async with self.slots:
                ran = await self._run_process(names, side)
            names = names[ran:]

    async def _run_process(self, names, side):
        """Run scenarios in one process until it ends; return how many have an outcome."""
        if self._left_s() <= 0:
            return self._skip(names, side)
        arguments = self.arguments
        command = ["-X", "faulthandler", "-m", "tests.gpu.differential", "--perform", ",".join(names), side]
        command += ["--flavour", arguments.flavour, "--plans", arguments.plans, "--version", self.version]
        command += ["--lean-runtime", arguments.lean_runtime]
        said, ran = [], 0
        with tempfile.TemporaryFile() as errors:
            output = {"stdout": asyncio.subprocess.PIPE, "stderr": errors, "limit": LINE_MAX}
            process = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=ROOT, **output)
            code = None
            try:
                while line := await asyncio.wait_for(process.stdout.readline(), self._left_s()):
                    said.append(line.decode(errors="replace"))
                    if said[-1].startswith('{"end"'):
                        self._note(names[ran], side, read_outcome("".join(said), "", 0))
                        said, ran = [], ran + 1
                code = await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
            errors.seek(0)
            stderr = errors.read().decode(errors="replace")
        if self._left_s() <= 0 or not (ran or said):
            return ran + self._skip(names[ran:], side, stderr)
        if said:
            self._note(names[ran], side, read_outcome("".join(said), stderr, code))
        return ran + bool(said)

    def _skip(self, names, side, stderr=""):
        for name in names:
            self._note(name, side, Outcome((), "not run", stderr[-STDERR_MAX:]))
        return len(names)

    def _left_s(self):
        return min(STEP_S, self.until_s - time.monotonic())

    def _note(self, name, side, outcome):
        self.outcomes[name, side] = outcome
        progress = f"{len(self.outcomes)} of {2 * len(self.names)}"
        print(f"{progress}: {name} on the {side} side: {outcome.text}", file=sys.stderr, flush=True)


def read_outcome(said, stderr, code):
    """Return what a process noted, and how it ended."""
    steps, begun, end = [], None, None
    for line in said.splitlines():
        try:
            note = json.loads(line)
        except ValueError:
            continue  # Libraries print, too.
        if not isinstance(note, dict):
            continue
        if "end" in note:
            end = note["end"]
        elif "begins" in note:
            begun = note["begins"]
        elif "step" in note:
            steps.append(note)
            begun = None
    if end is None:
        if code is None:
            end = "hangs"
        else:
            end = f"crash ({signal.Signals(-code).name})" if code < 0 else f"failure ({code})"
        steps.append({"step": begun or "between the steps", "value": end})
    return Outcome(tuple(steps), end, stderr[-STDERR_MAX:])


def differences(name, real, double):
    """Yield the steps that differ: the step, what each side did, and the verdict.

    A verdict is ``differs``, ``stricter`` where the double says that what follows is undefined, ``known``.
    """
    for one, other in zip(real.steps, double.steps, strict=False):
        step = one["step"]
        verdict = verdict_of(one, other)
        if verdict != "same":
            verdict = "known" if {name, (name, step)} & KNOWN.keys() else verdict
            yield step, told(one), told(other), verdict
        if is_end(one) or is_end(other):
            return
    if len(real.steps) != len(double.steps):
        verdict = "known" if name in KNOWN else "differs"
        yield "the end", real.text, double.text, verdict


def verdict_of(real, double):
    is_broken = any(str(one["value"]).startswith("failure") for one in (real, double))
    if real["step"] != double["step"] or is_broken:
        return "differs"
    if is_end(double):
        return "same" if is_end(real) else "stricter"
    return "same" if told(real) == told(double) else "differs"


def is_end(note):
    """Return whether nothing of a scenario counts after a step."""
    return str(note["value"]).startswith(("undefined", "crash", "hangs", "failure"))


def told(note):
    """Return what counts of a step: its value and what was reported, without the words."""
    errors = [*note.get("recorded", ()), *(f"{one} (logged)" for one in note.get("logged", ()))]
    value = note["value"]
    if isinstance(value, str):
        value = re.sub(r"^undefined: .*", "undefined", value, flags=re.DOTALL)
    return f"{value}" + (f"; {', '.join(errors)}" if errors else "")


def version_of(flavour):
    """Return the version of a package with four numbers, or an empty string for the double."""
    if flavour == "double":
        return ""
    program = "import os, sys; sys.setdlopenflags(os.RTLD_LAZY); "
    program += f"import {flavour}; print({flavour}.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        sys.exit(f"{flavour} cannot be imported: {done.stderr}")
    numbers = done.stdout.split()[-1].split(".")
    return ".".join([*numbers, "0"] if len(numbers) == 3 else numbers[:4])


def compare(arguments):
    """Run all scenarios on both sides, print the table, write the steps, and return how many differ."""
    version = version_of(arguments.flavour)
    comparison = Comparison(arguments, version)
    asyncio.run(comparison.run())
    outcomes = comparison.outcomes
    report, rows = {}, []
    for name in comparison.names:
        real, double = (outcomes[name, side] for side in SIDES)
        found = list(differences(name, real, double))
        verdicts = {verdict for *_, verdict in found}
        if "not run" in (real.end, double.end):
            verdict = "not run"
        else:
            verdict = next((one for one in ("differs", "stricter", "known") if one in verdicts), "same")
        rows.append((name, real.text, double.text, verdict))
        rows.extend((f"    {step}", one, other, kind) for step, one, other, kind in found)
        report[name] = {
            "verdict": verdict,
            "differences": [dict(zip(("step", *SIDES, "verdict"), one, strict=True)) for one in found],
            **{side: vars_of(outcomes[name, side]) for side in SIDES},
        }
    print_table(("scenario", *SIDES, "verdict"), rows)
    for (name, side), outcome in outcomes.items():
        if outcome.end.startswith(("failure", "not run")) and outcome.stderr:
            print(f"{name} on the {side} side: {''.join(outcome.stderr.splitlines()[-1:])}")
    counts = {
        kind: sum(one["verdict"] == kind for one in report.values())
        for kind in ("same", "stricter", "known", "differs", "not run")
    }
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if arguments.json:
        head = {"flavour": arguments.flavour, "version": version, "counts": counts, "scenarios": report}
        Path(arguments.json).write_text(json.dumps(head, indent=1) + "\n")
    return counts["differs"] + counts["not run"]


def vars_of(outcome):
    return {"end": outcome.text, "steps": list(outcome.steps), "stderr": outcome.stderr}


def print_table(head, rows):
    widths = [min(60, max(len(str(row[at])) for row in (head, *rows))) for at in range(4)]
    for row in (head, *rows):
        print("  ".join(str(one)[:60].ljust(width) for one, width in zip(row, widths, strict=True)).rstrip())


def setting_from_environment():
    """Return what the environment names: the package, the plans, the lean runtime."""
    return Setting(
        os.environ.get("ASYNCTRT_TEST_FLAVOUR", ""),
        os.environ.get("ASYNCTRT_TEST_PLANS", ""),
        os.environ.get("ASYNCTRT_TEST_LEAN_RUNTIME", ""),
    )


def main(argv=None):
    given = setting_from_environment()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--flavour", default=given.flavour or "tensorrt_lean")
    parser.add_argument("--plans", default=given.plans)
    parser.add_argument("--lean-runtime", default=given.lean_runtime)
    parser.add_argument("--json", default="", help="the file for what each step did")
    parser.add_argument("--only", default="", help="a pattern of names of scenarios")
    parser.add_argument("--within", type=float, default=60, help="seconds for all; later ones do not run")
    parser.add_argument("--jobs", type=int, default=JOBS, help="processes at a time")
    parser.add_argument("--version", default="", help=argparse.SUPPRESS)
    parser.add_argument("--perform", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.perform:
        # A full package names libraries that nothing here calls.
        sys.setdlopenflags(os.RTLD_LAZY)
        setting = Setting(arguments.flavour, arguments.plans, arguments.lean_runtime)
        names, side = arguments.perform
        perform(names.split(","), side, setting, arguments.version)
    return 1 if compare(arguments) else 0


if __name__ == "__main__":
    sys.exit(main())
