"""Benchmarks start, and print what they measure; whether the numbers are good is not tested."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.command

ROOT = Path(__file__).resolve().parents[1]
COSTS = ["alone", "loop", "ends", "parts", "norms", "checks", "input"]


def run(argv):
    """What a benchmark prints."""
    return python([str(ROOT / "benchmarks" / argv[0]), *argv[1:]])


def python(argv, code=0):
    """What a command prints that ends with this code."""
    command = [sys.executable, *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


@pytest.mark.full("a whole command: one of each kind")
def test_costs_prints_a_table_for_each_row(tmp_path):
    argv = ["costs", "--model=normed", "--rounds=1", "--steps=2", "--output", str(tmp_path / "a")]
    printed = run([*argv, "--only", *COSTS])
    assert (tmp_path / "a").read_text() == printed
    tables = dict(re.findall(r"^## (\w+)[^\n]*\n\n((?:\|[^\n]*\n|\n)+)", printed, re.M))
    assert list(tables) == COSTS
    assert len(re.findall(r"^\| normed, (?:dtk|plain) \|", tables["ends"], re.M)) == 2
    # Four steps and the three parts between them, each with its quartiles.
    assert re.search(r"^\| normed (\| [^|]+ \([^|]+\) ){7}\|$", tables["parts"], re.M), printed
    for name, judged in {"alone": 3, "loop": 1, "norms": 1, "checks": 3, "input": 3}.items():
        assert len(re.findall(r"\| (?:met|\*\*missed\*\*) \|", tables[name])) == judged, printed
    assert dict(re.findall(r"^\| (.*) \| (\d\.\d\d) \|$", tables["input"], re.M)) == {
        "arrays (rows gathered)": "2.00",
        "`tf.data`: `.map(decode).batch(n)`, with state": "2.00",
        "`PyDataset`": "2.00",
        "`shard(dataset.map(decode), ...)`": "2.00",
        "`shard(dataset, ...).map(decode)`": "1.00",
        "`shard(names, ..., read=read_and_decode)`": "1.00",
    }


@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and ip"
)
def test_a_host_with_half_a_core_computes_in_a_control_group_that_goes_with_it(tmp_path):
    script = tmp_path / "groups.py"
    script.write_text("print(open('/proc/self/cgroup').read())")
    import hosts

    with hosts.hosts(1, cores=0.5) as ((address,), shell):
        found = subprocess.run(
            [shell, address, sys.executable, str(script)], capture_output=True, text=True
        )
        group = re.search(r":(?:cpu|):/(dtk\w+)", found.stdout)
        assert group, found
        limits = hosts.CORES / group[1] / "cpu.cfs_quota_us", hosts.CORES / group[1] / "cpu.max"
        assert [file.read_text().split()[0] for file in limits if file.exists()] == ["1000"]
    assert not (hosts.CORES / group[1]).exists()


@pytest.mark.full("a whole command: one of each kind")
def test_cntks_table_trains_what_is_missing(tmp_path):
    argv = ["cntk_table.py", "--models", "convnet", "--workers", "1", "2", "--data=digits"]
    argv += ["--images=128", "--epochs=1", "--output", str(tmp_path)]
    printed = run([*argv, "--exchange", "none"])
    assert printed.count("round 1:") == 2
    table = (tmp_path / "cntk_table.md").read_text()
    cell = r"\d+\.\d\d / \d+\.\d\d"
    assert re.search(rf"^\| convnet \(1\) \| 1\.00 / [\d.]+ \| {cell} \|$", table, re.M), table
    assert "(not CIFAR-10), 128 training images" in table
    printed = run([*argv, "--exchange", "none", "--blocks", "64"])
    assert printed.count("round 1:") == 1, "what is in the file was trained again"
    assert re.search(r"^\| 64 \| [\d.]+ \|", (tmp_path / "cntk_table.md").read_text(), re.M)
    refused = python([str(ROOT / "benchmarks" / "cntk_table.py"), *argv[1:], "--threads=2"], code=1)
    assert "was measured with threads=1, and threads=2 is wanted" in refused
