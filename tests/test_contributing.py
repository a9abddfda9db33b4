"""CONTRIBUTING's worked examples fit the code that they are to be added to."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import asynctrt

ROOT = Path(__file__).parent.parent


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("number", range(3))
def test_a_diff_can_be_applied(number, tmp_path):
    diffs = blocks("diff")
    assert len(diffs) == 3
    for name in re.findall(r"^--- (\S+)", diffs[number], re.MULTILINE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    applied = subprocess.run(
        ["git", "apply", "-p0", "-"], cwd=tmp_path, input=diffs[number], text=True, capture_output=True
    )
    assert not applied.returncode, applied.stderr


@pytest.mark.anyio
async def test_the_backend_runs(tmp_path):
    (code,) = blocks("python")
    made = {}
    exec(compile(code, "CONTRIBUTING.md", "exec"), made)
    np.savez(tmp_path / "m.npz", w=3 * np.eye(3))
    async with asynctrt.open(made["load"](tmp_path / "m.npz")) as engine:
        assert (await engine.infer(np.ones((1, 3), np.float32)))["output"].tolist() == [[3, 3, 3]]
    with pytest.raises(asynctrt.ModelError, match=r"has no matrix w: .* Save one with np\.savez"):
        made["load"](tmp_path / "missing.npz")
