"""Is this tree slower than another commit? Measures what a request costs in both, in turn.

Each side is a process of its own, started anew for every repetition, that imports its own tree and uses only
the public API. A is the commit --base; B is this tree or the commit --head. Ratios are B over A, by pairs,
of the time and of the CPU time of a request, and "best" is the ratio of the smallest figures: below 1, B is
faster. On a machine that is busy with something else only the ratios mean something, and "best" the most.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from asynctrt.loadtest.making import describe_machine
from tests.benchmarks.common import save
from tests.benchmarks.mlp import mlp_onnx

ROOT = Path(__file__).parent.parent.parent
CHILD = Path(__file__).parent / "compare_commits_child.py"
WIDTHS = 7, 15, 7, 15, 6, 11, 6
ANSWER_S = 120.0
"""What a child may take to end, beyond the seconds that it measures."""


def unpack(commit, folder):
    """Unpack the package of a commit into a folder, without touching the checkout or its branches."""
    archive = folder / "tree.tar"
    subprocess.run(
        ["git", "-C", str(ROOT), "archive", "--output", str(archive), commit, "asynctrt"], check=True
    )
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()
    return folder


class Side:
    """Control a child process that measures one tree on one kind of event loop."""

    def __init__(self, tree, loop, model):
        self._child = subprocess.Popen(
            [sys.executable, "-P", str(CHILD), loop, str(model)],
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        ready = self._read()
        self.cases = ready["cases"]
        if not Path(ready["file"]).is_relative_to(tree):
            self.close()
            raise SystemExit(f"the child imported {ready['file']}, which is not in {tree}")

    def measure(self, case, seconds):
        self._child.stdin.write(json.dumps({"case": case, "seconds": seconds}) + "\n")
        self._child.stdin.flush()
        return self._read()

    def close(self):
        self._child.stdin.close()
        try:
            self._child.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()

    def _read(self):
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit(f"a child ended with exit status {self._child.wait()}")
        return json.loads(line)


def compare(trees, model, options):
    """Measure every case in turn, and return the figures of both sides by case."""
    runs = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("comparing", total=None)
        for repeat in range(options.repeats):
            for loop in options.loops.split(","):
                with ExitStack() as stack:
                    sides = {}
                    for name, tree in trees.items():
                        sides[name] = Side(tree, loop, model)
                        stack.callback(sides[name].close)
                    cases = [case for case in sides["A"].cases if options.only in f"{loop}: {case}"]
                    # The sides take turns in going first: A B, B A, A B.
                    order = list(sides)[:: -1 if repeat % 2 else 1]
                    for case in cases:
                        found = runs.setdefault(f"{loop}: {case}", {"A": [], "B": []})
                        for _ in range(options.blocks):
                            for name in order:
                                found[name].append(sides[name].measure(case, options.seconds))
                        progress.advance(task)
    return runs


def summary(pairs, figure):
    """Return medians and spreads of both sides and of their ratios, and the ratio of the smallest figures."""
    a, b = ([run[figure] for run in side] for side in zip(*pairs, strict=True))
    ratios = [after / max(before, 1e-3) for before, after in zip(a, b, strict=True)]
    return {
        "A": statistics.median(a),
        "A_spread": [min(a), max(a)],
        "B": statistics.median(b),
        "B_spread": [min(b), max(b)],
        "ratio": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
        "ratio_best": min(b) / max(min(a), 1e-3),
    }


def evaluate(runs):
    """Return by case the time and the CPU time of both sides with their ratios, or the errors."""
    figures = {}
    for case, sides in runs.items():
        errors = {name: run["error"] for name, side in sides.items() for run in side if "error" in run}
        if errors:
            figures[case] = {"errors": errors}
            continue
        pairs = list(zip(sides["A"], sides["B"], strict=True))
        figures[case] = {figure: summary(pairs, figure) for figure in ("us", "cpu_us")}
        figures[case]["runs"] = sides
    return figures


def print_table(title, figures):
    """Print one line for each case, as wide as it has to be."""
    print(title)
    columns = "A", "spread", "B", "spread", "B/A", "spread", "best"
    width = sum(WIDTHS) + len(WIDTHS)
    print(f"{'':42}{'µs a request':>{width}}{'CPU µs a request':>{width}}")
    print(
        f"{'':42}" + "".join(f" {name:>{size}}" for name, size in zip(columns * 2, WIDTHS * 2, strict=True))
    )
    for case, found in figures.items():
        if "errors" in found:
            print(f"{case:42} " + "; ".join(f"{name}: {text}" for name, text in found["errors"].items()))
            continue
        cells = []
        for figure in ("us", "cpu_us"):
            made = found[figure]
            for side in ("A", "B"):
                low, high = made[f"{side}_spread"]
                cells += [f"{made[side]:.1f}", f"{low:.1f}-{high:.1f}"]
            low, high = made["ratio_spread"]
            cells += [f"{made['ratio']:.3f}", f"{low:.2f}-{high:.2f}", f"{made['ratio_best']:.3f}"]
        print(
            f"{case:42}" + "".join(f" {cell:>{size}}" for cell, size in zip(cells, WIDTHS * 2, strict=True))
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="HEAD", help="commit A (default: HEAD)")
    parser.add_argument("--head", help="commit B (default: the files of this tree, committed or not)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each case on each side")
    parser.add_argument(
        "--blocks",
        type=int,
        default=1,
        help="how often each pair of processes measures a case, in turn: many short blocks find the "
        "quiet moments of a busy machine (--blocks 25 --seconds 0.05)",
    )
    parser.add_argument("--loops", default="asyncio,uvloop")
    parser.add_argument("--only", default="", help="only cases that have this text in their names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        for side in ("a", "b"):
            (folder / side).mkdir()
        trees = {"A": unpack(options.base, folder / "a"), "B": ROOT.resolve()}
        if options.head:
            trees["B"] = unpack(options.head, folder / "b")
        figures = evaluate(compare(trees, mlp_onnx(folder / "mlp.onnx"), options))
    machine = describe_machine()
    runs = options.repeats * options.blocks
    print_table(
        f"A: {options.base}, B: {options.head or 'this tree'}. Medians of {runs} runs of "
        f"{options.seconds} s in turn; {machine['cpu']}, {machine['cores']} cores",
        figures,
    )
    save(options.json, __doc__, figures)


if __name__ == "__main__":
    main()
