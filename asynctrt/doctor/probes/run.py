"""Run a probe, and write its answer as JSON to a descriptor: ``run.py DESCRIPTOR FILE ARGUMENTS``.

A separate program, started by its path: it must not import asynctrt.
"""

import json
import os
import runpy
import sys

if __name__ == "__main__":
    descriptor, path, *arguments = sys.argv[1:]
    answer = json.dumps(runpy.run_path(path)["probe"](*arguments)).encode()
    with os.fdopen(int(descriptor), "wb") as file:
        file.write(answer)
