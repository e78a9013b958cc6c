"""Jobs of a real Slurm: two nodes, each in a network namespace, whose own names mean loopback."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = [
    pytest.mark.command,
    pytest.mark.full("a cheaper test holds its rule"),
    pytest.mark.timeout(180),
]

TRAIN = """
import sys, dtk, keras, numpy as np
strategy = dtk.strategies.AllReduceStrategy(sys.argv[1], stall_timeout=5)
keras.utils.set_random_seed(1)
with strategy.scope():
    layers = [keras.layers.Dense(8, activation="relu", name="a"), keras.layers.Dense(1, name="b")]
    model = keras.Sequential([keras.Input((20,)), *layers])
    model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(64, 20)).astype("float32")
def fit(epochs, *callbacks):
    data = {"x": x, "y": x[:, :1], "batch_size": 16, "shuffle": False}
    model.fit(**data, epochs=epochs, verbose=0, callbacks=callbacks)
    return float(sum(abs(weights).sum() for weights in model.get_weights()))
"""
SUM = TRAIN + "print(strategy.communicator.name, strategy.rank, fit(2), flush=True)"
# The first run is ended at its second epoch, by whoever reads that it has come so far.
RESUME = (
    TRAIN
    + """
import os, pathlib, time
folder = pathlib.Path(sys.argv[2])
class Wait(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch, "restart", os.environ.get("SLURM_RESTART_COUNT", 0), flush=True)
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0 if "SLURM_RESTART_COUNT" in os.environ else 0.3)
print("ended", strategy.rank, fit(6, dtk.callbacks.Checkpoint(folder, save_freq="epoch"), Wait()))
"""
)
RUN = [sys.executable, "-m", "dtk.cli.main", "run"]
JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append --output={out}
{start} {script} collective {folder}
code=$?
[ $code = 143 ] && exec scontrol requeue $SLURM_JOB_ID
exit $code
"""


@pytest.fixture(scope="module")
def slurm():
    """The variables by which the commands of Slurm find a cluster of two nodes."""
    import slurm

    if os.getuid() != 0 or slurm.missing():
        pytest.skip("needs root, munge, slurmctld, slurmd and slurm-client (Debian's names)")
    try:
        with slurm.cluster(2) as environ:
            yield {**environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces do not work here: {error.stderr.decode().strip()}")


def srun(slurm, script, *arguments, mpi="none", ranks=2, seconds=90):
    """Run a script by `srun` on two nodes."""
    how = ["srun", "--nodes=2", f"--ntasks={ranks}", "--overcommit", f"--mpi={mpi}"]
    command = [*how, sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=seconds)


def sums(done):
    """Return which communicator trained, and what each rank's weights add up to."""
    assert done.returncode == 0, done.stderr[-3000:]
    told = sorted(line.split(" ") for line in done.stdout.splitlines())
    (name,) = {line[0] for line in told}
    return name, {int(line[1]): float(line[2]) for line in told}


@pytest.fixture(scope="module")
def alone():
    """What the weights add up to that one process trains."""
    command = [sys.executable, "-c", SUM, "local"]
    return sums(subprocess.run(command, capture_output=True, text=True))[1][0]


@pytest.mark.parametrize(
    "asked, mpi, ranks, taken",
    [
        ("auto", "none", 3, "mpi"),  # which dtk joins
        ("collective", "none", 2, "collective"),
        ("auto", "pmix", 2, "horovod"),
        ("mpi", "pmix", 3, "mpi"),
        ("horovod", "pmix", 3, "horovod"),
    ],
)
def test_srun_trains_what_one_process_does(slurm, alone, asked, mpi, ranks, taken):
    name, found = sums(srun(slurm, SUM, asked, mpi=mpi, ranks=ranks))
    assert name == taken
    assert found == {rank: pytest.approx(alone, rel=1e-6) for rank in range(ranks)}


def test_a_horovod_that_would_find_nobody_is_refused(slurm):
    done = srun(slurm, SUM, "horovod")
    assert done.returncode == 1
    for rank in (0, 1):
        assert f"rank {rank}: " in done.stderr
    assert "nothing to find them by (--mpi=none): start with `srun --mpi=pmix`" in done.stderr


@pytest.mark.parametrize("asked", ["auto", "collective"])
def test_a_rank_that_is_lost_under_a_plain_srun_ends_the_others(slurm, asked):
    """Srun leaves them alone: they waited, for the stall timeout or for ever."""
    dies = "import os\nif strategy.rank == 1: os._exit(9)\nfit(1000)"
    done = srun(slurm, TRAIN + dies, asked, ranks=3, seconds=60)
    assert done.returncode == 75, done.stderr[-3000:]
    assert re.search(r"dtk: rank 1, host \w+, was gone first", done.stderr)


def test_a_stopped_rank_is_named_and_ends_the_job(slurm, tmp_path):
    command = ["srun", "--nodes=2", "--ntasks=2", sys.executable, "-c", RESUME, "collective"]
    with open(tmp_path / "said", "w+") as said:
        job = subprocess.Popen([*command, str(tmp_path / "c")], env=slurm, stdout=said, stderr=said)
        await_text(tmp_path / "said", "epoch 1")
        os.kill(pid_of(1), signal.SIGSTOP)
        try:
            assert job.wait(60) in (124, 137, 143)  # the highest of all tasks' is shown
        finally:
            job.kill()
    told = (tmp_path / "said").read_text()
    assert re.search(r"rank 1, host \w+2, ", told), told[-3000:]
    assert re.search("rank 0 waits in (collective|train step)", told), told[-3000:]


@pytest.mark.parametrize("asked", ["collective", "mpi"])
def test_dtk_run_starts_ranks_on_the_hosts_of_an_allocation(slurm, alone, tmp_path, asked):
    (tmp_path / "train.py").write_text(SUM)
    how = ["salloc", "--nodes=2", "--ntasks=3", "--overcommit", "--quiet"]
    command = [*how, *RUN, "--communicator", asked, str(tmp_path / "train.py"), "auto"]
    done = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=120)
    where = r"dtk run: on the hosts of Slurm's job \d+, by srun: \w+1:2, \w+2:1\n"
    assert re.fullmatch(where, done.stderr), done.stderr[-3000:]
    done.stdout = "\n".join(line.split("] ")[1] for line in done.stdout.splitlines())
    name, found = sums(done)
    assert name == asked
    assert found == {rank: pytest.approx(alone, rel=1e-6) for rank in range(3)}


@pytest.mark.parametrize("start", [["srun", sys.executable], RUN], ids=["srun", "dtk run"])
def test_a_job_that_is_requeued_resumes(slurm, tmp_path, start):
    script, out, whole = tmp_path / "train.py", tmp_path / "out", tmp_path / "whole"
    script.write_text(RESUME)
    told = JOB.format(out=out, start=shlex.join(start), script=script, folder=tmp_path / "saved")
    (tmp_path / "job.sh").write_text(told)
    job = subprocess.run(
        ["sbatch", "--parsable", str(tmp_path / "job.sh")],
        env=slurm, check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    await_text(out, "epoch 1 restart 0")
    subprocess.run(["scancel", "--signal=TERM", job], env=slurm, check=True)
    await_text(out, "saved ")
    # Slurm lets a job wait for two minutes before it starts again.
    at_once = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
    deadline = time.monotonic() + 90
    while "restart 1" not in out.read_text():
        assert time.monotonic() < deadline, (queue(slurm), out.read_text())
        subprocess.run(at_once, env=slurm, capture_output=True)
        time.sleep(2.0)
    await_text(out, "ended 0", seconds=90)
    lines = out.read_text().splitlines()
    again = [line for line in lines if line.endswith("restart 1")]
    assert again and "epoch 0 restart 1" not in again, lines
    uninterrupted = [sys.executable, "-c", RESUME, "local", str(whole)]
    alone = subprocess.run(uninterrupted, capture_output=True, text=True, check=True).stdout
    expected = float(alone.split("ended 0 ")[1])
    assert float(out.read_text().split("ended 0 ")[1].split()[0]) == pytest.approx(
        expected, rel=1e-5
    )


def queue(slurm):
    return subprocess.run(["scontrol", "show", "job"], env=slurm, capture_output=True).stdout


def await_text(path, text, seconds=60):
    deadline = time.monotonic() + seconds
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, path.exists() and path.read_text()[-3000:]
        time.sleep(0.1)


def pid_of(rank):
    """Return the process of a rank of the newest step."""
    found = []
    for process in psutil.process_iter(["environ", "create_time"]):
        environ = process.info["environ"] or {}
        if environ.get("SLURM_PROCID") == str(rank) and "SLURM_STEP_NODELIST" in environ:
            found.append((process.info["create_time"], process.pid))
    return max(found)[1]
