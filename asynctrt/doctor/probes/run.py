"""Run a probe, and write its answer as JSON to a descriptor: ``run.py DESCRIPTOR FILE ARGUMENTS``.

A program of its own, started by its path: it must not import asynctrt.
"""

import faulthandler
import json
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location


def main(descriptor: int, path: str, *args: str) -> None:
    """Load the file, call its ``probe`` with the arguments, and write what it returns."""
    faulthandler.enable()
    spec = spec_from_file_location("probe", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    answer = json.dumps(module.probe(*args)).encode()
    with os.fdopen(descriptor, "wb") as file:
        file.write(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
