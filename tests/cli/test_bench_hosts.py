"""`dtk bench --hosts`: dtk and its peers between two hosts, one of which lacks an environment."""

import importlib.util
import json
import os
import subprocess
import sys
import venv

import pytest

from dtk.bench import bench_jobs

pytestmark = [pytest.mark.command, pytest.mark.full("a whole command: one of each kind")]


def environment_of(baseline, cache):
    """The environment of a baseline, as far as this machine can tell; returns its interpreter."""
    folder = cache / "dtk" / "bench" / baseline
    venv.create(folder, with_pip=False)
    environment = bench_jobs.find()[baseline].python.__self__
    (folder / "dtk-bench.json").write_text(json.dumps(environment.contents()))
    return folder / "bin" / "python"


@pytest.mark.timeout(180)
def test_peers_train_on_several_hosts_and_one_that_is_not_there_is_named(two_hosts, tmp_path):
    (first, second), reach = [host.name for host in two_hosts[0]], two_hosts[1]
    cache = tmp_path / "cache"
    python = environment_of("torch", cache)
    shell = tmp_path / "shell"
    # Over there the cache is empty.
    shell.write_text(
        f'#!/bin/sh\nhost=$1; shift\nexec {reach} $host "mount -t tmpfs none {cache} && $*"\n'
    )
    shell.chmod(0o755)
    peers = ["torch", "mpi4py"]
    if importlib.util.find_spec("horovod"):
        peers.append("horovod-loop")
    options = ["--communicator=collective", f"--hosts={first}:1,{second}:1", "--allreduce=4kB"]
    options += ["--steps=2", "--rounds=1", f"--remote-shell={shell}", "--json=run.json"]
    done = subprocess.run(
        [sys.executable, "-m", "dtk.cli.main", "bench", *options]
        + [f"--peer={baseline}" for baseline in peers],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "XDG_CACHE_HOME": str(cache)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads((tmp_path / "run.json").read_text())
    assert list(found["absent"]) == ["torch", "mpi4py"]
    why = found["absent"]["torch"]
    assert why.startswith(f"host {first} cannot run {python} (")
    assert why.endswith("share its folder, or make it there too")
    assert found["absent"]["mpi4py"].endswith("on this machine only; leave --hosts out")
    (turns,) = found["turns"].values()
    measured = ["collective", *peers[2:]]
    assert list(turns) == [f"{world} allreduce" for world in measured]
    for (turn,) in turns.values():
        assert len(turn) == 2 and all(reading["seconds"] > 0 for reading in turn)
