"""What an mpirun brings with it, and what then does not load."""

import os
import subprocess
import sys

import pytest

from dtk.cluster import mpi_installs

from world import missing

SCRIPT = """import dtk
import horovod.tensorflow.keras as hvd
"""


def test_a_script_that_imports_horovod_is_told_which_mpirun_it_needs(tmp_path):
    """It died in the loader, of a symbol that is undefined."""
    if reason := missing("horovod-mpi") or missing("mpi-wheel"):
        pytest.skip(reason)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    mpirun = [mpi_installs.mpirun(), "--allow-run-as-root", "-np", "1"]
    command = [*map(str, mpirun), sys.executable, script, "--name", "two words"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode != 0
    (told,) = (line for line in done.stderr.splitlines() if line.startswith("dtk.errors."))
    assert "rank 0: Horovod cannot be loaded under the mpirun of" in told
    again = f"{script} --name 'two words'"  # as a shell reads it
    assert f"{mpi_installs.find_other('mpirun')} -np 1 python {again}`" in told
    assert f"dtk run -n 1 --communicator horovod {again}`" in told
