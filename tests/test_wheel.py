"""What `make wheel` builds has everything, and runs README's ten minutes where no checkout is."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support.blocks import all_blocks

ROOT = Path(__file__).resolve().parents[1]
MAKE = shutil.which("make")

pytestmark = [
    pytest.mark.command,
    pytest.mark.full("half a minute"),
    pytest.mark.skipif(MAKE is None, reason="make is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("build") is None, reason="no extra `release`"),
]


def done(command, folder, **environ):
    """What a command printed."""
    env = {**os.environ, **environ}
    ended = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=250
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_wheel_trains_from_an_empty_folder(tmp_path):
    """Breaks as a file that only a checkout has, such as the code with which ranks begin."""
    # without isolation nothing is downloaded; the environment counts as made
    given = [f"BIN={Path(sys.executable).parent}", f"DIST={tmp_path}/dist", "BUILD=--no-isolation"]
    copy = shutil.copytree(
        ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(".*", "build", "*.egg-info")
    )
    said = done([MAKE, "-o", ".venv/.for-release", "wheel", *given], copy)
    assert said.count("PASSED") == 2 and said.endswith(".whl: OK\n")
    (wheel,) = tmp_path.glob("dist/*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    here = [one for one in (ROOT / "dtk").rglob("*") if one.suffix != ".pyc" and one.is_file()]
    assert packed == {str(one.relative_to(ROOT)) for one in here}
    assert {"dtk/py.typed", "dtk/launch/bootstrap/sitecustomize.py"} <= packed

    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    done([*pip, "--target", str(site), str(wheel)], work)
    (block,) = [one.text for one in all_blocks() if one.text.startswith("import dtk  # 1")]
    (work / "train.py").write_text(f"{block}\nprint(strategy.size, dtk.__file__)\n")
    said = done([str(site / "bin" / "dtk"), "run", "-n", "2", "train.py"], work, PYTHONPATH=site)
    last = re.findall(r"^\[(\d)\] 2 (.*)$", said, re.MULTILINE)
    assert sorted(last) == [(rank, str(site / "dtk" / "__init__.py")) for rank in "01"]
    assert "epoch 3/3" in said.lower()
