"""Baselines are found beside dtk in a checkout; an installed dtk says where they are."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dtk
from dtk.bench import bench_jobs
from dtk.bench.results import BenchError


def test_each_is_a_worker_in_a_file_of_its_own_and_can_be_started():
    found = bench_jobs.find()
    assert {"horovod-loop", "tf_keras", "torch", "mpi4py"} < set(found)
    for name, baseline in found.items():
        assert baseline.name == name
        assert "class Worker:" in baseline.worker.read_text()
        assert baseline.launcher in bench_jobs.LAUNCHERS


def test_there_are_none_in_another_folder_and_an_unknown_name_says_what_is_expected(tmp_path):
    assert bench_jobs.find(tmp_path) == {}
    known = bench_jobs.find()
    with pytest.raises(BenchError, match="--peer jax: unknown, expected horovod-loop, .* or "):
        bench_jobs.choose(["torch", "jax"], known)
    assert bench_jobs.choose(["torch", "mpi4py"], known) == (known["torch"], known["mpi4py"])


def test_an_installed_dtk_says_where_baselines_are(tmp_path):
    # As a wheel holds it: without what is beside it in the repository.
    shutil.copytree(Path(dtk.__file__).parent, tmp_path / "dtk")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dtk.cli.main", "bench", "--peer", "torch"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dtk bench: --peer torch: other frameworks are measured from a ")
    assert f"the dtk in {tmp_path / 'dtk'} is installed without" in done.stderr
    assert (
        "run `pip install -e '.[bench]'` in a clone, then `dtk bench --peer torch`" in done.stderr
    )
    assert done.stderr.count("\n") == 1
