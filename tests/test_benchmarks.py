"""Benchmarks start, and print what they measure; whether the numbers are good is not tested."""

import os
import re
import subprocess
import sys
from pathlib import Path

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
