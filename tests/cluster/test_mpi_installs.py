"""Which MPI is found: the one beside Python, or another; and what then does not load."""

import os
import stat
import subprocess
import sys

import pytest

from dtk.cluster import mpi_installs

from support.world import missing

pytestmark = pytest.mark.command


@pytest.mark.skipif(
    mpi_installs.mpirun() is None, reason="no MPI beside python: pip install './dtk[mpi]'"
)
def test_horovod_is_built_and_started_by_another_mpi_than_the_one_beside_python(
    tmp_path, monkeypatch
):
    # An activated environment finds that one first; `dtk install-horovod` failed its check there.
    beside = os.path.dirname(sys.executable)
    system = tmp_path / "bin"
    system.mkdir()
    (system / "mpirun").touch(stat.S_IRWXU)
    link = tmp_path / "link"
    link.symlink_to(beside)
    monkeypatch.setenv("PATH", os.pathsep.join([beside, str(link), str(system)]))
    assert mpi_installs.find_other("mpirun") == str(system / "mpirun")
    assert mpi_installs.find_other("mpicxx") is None
    assert mpi_installs.path_of_others() == str(system)


SCRIPT = """import dtk
import horovod.tensorflow.keras as hvd
"""


@pytest.mark.full("a cheaper test holds its rule")
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
