"""`dtk doctor` with stand-ins for the libraries, and one run with the real ones."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from dtk.cli import doctor as module
from dtk.cli.doctor import doctor
from dtk.version import pip_install, requirement

GOOD = {
    "tensorflow": """
__version__ = "2.21.0"
class config:
    @staticmethod
    def list_physical_devices(kind): return []
""",
    "keras": """
__version__ = "3.15.1"
class backend:
    @staticmethod
    def backend(): return "tensorflow"
""",
    "horovod": "raise ModuleNotFoundError(\"No module named 'horovod'\")",
}
WITHOUT_A_NAME = """
import contextlib, sys
from dtk import importing
@contextlib.contextmanager
def without():
    yield
    del sys.modules["keras.src.losses.loss"].unscale_loss_for_distribution
importing.inside("keras.src.losses.loss", without)
"""
LAUNCHERS = ("DTK_", "HOROVOD_", "OMPI_", "PMI", "SLURM_", "TF_CONFIG")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the doctor with the stand-ins, some of them replaced."""
    for name in os.environ:
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    monkeypatch.setattr(module, "_PRIVATE_NAMES", "")  # the stand-ins have none
    here = str(pathlib.Path(module.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), here]))

    def invoke(*arguments: str, **sources: str):
        for name, text in {**GOOD, **sources}.items():
            (tmp_path / f"{name}.py").write_text(text)
        return CliRunner().invoke(doctor, arguments)

    return invoke


def line(result, what: str) -> list[str]:
    """State and text of the line about `what`."""
    found = [text for text in result.output.splitlines() if text[8:].startswith(what)]
    assert len(found) == 1, result.output
    return [found[0][:8].strip(), found[0][8:].removeprefix(what).strip()]


def test_in_a_job_the_communicator_is_named_with_the_reason(monkeypatch):
    for name in ("DTK_COMMUNICATOR", "PMIX_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    here = {"JOB_ID": "7", "STEP_ID": "0", "PROCID": "0", "NTASKS": "2"}
    for name, text in here.items():
        monkeypatch.setenv(f"SLURM_{name}", text)
    kind, (_, joined) = module.environment()
    assert (kind, joined.what) == ("slurm", "Communicator")
    assert joined.found == "collective: srun offers no PMIx to an MPI. Faster: `srun --mpi=pmix`"
    monkeypatch.setenv("DTK_COMMUNICATOR", "mpi")
    assert module.environment()[1][1].found == "mpi: DTK_COMMUNICATOR says so"


def test_a_healthy_machine(run):
    result = run()
    assert result.exit_code == 0, result.output
    assert line(result, "TensorFlow") == ["ok", "2.21.0"]
    assert line(result, "Keras") == ["ok", "3.15.1"]
    assert line(result, "GPUs") == ["ok", "none that TensorFlow sees"]
    assert line(result, "Python")[1] == f"{sys.version.split()[0]} ({sys.executable})"
    assert line(result, "Cores")[1].startswith(str(len(os.sched_getaffinity(0))))
    assert line(result, "Cluster")[1].startswith("single, worker rank 0 of 1: ")


def test_horovod_is_optional(run):
    result = run()
    found = "Horovod is not installed. Next: dtk install-horovod"
    assert line(result, "Horovod") == ["note", found]
    assert result.exit_code == 0


@pytest.mark.parametrize("installed", [False, True])
def test_horovod_is_needed_under_mpirun_without_mpi4py(run, monkeypatch, installed):
    monkeypatch.setattr(module.communicators, "mpi_installed", lambda: installed)
    for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    result = run()
    assert line(result, "Cluster")[1].startswith("mpi, worker rank 1 of 2: ")
    assert line(result, "Horovod")[0] == ("note" if installed else "broken")
    assert ("Error: broken: Horovod" in result.output) is not installed


def test_broken_tensorflow(run):
    result = run(tensorflow="raise ImportError('libcudart.so: not found')")
    state, found = line(result, "TensorFlow")
    assert state == "broken"
    assert found.startswith("ImportError: libcudart.so: not found. Next: pip install")
    assert result.exit_code == 1


def test_tensorflow_that_kills_python(run):
    result = run(tensorflow="import os; os.write(2, b'Illegal instruction\\n'); os._exit(132)")
    assert line(result, "TensorFlow") == ["broken", "importing it ends Python: Illegal instruction"]
    assert result.exit_code == 1


def test_keras_on_another_backend(run):
    result = run(keras=GOOD["keras"].replace('"tensorflow"', '"jax"'))
    assert line(result, "Keras")[0] == "broken"
    assert "export KERAS_BACKEND=tensorflow" in line(result, "Keras")[1]
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("what", "stands", "here"),
    [
        ("Keras", "3.15.1", "3.12.4"),
        ("Keras", "3.15.1", "3.99.0"),
        ("TensorFlow", "2.21.0", "2.18.1"),
    ],
)
def test_versions_that_were_not_tested(run, what, stands, here):
    package = what.lower()
    result = run(**{package: GOOD[package].replace(stands, here)})
    state, found = line(result, what)
    assert state == "broken" and result.exit_code == 1
    assert found == (
        f"{here}, which dtk was not tested with. Next: pip install '{requirement(package)}'"
    )


def test_a_name_of_the_real_keras_that_has_gone(tmp_path, monkeypatch):
    """Importing Keras goes on, under `dtk run` too, and what needs the name is told in one line."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_A_NAME)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    said = "has no keras.src.losses.loss.unscale_loss_for_distribution, which dtk needs for steps"
    last = module.libraries()[-1]
    assert (last.what, last.state) == ("Private names", "broken")
    assert said in last.found and requirement("keras") in last.found
    script = "import dtk, keras\nprint('Keras is here')\ndtk.auto_strategy()\n"
    workers = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    job = {"DTK_RUN": "1", "TF_CONFIG": json.dumps(workers)}
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **job},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Keras is here" in ended.stdout, ended.stderr
    (told,) = [text for text in ended.stderr.splitlines() if text.startswith("dtk.errors")]
    assert told.startswith("dtk.errors.VersionError: keras ") and said in told


def test_malformed_tf_config(run, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{not json")
    result = run()
    state, found = line(result, "Cluster")
    assert state == "broken"
    assert "TF_CONFIG" in found
    assert result.exit_code == 1


def test_no_mpirun_is_a_note(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run()
    assert line(result, "mpirun") == [
        "note",
        f"not found. Next: {pip_install('mpi')}, or apt-get install openmpi-bin",
    ]
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("told", "there", "found"),
    [
        ("", True, ["ok", "joins ranks by MPI: mpi4py is there, and /bin/mpirun"]),
        (
            "",
            False,
            ["note", f"joins ranks by TensorFlow's collectives. Faster: {pip_install('mpi')}"],
        ),
        ("horovod", True, ["ok", "joins ranks by horovod: DTK_COMMUNICATOR says so"]),
    ],
    ids=["MPI", "no MPI", "told"],
)
def test_what_joins_the_ranks_and_why(run, monkeypatch, told, there, found):
    path = pathlib.Path("/bin/mpirun") if there else None
    monkeypatch.setattr(module.mpi_installs, "mpirun", lambda: path)
    if told:
        monkeypatch.setenv("DTK_COMMUNICATOR", told)
    assert line(run(), "dtk run") == found


def test_hosts(run):
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
        good = run("--hosts", "127.0.0.2:4", "--port", str(port))
    assert line(good, "Host 127.0.0.2") == ["ok", f"reached 127.0.0.2 on port {port}"]
    assert good.exit_code == 0
    bad = run("--hosts", f"localhost,{socket.gethostname()},127.0.0.2", "--port", str(port))
    state, found = line(bad, "Host 127.0.0.2")
    assert (state, found.split(". ")[0]) == ("broken", f"port {port}: Connection refused")
    assert bad.exit_code == 1


def test_this_machine_needs_no_ssh(run):
    result = run("--hosts", "localhost:2")
    assert line(result, "Host localhost") == ["ok", "this machine, needs no ssh"]


def test_unknown_host(run):
    result = run("--hosts", "no-such-host.invalid")
    assert line(result, "Host no-such-host.invalid")[0] == "broken"
    assert result.exit_code == 1


def test_the_real_libraries():
    result = CliRunner().invoke(doctor, [])
    assert result.exit_code == 0, result.output
    assert line(result, "TensorFlow")[0] == "ok"
    assert line(result, "Keras")[0] == "ok"


def test_hosts_are_told_apart_and_the_way_to_close_their_ports_is_said(run):
    result = run("--hosts", "127.0.0.1, localhost:4")
    assert line(result, "Host 127.0.0.1")[1] == line(result, "Host localhost")[1]
    said = line(result, "Ports of jobs on hosts")[1]
    assert "`dtk doctor --hosts 127.0.0.1,localhost --firewall` prints rules" in said


def test_rules_are_printed_alone():
    result = CliRunner().invoke(doctor, ["--hosts", "192.0.2.1,192.0.2.2:4", "--firewall"])
    assert result.exit_code == 0
    assert result.output.startswith("# Only 192.0.2.1, 192.0.2.2 reach")
    assert "ip saddr { 192.0.2.1, 192.0.2.2 } accept" in result.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--firewall needs the hosts of the job: --hosts node1,node2"),
        (["--hosts", "localhost"], "on which no other host is reached"),
        # its first part is a number, which would mean the address 0.0.7.209
        (["--hosts", "2001:db8::7"], "2001:db8::7"),
    ],
)
def test_rules_for_nobody_are_refused(options, said):
    result = CliRunner().invoke(doctor, ["--firewall", *options])
    assert result.exit_code != 0 and said in result.output
