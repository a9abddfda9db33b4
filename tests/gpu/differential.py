"""The strict double against the real TensorRT on a GPU: the same scenarios on both, a process for each.

With a package, plans that it runs, and the lean runtime of these if they are of an older version::

    export ASYNCTRT_TEST_FLAVOUR=tensorrt_lean  # 10.16
    export ASYNCTRT_TEST_PLANS=FOLDER  # Of mlp-vcx.plan and encoder2-vcx.plan, of TensorRT 8.6.
    export ASYNCTRT_TEST_LEAN_RUNTIME=libnvinfer_lean.so.8
    python -m tests.gpu.differential --json differences.json

It prints a table, writes what each step did, and exits with 1 if something differs that is not known. Without
a GPU, ``--flavour double`` puts the double on both sides.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.scenarios import SCENARIOS
from tests.gpu.sides import OverError, Setting, Side

ROOT = Path(__file__).parents[2]
SIDES = ("real", "double")
PROCESS_S = 60
JOBS = 8

KNOWN = {}
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


def perform(name, side, setting, version):
    """Run a scenario in this process, and note its steps."""
    with tempfile.TemporaryDirectory() as folder:
        here = Side(side, setting, version, Path(folder))
        try:
            SCENARIOS[name](here)
            end = "done"
        except OverError:
            end = "undefined"
        print(json.dumps({"end": end}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # What a library does when its process ends is none of the scenarios.


def outcome_of(name, side, arguments, version, until_s):
    """Run a scenario in another process."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.gpu.differential", "--perform", name, side]
    command += ["--flavour", arguments.flavour, "--plans", arguments.plans, "--version", version]
    command += ["--lean-runtime", arguments.lean_runtime]
    limit_s = min(PROCESS_S, until_s - time.monotonic())
    if limit_s <= 0:
        return Outcome((), "not run")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", cwd=ROOT, timeout=limit_s, check=False
        )
        said, stderr, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        if limit_s < PROCESS_S:
            return Outcome((), "not run")
        said, stderr = ((one or b"").decode(errors="replace") for one in (error.stdout, error.stderr))
        code = None
    return read_outcome(said, stderr, code)


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
    return Outcome(tuple(steps), end, stderr[-3000:])


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
    names = [name for name in SCENARIOS if not arguments.only or re.search(arguments.only, name)]
    until_s = time.monotonic() + arguments.within
    version = version_of(arguments.flavour)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        tasks = {
            (name, side): pool.submit(outcome_of, name, side, arguments, version, until_s)
            for name in names
            for side in SIDES
        }
        outcomes = {key: task.result() for key, task in tasks.items()}
    report, rows = {}, []
    for name in names:
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
        if outcome.end.startswith("failure"):
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
    parser.add_argument("--within", type=float, default=150, help="seconds for all; later ones do not run")
    parser.add_argument("--jobs", type=int, default=JOBS, help="processes at a time")
    parser.add_argument("--version", default="", help=argparse.SUPPRESS)
    parser.add_argument("--perform", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.perform:
        # A full package names libraries that nothing here calls.
        sys.setdlopenflags(os.RTLD_LAZY)
        setting = Setting(arguments.flavour, arguments.plans, arguments.lean_runtime)
        perform(*arguments.perform, setting, arguments.version)
    return 1 if compare(arguments) else 0


if __name__ == "__main__":
    sys.exit(main())
