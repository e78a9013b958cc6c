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
from dtk.cluster import mpi_installs, place
from dtk.launch import job_options
from dtk.version import pip_install, requirement

pytestmark = pytest.mark.command

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
    monkeypatch.setattr(module.communicators, "offer", str)
    kind, (_, joined) = module.environment()
    assert (kind, joined.what) == ("slurm", "Communicator")
    assert joined.found == "collective: srun offers no PMIx to an MPI. Faster: `srun --mpi=pmix`"
    monkeypatch.setenv("DTK_COMMUNICATOR", "mpi")
    assert module.environment()[1][1].found == "mpi: DTK_COMMUNICATOR says so"


def test_a_healthy_machine_to_which_horovod_and_mpirun_are_optional(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run("--hosts", "127.0.0.1, localhost:4")
    assert result.exit_code == 0, result.output
    assert line(result, "TensorFlow") == ["ok", "2.21.0"]
    assert line(result, "Keras") == ["ok", "3.15.1"]
    assert line(result, "GPUs") == ["ok", "none that TensorFlow sees"]
    assert line(result, "Python")[1] == f"{sys.version.split()[0]} ({sys.executable})"
    assert line(result, "Cores")[1].startswith(str(len(os.sched_getaffinity(0))))
    assert line(result, "Cluster")[1].startswith("single, worker rank 0 of 1: ")
    found = "Horovod is not installed. Next: dtk install-horovod"
    assert line(result, "Horovod") == ["note", found]
    cure = f"{pip_install('mpi')}, or apt-get install openmpi-bin"
    assert line(result, "mpirun") == ["note", f"not found. Next: {cure}"]
    here = ["ok", "this machine, needs no ssh"]
    assert line(result, "Host 127.0.0.1") == line(result, "Host localhost") == here
    said = line(result, "Ports of jobs on hosts")[1]
    assert "`dtk doctor --hosts 127.0.0.1,localhost --firewall` prints rules" in said


@pytest.mark.parametrize("installed", [False, True])
def test_horovod_is_needed_under_mpirun_without_mpi4py(run, monkeypatch, installed):
    monkeypatch.setattr(module.communicators, "mpi_installed", lambda: installed)
    for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    result = run()
    assert line(result, "Cluster")[1].startswith("mpi, worker rank 1 of 2: ")
    assert line(result, "Horovod")[0] == ("note" if installed else "broken")
    assert ("Error: broken: Horovod" in result.output) is not installed


UNTESTED = "{}, which dtk was not tested with. Next: pip install '{}'"
BROKEN = {
    "TensorFlow does not load": (
        {"tensorflow": "raise ImportError('libcudart.so: not found')"},
        {"TensorFlow": "ImportError: libcudart.so: not found. Next: pip install"},
    ),
    "TensorFlow kills Python": (
        {"tensorflow": "import os; os.write(2, b'Illegal instruction\\n'); os._exit(132)"},
        {"TensorFlow": "importing it ends Python: Illegal instruction"},
    ),
    "another backend": (
        {"keras": GOOD["keras"].replace('"tensorflow"', '"jax"')},
        {"Keras": "3.15.1 on the jax backend, dtk needs tensorflow. Next: export KERAS_BACKEND="},
    ),
    "versions and a cluster": (
        {
            "keras": GOOD["keras"].replace("3.15.1", "3.99.0"),
            "tensorflow": GOOD["tensorflow"].replace("2.21.0", "2.18.1"),
            "TF_CONFIG": "{not json",
        },
        {
            "Keras": UNTESTED.format("3.99.0", requirement("keras")),
            "TensorFlow": UNTESTED.format("2.18.1", requirement("tensorflow")),
            "Cluster": "TF_CONFIG",
        },
    ),
}


@pytest.mark.parametrize(("given", "told"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_said_with_the_cure(run, monkeypatch, given, told):
    if "TF_CONFIG" in given:
        monkeypatch.setenv("TF_CONFIG", given["TF_CONFIG"])
    result = run(**{name: text for name, text in given.items() if name in GOOD})
    assert result.exit_code == 1
    for what, said in told.items():
        state, found = line(result, what)
        assert state == "broken" and said in found


@pytest.mark.full("a whole command: one of each kind")
def test_a_name_of_the_real_keras_that_has_gone(tmp_path, monkeypatch):
    """Importing Keras goes on, under `dtk run` too, and what needs the name is told in one line."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_A_NAME)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    said = "has no keras.src.losses.loss.unscale_loss_for_distribution, which dtk needs for steps"
    script = "import dtk, keras\nprint('Keras is here')\ndtk.auto_strategy()\n"
    workers = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    env = {**os.environ, "DTK_RUN": "1", "TF_CONFIG": json.dumps(workers)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], env=env, **pipes) as started:
        last = module.libraries()[-1]
        printed, errors = started.communicate(timeout=120)
    assert (last.what, last.state) == ("Private names", "broken")
    assert said in last.found and requirement("keras") in last.found
    assert "Keras is here" in printed, errors
    (told,) = [text for text in errors.splitlines() if text.startswith("dtk.errors")]
    assert told.startswith("dtk.errors.VersionError: keras ") and said in told


def test_which_dtk_runs_and_what_else_has_its_name(tmp_path, monkeypatch):
    root = pathlib.Path(module.__file__).parents[2]

    def distribution(name, version, record):
        info = tmp_path / "site" / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        (info / "top_level.txt").write_text("dtk\n")
        (info / "direct_url.json").write_text(json.dumps(record))

    def installed():
        return module.own_install().state, module.own_install().found

    here = {"url": root.as_uri(), "dir_info": {"editable": True}}
    distribution("keras_dtk", "7.1", here)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.chdir(tmp_path)
    assert installed() == ("ok", f"keras_dtk 7.1, editable, in {root / 'dtk'}")

    (tmp_path / "dtk").mkdir()
    (tmp_path / "dtk" / "__init__.py").touch()
    state, found = installed()
    wrong = f"scripts in {tmp_path} import {tmp_path / 'dtk'} instead. Next: rename that"
    assert state == "note" and found.endswith(wrong)

    monkeypatch.chdir("/")
    distribution("dtk", "0.0.3", here)
    state, found = installed()
    assert state == "note" and "dtk 0.0.3, editable and keras_dtk 7.1, editable, in " in found
    cure = "both own its files. Next: pip uninstall -y dtk keras_dtk; pip install keras-dtk"
    assert found.endswith(cure)

    for info in (tmp_path / "site").glob("*/direct_url.json"):
        info.write_text("{}")
    state, found = installed()
    assert state == "note" and found.startswith(f"{module.__version__}, not installed, in {root}")
    assert found.endswith(f"keras_dtk 7.1 in {tmp_path / 'site' / 'dtk'}: see PYTHONPATH")


@pytest.mark.parametrize(
    ("told", "path", "state", "found"),
    [
        ("", "/bin/mpirun", "ok", "joins ranks by MPI: mpi4py is there, and /bin/mpirun"),
        ("", None, "note", "joins ranks by TensorFlow's collectives. Faster: "),
        ("horovod", "/bin/mpirun", "ok", "joins ranks by horovod: DTK_COMMUNICATOR says so"),
    ],
)
def test_what_joins_the_ranks_and_why(monkeypatch, told, path, state, found):
    monkeypatch.setattr(module.mpi_installs, "mpirun", lambda: path)
    monkeypatch.setenv("DTK_COMMUNICATOR", told)
    joined = module.joined_by()
    assert joined.state == state and joined.found.startswith(found)


def test_hosts_are_tried_on_the_port_that_is_given():
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
        (good,) = module.reach(["127.0.0.2"], port)
    assert (good.state, good.found) == ("ok", f"reached 127.0.0.2 on port {port}")
    own, there, unknown = module.reach(["localhost", "127.0.0.2", "no-such-host.invalid"], port)
    assert own.what == "Host localhost" and unknown.state == there.state == "broken"
    assert there.found.startswith(f"port {port}: Connection refused. ")


@pytest.mark.full("a whole command: one of each kind")
def test_the_real_libraries():
    result = CliRunner().invoke(doctor, [])
    assert result.exit_code == 0, result.output
    assert line(result, "TensorFlow")[0] == line(result, "Keras")[0] == "ok"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--firewall needs the hosts of the job: --hosts node1,node2"),
        # its first part is a number, which would mean the address 0.0.7.209
        (["--hosts", "2001:db8::7"], "2001:db8::7"),
    ],
)
def test_rules_are_printed_alone_and_refused_for_nobody(options, said):
    result = CliRunner().invoke(doctor, ["--hosts", "192.0.2.1,192.0.2.2:4", "--firewall"])
    assert result.exit_code == 0 and result.output.startswith("# Only 192.0.2.1, 192.0.2.2 reach")
    assert "ip saddr { 192.0.2.1, 192.0.2.2 } accept" in result.output
    result = CliRunner().invoke(doctor, ["--firewall", *options])
    assert result.exit_code != 0 and said in result.output


H100 = {
    "tensorflow": "2.21.0",
    "gpus": ["NVIDIA H100", "NVIDIA H100"],
    "capabilities": [[9, 0], [9, 0]],
    "kinds": [60, 90],
    "cuda": "12.5.1",
    "cudnn": "9",
    "nccl": 22304,
}
PEERS = " \tGPU0\tGPU1\n GPU0\tX\t{0}\n GPU1\t{0}\tX\n\nLegend:\n  NS = Not supported\n"
CUDA = ["ok", "CUDA", "TensorFlow was built for CUDA 12.5.1 and cuDNN 9"]


@pytest.mark.parametrize(
    "changed, peers, wanted",
    [
        (
            {},
            "OK",
            [
                ["ok", "GPU 0", "NVIDIA H100, compute capability 9.0"],
                ["ok", "GPU 1", "NVIDIA H100, compute capability 9.0"],
                CUDA,
                ["ok", "NCCL", "2.23.4"],
                ["ok", "P2P", "between all GPUs"],
            ],
        ),
        (
            {"capabilities": [[5, 2], [10, 0]], "nccl": 0},
            "NS",
            [
                ["broken", "GPU 0", "5.2: too old for this TensorFlow, from 6.0"],
                ["note", "GPU 1", "10.0: newer than this TensorFlow's 9.0, so it compiles first"],
                CUDA,
                ["note", "NCCL", "not found: gradients between GPUs need it. Next: pip install"],
                ["note", "P2P", "2 pairs of GPUs have none, and are slow"],
            ],
        ),
        ({"gpus": []}, "", [["broken", "GPUs", "sees none, for want of CUDA's libraries. Next:"]]),
    ],
)
def test_gpus_are_reported_with_what_they_lack(tmp_path, monkeypatch, changed, peers, wanted):
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5 2024\n")
    monkeypatch.setattr(module, "DRIVER", driver)
    told = subprocess.CompletedProcess([], 0, PEERS.format(peers), "")
    monkeypatch.setattr(module, "ask", lambda command: told)
    first, *found = module.gpus({**H100, **changed})
    assert (first.what, first.found) == ("NVIDIA's driver", "550.54.15")
    for finding, (state, what, said) in zip(found, wanted, strict=True):
        assert (finding.state, finding.what) == (state, what)
        assert said in finding.found


def test_ranks_with_gpus_are_not_joined_by_mpi_unasked(tmp_path, monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "DTK_COMMUNICATOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(place, "DRIVER", tmp_path)
    monkeypatch.setattr(mpi_installs, "mpirun", lambda: tmp_path / "mpirun")
    assert job_options.installed()[:2] == ["collective", "mpi"]
    assert "over NCCL on GPUs" in module.joined_by().found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert job_options.installed()[:2] == ["mpi", "collective"]
    assert "by MPI" in module.joined_by().found
