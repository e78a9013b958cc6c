"""Benchmarks start, and print what they measure; whether the numbers are good is not tested."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_overhead_prints_a_ratio_for_each_model():
    argv = [sys.executable, str(ROOT / "benchmarks" / "overhead.py"), "--rounds=1", "--steps=2"]
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    ratios = re.findall(r"ratio +(\d+\.\d+) \(", done.stdout)
    assert len(ratios) == 2, done.stdout
    assert all(0.05 < float(ratio) < 20 for ratio in ratios)


def test_startup_prints_every_phase_of_every_contender(tmp_path):
    argv = [sys.executable, str(ROOT / "benchmarks" / "startup.py"), "-n1", "--rounds=1"]
    argv += ["--contenders", "bare", "dtk run", "--samples", str(tmp_path / "samples.json")]
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    (turn,) = json.loads((tmp_path / "samples.json").read_text())["dtk run"]
    whole = turn.pop("until all is over")
    assert 0 < turn.pop("until the first step is over") < whole
    assert sum(turn.values()) == pytest.approx(whole)
    assert re.search(r"dtk run - bare, until all is over: +-?\d", done.stdout), done.stdout
