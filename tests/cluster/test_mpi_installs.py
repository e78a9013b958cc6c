"""Which MPI is found: the one beside Python, or another."""

import os
import stat
import sys

import pytest

from dtk.cluster import mpi_installs


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
