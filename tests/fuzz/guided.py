"""Run a fuzzer that looks for inputs that reach new lines: atheris, in a process of its own.

A module that fuzzes gives :func:`main` a function that tries one input. README.md has the commands.
"""

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def instrumented(*packages):
    """Have atheris measure the coverage of what is imported in this context, in a process that fuzzes."""
    if "--worker" not in sys.argv:
        return contextlib.nullcontext()
    import atheris

    return atheris.instrument_imports(include=list(packages))


class Reader:
    """Turns the fuzzer's bytes into choices; beyond their end every choice is 0."""

    def __init__(self, data):
        self._data = data
        self._position = 0

    def take(self, count):
        """Return the next `count` bytes, or fewer at the end."""
        start, self._position = self._position, min(self._position + count, len(self._data))
        return self._data[start : self._position]

    def number(self, count=1):
        """Return the next `count` bytes as a number."""
        return int.from_bytes(self.take(count), "little")

    def pick(self, choices):
        """Return one of the choices."""
        return choices[self.number() % len(choices)]

    def rest(self):
        """Return all remaining bytes."""
        return self.take(len(self._data))


def fuzz(module, try_one, seeds, words, runs, seconds, folder, seed):
    """Run the fuzzer in its own process, print what it found, and return its exit status."""
    corpus, found = folder / "corpus", folder / "found"
    corpus.mkdir()
    found.mkdir()
    for number, raw in enumerate(seeds()):
        try_one(raw)
        (corpus / f"seed{number}").write_bytes(raw)
    dictionary = folder / "words"
    quoted = ["".join(f"\\x{byte:02x}" for byte in word) for word in words]
    dictionary.write_text("".join(f'"{word}"\n' for word in quoted))
    flags = [f"-runs={runs}", f"-max_total_time={seconds}", f"-seed={seed}", f"-dict={dictionary}"]
    flags += [f"-artifact_prefix={found}/", "-max_len=4096", "-timeout=20", "-rss_limit_mb=4096"]
    command = [sys.executable, "-m", module, "--worker", *flags, "-print_final_stats=1", str(corpus)]
    worker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace")
    lines = []
    for line in worker.stderr:
        lines.append(line)
        if re.match(r"#\d+\s+(INITED|pulse|NEW|DONE)", line):
            print(line, end="", flush=True)
    status = worker.wait()
    reached = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", "".join(lines))
    executed = re.findall(r"number_of_executed_units: (\d+)", "".join(lines))
    print(
        f"{executed[-1] if executed else 0} runs with seed {seed}; (edges, features, inputs): {reached[-1:]}"
    )
    for path in sorted(found.iterdir()):
        kept = Path(tempfile.gettempdir()) / f"{module.rpartition('.')[2]}-{path.name}"
        kept.write_bytes(path.read_bytes())
        print("".join(line for line in lines if not line.startswith("#"))[-4000:])
        print(f"a finding: {path.read_bytes()!r}\nreplay it: python -m {module} --replay {kept}")
    if status and not list(found.iterdir()):
        print("".join(lines)[-4000:])
    return status


def main(module, doc, try_one, seeds, words):
    """Run the command line of a module that fuzzes, and exit.

    :param try_one: tries one input, ``bytes``, and raises if a property is violated.
    :param seeds: yields valid inputs to start from.
    :param words: bytes that occur in inputs.
    """
    if "--worker" in sys.argv:
        import atheris

        atheris.Setup([sys.argv[0], *sys.argv[sys.argv.index("--worker") + 1 :]], try_one)
        atheris.Fuzz()
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--seconds", type=int, default=0, help="at most; 0 means no limit")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=Path, help="a file with a failing input")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        try_one(arguments.replay.read_bytes())
        print("no property is violated")
        sys.exit(0)
    with tempfile.TemporaryDirectory() as folder:
        given = arguments.runs, arguments.seconds, Path(folder), arguments.seed
        sys.exit(fuzz(module, try_one, seeds, words, *given))
