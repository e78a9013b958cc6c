"""Hosts, network namespaces here, are compared before anything starts on them."""

import importlib.metadata
import re
import subprocess
import sys

import pytest

SCRIPT = "import os; print('rank', os.environ['DTK_RUN'])"


@pytest.fixture
def run(tmp_path, two_hosts):
    """`dtk run` on two hosts, of which the second finds `site` before its packages."""
    (first, second), there = [host.name for host in two_hosts[0]], two_hosts[1]
    site = tmp_path / "site"
    site.mkdir()
    script, shell = tmp_path / "train.py", tmp_path / "shell"
    script.write_text("import os; print('trained on', os.environ['DATA_DIR'])")
    beside = f'[ "$1" = {second} ] && export PYTHONPATH="{site}:$PYTHONPATH"'
    shell.write_text(f'#!/bin/sh\n{beside}\nexec {there} "$@"\n')
    shell.chmod(0o755)

    def run(name="", content=""):
        if name:
            (site / name).parent.mkdir(exist_ok=True)
            (site / name).write_text(content)
        command = [sys.executable, "-m", "dtk.cli.main", "run", "--communicator", "collective"]
        command += ["-x", "DATA_DIR=/data"]
        command += ["--hosts", f"{first}:1,{second}:1", "--remote-shell", str(shell), str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        done.stderr = done.stderr.replace(first, "node1").replace(second, "node2")
        return done

    return run


def test_hosts_with_other_versions_are_refused_by_name(run):
    name = importlib.metadata.packages_distributions()["tensorflow"][0]  # also a nightly's
    info = f"{name.replace('-', '_')}-1.15.0.dist-info/METADATA"
    done = run(info, f"Name: {name}\nVersion: 1.15.0\n")
    assert (done.returncode, done.stdout) == (2, "")
    told = r"hosts differ in tensorflow: 2\S+ on node1, 1.15.0 on node2; ranks must"
    assert re.search(told, done.stderr), done.stderr


def test_a_clock_that_is_wrong_is_told(run):
    """Far from half a minute: the survey takes as long as a process takes to start."""
    done = run("sitecustomize.py", "import time\nreal = time.time\ntime.time = lambda: real() - 90")
    told = r"dtk run: the clock of node2 is (8\d|90) s behind this machine's: times in logs"
    assert re.search(told, done.stderr), done.stderr
    assert done.stderr.count("clock") == 1 and done.returncode == 0


def test_hosts_that_are_alike_are_not_mentioned_and_get_the_variables_that_were_asked_for(run):
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] trained on /data" for rank in (0, 1)]
