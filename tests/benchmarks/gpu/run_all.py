"""Run all GPU benchmarks, each in a process of its own, within one time budget.

Their output also goes to DIR/log.txt, the figures to DIR/gpu-NAME.json, the timeline to DIR/gpu-overlap.svg.
If one fails or takes too long, the others run all the same, and the exit status is 1.
"""

import argparse
import os
import subprocess
import sys
import threading
from pathlib import Path

from asynctrt._util import clock

QUICK = {
    "completion": ["--seconds", "0.4"],
    "saturation": ["--seconds", "0.2"],
    "overlap": ["--seconds", "0.25"],
    "sharing": ["--seconds", "0.4"],
    "urgent": ["--seconds", "1"],
    "resnet": ["--seconds", "0.4", "--load-seconds", "2.5"],
    "poisson": ["--seconds", "1.5", "--repeats", "2"],
    "shapes": ["--seconds", "0.7", "--repeats", "1"],
    "weights": ["--seconds", "0.5", "--repeats", "1"],
    "million": ["--seconds", "170"],
}
FULL = {
    "completion": ["--seconds", "2"],
    "saturation": ["--seconds", "1"],
    "overlap": ["--seconds", "1"],
    "sharing": ["--seconds", "2", "--repeats", "5"],
    "urgent": ["--seconds", "5"],
    "resnet": ["--seconds", "1", "--repeats", "5", "--load-seconds", "10"],
    "poisson": [],
    "shapes": [],
    "weights": [],
    "million": [],
}
QUICK_LIMIT_S = {
    "completion": 130,
    "saturation": 90,
    "overlap": 45,
    "sharing": 70,
    "urgent": 60,
    "resnet": 150,
    "poisson": 170,
    "shapes": 60,
    "weights": 40,
    "million": 190,
}


def run(name, more, limit_s, log):
    """Run one of them; return whether it succeeded in time."""
    command = [sys.executable, "-m", f"tests.benchmarks.gpu.{name}", *more]
    print(f"=== {name}: at most {limit_s:.0f} s", flush=True)
    start_ns = clock.now_ns()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    guard = threading.Timer(limit_s, process.kill)
    guard.start()
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
    finally:
        guard.cancel()
    status = process.wait()
    took_s = (clock.now_ns() - start_ns) / 1e9
    end = "ended" if not status else f"FAILED with {status}" if took_s < limit_s else "TOOK TOO LONG"
    said = f"=== {name}: {end} after {took_s:.0f} s\n"
    print(said, flush=True)
    log.write(said)
    log.flush()
    return not status


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true", help="run all of them within the budget")
    parser.add_argument("--budget", type=float, default=530, help="seconds for all of them, with --quick")
    parser.add_argument("--only", action="append", choices=list(QUICK), help="only this one; may be repeated")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    end_ns = clock.now_ns() + int(options.budget * 1e9)
    failed = []
    with (options.out / "log.txt").open("a") as log:
        for name in options.only or QUICK:
            more = list((QUICK if options.quick else FULL)[name])
            limit_s = 3600.0
            if options.quick:
                limit_s = min(QUICK_LIMIT_S[name], (end_ns - clock.now_ns()) / 1e9)
                if name == "million":
                    more = ["--seconds", str(max(limit_s - 20, 1))]
            more += ["--device", options.device, "--json", str(options.out / f"gpu-{name}.json")]
            if name == "overlap":
                more += ["--picture", str(options.out / "gpu-overlap.svg")]
            if limit_s < 5 or not run(name, more, limit_s, log):
                failed.append(name)
    print(f"failed, or not reached: {', '.join(failed)}" if failed else "all of them succeeded", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
