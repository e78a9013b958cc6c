"""`dtk run` as a user meets it: one clear line for a mistake, and an end to every process."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

import dtk as dtk_package
from dtk.cli import run
from dtk.cli.main import main
from dtk.cluster.detect import check_not_launched
from dtk.errors import ClusterError
from dtk.launch import assign, job_options, job_run

pytestmark = pytest.mark.command

DTK = [sys.executable, "-m", "dtk.cli.main"]


def dtk(*arguments, cwd=None, **environ):
    return subprocess.run(
        [*DTK, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.getcwd(), **environ},
    )


@pytest.fixture
def script(tmp_path):
    def write(code, name="train.py"):
        (tmp_path / name).write_text(code)
        return str(tmp_path / name)

    return write


def refused(*arguments):
    """The one line by which a command is refused, in this process: nothing is started."""
    done = CliRunner().invoke(main, ["run", *arguments])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.output
    return done.stderr


def test_a_module_runs_on_n_processes_with_its_arguments(script, tmp_path):
    (tmp_path / "package").mkdir()
    code = "import os, sys; from dtk.cluster import detect\n"
    code += "print(__name__, detect().size, sys.argv[1:], len(os.sched_getaffinity(0)))"
    script(code, "package/train.py")
    arguments = ("-m", "package.train", "-n", "5", "--communicator", "x")
    done = dtk("run", "-n", "2", "--no-bind", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    here = len(os.sched_getaffinity(0))
    expected = f"__main__ 2 ['-n', '5', '--communicator', 'x'] {here}"
    assert sorted(done.stdout.splitlines()) == [f"[0] {expected}", f"[1] {expected}"]


def test_the_slots_of_the_hosts_are_the_default_number_and_ranks_are_bound(script, tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=1\nlocalhost slots=1  # one more\n")
    path = script("import os; print(len(os.sched_getaffinity(0)))")
    lines = dtk("run", "--hostfile", str(tmp_path / "hosts"), path).stdout.splitlines()
    assert len(lines) == 2
    here = len(os.sched_getaffinity(0))
    assert here == 1 or sum(int(line[4:]) for line in lines) == here, "each has its own cores"
    asked = ("-x", f"OMP_NUM_THREADS={here}", "-n", "2")  # more than a share: nothing is bound
    lines = dtk("run", *asked, path).stdout.splitlines()
    assert [int(line[4:]) for line in lines] == [here, here]


def test_the_failing_ranks_traceback_is_the_last_thing_seen(script, tmp_path):
    path = script(
        "import os, time\n"
        "if '\"index\": 1' in os.environ['TF_CONFIG']:\n    raise ValueError('boom')\n"
        "time.sleep(600)"
    )
    hosts = ("--hosts", "localhost:2", "--output-dir", str(tmp_path / "out"))
    done = dtk("run", *hosts, "--timeout-grace", "1", path)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: boom\n")
    assert "dtk: rank 1, host localhost, failed first" in done.stderr
    assert str(tmp_path / "out" / "rank-1.log") in done.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import horovod.tensorflow.keras as hvd", "or write `import dtk.migrate.horovod as hvd`"),
        ("s = tf.distribute.MultiWorkerMirroredStrategy()", "is for TensorFlow's own strategy, "),
        ("import dtk; from horovod import x", ""),
    ],
    ids=["Horovod", "TensorFlow", "beside dtk"],
)
@pytest.mark.parametrize("trains", [True, False])
def test_a_script_for_another_library_is_told_how_to_move(script, line, said, trains):
    """It ended in errors of MPI's own, or in as many trainings as there are ranks."""
    path = script(f"{'pass' if trains else 'raise ValueError()'}\nif 0:\n    {line}")
    done = dtk("run", "-n", "2", path)
    assert (done.returncode == 0) == trains
    if said:
        last = done.stderr.splitlines()[-1]
        assert last.startswith(f"dtk run: {path}:3 is for ") and said in last
        assert f"`dtk migrate {path}`" in last
    else:
        assert "migrate" not in done.stderr


ROLES = """
import json, os, pathlib, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
here = pathlib.Path(__file__).parent
if task["type"] == "worker" and not (here / "killed").exists():
    (here / "killed").touch()
    os.kill(os.getpid(), 9)
(here / ("up-" + task["type"])).touch()
while not (here / "up-worker").exists():
    time.sleep(0.02)
print(task["type"])
"""


def test_parameter_servers_get_a_chief_and_workers_that_are_replaced(script):
    path = script(ROLES)
    done = dtk("run", "-n", "1", "--ps", "1", "--evaluator", path)
    assert done.returncode == 0, done.stderr
    lines = ["[          0] chief", "[          1] worker", "[evaluator 0] evaluator"]
    assert sorted(done.stdout.splitlines()) == sorted([*lines, "[       ps 0] ps"])
    assert done.stderr == (
        "dtk run: rank 1 (worker 0) was killed by SIGKILL; starting it again (1 of 3)\n"
    )


def test_max_restarts_0_does_without_the_worker(script):
    done = dtk("run", "-n", "1", "--ps", "1", "--max-restarts", "0", script(ROLES))
    assert done.returncode == 137
    assert done.stderr.startswith(
        "dtk run: rank 1 (worker 0) was killed by SIGKILL; no worker is left\n"
    )


@pytest.mark.parametrize("name", ["keras", "numpy"])
def test_a_file_that_would_take_the_place_of_a_package_is_named(script, name, monkeypatch):
    """Ranks failed in the middle of an import, over names that the file does not have."""
    path = script("print('hi')")
    shadow = Path(path).with_name(f"{name}.py")
    shadow.touch()
    monkeypatch.chdir(shadow.parent)
    for args in ([path], [str(shadow)], ["-m", "train"]):
        assert refused("-n", "2", *args).startswith(
            f"dtk run: {shadow} would be imported in place of the package {name}, as it stands "
        )


@pytest.mark.parametrize("name", ["dtk", "keras", "tensorflow"])
def test_a_folder_that_would_is_named_if_it_is_a_package(script, name, tmp_path, monkeypatch):
    """Ranks failed in dtk's own code: module 'keras' has no attribute 'backend'."""
    (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    path = script(f"import {name}; print({name}.__file__)")
    (tmp_path / name / "data.csv").touch()
    done = dtk("run", "-n", "1", path)  # Python goes on to the package that is installed
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[0] /") and str(tmp_path) not in done.stdout
    script("", f"{name}/__init__.py")
    assert refused("-n", "2", path) == (
        f"dtk run: {tmp_path / name} would be imported in place of the package {name}, as it "
        "stands beside the script; rename it\n"
    )


def test_a_checkout_of_dtk_beside_the_script_is_dtk(script, tmp_path):
    (tmp_path / "dtk").symlink_to(Path(dtk_package.__file__).parent)
    done = dtk("run", "-n", "1", script("import dtk; print(dtk.__file__)"))
    assert done.stdout == f"[0] {tmp_path}/dtk/__init__.py\n", done.stderr


SCRIPT = "SCRIPT"
# What no job can be, and no hostfile, is in launch/test_plan.py and cluster/test_hostfile.py.
MISTAKES = {
    "no script": ([], "no script given; for example `dtk run -n 2 train.py`"),
    "an empty one": (["-n", "2", ""], "no script given"),
    "missing script": (["-n", "2", "nope.py"], "no such script: nope.py"),
    "python train.py": (["-n", "2", "python", "train.py"], "`dtk run -n 2 train.py`"),
    "directory": (["-n", "2", "/"], "/ is a directory"),
    # Ranks read nothing, and the job reported success.
    "standard input": (["-n", "2", "/dev/stdin"], "/dev/stdin is no file that each rank can read"),
    "missing module": (["-n", "2", "-m", "no_such.x"], "no module named 'no_such'"),
    "no number": ([SCRIPT], "the number of processes is not given; add -n before"),
    "not a number": (["-n", "two", SCRIPT], "see `dtk run --help`"),
    "bad hosts": (["--hosts", "a:x", SCRIPT], "'a:x' is not a host; expected"),
    "a user": (["-H", "me@a:2", SCRIPT], "write a:2, and `User me` for it in ~/.ssh/config"),
    "names of Slurm": (["-np", "2", "-H", "n[1-2]", SCRIPT], "`scontrol show hostnames n[1-2]`"),
    "IPv6": (["--hosts", "::1", SCRIPT], "for an IPv6 address, write a name"),
    "no hostfile": (["--hostfile", "nope", SCRIPT], "cannot read hostfile nope: No such file"),
    "both": (["--hosts", "a", "--hostfile", "f", SCRIPT], "--hosts and --hostfile were both given"),
    "grace": (
        ["-n", "1", "--timeout-grace", "-1", SCRIPT],
        "--timeout-grace -1: expected 0 to 3600",
    ),
    "no time to save": (
        ["-n", "1", "--save-grace", "nan", SCRIPT],
        "--save-grace nan: expected 1 to 1000000 seconds",
    ),
    "no variable": (["-n", "1", "-x", "NO_SUCH", SCRIPT], "NO_SUCH is not set here; set it, or"),
    "variable without a name": (["-n", "1", "-x", "=3", SCRIPT], "-x =3: no name; give -x NAME="),
    # Each rank trained alone.
    "a place": (["-n", "2", "-x", "TF_CONFIG={}", SCRIPT], "gives each rank a TF_CONFIG of its"),
    "negative restarts": (
        ["-n", "1", "--ps", "1", "--max-restarts", "-1", SCRIPT],
        "--max-restarts -1: expected 0 or more",
    ),
    "fewest without hosts": (
        ["-n", "1", "--min-workers", "1", SCRIPT],
        "--min-workers is for hosts that may be lost; give them with --hosts or --hostfile",
    ),
    "fewest above all": (
        ["-n", "2", "--hosts", "localhost:2", "--min-workers", "3", SCRIPT],
        "--min-workers 3: expected 1 to 2, the number of workers",
    ),
    "isolated hosts": (
        ["-n", "2", "--hosts", "localhost:2", "--isolate", SCRIPT],
        "--isolate is for a job on this machine",
    ),
    "fewest with ps": (
        ["-n", "1", "--ps", "1", "--min-workers", "1", SCRIPT],
        "--min-workers and --ps were both given",
    ),
    "remote shell": (["-n", "1", "--remote-shell", "", SCRIPT], "--remote-shell is empty"),
    "unreachable": (
        ["--hosts", "node.invalid", "--remote-shell", "no-such-shell", SCRIPT],
        "host node.invalid cannot be reached",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, script):
    path = script("print('must not run')")
    said = refused(*[path if argument == SCRIPT else argument for argument in arguments])
    assert said.startswith("dtk run: ") and message in said


def test_a_job_in_each_rank_of_mpirun_is_refused(script, monkeypatch):
    """Four processes would train in two jobs, each of which is told that it is the whole."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    said = refused("-n", "2", script("print('must not run')"))
    assert "each of 2 processes would start a job of its own" in said
    # A rank has the same variables, and may start a job.
    for name, value in (("DTK_RUN", "1"), ("DTK_JOINED", "7 rank 1 of job")):
        with monkeypatch.context() as its:
            its.setenv(name, value)
            check_not_launched(os.environ)


def test_horovod_that_is_not_installed_names_the_cure(script, monkeypatch):
    monkeypatch.setattr(job_options, "installed", lambda: ["collective"])
    assert refused("-n", "2", "--communicator", "horovod", script("pass")) == (
        "dtk run: --communicator horovod: Horovod is not installed; run `dtk install-horovod`\n"
    )


@pytest.mark.parametrize("patient", [True, False], ids=["once", "again and again"])
def test_signals_end_everything(script, patient):
    """Ranks that are deaf get the grace; an impatient user cuts it short, and spoils no code."""
    number, grace = (signal.SIGHUP, "0.5") if patient else (signal.SIGINT, "600")
    path = script(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(os.getpid(), flush=True)\ntime.sleep(600)"
    )
    launcher = subprocess.Popen(
        [*DTK, "run", "-n", "2", "--timeout-grace", grace, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
        children = psutil.Process(launcher.pid).children(recursive=True)
        assert set(pids) <= {child.pid for child in children}
        began = time.monotonic()
        launcher.send_signal(number)
        while not patient and launcher.poll() is None and time.monotonic() < began + 10:
            launcher.send_signal(number)
            time.sleep(0.05)
        _, err = launcher.communicate(timeout=20)
    finally:
        launcher.kill()
        launcher.communicate()
    assert time.monotonic() - began < 10
    assert (launcher.returncode, err) == (
        128 + number,
        f"dtk run: {number.name}: every process was ended\n",
    )
    _, alive = psutil.wait_procs(children, timeout=2)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []


def test_a_port_that_was_taken_meanwhile_is_planned_anew(script, monkeypatch):
    planned = []
    with contextlib.ExitStack() as held:

        def plan_and_lose_a_port(*given, **named):
            planned.append(assign(*given, **named))
            if len(planned) < 3:
                host, _, port = planned[-1][1].address.rpartition(":")
                held.enter_context(socket.create_server((host, int(port))))
            return planned[-1]

        monkeypatch.setattr(job_run, "assign", plan_and_lose_a_port)
        done = CliRunner().invoke(main, ["run", "-n", "2", str(script("pass"))])
        assert (done.exit_code, done.output, len(planned)) == (0, "", 3)
        planned.clear()
        monkeypatch.setattr(job_run, "_PLANS", 1)
        done = CliRunner().invoke(main, ["run", "-n", "2", str(script("pass"))])
        assert done.exit_code == 2 and "is taken" in done.output


@pytest.mark.parametrize(
    "begin, python",
    [
        ("#!/usr/bin/env python3\nprint()\n", True),
        ("#!/bin/sh\n'''exec' /a/long/path/python \"$0\" \"$@\"\n' '''\nprint()\n", True),
        ("#!/bin/sh\npython train.py\n", False),
        ("print()\n", True),
    ],
)
def test_a_script_of_a_shell_is_refused_and_a_command_of_pips_is_not(tmp_path, begin, python):
    file = tmp_path / "train"
    file.write_text(begin)
    with contextlib.nullcontext() if python else pytest.raises(ClusterError, match="is a program"):
        assert run.command_of(str(file), False, ()) == [sys.executable, str(file)]
